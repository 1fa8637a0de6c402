"""The caches of the bridge: their sizes, and an end of them."""

from typing import NamedTuple

import jax

from jax_kernels.bridge import any_shape, known, once, plans, running
from jax_kernels.bridge.direct import route

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
        functions=len(plans.FUNCTIONS),
        plans=len(plans.PLANS),
        chains=route.count(),
        known_calls=known.count(),
        recipes=any_shape.count(),
        plan_recipes=plans.count_recipes(),
        tangents=plans.count_tangents(),
    )


def clear_cache() -> None:
    """Drops compiled programs, loaded kernels, and JAX's own caches; what is called again is compiled again.

    A graph of torch.compile whose recipe it drops (cache_info) has to be compiled again, after torch.compiler.reset().
    Kernels in captured CUDA graphs stay loaded. Waits for the GPUs whose kernels it unloads.
    """
    known.clear()
    running.forget()
    once.clear()
    plans.clear()
    any_shape.clear()
    jax.clear_caches()
    route.clear()
