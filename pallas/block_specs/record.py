"""BlockSpecs: all block specs of one compute capability, and `first`, which finds a row in one of its tables."""

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

from jax_kernels.pallas.block_specs.matmul_specs import (
    GroupedOrder,
    GroupedRow,
    MatmulLowBitRow,
    MatmulOrder,
    MatmulRow,
)
from jax_kernels.pallas.block_specs.normalization_specs import NormOrder, NormRow
from jax_kernels.pallas.block_specs.ring_specs import RingRow
from jax_kernels.pallas.block_specs.specs import (
    AttentionDecodeRow,
    AttentionDqueryRow,
    AttentionFp8Row,
    AttentionRow,
    DilatedLaunches,
    TimedGpu,
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BlockSpecs:
    """The block specs of one compute capability: a table of rows for each kind of kernel.

    A call uses the first row of a table that applies to it.

    capability: (major, minor). inherited_from: the name, such as "sm_86", of the record whose attention_order this one
    takes; None if the order is its own. measured_on: the GPU on which attention_order was timed; None if it was not.
    Rows and the other orders have a `measured_on` of their own. A row in several records belongs to the oldest of these
    records.

    attention_order: the names of the implementations of attention, in the order in which they are tried. matmul_order,
    low_bit_order, grouped_order and norm_order are tables of such orders.
    attention, attention_decode, attention_fp8: blocks of attention, of decoding, and of 8-bit attention.
    attention_dquery: blocks of the dquery of deterministic backwards. It and attention_fp8 are empty for a GPU without
    such kernels.
    matmul, matmul_low_bit, grouped, norm: blocks of matmuls, of matmuls with low-bit weights, of grouped matmuls, and
    of normalisations.
    dilated_launches: the costs that decide about the launches of dilated attention. ring: strategies of ring_attention.
    If one is None, sm_90's is used.
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
    grouped_order: tuple[GroupedOrder, ...]
    grouped: tuple[GroupedRow, ...]
    norm_order: tuple[NormOrder, ...]
    norm: tuple[NormRow, ...]
    dilated_launches: DilatedLaunches | None = None
    ring: tuple[RingRow, ...] | None = None

    @property
    def name(self) -> str:
        """The compiler's name of the compute capability, such as "sm_90"."""
        return sm_name(self.capability)


def sm_name(capability: tuple[int, int]) -> str:
    """The compiler's name of a compute capability: "sm_90" for (9, 0)."""
    return "sm_{}{}".format(*capability)


def measured[Row](gpu: TimedGpu, *rows: Row) -> tuple[Row, ...]:
    """Returns copies of the rows, in order, with `gpu` as the GPU on which they were timed."""
    return tuple(dataclasses.replace(row, measured_on=gpu) for row in rows)  # type: ignore[type-var]


def first(rows: Iterable[Any], implementation: str | None, request: Hashable) -> Any:
    """The first of the rows that belongs to an implementation and applies to a call.

    implementation: the implementation's name; None takes rows of any implementation, as in tables without one. request:
    the facts of the call that row.serves takes. Raises LookupError if no row applies.
    """
    for row in rows:
        if (implementation is None or row.implementation == implementation) and row.serves(request):
            return row
    raise LookupError(f"no {implementation or ''} row serves {request}")
