"""Measured times of recorded calls, by the timer of jax_kernels.tune, with random arrays."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.ops.planned_op import TunableCall, tuned_by
from jax_kernels.tuning.measure import program_of
from jax_kernels.tuning.session import filled
from jax_kernels.tuning.timers import Program, Timer, milliseconds

__all__ = ["CallTime", "function_ms", "time_call"]

_READINGS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTime:
    """Milliseconds of one run of a call. backward: of its own backward, None if it has none or was not timed."""

    forward: float
    backward: float | None = None

    @property
    def total(self) -> float:
        return self.forward + (self.backward or 0.0)


def _read(program: Program, timer: Timer, seconds: float) -> float:
    """The median of the readings of a program, after its first run, which compiles it."""
    jax.block_until_ready(program.call())
    begin = time.perf_counter()
    jax.block_until_ready(program.call())
    once = (time.perf_counter() - begin) * 1e3
    return statistics.median(milliseconds(program, timer, seconds, once) for _ in range(_READINGS))


def time_call(tunable: TunableCall, timer: Timer, seconds: float, *, backward: bool) -> CallTime | None:
    """The CallTime of a recorded call; None if it does not run, as when its arrays do not fit the memory."""
    try:
        with tuned_by(None):
            given = dataclasses.replace(tunable, inputs=filled(tunable))
            name, config = ("", None) if given.parts else (given.call.implementation, given.call.config)
            read = lambda direction: _read(program_of(given, name, config, direction), timer, seconds)
            forward = read("forward")
            if not backward or not tunable.moving:
                return CallTime(forward=forward)
            return CallTime(forward=forward, backward=max(read("gradients") - forward, 0.0))
    except jax.errors.JaxRuntimeError:
        return None


def function_ms(call: Callable[..., Any], arrays: Any, timer: Timer, seconds: float) -> float:
    """Milliseconds of a call of the function under jit. arrays: its arguments."""
    jitted = jax.jit(call)
    program = Program(implementation="", config=None, direction="forward", call=lambda: jitted(*arrays))
    with tuned_by(None):
        return _read(program, timer, seconds)
