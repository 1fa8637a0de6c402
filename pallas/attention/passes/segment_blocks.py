"""The blocks that may attend to each other because of segment ids, and their order of processing, in one launch.

A program has all ids of a batch entry. At 2 x 8192 ids it compares 64 blocks with 64 or 128 blocks; its time is the
latency of a launch. XLA takes four launches without the order.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota
from jax_kernels.pallas.varying import result_types

MOST_IDS = 16384  # of a side, and the most pairs of blocks, in a program
WARPS = 8


class SegmentBlocks(NamedTuple):
    """Segment ids, and for each block of the own side the blocks of the other side that it may attend to.

    own, others: segment ids, padded to whole blocks. ranges: (first, end, full_first, full_end) of each own block, as
    block_ranges.segment_ranges returns them. order: the own blocks by the number of blocks that they visit, from the
    fewest to the most.
    """

    own: Int32[Array, "B own"]
    others: Int32[Array, "B others"]
    ranges: Int32[Array, "B blocks 4"]
    order: Int32[Array, "B blocks"]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """The positions that causality and a window leave to a block. Only the order of blocks depends on it.

    left, right: an element of the own side at position p meets positions p - left ... p + right of the other side; -1:
    no limit. offset: the position of the other side's first element, if the own side's has position 0.
    """

    left: int = -1
    right: int = -1
    offset: int = 0

    @classmethod
    def of(cls, *, is_causal: bool, window: tuple[int, int] | None, q_offset: int, of_keys: bool) -> "Reach":
        """The Reach of the queries of a call, or of its keys."""
        left, right = window or (-1, -1)
        right = 0 if is_causal else right
        if of_keys:
            return cls(left=right, right=left, offset=q_offset)
        return cls(left=left, right=right, offset=-q_offset)

    def visited(self, first: jax.Array, end: jax.Array, index: jax.Array, own: Side, others: Side) -> jax.Array:
        """The number of blocks first ... end - 1 that own block number `index` reaches."""
        start = index * own.block - self.offset
        block_of = lambda position: jnp.maximum(position, 0) // others.block
        if self.left >= 0:
            first = jnp.maximum(first, block_of(start - self.left))
        if self.right >= 0:
            end = jnp.minimum(end, block_of(start + own.block - 1 + self.right) + 1)
        return jnp.maximum(end - first, 0)


def of_ids(
    own_ids: Int32[Array, "B own"],
    other_ids: Int32[Array, "B others"],
    own: Side,
    others: Side,
    reach: Reach,
    *,
    interpret: bool,
) -> SegmentBlocks:
    """The SegmentBlocks of segment ids; an id below 0 equals no other id."""
    mine, theirs = own.whole(own_ids), others.whole(other_ids)
    rows, columns = pl.next_power_of_2(mine.shape[1]), pl.next_power_of_2(theirs.shape[1])
    is_power = lambda x: x & (x - 1) == 0
    fits = max(rows * own.block, columns * others.block, rows * columns, rows * rows) <= MOST_IDS
    if backend.AVAILABLE and fits and is_power(own.block) and is_power(others.block):
        found = _launch(mine, theirs, own, others, reach, interpret=interpret)
    else:
        found = _by_xla(mine, theirs, own, others, reach)
    batch = len(own_ids)
    return found._replace(own=found.own.reshape(batch, -1), others=found.others.reshape(batch, -1))


def _by_xla(mine: jax.Array, theirs: jax.Array, own: Side, others: Side, reach: Reach) -> SegmentBlocks:
    """The SegmentBlocks of ids in whole blocks."""
    mine, theirs = jnp.where(mine < 0, own.none, mine), jnp.where(theirs < 0, others.none, theirs)
    batch = len(mine)
    ids = mine.reshape(batch, -1), theirs.reshape(batch, -1)
    ranges = block_ranges.segment_ranges(ids[0], own.block, ids[1], others.block)
    index = jnp.arange(ranges.shape[1], dtype=jnp.int32)
    visited = reach.visited(ranges[..., 0], ranges[..., 1], index, own, others)
    return SegmentBlocks(*ids, ranges, jnp.argsort(visited, axis=1).astype(jnp.int32))


def _launch(
    mine: jax.Array, theirs: jax.Array, own: Side, others: Side, reach: Reach, *, interpret: bool
) -> SegmentBlocks:
    """The SegmentBlocks of ids in whole blocks, by a kernel with a program per batch entry."""
    batch, count, other_count = len(mine), mine.shape[1], theirs.shape[1]
    rows, columns = pl.next_power_of_2(count), pl.next_power_of_2(other_count)

    def kernel(own_ref, other_ref, own_out, other_out, ranges_ref, order_ref):
        index = iota(rows)
        exists = index < count
        low, high, only = _extremes(own_ref, own_out, exists, own)
        other_low, other_high, other_only = _extremes(other_ref, other_out, iota(columns) < other_count, others)
        block = jnp.broadcast_to(iota(columns)[None, :], (rows, columns))
        least = lambda chosen, other: jnp.where(chosen, block, other).min(axis=1)
        meet = (low[:, None] <= other_high[None, :]) & (other_low[None, :] <= high[:, None])
        end = jnp.where(meet, block + 1, 0).max(axis=1)
        first = jnp.where(end > 0, least(meet, other_count), 0)
        full = (only[:, None] == other_only[None, :]) & (only >= 0)[:, None]
        full_first = least(full, other_count)
        full_first = jnp.where(full_first < other_count, full_first, end)
        past = ~full & (block >= full_first[:, None])
        full_end = jnp.maximum(least(past, other_count), full_first)
        column = jnp.broadcast_to(iota(4)[None, :], (rows, 4))
        ranges = functools.reduce(
            lambda found, x: jnp.where(column == x[0], x[1][:, None], found),
            enumerate((end, full_first, full_end), 1),
            jnp.broadcast_to(first[:, None], (rows, 4)),
        )
        plgpu.store(ranges_ref, ranges, mask=jnp.broadcast_to(exists[:, None], (rows, 4)))
        # A block's rank: the number of blocks with fewer visits, or with as many and a lower index.
        visited = jnp.where(exists, reach.visited(first, end, index, own, others), other_count + 1)
        fewer = visited[None, :] < visited[:, None]
        same = (visited[None, :] == visited[:, None]) & (index[None, :] < index[:, None])
        rank = (fewer | same).astype(jnp.int32).sum(axis=1)
        order = jnp.where(rank[:, None] == index[None, :], index[:, None], 0).sum(axis=0)
        plgpu.store(order_ref, order, mask=exists)

    spec = lambda *block: pl.BlockSpec((None, *block), lambda b: (b, *(0 for _ in block)))
    ids = [spec(rows, own.block), spec(columns, others.block)]
    shapes = [mine.shape, theirs.shape, (batch, count, 4), (batch, count)]
    return SegmentBlocks(
        *pl.pallas_call(
            kernel,
            grid=(batch,),
            in_specs=ids,
            out_specs=[*ids, spec(rows, 4), spec(rows)],
            out_shape=result_types([jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes], mine, theirs),
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=interpret,
            name="attention_segment_blocks",
        )(mine, theirs)
    )


def _extremes(ref, out, exists: jax.Array, side: Side) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the lowest id, the highest id, the only id) of each block, as block_ranges finds them; also writes the ids.

    ref, out: [blocks, side.block]. exists: which blocks exist.
    """
    mask = jnp.broadcast_to(exists[:, None], (len(exists), side.block))
    ids = plgpu.load(ref, mask=mask, other=-1)
    ids = jnp.where(ids < 0, side.none, ids)
    plgpu.store(out, ids, mask=mask)
    highest = ids.max(axis=1)
    only = jnp.where(ids.min(axis=1) == highest, highest, -1)
    return jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids).min(axis=1), highest, only
