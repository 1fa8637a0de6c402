"""The look-up of block specs: from a compute capability and a call to a row, and where the row comes from."""

import contextlib
import dataclasses
import functools
import importlib
import pkgutil
import re
from collections.abc import Hashable, Iterator
from typing import Any

from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.matmul_specs import (
    GroupedCall,
    GroupedRow,
    LowBitCall,
    MatmulCall,
    MatmulLowBitRow,
    MatmulRow,
)
from jax_kernels.pallas.block_specs.normalization_specs import NormRow
from jax_kernels.pallas.block_specs.record import BlockSpecs, first, sm_name
from jax_kernels.pallas.block_specs.ring_specs import RingCall, RingRow
from jax_kernels.pallas.block_specs.sm80 import SM80
from jax_kernels.pallas.block_specs.sm90 import SM90
from jax_kernels.pallas.block_specs.specs import (
    AttentionCall,
    AttentionDecodeRow,
    AttentionDquerySm90,
    AttentionFp8Row,
    AttentionRow,
    DilatedLaunches,
    DqueryCall,
    Fp8Call,
    TimedGpu,
)

Capability = tuple[int, int] | None


def _records() -> list[BlockSpecs]:
    """The record of each file of a compute capability in this folder, such as SM90 of sm90.py; the oldest first."""
    names = (x.name for x in pkgutil.iter_modules(block_specs.__path__) if re.fullmatch(r"sm\d+", x.name))
    records = [getattr(importlib.import_module(f"{block_specs.__name__}.{name}"), name.upper()) for name in names]
    return sorted(records, key=lambda specs: specs.capability)


# By compute capability, the oldest first.
BLOCK_SPECS = {specs.capability: specs for specs in _records()}

# The number of last used calls whose rows are cached.
_MOST_CALLS = 4096


def nearest(compute_capability: tuple[int, int]) -> BlockSpecs:
    """The block specs of a compute capability; if it has none, of the newest older one that has, or else sm_80's."""
    return BLOCK_SPECS[max((known for known in BLOCK_SPECS if known <= compute_capability), default=SM80.capability)]


@contextlib.contextmanager
def replaced_tables(compute_capability: tuple[int, int], **tables: Any) -> Iterator[None]:
    """A context manager for tests and benchmarks: inside, calls are planned with other tables of block specs.

    compute_capability: of the record whose tables are replaced; a key of BLOCK_SPECS. tables: the new tables, by the
    names of the fields of BlockSpecs.
    """
    before = BLOCK_SPECS[compute_capability]
    BLOCK_SPECS[compute_capability] = dataclasses.replace(before, **tables)
    try:
        yield
    finally:
        BLOCK_SPECS[compute_capability] = before


def attention_order(compute_capability: Capability) -> tuple[tuple[str, ...], str]:
    """(names of attention's implementations in the order in which they are tried, the origin of this order in words).

    The only name is "xla" without a GPU (compute_capability None), and below compute capability 8.0.
    """
    if (specs := _with_kernels(compute_capability)) is None:
        return _XLA_ALONE
    return specs.attention_order, _order_source(specs, compute_capability)


def attention_row(
    compute_capability: Capability,
    implementation: str,
    *,
    head_dim: int,
    bits: int,
    is_causal: bool,
    is_limited: bool = False,
    has_segments: bool = False,
    dense_bits: int = 0,
    has_lists: bool = False,
    kv_length: int = 1 << 31,
    v_head_dim: int | None = None,
) -> tuple[AttentionRow, str]:
    """(the row with the blocks of an attention, the origin of the row in words).

    head_dim: the larger one of key and value. bits: of the dtype of query, key and value. is_limited: whether there is
    a window or segment ids. dense_bits: the bits of a bias or dense mask that a kernel reads for each query and key: 0,
    1, 16 or 32. has_lists: whether block lists give the keys of each query, without a bias. kv_length: the number of
    keys. v_head_dim: of value; None is head_dim.

    Without a GPU (compute_capability None, as in interpret mode) the rows of sm_90 are used for "mosaic_gpu", and the
    rows of sm_80 for other implementations. Raises LookupError if no row matches.
    """
    call = AttentionCall(
        head_dim=head_dim,
        v_head_dim=head_dim if v_head_dim is None else v_head_dim,
        bits=bits,
        is_causal=is_causal,
        is_limited=is_limited,
        has_segments=has_segments,
        dense_bits=dense_bits,
        has_lists=has_lists,
        kv_length=kv_length,
    )
    return _row(compute_capability, implementation, "attention", call)


def decode_row(compute_capability: Capability, implementation: str, *, head_dim: int) -> tuple[AttentionDecodeRow, str]:
    """(the row with the blocks of decoding, the origin of the row in words).

    head_dim: the larger one of key and value. Raises LookupError if no row matches.
    """
    return _row(compute_capability, implementation, "attention_decode", head_dim)


def fp8_row(
    compute_capability: Capability, implementation: str, *, head_dim: int, is_causal: bool
) -> tuple[AttentionFp8Row, str]:
    """(the row with the blocks of an 8-bit attention, the origin of the row in words). Only Hopper has such rows.

    head_dim: the larger one of key and value. Raises LookupError if no row matches.
    """
    call = Fp8Call(head_dim=head_dim, is_causal=is_causal)
    return _row(compute_capability, implementation, "attention_fp8", call)


def dquery_blocks(*, head_dim: int, bias_bits: int) -> AttentionDquerySm90:
    """The blocks of the Hopper kernel that computes the dquery of a deterministic backward.

    head_dim, bias_bits: as in DqueryCall. Raises LookupError if no row matches.
    """
    call = DqueryCall(head_dim=head_dim, bias_bits=bias_bits)
    return first(BLOCK_SPECS[SM90.capability].attention_dquery, None, call).blocks


def dilated_launches(compute_capability: Capability) -> DilatedLaunches:
    """The costs of launches and gathers, which decide which parts of a dilated attention run in one launch.

    Hopper's costs are used for GPUs without their own.
    """
    costs = _specs(compute_capability, "mosaic_gpu").dilated_launches
    costs = BLOCK_SPECS[SM90.capability].dilated_launches if costs is None else costs
    assert costs is not None
    return costs


def ring_row(compute_capability: Capability, *, tokens: int, is_windowed: bool) -> RingRow:
    """The row that gives the strategy of a ring_attention with strategy="auto".

    tokens: the number of tokens on one device. is_windowed: whether the call has a window. Hopper's rows are used for
    GPUs without their own.
    """
    rows = _specs(compute_capability, "mosaic_gpu").ring
    rows = BLOCK_SPECS[SM90.capability].ring if rows is None else rows
    assert rows is not None
    return first(rows, None, RingCall(tokens=tokens, is_windowed=is_windowed))


def matmul_order(compute_capability: Capability, *, rows: int, columns: int) -> tuple[tuple[str, ...], str]:
    """(names of matmul's implementations in the order in which they are tried, the origin of this order in words).

    rows: the number of rows of x. columns: the number of columns of w. The only name is "xla" without a GPU, and below
    compute capability 8.0.
    """
    return _order(compute_capability, "matmul_order", (rows, columns))


def matmul_row(compute_capability: Capability, implementation: str, call: MatmulCall) -> tuple[MatmulRow, str]:
    """(the row with the blocks of a matmul, the origin of the row in words).

    Without a GPU the row is sm_90's for "mosaic_gpu", else sm_80's. Raises LookupError if no row matches.
    """
    return _row(compute_capability, implementation, "matmul", call)


def low_bit_order(compute_capability: Capability, rows: int) -> tuple[tuple[str, ...], str]:
    """(names of implementations in the order in which a low-bit matmul tries them, the origin of the order in words).

    rows: the number of rows of x. The only name is "xla" without a GPU, and below compute capability 8.0.
    """
    return _order(compute_capability, "low_bit_order", (rows, 0))


def low_bit_row(
    compute_capability: Capability, implementation: str, *, rows: int, bits: int, weight_bits: int
) -> tuple[MatmulLowBitRow, str]:
    """(the row with the blocks of a matmul with low-bit weights, the origin of the row in words).

    rows: the number of rows of x. bits: of x's dtype. weight_bits: of a weight, 4 or 8. Without a GPU the row is
    sm_90's for "mosaic_gpu", else sm_80's. Raises LookupError if no row matches.
    """
    call = LowBitCall(rows=rows, bits=bits, weight_bits=weight_bits)
    return _row(compute_capability, implementation, "matmul_low_bit", call)


def grouped_order(compute_capability: Capability, *, rows: int, groups: int) -> tuple[tuple[str, ...], str]:
    """(names of grouped_matmul's implementations in the order in which they are tried, the origin of this order).

    rows: of x. groups: their number. The only name is "xla" without a GPU, and below compute capability 8.0.
    """
    return _order(compute_capability, "grouped_order", (rows, groups))


def grouped_row(compute_capability: Capability, implementation: str, call: GroupedCall) -> tuple[GroupedRow, str]:
    """(the row with the blocks of a grouped matmul, the origin of the row in words).

    Without a GPU the row is sm_90's for "mosaic_gpu", else sm_80's. Raises LookupError if no row matches.
    """
    return _row(compute_capability, implementation, "grouped", call)


def norm_order(compute_capability: Capability, *, columns: int) -> tuple[tuple[str, ...], str]:
    """(names of implementations in the order in which a normalisation tries them, the origin of the order in words).

    columns: the number of values of a row. The only name is "xla" without a GPU, and below compute capability 8.0.
    """
    return _order(compute_capability, "norm_order", columns)


def norm_row(compute_capability: Capability, implementation: str, *, columns: int) -> tuple[NormRow, str]:
    """(the row with the blocks of a layer_norm or rms_norm, the origin of the row in words).

    columns: the number of values of a row. Without a GPU the row is sm_90's for "mosaic_gpu", else sm_80's. Raises
    LookupError if no row matches.
    """
    return _row(compute_capability, implementation, "norm", columns)


_XLA_ALONE = ("xla",), "without kernels for this device"


def _with_kernels(compute_capability: Capability) -> BlockSpecs | None:
    """The block specs for a GPU; None without a GPU, and below compute capability 8.0, where there are no kernels."""
    if compute_capability is None or compute_capability < SM80.capability:
        return None
    return nearest(compute_capability)


def _specs(compute_capability: Capability, implementation: str) -> BlockSpecs:
    """The block specs for a GPU, from its own or the newest older compute capability.

    Without a GPU, for the interpreter: sm_90's for "mosaic_gpu", sm_80's for other implementations.
    """
    if compute_capability is None:
        return BLOCK_SPECS[SM90.capability if implementation == "mosaic_gpu" else SM80.capability]
    return nearest(compute_capability)


def _row(compute_capability: Capability, implementation: str, table: str, request: Hashable) -> Any:
    """(the first row of a table that applies to a call, its origin in words). table: a field's name in BlockSpecs.

    request: the facts of the call that the table's rows compare. Raises LookupError if no row applies.
    """
    return _cached_row(_specs(compute_capability, implementation), compute_capability, implementation, table, request)


@functools.lru_cache(maxsize=_MOST_CALLS)
def _cached_row(
    specs: BlockSpecs, compute_capability: Capability, implementation: str | None, table: str, request: Hashable
) -> tuple[Any, str]:
    """(the first row of a table of `specs` that applies to a call, its origin in words).

    compute_capability: of the call's device; None without a GPU. implementation: only rows of this one; None: of any.
    table: a field's name in BlockSpecs. request: the facts of the call that the table's rows compare. Raises
    LookupError if no row applies.
    """
    row = first(getattr(specs, table), implementation, request)
    return row, _source("rows", _owner(specs, table, row), specs, compute_capability, row.measured_on)


def _order(compute_capability: Capability, table: str, request: Hashable) -> tuple[tuple[str, ...], str]:
    """(names of implementations in the order in which they are tried, the origin of the order in words).

    table: the name of a table of orders in BlockSpecs. request: the size that the table's rows compare.
    """
    if (specs := _with_kernels(compute_capability)) is None:
        return _XLA_ALONE
    return _cached_order(specs, compute_capability, table, request)


@functools.lru_cache(maxsize=_MOST_CALLS)
def _cached_order(
    specs: BlockSpecs, compute_capability: Capability, table: str, request: Hashable
) -> tuple[tuple[str, ...], str]:
    """(names of implementations in order, the order's origin in words), from the first matching row of the table.

    table: the name of a field of `specs`, such as "matmul_order". request: as the rows of this table match it.
    """
    row = first(getattr(specs, table), None, request)
    return row.names, _source("order", _owner(specs, table, row), specs, compute_capability, row.measured_on)


@functools.lru_cache(maxsize=_MOST_CALLS)
def _order_source(specs: BlockSpecs, compute_capability: Capability) -> str:
    """The origin of the attention_order of `specs`, in words."""
    owner = specs.inherited_from or specs.name
    return _source("order", owner, specs, compute_capability, specs.measured_on)


def _owner(specs: BlockSpecs, table: str, row: Any) -> str:
    """The name, such as "sm_80", of the oldest block specs whose table has this row object; or else of `specs`."""
    owners = (x.name for x in BLOCK_SPECS.values() if any(row is other for other in getattr(x, table)))
    return next(owners, specs.name)


def _source(
    noun: str, owner: str, specs: BlockSpecs, compute_capability: Capability, measured_on: TimedGpu | None
) -> str:
    """The origin of a row or an order, in words, such as "sm_86's rows, inherited by sm_89, not measured".

    noun: "rows" or "order". owner: the name of the block specs that the row comes from. specs: the block specs that
    were searched. compute_capability: of the call's device. measured_on: the GPU on which the row was timed.
    """
    words = f"{owner}'s {noun}"
    if owner != specs.name:
        words += f", inherited by {specs.name}"
    if compute_capability is None:
        words = f"heuristic: {words}, for the interpreter"
    elif compute_capability != specs.capability:
        words = f"heuristic: {words}, for {sm_name(compute_capability)}, which has none"
    if measured_on is None:
        return f"{words}, not measured"
    if compute_capability in (None, measured_on.capability):
        return f"{words}, measured on {measured_on.name}"
    return f"{words}, not measured on {sm_name(compute_capability)}, only on {measured_on.name}"
