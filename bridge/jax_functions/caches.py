"""The caches of the bridge: their sizes, and an end of them."""

from typing import NamedTuple

import jax

from jax_kernels.bridge.direct import route
from jax_kernels.bridge.interop import keyed_cache
from jax_kernels.bridge.jax_functions import dynamic_shapes, programs
from jax_kernels.bridge.operators import call_cache, execute

__all__ = ["CacheInfo", "cache_info", "clear_cache"]


class CacheInfo(NamedTuple):
    """The entries of the bridge's caches.

    functions: those given to from_jax, and the bridge's own, which are kept. plans: of calls, with JAX's programs; the
    1,024 newest are kept. chains: of kernels that the direct route has loaded, and calls that have none; the 512 that
    were used last are kept. known_calls: those that are launched without checks, up to 512 for an op. recipes: of
    compiled graphs for many sizes, where a constant is more than a number or a text; the 1,024 that were used last are
    kept, and another graph raises an error that says so. plan_recipes: by which plans are made again; the 1,024 newest
    are kept, and those of plans that a graph has. tangents: functions that forward mode made, kept with their plans.
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
        plans=len(programs.PLANS),
        chains=route.count(),
        known_calls=call_cache.count(),
        recipes=dynamic_shapes.count(),
        plan_recipes=programs.count_recipes(),
        tangents=programs.count_tangents(),
    )


def clear_cache() -> None:
    """Drops compiled programs, loaded kernels, and JAX's own caches; what is called again is compiled again.

    A graph of torch.compile whose recipe it drops (cache_info) has to be compiled again, after torch.compiler.reset().
    Kernels in captured CUDA graphs stay loaded. Waits for the GPUs whose kernels it unloads.
    """
    call_cache.clear()
    execute.forget()
    keyed_cache.clear()
    programs.clear()
    dynamic_shapes.clear()
    jax.clear_caches()
    route.clear()
