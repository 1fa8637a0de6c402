"""The blocks that may attend to each other because of segment ids, in one launch.

A program has all ids of a batch entry. At 2 x 8192 ids it compares 64 blocks with 64 or 128 blocks; its time is the
latency of a launch. XLA takes four launches.
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
    block_ranges.segment_ranges returns them.
    """

    own: Int32[Array, "B own"]
    others: Int32[Array, "B others"]
    ranges: Int32[Array, "B blocks 4"]


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
    rows, columns = pl.next_power_of_2(mine.shape[1]), pl.next_power_of_2(theirs.shape[1])
    is_power = lambda x: x & (x - 1) == 0
    fits = max(rows * own.block, columns * others.block, rows * columns) <= MOST_IDS
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
    return SegmentBlocks(*ids, block_ranges.segment_ranges(ids[0], own.block, ids[1], others.block))


def _launch(mine: jax.Array, theirs: jax.Array, own: Side, others: Side, *, interpret: bool) -> SegmentBlocks:
    """The SegmentBlocks of ids in whole blocks, by a kernel with a program per batch entry."""
    batch, count, other_count = len(mine), mine.shape[1], theirs.shape[1]
    rows, columns = pl.next_power_of_2(count), pl.next_power_of_2(other_count)

    def kernel(own_ref, other_ref, own_out, other_out, ranges_ref):
        exists = iota(rows) < count
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

    spec = lambda *block: pl.BlockSpec((None, *block), lambda b: (b, *(0 for _ in block)))
    ids = [spec(rows, own.block), spec(columns, others.block)]
    shapes = [mine.shape, theirs.shape, (batch, count, 4)]
    return SegmentBlocks(
        *pl.pallas_call(
            kernel,
            grid=(batch,),
            in_specs=ids,
            out_specs=[*ids, spec(rows, 4)],
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
