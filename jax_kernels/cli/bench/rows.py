"""The rows of `jax-kernels bench`: the times of standard calls by this library's implementations and by peers."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_kernels import masks
from jax_kernels.cli.bench import peers, sizes
from jax_kernels.cli.bench.sizes import StandardCall
from jax_kernels.cli.ops import OPS
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.attention.prepare_mask import prepare_mask
from jax_kernels.tuning import timers
from jax_kernels.tuning.benchmark import ImplementationTime, benchmark_implementations

__all__ = ["DENSITIES", "Roofs", "Row", "density_rows", "measure_roofs", "rows_of"]

# Ops without a backward: --gradients times their forward.
FORWARD_ONLY = ("flash_attention_fp8", "decode_attention")
# The parts of the mask's blocks that are kept.
DENSITIES = (1.0, 0.5, 0.25, 0.125, 0.0625)
_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The time of a standard call by one implementation, or the reason why there is none.

    call: its name. options: of the call, as on the command line. gradients: whether the backward is included. tflops:
    10**12 floating-point operations of the matmuls per second; None without a time, and for ops that are bound by
    memory. intensity: the operations per byte of the call's arguments and results; None if tflops is. blocks: the
    implementation's blocks as text. tuned: whether tuning chose them. is_peer: whether the implementation is another
    library's. density: the part of the mask's blocks that are kept; None for a call without such a mask.
    """

    op: str
    call: str
    options: dict[str, Any]
    gradients: bool
    implementation: str
    ms: float | None
    spread: float | None
    timer: str | None
    tflops: float | None
    blocks: str | None
    tuned: bool
    reason: str | None
    intensity: float | None = None
    is_peer: bool = False
    density: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofs:
    """The limits of this machine, as measured: 10**12 operations per second of a large matmul by XLA, and 10**12 bytes
    per second, read and written, of a large copy.
    """

    tflops: float
    terabytes: float


def _row(op: str, call: str, values: dict[str, Any], gradients: bool, x: ImplementationTime, **others: Any) -> Row:
    work = others.pop("work")
    return Row(
        op=op,
        call=call,
        options=values,
        gradients=gradients,
        implementation=x.implementation,
        ms=x.ms,
        spread=x.spread,
        timer=x.timer,
        tflops=None if work is None or x.ms is None else work / x.ms / 1e9,
        blocks=None if x.plan is None or x.plan.config is None else str(x.plan.config),
        tuned=x.plan is not None and x.plan.tuned is not None,
        reason=x.reason,
        **others,
    )


def rows_of(op: str, call: StandardCall, gradients: bool, seconds: float, with_peers: bool = False) -> list[Row]:
    """The rows of a standard call: this library's implementations, the fastest first, then the peers."""
    gradients = gradients and op not in FORWARD_ONLY
    given = sizes.arrays(op, call)
    work = sizes.flops(op, given, gradients)
    times = benchmark_implementations(OPS[op].function, gradients=gradients, seconds=seconds, **given)
    others = peers.times(op, given, OPS[op].function, gradients=gradients, seconds=seconds) if with_peers else []
    intensity = None if work is None else work / sizes.traffic(OPS[op].function, given, gradients)
    of_call = {"work": work, "intensity": intensity}
    return [
        *(_row(op, call.name, call.values, gradients, x, **of_call) for x in times),
        *(_row(op, call.name, call.values, gradients, x, is_peer=True, **of_call) for x in others),
    ]


def density_rows(is_gpu: bool, seconds: float, with_peers: bool = False) -> list[Row]:
    """The rows of flash_attention's forward under random block masks of each density of DENSITIES.

    Each row of queries keeps the same number of blocks, among them the diagonal one. tflops counts the kept pairs. The
    blocks of a mask are found before the call, once: prepare_mask.
    """
    shape = (2, 8192, 16, 128) if is_gpu else (1, 1024, 2, 64)
    found = []
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, shape, jax.numpy.bfloat16 if is_gpu else "float32") for k in keys)
    count = shape[1] // _BLOCK
    for kept in dict.fromkeys(max(1, round(density * count)) for density in DENSITIES):
        blocks = random_blocks(count, kept)
        mask = masks.block_sparse(jax.numpy.asarray(blocks), block_size=_BLOCK)
        given: dict[str, Any] = {"query": query, "key": key, "value": value}
        given["mask"] = prepare_mask(mask, query, key) if kept < count else None
        work = 4 * shape[0] * shape[2] * shape[1] ** 2 * shape[3] * kept / count
        times = benchmark_implementations(flash_attention, seconds=seconds, **given)
        others = peers.density_times(given, blocks, _BLOCK, seconds=seconds) if with_peers else []
        values = {"shape": ",".join(map(str, shape)), "blocks kept": kept, "blocks": count}
        for x, is_peer in [*((x, False) for x in times), *((x, True) for x in others)]:
            of_call = {"work": work, "is_peer": is_peer, "density": kept / count}
            found.append(_row("flash_attention", f"{kept} of {count} blocks", values, False, x, **of_call))
    return found


def random_blocks(count: int, kept: int) -> np.ndarray:
    """bool [count, count], with `kept` True in each row, one of them on the diagonal."""
    generator = np.random.default_rng(0)
    found = np.eye(count, dtype=bool)
    for row in found:
        row[generator.permutation(np.flatnonzero(~row))[: kept - 1]] = True
    return found


def measure_roofs(is_gpu: bool, seconds: float) -> Roofs:
    """The Roofs of JAX's default device."""
    size, dtype = (8192, jax.numpy.bfloat16) if is_gpu else (1024, jax.numpy.float32)
    length = 1 << (29 if is_gpu else 24)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    data = jax.numpy.zeros(length, jax.numpy.int8)
    product, copy = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    timer = timers.choose()

    def ms(call: Any) -> float:
        jax.block_until_ready(call())
        program = timers.Program(implementation="xla", config=None, direction="forward", call=call)
        return min(timers.milliseconds(program, timer, seconds, 1.0) for _ in range(3))

    return Roofs(
        tflops=2 * size**3 / ms(lambda: product(x)) / 1e9,
        terabytes=2 * length / ms(lambda: copy(data)) / 1e9,
    )
