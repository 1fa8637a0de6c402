"""The blocks that may attend to each other because of segment ids, and the range of each id, in one launch.

A program has the ids of one own block, and all ids of the other side: 32 KiB at 8192 ids, which it reads from the L2
cache. Its time is the latency of a launch. XLA takes four launches for the blocks alone.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota
from jax_kernels.pallas.varying import result_types

MOST_IDS = 16384  # of a side
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
    fits = max(mine.size // len(mine), columns * max(own.block, others.block)) <= MOST_IDS
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

    def kernel(own_ref, other_ref, flat_ref, own_out, other_out, ranges_ref, spans_ref):
        ids = own_ref[...]
        ids = jnp.where(ids < 0, own.none, ids)
        own_out[...] = ids
        exists = iota(columns) < other_count
        low, high, only = _extremes(ids[None, :])
        other_ids = _loaded(other_ref, exists, others)
        pl.when(pl.program_id(1) == 0)(lambda: plgpu.store(other_out, other_ids, mask=_of_rows(exists, others.block)))
        found = _ranges((low, high, only), _extremes(other_ids), other_count)
        column = iota(4)
        ranges = functools.reduce(
            lambda ranges, x: jnp.where(column == x[0], x[1], ranges), enumerate(found), jnp.zeros((4,), jnp.int32)
        )
        ranges_ref[...] = ranges
        spans_ref[0, :], spans_ref[1, :] = _spans(ids, other_ids, flat_ref, exists, others.block)

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


def _ranges(own: tuple[jax.Array, ...], other: tuple[jax.Array, ...], other_count: int) -> tuple[jax.Array, ...]:
    """(first, end, full_first, full_end) of one own block, int32 scalars.

    own, other: the _extremes of the own block, and of all other blocks. other_count: the number of them that exist.
    """
    (low, high, only), (other_low, other_high, other_only) = own, other
    block = iota(len(other_low))
    least = lambda chosen, otherwise: jnp.where(chosen, block, otherwise).min()
    meet = (low <= other_high) & (other_low <= high)
    end = jnp.where(meet, block + 1, 0).max()
    first = jnp.where(end > 0, least(meet, other_count), 0)
    full = (only == other_only) & (only >= 0)
    full_first = least(full, other_count)
    full_first = jnp.where(full_first < other_count, full_first, end)
    past = ~full & (block >= full_first)
    return first, end, full_first, jnp.maximum(least(past, other_count), full_first)


def _spans(
    ids: jax.Array, other_ids: jax.Array, flat_ref: Any, exists: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """(first, end) of each own id, as block_ranges.segment_spans returns them, int32 [own block].

    ids: of the own block. other_ids: [blocks, block]. flat_ref: the same ids in one row, as the caller gave them.
    exists: which blocks exist.
    """
    last = block_ranges.NOT_SORTED
    of_rows = functools.partial(_of_rows, exists)
    # Ids below 0 count as larger than all others: they are sorted if they come last.
    keys = lambda ids: jnp.where(ids < 0, last, ids)
    index = iota(len(exists))[:, None] * block + iota(block)[None, :]
    following = plgpu.load(flat_ref.at[index + 1], mask=of_rows(block) & (index + 1 < exists.sum() * block), other=-1)
    is_sorted = ((keys(other_ids) <= keys(following)) & (other_ids != last)).astype(jnp.int32).min() > 0
    highest = jnp.where(exists, keys(other_ids).max(axis=1), last)

    def below(limit: jax.Array) -> jax.Array:
        """The number of ids of the other side that are below each id's limit."""
        blocks = (highest[None, :] < limit[:, None]).astype(jnp.int32).sum(axis=1)
        inside = blocks[:, None] * block + iota(block)[None, :]
        in_block = plgpu.load(flat_ref.at[inside], mask=inside < exists.sum() * block, other=-1)
        return blocks * block + (keys(in_block) < limit[:, None]).astype(jnp.int32).sum(axis=1)

    of_id = lambda x, otherwise: jnp.where(is_sorted, jnp.where(ids < 0, 0, x), otherwise)
    return of_id(below(ids), 0), of_id(below(jnp.where(ids < last, ids + 1, last)), last)


def _of_rows(exists: jax.Array, block: int) -> jax.Array:
    return jnp.broadcast_to(exists[:, None], (len(exists), block))


def _loaded(ref: Any, exists: jax.Array, side: Side) -> jax.Array:
    """The ids of all blocks of a side, [blocks, side.block]. exists: which blocks exist."""
    ids = plgpu.load(ref, mask=_of_rows(exists, side.block), other=-1)
    return jnp.where(ids < 0, side.none, ids)


def _extremes(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the lowest id, the highest id, the only id) of each block of ids, [blocks, ids], as block_ranges finds them."""
    highest = ids.max(axis=1)
    only = jnp.where(ids.min(axis=1) == highest, highest, -1)
    return jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids).min(axis=1), highest, only
