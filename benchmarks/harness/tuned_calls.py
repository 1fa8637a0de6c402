"""Calls that the benchmarks of tuning tune, each in turns on the GPU with other processes (side_by_side)."""

import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_kernels
from harness.process import prepare_process, refuse, say
from harness.side_by_side import gpu_alone
from jax_kernels.ops.planned_op import TunableCall, tuned_by
from jax_kernels.tuning.measure import Measurement, Settings
from jax_kernels.tuning.session import filled, without_trace
from jax_kernels.tuning.timers import Program

__all__ = [
    "Clock",
    "OutOfTimeError",
    "TunedCase",
    "TurnsMeasurement",
    "attention",
    "decoding",
    "matmul",
    "norm",
    "prepare",
]


class OutOfTimeError(Exception):
    """The budget is spent."""


@dataclasses.dataclass(frozen=True)
class Clock:
    """The time since the start of a script, and its budget, in seconds."""

    budget: float
    start: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.budget - self.spent

    def check(self, *_: Any) -> None:
        """Raises OutOfTimeError if the budget is spent."""
        if self.left <= 0:
            raise OutOfTimeError(f"the budget of {self.budget:g} s is spent")

    def say(self, text: str) -> None:
        say(f"[{self.spent:5.1f} s] {text}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedCase:
    """A call of an op of jax_kernels. name: for the report. shapes: of its bfloat16 arrays.

    integers: shapes of further arrays of int32, by argument. gradients: whether the backward is timed too.
    """

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    integers: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    gradients: bool = False

    def tunable(self) -> TunableCall:
        """The call, without its arrays. Raises the errors of the op."""
        recorder = _Recorder()
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in self.shapes]
        integers = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in self.integers.items()}
        op = functools.partial(getattr(jax_kernels, self.op), **self.arguments)
        with tuned_by(recorder):
            jax.eval_shape(op, *arrays, **integers)
        (tunable,) = recorder.found
        return tunable


class _Recorder:
    """A Tuner that keeps the calls it sees."""

    lists_composed = False

    def __init__(self) -> None:
        self.found: list[TunableCall] = []

    def tuned(self, tunable: TunableCall) -> tuple[Any, Any]:
        self.found.append(dataclasses.replace(tunable, inputs=jax.tree.map(without_trace, tunable.inputs)))
        return tunable.call, tunable.inputs

    def composed(self, tunable: TunableCall) -> Any:
        return tunable.inputs


class TurnsMeasurement(Measurement):
    """A Measurement that compiles while other processes use the GPU, and is alone on it for its readings.

    programs: the compiled programs that it ran, by (implementation, config, direction).
    """

    def __init__(self, tunable: TunableCall, settings: Settings):
        with gpu_alone():
            super().__init__(dataclasses.replace(tunable, inputs=filled(tunable)), settings)
        self.programs: dict[tuple[str, Any, str], Program] = {}

    def others(self, name: str, field: str) -> Sequence[Any]:
        """All candidates of an implementation for a field of its config, without its block spec."""
        return self._others(name).get(field, ())

    def program(self, name: str, config: Any, direction: str) -> Program:
        """A program that is not compiled yet."""
        return self._program(name, config, direction)

    def first_readings(self, program: Program, others: Sequence[Any]) -> Any:
        """A candidate with its first readings. others: candidates; a far slower one has a single reading."""
        return self._first_readings(program, others)

    def _first_readings(self, program: Program, *others: Any) -> Any:
        with gpu_alone():
            found = super()._first_readings(program, *others)
        self.programs[program.implementation, program.config, program.direction] = program
        return found

    def _alternate(self, *args: Any) -> None:
        with gpu_alone():
            super()._alternate(*args)


def attention(
    batch: int, length: int, heads: int, head_dim: int, *, kv_heads: int | None = None, causal: bool, gradients: bool
) -> TunedCase:
    keys = (batch, length, kv_heads or heads, head_dim)
    grouped = "" if kv_heads is None else f"/{kv_heads}"
    kind = ("causal" if causal else "full") + (" with backward" if gradients else "")
    return TunedCase(
        name=f"attention {batch}x{length} {heads}{grouped}x{head_dim} {kind}",
        op="flash_attention",
        shapes=((batch, length, heads, head_dim), keys, keys),
        arguments={"is_causal": causal},
        gradients=gradients,
    )


def decoding(batch: int, heads: int, kv_heads: int, head_dim: int, kv_length: int) -> TunedCase:
    keys = (batch, kv_length, kv_heads, head_dim)
    return TunedCase(
        name=f"decoding {batch}x{kv_length} {heads}/{kv_heads}x{head_dim}",
        op="decode_attention",
        shapes=((batch, 1, heads, head_dim), keys, keys),
        integers={"kv_lengths": (batch,)},
    )


def matmul(m: int, n: int, k: int, *, gated: bool = False, **arguments: Any) -> TunedCase:
    w = (k, n)
    return TunedCase(
        name=f"{'gated ' if gated else ''}matmul {m}x{n}x{k}",
        op="gated_matmul" if gated else "matmul",
        shapes=((m, k), w, w) if gated else ((m, k), w),
        arguments=arguments,
    )


def norm(op: str, rows: int, columns: int) -> TunedCase:
    weights = ((columns,),) if op == "rms_norm" else ((columns,), (columns,))
    return TunedCase(name=f"{op} {rows}x{columns}", op=op, shapes=((rows, columns), *weights), gradients=True)


def prepare(part: tuple[int, int]) -> None:
    """Sets the environment variables of a process that tunes while up to three others do.

    Ends the process if others share its calls, and they do not take turns on the GPU.
    """
    index, count = part
    if count > 1 and "BENCHMARK_LOCK" not in os.environ:
        refuse(f"--part: got {index}/{count} without BENCHMARK_LOCK, want the path of a file that all parts share")
    os.environ["JAX_KERNELS_TUNED"] = "0"  # block specs alone
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.24")
    prepare_process()
