"""Segment ids in the Hopper kernels."""

import functools
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.passes import segment_blocks
from jax_kernels.pallas.kernel_types import needed
from jax_kernels.pallas.mosaic.layouts import COLUMN, ROW


class Segments(NamedTuple):
    """Segment ids in device memory, and for each block that a CTA owns the blocks that it may attend to.

    q_ids, kv_ids: int32 [B, T] and [B, S], padded to whole blocks; the padding of queries and of keys equals no id of
    the other side. ranges: int32 [B, blocks, 4], for each block of the side whose blocks CTAs own, block indices of the
    other side (first, end, full_first, full_end). Blocks first ... end - 1 may have an equal id; blocks full_first ...
    full_end - 1 have one id, the block's only id.
    """

    q_ids: Any
    kv_ids: Any
    ranges: Any

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
    return Segments(q_ids=q_ids, kv_ids=kv_ids, ranges=found.ranges)
