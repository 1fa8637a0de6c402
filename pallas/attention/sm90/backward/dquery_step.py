"""A step of the kv loop of the Hopper kernel for a deterministic dquery: one block of keys."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward.dquery_state import DqueryKernel, DqueryTraits, QueryRows
from jax_kernels.pallas.attention.sm90.features import score_mod
from jax_kernels.pallas.kernel_types import Index, needed
from jax_kernels.pallas.mosaic.layouts import ROW, WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvStep:
    """One step of the kv loop of a warpgroup, which visits one block of keys. The rows of its scores are queries.

    wg: index of the warpgroup. index: number of the step. slot, v_slot: the stages of shared memory that hold its keys
    and its values.
    """

    transposed: ClassVar[bool] = False
    words: ClassVar[None] = None  # a partial block's mask words are read in drop_pairs

    rows: QueryRows
    wg: Index
    index: Index
    slot: Index
    v_slot: Index

    @classmethod
    def of(cls, rows: QueryRows, i: Index) -> "KvStep":
        """Step number `i`, after waiting for its loads."""
        traits, smem = rows.kernel.traits, rows.kernel.smem
        blocks = traits.blocks
        wg = recomputed(rows.kernel.wg)
        slot = lax.rem(i, jnp.int32(blocks.k_stages))
        v_slot = lax.rem(i, jnp.int32(blocks.v_stages)) if blocks.v_stages > 1 else recomputed(0)
        # All waits come before the accumulators: a wait between zeroing and matmul costs a fence (C7519).
        if not traits.scores_ahead:
            plgpu.barrier_wait(smem.k_ready.at[slot])
        plgpu.barrier_wait(smem.v_ready.at[v_slot])
        if smem.bias is not None:
            plgpu.barrier_wait(smem.bias.ready)
        return cls(rows=rows, wg=wg, index=i, slot=slot, v_slot=v_slot)

    @property
    def kernel(self) -> DqueryKernel:
        return self.rows.kernel

    @property
    def traits(self) -> DqueryTraits:
        return self.rows.kernel.traits

    def kv_start(self) -> Index:
        """The index of the step's first key."""
        return self.kernel.blocks.at(self.index) * self.traits.blocks.block_kv

    @property
    def row(self) -> Index:
        """The first of the warpgroup's queries, counted within the CTA's block of queries."""
        return 64 * self.wg

    @property
    def is_partial(self) -> bool | jax.Array:
        return self.kernel.blocks.is_partial(self.index)

    def score_mod_tile(self, s: jax.Array) -> score_mod.Tile:
        """The call's score_mod on the step's scores. s: Q K^T without the scale, [64 queries, keys]."""
        tile, mod = self.kernel.tile, needed(self.kernel.arrays.mod)
        return mod.on(s, self.rows.mod_numbers, tile.b, tile.head, self.rows.q_start, self.kv_start())

    def drop_pairs(self, s: jax.Array) -> jax.Array:
        """The scores of a partial block, -inf for pairs that limits, segments or block lists drop."""
        traits, kernel, rows = self.traits, self.kernel, self.rows
        if kernel.arrays.lists is not None:
            return kernel.arrays.lists.blocks_of(recomputed(kernel.cta)).masked(s, self.index, self.row, by_word=False)
        limits, segments, ids = needed(kernel.limits), kernel.arrays.segments, None
        kv_start = self.kv_start()
        if segments is not None:
            ids = segments.load(kernel.tile.b, rows.q_start, 64, kv_start, traits.blocks.block_kv)
        if traits.options.window is not None:
            keep = limits.keep(
                s.shape, kv_start, rows.q_start, layout=WGMMA, kv_axis=1, may_end=traits.may_end, ids=ids
            )
            return jnp.where(keep, s, -jnp.inf)
        # Not limits.keep: one comparison with a value per row takes fewer registers.
        count = limits.kv_length - kv_start
        if traits.options.is_causal:
            of_rows = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=ROW)
            count = lax.broadcast_in_dim(limits.key_limit(rows.q_start + of_rows) - kv_start, s.shape, [0])
        keep = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA) < count
        if ids is not None:
            keep &= lax.broadcast_in_dim(ids[0], s.shape, [0]) == lax.broadcast_in_dim(ids[1], s.shape, [1])
        return jnp.where(keep, s, -jnp.inf)
