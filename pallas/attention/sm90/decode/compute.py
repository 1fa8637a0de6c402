"""The decoding kernel's compute warpgroups: a loop over the blocks of keys, and the epilogue."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention import softmax
from jax_kernels.pallas.attention.sm90.decode.state import COMPUTE_REGISTERS, OUT_COLUMNS, TILE, Item, Warpgroup
from jax_kernels.pallas.attention.sm90.features.softcap import softcapped
from jax_kernels.pallas.attention.sm90.forward.step import Accumulators, TileSums, with_accumulators
from jax_kernels.pallas.kernel_types import Index, Ref, Slice
from jax_kernels.pallas.mosaic.layouts import COLUMN, ROW, WGMMA


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLimits:
    """The keys that each row of a tile may attend to: limits - (left + 1) ... limits - 1 (from 0 without a window).

    limits: int32 [64], exclusive ends. length: the number of keys of the sequence. Blocks of keys that lie within
    full_start ... full_end - 1 need no mask; without a window only full_end counts.
    """

    limits: jax.Array
    length: Index
    full_start: Index
    full_end: Index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopState:
    """The state of the loop over keys: the softmax so far, and the pipeline's slot of the next block.

    row_max, row_sum: the maximum of each row in base 2, [64], and partial sums of each row of P, [64, 8], both float32.
    """

    row_max: jax.Array
    row_sum: jax.Array
    slot: Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(Warpgroup):
    """Compute warpgroup w, which processes an item's blocks w, w + compute_warpgroups, w + 2 * compute_warpgroups
    ...
    """

    out_gmem: Ref
    lse_gmem: Ref
    w: int

    def run(self) -> None:
        """Computes and stores all items of the CTA, this warpgroup's blocks only."""
        config, scratch = self.traits.config, self.scratch
        if config.compute_warpgroups == 2:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for slot in range(config.stages):
            plgpu.barrier_arrive(scratch.k_free.at[self.w * config.stages + slot])
            plgpu.barrier_arrive(scratch.v_free.at[self.w * config.stages + slot])
        self.for_each_item(self._run_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _run_item(self, index: Index, slot: Index) -> Index:
        """Computes and stores the warpgroup's part of item `index`, whose first block is in `slot`. Returns the next
        slot.
        """
        traits, scratch, w = self.traits, self.scratch, self.w
        item = self.item(index)
        tile_rows = pl.ds(item.tile * TILE, TILE)
        queries = self.arrays.query.at[item.b, item.head, tile_rows]
        plgpu.copy_gmem_to_smem(queries, scratch.q_smem.at[w], scratch.q_ready.at[w])
        rows = self._row_limits(item)
        plgpu.barrier_wait(scratch.q_ready.at[w])
        attend = functools.partial(self._attend, item, rows, slot)
        sums = with_accumulators(attend, v_head_dim=traits.v_head_dim, block_kv=traits.config.block_kv)
        self._epilogue(item, tile_rows, sums)
        return sums.slot

    def _row_limits(self, item: Item) -> RowLimits:
        """The limits of the keys of each row of an item's tile. Rows past the last query have the last query's
        limit.
        """
        q_length, length = self.traits.q_length, item.length
        # Rows past the last query have the last query's limit.
        row = item.tile * TILE + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
        limits = length - q_length + 1 + jnp.minimum(lax.div(row, jnp.int32(self.traits.group)), q_length - 1)
        full_end, full_start = length - q_length + 1, length - 1 - self.traits.left
        return RowLimits(limits=limits, length=length, full_start=full_start, full_end=full_end)

    def _attend(self, item: Item, rows: RowLimits, slot: Index, accs: Accumulators) -> TileSums:
        """The sums of the loop over the warpgroup's blocks of keys: O = P V before the division, and the softmax
        state.
        """
        compute_wgs = self.traits.config.compute_warpgroups
        steps = lax.div(item.count + (compute_wgs - 1 - self.w), compute_wgs)
        row_max, row_sum = softmax.start(TILE)
        step = functools.partial(self._mma_step, item, rows, accs)
        state = lax.fori_loop(0, steps, step, LoopState(row_max=row_max, row_sum=row_sum, slot=slot))
        acc = plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        return TileSums(acc=acc, row_max=state.row_max, row_sum=state.row_sum, slot=state.slot)

    def _mma_step(self, item: Item, rows: RowLimits, accs: Accumulators, step: Index, state: LoopState) -> LoopState:
        """Adds one block of keys: S = Q K^T, its softmax P, and O += P V. Returns the next state."""
        traits, scratch, config, w = self.traits, self.scratch, self.traits.config, self.w
        at = w * config.stages + state.slot
        start = self.first_key(item, step * config.compute_warpgroups + w)
        kept = self._kept_keys(item, start)
        plgpu.barrier_wait(scratch.k_ready.at[at])
        accs.s_ref[...] = plgpu.layout_cast(jnp.zeros((TILE, config.block_kv), jnp.float32), WGMMA)
        plgpu.wgmma(accs.s_ref, scratch.q_smem.at[w], scratch.k_smem.at[at].transpose((1, 0)))  # S = Q K^T
        s = plgpu.wgmma_accumulator_load(accs.s_ref, wait_n=0)
        plgpu.barrier_arrive(scratch.k_free.at[at])
        s = self._masked_if_partial(softcapped(s, traits.softcap, traits.scale) if traits.softcap else s, rows, start)
        if kept is not None:
            s = jnp.where(lax.broadcast_in_dim(kept, s.shape, [1]) != 0, s, -jnp.inf)
        p, row_max, row_sum, alpha = softmax.step(s, state.row_max, state.row_sum, traits.softcap or traits.scale)
        plgpu.barrier_wait(scratch.v_ready.at[at])
        left_over = lambda: self._clear_values(scratch.v_smem.at[at], rows.length - start)
        pl.when(start + config.block_kv > rows.length)(left_over)
        acc = plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        accs.acc_ref[...] = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        plgpu.wgmma(accs.acc_ref, p.astype(traits.dtype), scratch.v_smem.at[at])  # O += P V
        plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        plgpu.barrier_arrive(scratch.v_free.at[at])
        return LoopState(row_max=row_max, row_sum=row_sum, slot=traits.following(state.slot))

    def _kept_keys(self, item: Item, start: Index) -> jax.Array | None:
        """The mask of the block of keys from key `start` on: int32 [block_kv], nonzero for kept keys; None without one.

        Loaded before the block has arrived, so that the scores do not wait for it.
        """
        mask = self.arrays.mask
        if mask is None:
            return None
        entry = lax.div(item.b, jnp.int32(self.traits.batch // mask.shape[0]))
        of_block = mask.at[entry, pl.ds(start, self.traits.config.block_kv)]
        return plgpu.load(of_block, layout=COLUMN, optimized=False)

    def _masked_if_partial(self, s: jax.Array, rows: RowLimits, start: Index) -> jax.Array:
        """The scores of the block of keys from key `start` on, with -inf where a row may not attend to a key."""
        left = self.traits.left
        is_partial = start + self.traits.config.block_kv > rows.full_end
        if left >= 0:
            is_partial = is_partial | (start < rows.full_start)

        def masked(s):
            columns = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA)
            wide = lambda x: lax.broadcast_in_dim(x, s.shape, [0])
            keep = columns < wide(rows.limits - start)
            if left >= 0:
                keep = keep & (columns >= wide(rows.limits - start - (left + 1)))
            return jnp.where(keep, s, -jnp.inf)

        return lax.cond(is_partial, masked, lambda s: s, s)

    def _clear_values(self, v_ref: Ref, left_over: Index) -> None:
        """Writes zeros to the rows of a slot that lie past the sequence's keys: a cache may hold NaN or infinity there.

        v_ref: the slot's values in shared memory. left_over: the number of its rows that are keys of the sequence.
        """
        for first in range(0, self.traits.config.block_kv, TILE):
            for column in range(0, self.traits.v_head_dim, 64):
                ref = v_ref.at[pl.ds(first, TILE), pl.ds(column, 64)]
                v = plgpu.load(ref, layout=WGMMA)
                keep = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WGMMA) < left_over - first
                ref[...] = jnp.where(keep, v, jnp.zeros_like(v))
        plgpu.commit_smem()

    def _epilogue(self, item: Item, tile_rows: Slice, sums: TileSums) -> None:
        """Stores out = O / row_sum and lse, in natural log, of the warpgroup's part of an item.

        lse = log(row_sum) + row_max * ln 2, since row_max is in base 2. A row without keys and sinks has out = 0 and
        lse = -inf. The sinks join part 0 only. tile_rows: the rows of the item's tile.
        """
        traits, sinks, w = self.traits, self.arrays.sinks, self.w
        out_smem, lse_smem = self.scratch.out_smem, self.scratch.lse_smem
        b, head, part = item.b, item.head, item.split * traits.config.compute_warpgroups + w
        row_max, row_sum, factor = sums.row_max, sums.row_sum, 1.0
        if sinks is not None:  # in one part only
            sink = plgpu.load(sinks.at[b, head, tile_rows], layout=ROW, optimized=False)
            row_max, row_sum, factor = softmax.with_sink(row_max, row_sum, jnp.where(part == 0, sink, -jnp.inf))
        inverse, lse = softmax.finish(row_max, row_sum, may_be_dead=True)
        acc = sums.acc * lax.broadcast_in_dim(inverse * factor, sums.acc.shape, [0])
        acc = acc.astype(traits.out_dtype)
        to = self.out_gmem.at[b, head, part, pl.ds(item.tile * TILE, traits.stored_rows)]
        for column in range(0, traits.v_head_dim, OUT_COLUMNS):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last stores have left shared memory
            out_smem[w] = acc[:, column : column + OUT_COLUMNS]
            if column == 0:
                lse_smem[w] = lse
            plgpu.commit_smem()
            columns = pl.ds(column, OUT_COLUMNS)
            plgpu.copy_smem_to_gmem(out_smem.at[w, pl.ds(0, traits.stored_rows)], to.at[:, columns])
        plgpu.copy_smem_to_gmem(lse_smem.at[w], self.lse_gmem.at[b, head, part, tile_rows])
