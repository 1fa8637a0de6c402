"""Segment ids in the Hopper kernels."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.passes import segment_blocks
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.mosaic.layouts import COLUMN, PART, ROW, WGMMA


class Segments(NamedTuple):
    """Segment ids in device memory, and for each block that a CTA owns the blocks that it may attend to.

    q_ids, kv_ids: int32 [B, T] and [B, S], padded to whole blocks; the padding of queries and of keys equals no id of
    the other side. ranges: int32 [B, blocks, 4], for each block of the side whose blocks CTAs own, block indices of the
    other side (first, end, full_first, full_end). Blocks first ... end - 1 may have an equal id; blocks full_first ...
    full_end - 1 have one id, the block's only id. spans: int32 [B, 2, length], for each id of that side (first, end) of
    the equal ids of the other side; end is NOT_SORTED in batch entries where these may not be consecutive.
    """

    q_ids: Any
    kv_ids: Any
    ranges: Any
    spans: Any

    def among(self, batch_index, block):
        """The row of `ranges` for block number `block` of the side that CTAs own, read from device memory.

        Returns a block_ranges.Among of four traced scalars.
        """
        return block_ranges.among(self.ranges, batch_index, block)

    def load(self, batch_index, q_start, q_rows: int, kv_start, kv_rows: int):
        """(ids of the rows, ids of the columns) of a tile whose rows are queries, loaded from device memory to
        registers.

        q_start, q_rows: the tile's first query, and the number of queries; kv_start, kv_rows: of keys.
        """
        q_ids = self.q_ids.at[batch_index, pl.ds(q_start, q_rows)]
        kv_ids = self.kv_ids.at[batch_index, pl.ds(kv_start, kv_rows)]
        load = functools.partial(plgpu.load, optimized=False)
        return load(q_ids, layout=ROW), load(kv_ids, layout=COLUMN)

    def words(
        self,
        words: jax.Array,
        spans: Ref,
        batch_index: Index,
        row: Index,
        column: Index,
        columns: int,
        *,
        of_keys: bool,
    ) -> jax.Array:
        """The mask words of a block, without the pairs whose segment ids differ, if the spans do not show them.

        words: [64, PART], of the limits and of `spans`, [2, 64] in shared memory. row, column, columns: the block's
        first row, first column, and number of columns. of_keys: whether the rows are keys, and the columns queries.
        """
        of_rows, of_columns = (self.kv_ids, self.q_ids) if of_keys else (self.q_ids, self.kv_ids)
        load = lambda ids, start, size, layout: plgpu.load(
            ids.at[batch_index, pl.ds(start, size)], layout=layout, optimized=False
        )

        def by_ids(words: jax.Array) -> jax.Array:
            mine, equal = load(of_rows, row, 64, ROW), jnp.zeros_like(words)
            for i in range(columns // PART):
                theirs = load(of_columns, column + PART * i, PART, COLUMN)
                same = lax.broadcast_in_dim(mine, words.shape, [0]) == lax.broadcast_in_dim(theirs, words.shape, [1])
                equal |= jnp.where(same, 1 << i, 0)
            return words & equal

        return lax.cond(spans[1, 0] == block_ranges.NOT_SORTED, by_ids, lambda words: words, words)


def segments_of(
    inputs: AttentionInputs, block_q: int, block_kv: int, *, of_keys: bool, interpret: bool
) -> Segments | None:
    """The call's Segments, padded to whole blocks with ids that equal no id; None without segments.

    of_keys: a CTA owns a block of keys; otherwise a block of queries.
    """
    if inputs.q_segment_ids is None:
        return None
    queries = segment_blocks.Side(block=block_q, none=block_ranges.NO_QUERY)
    keys = segment_blocks.Side(block=block_kv, none=block_ranges.NO_KEY)
    sides = (inputs.q_segment_ids, queries), (needed(inputs.kv_segment_ids), keys)
    (own_ids, own), (other_ids, others) = sides[:: -1 if of_keys else 1]
    found = segment_blocks.of_ids(own_ids, other_ids, own, others, interpret=interpret)
    q_ids, kv_ids = (found.own, found.others)[:: -1 if of_keys else 1]
    return Segments(q_ids=q_ids, kv_ids=kv_ids, ranges=found.ranges, spans=found.spans)


def span_words(first: jax.Array, end: jax.Array, columns: int) -> jax.Array:
    """Mask words that keep columns first ... end - 1 of each row, for mask_bits.kept(..., by_word=True).

    first, end: int32 [64]; they may lie outside of the columns. columns: of a block, at most 240.

    A thread makes four words for 64 x 128 scores, and ptxas moves seven of their bits at a time into predicates. A
    comparison per score and limit takes twice as many instructions.
    """
    shape = len(first), PART
    first = jnp.minimum(jnp.maximum(first, 0), columns)
    end = jnp.maximum(jnp.minimum(end, columns), first)
    before = (PART - 1) - plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
    # Bit i of word j is column i * 8 + j: (x + 7 - j) / 8 of these columns are below x.
    bits = lambda x: jnp.left_shift(1, jnp.right_shift(lax.broadcast_in_dim(x, shape, [0]) + before, 3))
    return bits(end) - bits(first)
