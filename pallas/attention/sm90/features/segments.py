"""Segment ids in the Hopper kernels."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.kernel_types import needed
from jax_kernels.pallas.mosaic.layouts import COLUMN, ROW


class Segments(NamedTuple):
    """Segment ids and, for each block that a CTA owns, the blocks that it may meet (block_ranges.segment_ranges)."""

    q_ids: Any
    kv_ids: Any
    ranges: Any

    def among(self, batch_index, block):
        """The blocks that a block may meet, as Limits takes them."""
        return block_ranges.among(self.ranges, batch_index, block)

    def load(self, batch_index, q_start, q_rows: int, kv_start, kv_rows: int):
        """The ids of a tile whose rows are queries: (ids of its rows, ids of its columns), from device memory."""
        q_ids = self.q_ids.at[batch_index, pl.ds(q_start, q_rows)]
        kv_ids = self.kv_ids.at[batch_index, pl.ds(kv_start, kv_rows)]
        load = functools.partial(plgpu.load, optimized=False)
        return load(q_ids, layout=ROW), load(kv_ids, layout=COLUMN)


def segments_of(inputs: AttentionInputs, block_q: int, block_kv: int, *, of_keys: bool) -> Segments | None:
    """The call's segments, padded to whole blocks with ids that meet no id. of_keys: a CTA owns a block of keys."""
    if inputs.q_segment_ids is None:
        return None
    q_ids, kv_ids = block_ranges.segment_arrays(inputs.q_segment_ids, needed(inputs.kv_segment_ids))
    own, others = ((q_ids, block_q), (kv_ids, block_kv))[:: -1 if of_keys else 1]
    whole = lambda ids, block, none: jnp.pad(ids, [(0, 0), (0, -ids.shape[1] % block)], constant_values=none)
    return Segments(
        whole(q_ids, block_q, block_ranges.NO_QUERY),
        whole(kv_ids, block_kv, block_ranges.NO_KEY),
        block_ranges.segment_ranges(*own, *others),
    )
