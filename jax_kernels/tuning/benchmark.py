"""jax_kernels.benchmark_implementations: the time of a call by each implementation."""

import dataclasses
import functools
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.dispatch import Plan, explain, reason_against
from jax_kernels.frameworks import check_function, check_no_tensors
from jax_kernels.quantization.arrays import QuantizedArray
from jax_kernels.tuning import timers
from jax_kernels.tuning.timers import Program, Timer, milliseconds, ones_like_result

__all__ = ["ImplementationTime", "benchmark_implementations", "read_in_turns"]

_ROUNDS = 5
_NAMES = ("mosaic_gpu", "triton", "cudnn", "xla")
_UNKNOWN = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImplementationTime:
    """The time of a call by one implementation, or the reason why it was not timed.

    plan: the call's Plan by this implementation, None if it cannot serve the call. ms: the median of the readings, None
    without a time. spread: the distance between the quartiles of the readings, over the median. timer: "cupti" for the
    device time of the kernels, "host" for the host's clock around a queue of calls. reason: why there is no time.
    """

    implementation: str
    plan: Plan | None
    ms: float | None = None
    spread: float | None = None
    timer: str | None = None
    reason: str | None = None

    @classmethod
    def of(
        cls, implementation: str, plan: Plan | None, *, readings: Sequence[float], timer: str
    ) -> "ImplementationTime":
        """The time from two readings or more, in ms of a call."""
        low, ms, high = statistics.quantiles(readings, n=4, method="inclusive")
        return cls(implementation=implementation, plan=plan, ms=ms, spread=(high - low) / ms, timer=timer)

    def __str__(self) -> str:
        if self.ms is None:
            return f"{self.implementation}: {self.reason}"
        return f"{self.implementation}: {self.ms:.4g} ms (spread {self.spread:.1%}, {self.timer} timer)"


def benchmark_implementations(
    op: Callable[..., Any], *args: Any, gradients: bool = False, seconds: float = 0.2, **kwargs: Any
) -> list[ImplementationTime]:
    """Times `op(*args, **kwargs)`, under jit, with each implementation.

    On a GPU the times are device times by CUPTI, without memsets and copies; elsewhere, and where CUPTI does not work,
    they are the host's. The implementations alternate. Winners of jax_kernels.tune apply. For example::

        for row in benchmark_implementations(flash_attention, query, key, value, is_causal=True):
            print(row)

    gradients: times the call with the gradients of all its floating-point arrays, for cotangents of 1. The arrays of a
      QuantizedArray are constants.
    seconds: the approximate time of the readings of each implementation.

    Returns an ImplementationTime for each implementation of the op: the fastest first, then implementations without a
    time, each with its reason.

    Raises the error of op for these arguments; ValueError if kwargs has `implementation`, and for `gradients` if no
    array has floating-point values; TypeError if op has no plan, or no argument `implementation`.
    """
    timers.check_seconds(seconds)
    check_function("op", op, "benchmark_implementations")
    check_no_tensors((args, kwargs), "benchmark_implementations")
    if "implementation" in kwargs:
        raise ValueError(f"implementation: got {kwargs['implementation']!r}, want none: all are timed")
    if not _takes_implementation(op):
        raise TypeError(f"op: got {op!r}, which has no argument `implementation`, want an op that has, or a partial")
    if gradients and not any(_has_gradient((args, kwargs))):
        raise ValueError("gradients: got True, want an array of floating-point values")
    timer, programs = timers.choose(), {}
    plans: dict[str, Plan] = {}
    refused: list[ImplementationTime] = []
    for name in _names(op, args, kwargs):
        try:
            plans[name] = explain(op, *args, implementation=name, **kwargs)
            programs[name] = _program(op, name, args, kwargs, gradients)
        except Exception as error:  # it cannot serve the call, does not compile, or asks for too much memory
            plan = plans.get(name)
            if plan is None and not isinstance(error, NotImplementedError | ValueError):
                raise
            first_line = str(error).strip().partition("\n")[0]
            reason = reason_against(error) if plan is None else f"{type(error).__name__}: {first_line}"
            refused.append(ImplementationTime(implementation=name, plan=plan, reason=reason))
    readings = read_in_turns(programs, timer, seconds)
    timed = [ImplementationTime.of(name, plans[name], readings=x, timer=timer.name) for name, x in readings.items()]
    return sorted(timed, key=lambda x: x.ms or 0.0) + refused


def _names(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The op's implementations: all names of the call's plan. Raises the op's errors, but for an unserved call."""
    try:
        plan = explain(op, *args, **kwargs)
    except NotImplementedError:
        return list(_NAMES)
    return [plan.implementation, *plan.why_not]


def _takes_implementation(op: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(op).parameters.values()
    except (TypeError, ValueError):  # it has no signature, or is no function
        return False
    return any(x.name == "implementation" or x.kind is x.VAR_KEYWORD for x in parameters)


def _is_floating(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def _has_gradient(tree: Any) -> list[bool]:
    """For each leaf of the tree, whether it is a floating-point array outside of a QuantizedArray."""
    is_quantized = lambda x: isinstance(x, QuantizedArray)
    parts = jax.tree.leaves(tree, is_leaf=is_quantized)
    return [not is_quantized(part) and _is_floating(x) for part in parts for x in jax.tree.leaves(part)]


def _is_argument(x: Any) -> bool:
    """Whether an array may be traced: not a number in an array, such as q_offset, which plans may need to know."""
    return _is_floating(x) or (isinstance(x, jax.Array | np.ndarray) and x.ndim > 0)


def _program(
    op: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool
) -> Program:
    """The compiled call by an implementation, after its first run. Arrays are arguments of the program.

    If the op must know the values of some arrays, only arrays of floating-point values are arguments.
    """
    build = functools.partial(_built, op, name, args, kwargs, gradients)
    try:
        program = build(_is_argument)
        jax.block_until_ready(program.call())
    except _UNKNOWN:
        program = build(_is_floating)
        jax.block_until_ready(program.call())
    return program


def _built(
    op: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradients: bool,
    is_argument: Callable[[Any], bool],
) -> Program:
    leaves, structure = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if is_argument(x)]
    has_gradient = _has_gradient((args, kwargs))
    moving = [i for i in places if gradients and has_gradient[i]]

    def call(arrays: dict[int, Any]) -> Any:
        filled = [arrays.get(i, x) for i, x in enumerate(leaves)]
        given, named = jax.tree.unflatten(structure, filled)
        return op(*given, implementation=name, **named)

    def differentiated(arrays: dict[int, Any], cotangents: Any) -> Any:
        out, vjp = jax.vjp(lambda floats: call(arrays | floats), {i: arrays[i] for i in moving})
        return out, vjp(cotangents)

    jitted = jax.jit(differentiated if gradients else call)
    arrays = {i: jnp.asarray(leaves[i]) for i in places}
    everything = (arrays, ones_like_result(call, arrays)) if gradients else (arrays,)
    direction = "gradients" if gradients else "forward"
    return Program(implementation=name, config=None, direction=direction, call=lambda: jitted(*everything))


def read_in_turns(programs: dict[str, Program], timer: Timer, seconds: float) -> dict[str, list[float]]:
    """By name, the ms of a call of each program, in rounds in which the programs take turns."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    once = {}
    for name, program in programs.items():
        begin = time.perf_counter()
        jax.block_until_ready(program.call())
        once[name] = (time.perf_counter() - begin) * 1e3
    for _ in range(_ROUNDS):
        for name, program in programs.items():
            found[name].append(milliseconds(program, timer, seconds / _ROUNDS, once[name]))
    return found
