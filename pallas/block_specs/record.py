"""BlockSpecs: all block specs of one compute capability, and `first`, which finds a row in one of its tables."""

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

from jax_kernels.pallas.block_specs.matmul_specs import MatmulLowBitRow, MatmulOrder, MatmulRow
from jax_kernels.pallas.block_specs.specs import (
    AttentionDecodeRow,
    AttentionDqueryRow,
    AttentionFp8Row,
    AttentionRow,
    DilatedLaunches,
    NormOrder,
    NormRow,
    RingRow,
    TimedGpu,
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BlockSpecs:
    """The block specs of one compute capability. A call uses the first row of a table that serves it.

    capability: (major, minor). inherited_from: the name ("sm_86") of the record whose attention_order this one takes;
    None if the order is its own. measured_on: the GPU on which attention_order was timed; None if it was not. Rows and
    the other orders have a `measured_on` of their own. A row in several records belongs to the oldest of these records.

    attention_order: the implementations of attention in the order in which they are tried.
    attention_dquery, attention_fp8: empty for a GPU without such kernels.
    dilated_launches, ring: None takes sm_90's.
    """

    capability: tuple[int, int]
    inherited_from: str | None = None
    measured_on: TimedGpu | None = None

    attention_order: tuple[str, ...]
    attention: tuple[AttentionRow, ...]
    attention_decode: tuple[AttentionDecodeRow, ...]
    attention_dquery: tuple[AttentionDqueryRow, ...] = ()
    attention_fp8: tuple[AttentionFp8Row, ...] = ()
    matmul_order: tuple[MatmulOrder, ...]
    matmul: tuple[MatmulRow, ...]
    low_bit_order: tuple[MatmulOrder, ...]
    matmul_low_bit: tuple[MatmulLowBitRow, ...]
    norm_order: tuple[NormOrder, ...]
    norm: tuple[NormRow, ...]
    dilated_launches: DilatedLaunches | None = None
    ring: tuple[RingRow, ...] | None = None

    @property
    def name(self) -> str:
        return sm_name(self.capability)


def sm_name(capability: tuple[int, int]) -> str:
    """The compiler's name of a compute capability: "sm_90"."""
    return "sm_{}{}".format(*capability)


def measured[Row](gpu: TimedGpu, *rows: Row) -> tuple[Row, ...]:
    """The rows, marked as timed on this GPU."""
    return tuple(dataclasses.replace(row, measured_on=gpu) for row in rows)  # type: ignore[type-var]


def first(rows: Iterable[Any], implementation: str | None, request: Hashable) -> Any:
    """The first row of this implementation that serves the request. implementation: None for rows without one.

    Raises LookupError if no row serves it.
    """
    for row in rows:
        if (implementation is None or row.implementation == implementation) and row.serves(request):
            return row
    raise LookupError(f"no {implementation or ''} row serves {request}")
