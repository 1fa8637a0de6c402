"""Sizes and clearing of the bridge's caches."""

from typing import NamedTuple

import jax

from jax_kernels.bridge.direct import route
from jax_kernels.bridge.interop import keyed_cache
from jax_kernels.bridge.jax_functions import store
from jax_kernels.bridge.jax_functions.dynamic_shapes import CALLS
from jax_kernels.bridge.jax_functions.programs import FUNCTIONS, PROGRAMS
from jax_kernels.bridge.operators import call_cache

__all__ = ["CacheInfo", "cache_info", "clear_cache"]


class CacheInfo(NamedTuple):
    """The number of entries in some of the bridge's caches: of functions, programs, chains and calls.

    functions: JAX functions, given to from_jax or used by the bridge's own ops; all are kept. programs: compiled
    forwards and backwards for one set of shapes, dtypes and constants each; the 1,024 last used are kept.
    chains: pairs of a function and shapes for which the direct route has loaded a launch chain, or has found that there
    is none; the 512 last used are kept. cached_calls: calls that later equal calls repeat without checks, up to 512 for
    each op. dynamic_calls: calls in torch.compile graphs for many sizes, if a constant is neither a number nor a text;
    the 1,024 last used are kept, and a graph whose call was dropped raises an error that says so. program_records: the
    entries of `programs`, and all dropped programs whose name is in a graph, which are built again. tangents: functions
    that forward-mode differentiation made; the 1,024 last used are kept, and all that a program holds.
    """

    functions: int
    programs: int
    chains: int
    cached_calls: int
    dynamic_calls: int
    program_records: int
    tangents: int


def cache_info() -> CacheInfo:
    """The number of entries now in each of the caches that CacheInfo lists. The bridge has other caches too."""
    return CacheInfo(
        functions=sum(map(FUNCTIONS.is_pinned, FUNCTIONS.names())),
        programs=len(PROGRAMS),
        chains=route.count(),
        cached_calls=call_cache.count(),
        dynamic_calls=len(CALLS),
        program_records=len(PROGRAMS.names()),
        tangents=sum(not FUNCTIONS.is_pinned(name) for name in FUNCTIONS.alive()),
    )


def clear_cache() -> None:
    """Drops compiled programs, loaded kernels, and JAX's own caches. Later calls are compiled again.

    A torch.compile graph for many sizes with a constant that is neither a number nor a text (`dynamic_calls` of
    CacheInfo) must be compiled again, after torch.compiler.reset(). Kernels in captured CUDA graphs stay loaded. Waits
    for the GPUs whose kernels it unloads.
    """
    call_cache.clear()
    keyed_cache.clear()
    store.clear()
    jax.clear_caches()
    route.clear()
