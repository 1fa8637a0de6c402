"""The blocks that may attend to each other because of segment ids, and the range of each id, in one launch.

A program has the ids of one own block, and reads all ids of the other side from the L2 cache, in parts of at most 8,192
ids: 32 KiB. At 8,192 ids its time is the latency of a launch. XLA takes four launches for the blocks alone, and about
ten with the ranges.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.kernel_types import Index
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota
from jax_kernels.pallas.varying import result_types

MOST_IDS = 32768  # of a side: each program reads all ids of the other side
PART_IDS = 8192  # of the other side; with 16384 the forward's pass spills registers
WARPS = 8


class SegmentBlocks(NamedTuple):
    """Segment ids, and the blocks and the ids of the other side that each block, and each id, may attend to.

    own, others: segment ids, padded to whole blocks. ranges: (first, end, full_first, full_end) of each own block, as
    block_ranges.segment_ranges returns them. spans: (first, end) of each own id, as block_ranges.segment_spans returns
    them.
    """

    own: Int32[Array, "B own"]
    others: Int32[Array, "B others"]
    ranges: Int32[Array, "B blocks 4"]
    spans: Int32[Array, "B 2 own"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The ids of one side: queries or keys. block: the number of ids in a block. none: the id that replaces ids below
    0, and pads the last block.
    """

    block: int
    none: int

    def whole(self, ids: Int32[Array, "B length"]) -> Int32[Array, "B blocks ids"]:
        """The ids in whole blocks."""
        short = -ids.shape[1] % self.block
        ids = jnp.pad(ids, [(0, 0), (0, short)], constant_values=-1) if short else ids
        return ids.reshape(ids.shape[0], -1, self.block)


def of_ids(
    own_ids: Int32[Array, "B own"],
    other_ids: Int32[Array, "B others"],
    own: Side,
    others: Side,
    *,
    interpret: bool,
) -> SegmentBlocks:
    """The SegmentBlocks of segment ids; an id below 0 equals no other id."""
    mine, theirs = own.whole(own_ids), others.whole(other_ids)
    columns = pl.next_power_of_2(theirs.shape[1])
    is_power = lambda x: x & (x - 1) == 0
    fits = max(mine[0].size, columns * others.block) <= MOST_IDS
    if backend.AVAILABLE and fits and is_power(own.block) and is_power(others.block):
        found = _launch(mine, theirs, own, others, interpret=interpret)
    else:
        found = _by_xla(mine, theirs, own, others)
    batch = len(own_ids)
    return found._replace(own=found.own.reshape(batch, -1), others=found.others.reshape(batch, -1))


def _by_xla(mine: jax.Array, theirs: jax.Array, own: Side, others: Side) -> SegmentBlocks:
    """The SegmentBlocks of ids in whole blocks."""
    mine, theirs = jnp.where(mine < 0, own.none, mine), jnp.where(theirs < 0, others.none, theirs)
    batch = len(mine)
    ids = mine.reshape(batch, -1), theirs.reshape(batch, -1)
    ranges = block_ranges.segment_ranges(ids[0], own.block, ids[1], others.block)
    return SegmentBlocks(*ids, ranges, block_ranges.segment_spans(*ids))


def _launch(mine: jax.Array, theirs: jax.Array, own: Side, others: Side, *, interpret: bool) -> SegmentBlocks:
    """The SegmentBlocks of ids in whole blocks, by a kernel with a program per own block."""
    batch, count, other_count = len(mine), mine.shape[1], theirs.shape[1]
    columns = pl.next_power_of_2(other_count)
    rows = min(columns, PART_IDS // max(own.block, others.block))  # blocks of a part, a power of two

    def kernel(own_ref, other_ref, flat_ref, own_out, other_out, ranges_ref, spans_ref):
        ids = own_ref[...]
        ids = jnp.where(ids < 0, own.none, ids)
        own_out[...] = ids
        extremes, is_first = Extremes.of(ids[None, :]), pl.program_id(1) == 0

        def with_part(part, found):
            first = part * rows
            exists = _of_rows(first + iota(rows) < other_count, others.block)
            other_ids = plgpu.load(other_ref.at[pl.ds(first, rows)], mask=exists, other=-1)
            other_ids = jnp.where(other_ids < 0, others.none, other_ids)
            pl.when(is_first)(lambda: plgpu.store(other_out.at[pl.ds(first, rows)], other_ids, mask=exists))
            return found.with_part(extremes, other_ids, first, flat_ref, other_count)

        found = Found.start(other_count)
        found = lax.fori_loop(0, columns // rows, with_part, found) if columns > rows else with_part(0, found)
        column = iota(4)
        ranges = functools.reduce(
            lambda ranges, x: jnp.where(column == x[0], x[1], ranges),
            enumerate(found.ranges(other_count)),
            jnp.zeros((4,), jnp.int32),
        )
        ranges_ref[...] = ranges
        spans_ref[0, :], spans_ref[1, :] = found.spans(ids, flat_ref, other_count * others.block)

    spec = lambda *block: pl.BlockSpec((None, *block), lambda b, i: (b, *(0 for _ in block)))
    of_block = lambda *block: pl.BlockSpec((None, None, *block), lambda b, i: (b, i, *(0 for _ in block)))
    theirs_spec = spec(columns, others.block)
    spans_spec = pl.BlockSpec((None, 2, own.block), lambda b, i: (b, 0, i))
    shapes = [mine.shape, theirs.shape, (batch, count, 4), (batch, 2, count * own.block)]
    return SegmentBlocks(
        *pl.pallas_call(
            kernel,
            grid=(batch, count),
            in_specs=[of_block(own.block), theirs_spec, spec(columns * others.block)],
            out_specs=[of_block(own.block), theirs_spec, of_block(4), spans_spec],
            out_shape=result_types([jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes], mine, theirs),
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=interpret,
            name="attention_segment_blocks",
        )(mine, theirs, theirs.reshape(batch, -1))
    )


class Found(NamedTuple):
    """The results of one own block so far, from the parts of the other side that were read, int32.

    first, end: of the blocks that the own block may attend to; if none was found, first is the number of the other
    blocks and end is 0. full_first, full_end: of the full blocks; both are the number of the other blocks if none was
    found. is_sorted: 1 or 0, as in block_ranges.segment_spans.
    """

    first: jax.Array
    end: jax.Array
    full_first: jax.Array
    full_end: jax.Array
    is_sorted: jax.Array

    @classmethod
    def start(cls, other_count: int) -> "Found":
        count = jnp.int32(other_count)
        return cls(first=count, end=jnp.int32(0), full_first=count, full_end=count, is_sorted=jnp.int32(1))

    def with_part(
        self, mine: "Extremes", other_ids: jax.Array, first: Index, flat_ref: Any, other_count: int
    ) -> "Found":
        """The results with one more part.

        mine: the extremes of the own block. other_ids: of the part, [blocks, ids]. first: the index of the part's first
        block. flat_ref: all ids of the other side in one row, as the caller gave them. other_count: the number of the
        other side's blocks.
        """
        theirs, (rows, size) = Extremes.of(other_ids), other_ids.shape
        block = first + iota(rows)
        least = lambda chosen: jnp.where(chosen, block, other_count).min()
        meet = (mine.low <= theirs.high) & (theirs.low <= mine.high)
        full = (mine.only == theirs.only) & (mine.only >= 0)
        full_first = jnp.minimum(self.full_first, least(full))
        # Ids below 0 count as larger than all others: they are sorted if they come last.
        index = block[:, None] * size + iota(size)[None, :]
        has_next = index + 1 < other_count * size
        following = plgpu.load(flat_ref.at[index + 1], mask=has_next, other=-1)
        is_sorted = (_keys(other_ids) <= _keys(following)) & (other_ids != block_ranges.NOT_SORTED)
        return Found(
            first=jnp.minimum(self.first, least(meet)),
            end=jnp.maximum(self.end, jnp.where(meet, block + 1, 0).max()),
            full_first=full_first,
            full_end=jnp.minimum(self.full_end, least(~full & (block >= full_first))),
            is_sorted=jnp.minimum(self.is_sorted, is_sorted.astype(jnp.int32).min()),
        )

    def ranges(self, other_count: int) -> tuple[jax.Array, ...]:
        """(first, end, full_first, full_end) after all parts, as block_ranges.segment_ranges returns them."""
        has_full = self.full_first < other_count
        return (
            jnp.where(self.end > 0, self.first, 0),
            self.end,
            jnp.where(has_full, self.full_first, self.end),
            jnp.where(has_full, jnp.maximum(self.full_end, self.full_first), self.end),
        )

    def spans(self, ids: jax.Array, flat_ref: Any, count: int) -> tuple[jax.Array, jax.Array]:
        """(first, end) of each own id after all parts, as block_ranges.segment_spans returns them.

        ids: of the own block. flat_ref: as in with_part. count: the number of ids of the other side.
        """

        def below(limit: jax.Array) -> jax.Array:
            """The number of ids of the other side that are below each id's limit, by bisection: they are sorted."""
            found = jnp.zeros_like(limit)
            for bit in reversed(range(count.bit_length())):
                more = found + (1 << bit)
                last = plgpu.load(flat_ref.at[more - 1], mask=more <= count, other=-1)
                found = jnp.where(_keys(last) < limit, more, found)
            return found

        of_id = lambda x, otherwise: jnp.where(self.is_sorted > 0, jnp.where(ids < 0, 0, x), otherwise)
        return of_id(below(ids), 0), of_id(below(_next(ids)), block_ranges.NOT_SORTED)


class Extremes(NamedTuple):
    """The lowest id, the highest id and the only id of each block of ids, as block_ranges finds them."""

    low: jax.Array
    high: jax.Array
    only: jax.Array

    @classmethod
    def of(cls, ids: jax.Array) -> "Extremes":
        """ids: [blocks, ids]."""
        high = ids.max(axis=1)
        low = jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids).min(axis=1)
        return cls(low, high, jnp.where(ids.min(axis=1) == high, high, -1))


def _keys(ids: jax.Array) -> jax.Array:
    """Ids by which others are sorted: the ids, with the largest int32 for ids below 0."""
    return jnp.where(ids < 0, block_ranges.NOT_SORTED, ids)


def _next(ids: jax.Array) -> jax.Array:
    """Each id plus 1; the largest int32 stays."""
    return jnp.where(ids < block_ranges.NOT_SORTED, ids + 1, block_ranges.NOT_SORTED)


def _of_rows(exists: jax.Array, block: int) -> jax.Array:
    return jnp.broadcast_to(exists[:, None], (len(exists), block))
