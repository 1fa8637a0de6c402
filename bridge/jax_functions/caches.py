"""Sizes and clearing of the bridge's caches."""

from typing import NamedTuple

import jax

from jax_kernels.bridge.direct import route
from jax_kernels.bridge.interop import keyed_cache
from jax_kernels.bridge.jax_functions import dynamic_shapes, programs
from jax_kernels.bridge.operators import call_cache, execute

__all__ = ["CacheInfo", "cache_info", "clear_cache"]


class CacheInfo(NamedTuple):
    """The number of entries in each of the bridge's caches.

    functions: functions given to from_jax, and the bridge's own, which are kept. plans: plans of calls, with JAX's
    programs; the 1,024 newest are kept. chains: launch chains that the direct route has loaded, and calls without a
    launch chain; the 512 last used are kept. known_calls: cached calls, which are launched without checks, up to 512
    for an op. recipes: compiled graphs for many sizes with a constant other than a number or a text; the 1,024 last
    used are kept, and a graph whose recipe was dropped raises an error that says so. plan_recipes: recipes to make
    plans again; the 1,024 newest are kept, and the recipes of plans in a graph. tangents: functions that forward mode
    made, kept with their plans.
    """

    functions: int
    plans: int
    chains: int
    known_calls: int
    recipes: int
    plan_recipes: int
    tangents: int


def cache_info() -> CacheInfo:
    """The sizes of the bridge's caches."""
    return CacheInfo(
        functions=len(programs.FUNCTIONS),
        plans=len(programs.PROGRAMS),
        chains=route.count(),
        known_calls=call_cache.count(),
        recipes=dynamic_shapes.count(),
        plan_recipes=programs.count_recipes(),
        tangents=programs.count_tangents(),
    )


def clear_cache() -> None:
    """Drops compiled programs, loaded kernels, and JAX's own caches. Later calls are compiled again.

    A graph of torch.compile whose recipe it drops (cache_info) must be compiled again, after torch.compiler.reset().
    Kernels in captured CUDA graphs stay loaded. Waits for the GPUs whose kernels it unloads.
    """
    call_cache.clear()
    execute.clear()
    keyed_cache.clear()
    programs.clear()
    dynamic_shapes.clear()
    jax.clear_caches()
    route.clear()
