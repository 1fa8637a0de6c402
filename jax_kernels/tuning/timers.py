"""The time of a call: device time on a GPU, by CUPTI, and the host's clock elsewhere."""

import dataclasses
import functools
import math
import numbers
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Program", "Timer", "check_seconds", "choose", "host", "milliseconds", "ones_like_result"]

_MOST_CALLS = 200


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A compiled call. implementation, config: with which it was planned. direction: "forward" or "gradients".

    call(): queues the call and returns its results. lower(): the call's jax.stages.Lowered program, and its arguments,
    so that programs can be compiled at once; None for programs of other frameworks.
    """

    implementation: str
    config: Any
    direction: str
    call: Callable[[], Any]
    lower: Callable[[], tuple[jax.stages.Lowered, Any]] | None = None


def check_seconds(seconds: float) -> None:
    """Raises ValueError if the option `seconds` is no finite number above 0."""
    if not isinstance(seconds, numbers.Real) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds: got {seconds!r}, want a finite number above 0")


@functools.lru_cache(maxsize=2)  # the programs of a call share the array
def _ones(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    with jax.ensure_compile_time_eval():  # the call may be inside a trace
        return jnp.ones(shape, dtype)


def ones_like_result(function: Callable[..., Any], *args: Any) -> Any:
    """Arrays of ones in the shapes, dtypes and structure of function(*args), which is not run."""
    return jax.tree.map(lambda x: _ones(x.shape, x.dtype), jax.eval_shape(function, *args))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timer:
    """A way to time programs. name: "cupti" or "host". read(program, calls): ms of a call, from a queue of calls."""

    name: str
    read: Callable[[Program, int], float]


def host(program: Program, calls: int) -> float:
    """Milliseconds of a call by the host's clock, from a queue of calls. The dispatch of short calls is included."""
    begin = time.perf_counter()
    results = None
    for _ in range(calls):
        results = program.call()
    jax.block_until_ready(results)
    return (time.perf_counter() - begin) * 1e3 / calls


def _cupti(program: Program, calls: int) -> float:
    """Milliseconds of a call: the sum of the device times of its kernels, by CUPTI, which JAX's package includes.

    Raises RuntimeError if CUPTI sees no kernel, as under another profiler.
    """
    from jax._src.lib import mosaic_gpu

    extension = mosaic_gpu._mosaic_gpu_ext
    extension._cupti_init()
    try:
        results = None
        for _ in range(calls):
            results = program.call()
        jax.block_until_ready(results)
    finally:
        timings = extension._cupti_get_timings(True)
    if not timings:
        raise RuntimeError("CUPTI saw no kernel")
    return sum(ms for _, ms in timings) / calls


def choose() -> Timer:
    """The timer for JAX's default backend: CUPTI on a GPU, where it works, else the host's clock."""
    if jax.default_backend() != "gpu":
        return Timer(name="host", read=host)
    add = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(add(jax.numpy.zeros(1024)))
    try:
        _cupti(Program(implementation="xla", config=None, direction="forward", call=lambda: add(x)), 3)
    except Exception:  # another profiler is attached, or this jaxlib lacks the extension
        return Timer(name="host", read=host)
    return Timer(name="cupti", read=_cupti)


def milliseconds(program: Program, timer: Timer, seconds: float, once: float) -> float:
    """Milliseconds of a call, from a queue of calls of about `seconds`. once: the ms of a call, as far as known."""
    return timer.read(program, max(2, min(_MOST_CALLS, int(seconds * 1e3 / max(once, 1e-3)))))
