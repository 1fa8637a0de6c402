"""The attention forward's kernel on Hopper: a TMA producer, and warpgroups that overlap wgmma and softmax.

Each of two or three compute warpgroups owns 64 queries. In a step it issues S = Q K^T of this block of keys and O += P
V of the previous block, and computes the softmax of S while the second matmul runs. A CTA is persistent: it processes
work tiles of (batch, head, block of queries), whose blocks of keys come from block_ranges.py or from a mask's lists
(block_lists.py). The memory warpgroup is in load.py, the step in step.py and scores.py.

A tile of 64 x block_kv takes 4 * 64 * block_kv * head_dim FLOPs on the tensor cores and 64 * block_kv exp2; keys and
values are read from shared memory once per warpgroup. At head_dim 128 the matmuls and exp2 take about the same time, so
they have to overlap.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.pallas.attention import softmax
from jax_kernels.pallas.attention.sm90.features.bias import Bias
from jax_kernels.pallas.attention.sm90.features.head_views import LaunchCall, of_call
from jax_kernels.pallas.attention.sm90.forward.compute import ComputeWarpgroup
from jax_kernels.pallas.attention.sm90.forward.load import Loader
from jax_kernels.pallas.attention.sm90.forward.loop import PingPong, WorkTile, run_warpgroups
from jax_kernels.pallas.attention.sm90.forward.scores import QueryTile16
from jax_kernels.pallas.attention.sm90.forward.state import Arrays, Results, Scratch, Smem, Traits
from jax_kernels.pallas.attention.sm90.forward.step import (
    Accumulators,
    TileSums,
    first_scores,
    mma_step,
    with_accumulators,
)
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import ROW, WGMMA
from jax_kernels.pallas.mosaic.tile_scheduler import TileScheduler


def run(
    arrays: Arrays[jax.Array],
    scheduler: TileScheduler,
    options: AttentionOptions,
    calls: tuple[LaunchCall, ...],
    *,
    out_dtype: DTypeLike,
    config: AttentionForwardSm90,
    interpret: bool,
) -> Results[jax.Array]:
    """Launches the kernel for one or more calls, and returns their out, lse and lse_lo.

    lse is present if options.has_lse; lse_lo if also the call has a bias or a score_mod that may mask. calls: the
    static facts of each call; arrays has a query, key and value for each.
    """
    traits = Traits.of(arrays, scheduler, options, calls, out_dtype=out_dtype, config=config, interpret=interpret)
    leaves, tree = jax.tree.flatten(arrays)
    bias = arrays.bias or Bias()

    def entry(*refs):
        given = jax.tree.unflatten(tree, refs[: len(leaves)])
        results = Results.of(refs[len(leaves) :], len(calls))
        body = functools.partial(_body, traits, given, results)
        pl.run_scoped(body, Scratch.of(traits, bias), collective_axes="wg")

    shape = jax.ShapeDtypeStruct
    # Stores from registers write whole blocks of rows.
    rows = [of.blocks * config.block_q if traits.stores_registers else None for of in scheduler.shapes]
    outs = [
        shape((query.shape[0], whole or query.shape[1], call.heads, traits.v_head_dim), out_dtype)
        for query, call, whole in zip(arrays.query, calls, rows, strict=True)
    ]
    lses = [
        shape((of.batch, of.heads, _stored_rows(call.q_length, of.blocks * config.block_q)), jnp.float32)
        for call, of in zip(calls, scheduler.shapes, strict=True)
    ]
    kernel = launch(
        entry,
        "attention_forward_sm90",
        out_type=(*outs, *(lses if traits.has_lse else ()), *(lses if traits.has_lse_lo else ())),
        ctas=scheduler.ctas,
        warpgroups=config.compute_warpgroups + 1,
        semantics=plgpu.LoweringSemantics.Lane,
        interpret=interpret,
    )
    return Results.of(kernel(*leaves), len(calls))


def _stored_rows(length: int, whole: int) -> int:
    """The number of rows of a float32 result [B, H, rows] for `length` queries: length, or `whole` if copies need it.

    whole: length rounded up to whole blocks. Bulk copies have multiples of 16 bytes. If `length` rows are no such
    multiple, whole blocks are stored.
    """
    return length if length % 4 == 0 else whole


def _body(traits: Traits, arrays: Arrays[Ref], results: Results[Ref], scratch: Scratch) -> None:
    """Runs one CTA: each warpgroup takes its part."""
    wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
    smem, kv_loop = Smem.of(traits, scratch), traits.kv_loop(arrays, cta)
    loader = Loader(traits=traits, arrays=arrays, scratch=scratch, smem=smem, kv_loop=kv_loop)

    def compute(w: int) -> None:
        Compute(
            kv_loop=kv_loop,
            pingpong=PingPong.of(traits.config, interpret=traits.interpret),
            pipeline=scratch.pipeline,
            fetched=scratch.fetched,
            w=w,
            bias=scratch.bias,
            traits=traits,
            arrays=arrays,
            results=results,
            scratch=scratch,
            smem=smem,
        ).run()

    run_warpgroups(wg, traits.config, compute, loader.run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(ComputeWarpgroup):
    """A compute warpgroup of the 16-bit forward."""

    traits: Traits
    arrays: Arrays[Ref]
    results: Results[Ref]
    scratch: Scratch
    smem: Smem

    def load_q(self, index: Index, turn: Index) -> None:
        traits, w, tile = self.traits, self.w, self.kv_loop.work_tile(index)
        rows, copied = pl.ds(tile.q_start + w * 64, 64), self.smem.q_copied.at[traits.q_slot(w, turn)]
        ready = self.scratch.q_ready.at[w]

        def load(i: int) -> None:
            traits.qk_tiles.load(self.arrays.query[i].at[tile.b, rows, tile.q_head], copied, ready)

        of_call(tile.call, len(traits.calls), load)
        if traits.has_segments:
            spans = needed(self.arrays.segments).spans.at[tile.b, :, rows]
            plgpu.copy_gmem_to_smem(spans, needed(self.scratch.spans).at[traits.q_slot(w, turn)], ready)

    def load_next_q(self, following: Index, turn: Index) -> None:
        """Starts the copy of the queries of work tile `following`, if there is one. turn: of the current work tile."""

        @pl.when(following < self.traits.scheduler.count)
        def _():
            self.load_q(following, turn + 1)

    def run_tile(self, index: Index, turn: Index, slot: Index) -> tuple[Index, Index]:
        traits = self.traits
        own, slot = self.own_tile(index, slot)
        attend = functools.partial(self.attend, self.start_tile(index, turn, own), slot)
        sums, following = with_accumulators(attend, v_head_dim=traits.v_head_dim, block_kv=traits.config.block_kv)
        self.epilogue(index, turn, sums)
        if traits.share_q_out:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.load_next_q(following, turn)
        return following, self.pipeline.following(sums.slot)

    def start_tile(self, index: Index, turn: Index, own: WorkTile) -> QueryTile16:
        """The warpgroup's queries of work tile `index`, after they have arrived. own: the warpgroup's part of the work
        tile.
        """
        traits, arrays, w = self.traits, self.arrays, self.w
        mod_numbers = needed(arrays.mod).of_head(own.b, own.h) if traits.has_mod else None
        plgpu.barrier_wait(self.scratch.q_ready.at[w])
        q_smem = self.smem.q.at[traits.q_slot(w, turn)]
        score_bound = is_small = None
        if arrays.score_bounds is not None:
            score_bound = arrays.score_bounds[own.b, own.q_head]
        if score_bound is not None and traits.config.norms_q_in_kernel:
            parts = [plgpu.load(q_smem.at[c], layout=WGMMA) for c in range(traits.qk_tiles.count)]
            score_bound = score_bound * softmax.norms(parts)
            plgpu.commit_smem()  # after the reads: the next queries overwrite this memory
        # If the loop masks before the softmax, heads with small scores cannot have a softmax branch of their own.
        if arrays.small_scores is not None and (not self.kv_loop.has_partial or self.kv_loop.only_first_partial):
            is_small = arrays.small_scores[own.b, own.q_head] != 0
        return QueryTile16(
            pipeline=self.pipeline,
            pingpong=self.pingpong,
            w=w,
            index=index,
            own=own,
            traits=traits,
            arrays=arrays,
            scratch=self.scratch,
            smem=self.smem,
            kv_loop=self.kv_loop,
            turn=turn,
            q_smem=q_smem,
            mod_numbers=mod_numbers,
            score_bound=score_bound,
            is_small=is_small,
        )

    def attend(self, tile: QueryTile16, slot: Index, accs: Accumulators) -> tuple[TileSums, Index]:
        """(the sums of the loop over the warpgroup's blocks of keys, the following work tile).

        slot: of the first block.
        """
        traits, scheduler, has_lists = self.traits, self.traits.scheduler, self.kv_loop.lists is not None
        tile, state = tile.first_softmax(first_scores(tile, accs, slot), slot)
        if traits.early_q:
            following = scheduler.following(self.fetched, tile.index, tile.turn)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # for the last tile's output
            self.load_next_q(following, tile.turn)
        plgpu.barrier_wait(self.pipeline.v_ready.at[slot])
        state = lax.fori_loop(1, tile.own.blocks.count, functools.partial(mma_step, tile, accs), state)
        if not traits.early_q:
            following = scheduler.following(self.fetched, tile.index, tile.turn)
        # The last scores have read the queries. With share_q_out the output goes to the queries' memory first.
        loads_q_now = not traits.share_q_out and not traits.early_q
        if loads_q_now and has_lists:
            self.load_next_q(following, tile.turn)
        # O += P V, of the last block
        tile.issue_values(accs, state.p, state.slot)
        acc = plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        if loads_q_now and not has_lists:
            self.load_next_q(following, tile.turn)
        plgpu.barrier_arrive(self.pipeline.v_free.at[state.slot])
        return TileSums(acc=acc, row_max=state.row_max, row_sum=state.row_sum, slot=state.slot), following

    def epilogue(self, index: Index, turn: Index, sums: TileSums) -> None:
        """Stores out = O / row_sum, lse and lse_lo of the warpgroup's queries, as far as the call wants them.

        lse is the log-sum-exp in natural log: log(row_sum) + row_max, taken to natural units. Sinks join the
        sums before, and an earlier result is merged into out and lse. index: of the work tile in the launch. turn: its
        number in the CTA.
        """
        traits, results, w = self.traits, self.results, self.w
        tile = self.kv_loop.work_tile(lax.optimization_barrier(index))
        b, h, q_start = tile.b, tile.h, tile.q_start + w * 64
        row_max, row_sum, factor = sums.row_max, sums.row_sum, 1.0
        if traits.has_sinks:
            row_max, row_sum, factor = softmax.with_sink(
                row_max, row_sum, needed(self.arrays.sinks)[b, h], natural=traits.natural
            )
        if traits.has_lse_lo:
            inverse, lse, lse_lo = softmax.finish_exactly(row_max, row_sum, natural=traits.natural)
        else:
            may_be_dead = self.kv_loop.may_be_dead or traits.has_bias or traits.has_mod
            inverse, lse = softmax.finish(row_max, row_sum, may_be_dead=may_be_dead)
        acc = sums.acc * lax.broadcast_in_dim(inverse * factor, sums.acc.shape, [0])
        if traits.has_earlier:
            acc, lse = self._merged(acc, lse, b, h, q_start)
        if not traits.early_q:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have left shared memory
        if traits.stores_registers:
            of_call(tile.call, len(traits.calls), lambda i: self._store_registers(i, acc, b, h, q_start))
        else:
            for c, part in enumerate(traits.out_tiles.chunks(acc.astype(traits.out_dtype))):
                self.smem.out.at[traits.q_slot(w, turn), c][...] = part
        lse_smem, lse_lo_smem = self.scratch.lse_refs(traits, w)
        if traits.has_lse:
            lse_smem[...] = lse
        if traits.has_lse_lo:
            needed(lse_lo_smem)[...] = lse_lo
        plgpu.commit_smem()

        def store(i: int) -> None:
            rows = pl.ds(q_start, 64)
            if not traits.stores_registers:
                traits.out_tiles.store(self.smem.out_copied.at[traits.q_slot(w, turn)], results.outs[i].at[b, rows, h])
            if traits.has_lse:
                self._store_numbers(lse_smem, results.lses[i].at[b, h], q_start)
            if traits.has_lse_lo:
                self._store_numbers(needed(lse_lo_smem), results.lse_lo[i].at[b, h], q_start)

        of_call(tile.call, len(traits.calls), store)

    def _store_numbers(self, smem: Ref, gmem: Ref, q_start: Index) -> None:
        """Stores a float32 value for each of 64 queries from q_start on. gmem: [rows], the values of a head."""
        length = gmem.shape[0]
        whole = lambda: plgpu.copy_smem_to_gmem(smem, gmem.at[pl.ds(q_start, 64)])
        if length % self.traits.config.block_q == 0:
            whole()
            return
        # A copy of contiguous values past the row's end would overwrite the next head's values.
        pl.when(q_start + 64 <= length)(whole)
        rest = length % 64
        if rest:
            start = length - rest

            @pl.when(q_start == start)
            def _store_rest():
                plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, rest)], gmem.at[pl.ds(start, rest)])

    def _merged(
        self, acc: jax.Array, lse: jax.Array, b: Index, h: Index, q_start: Index
    ) -> tuple[jax.Array, jax.Array]:
        """(O, lse) over the keys of this call and of the earlier result in arrays.earlier. acc, lse: over this call's
        keys.
        """
        earlier, rows = self.arrays.earlier, pl.ds(q_start, 64)
        assert earlier is not None
        earlier_lse = plgpu.load(earlier.lse.at[b, h, rows], layout=ROW, optimized=False)
        earlier_out = plgpu.load(earlier.out.at[b, rows, h], layout=WGMMA, optimized=False)
        lse, mine, theirs = softmax.merged(lse, earlier_lse)
        wide = lambda x: lax.broadcast_in_dim(x, acc.shape, [0])
        return acc * wide(mine) + earlier_out * wide(theirs), lse

    def _store_registers(self, i: int, acc: jax.Array, b: Index, h: Index, q_start: Index) -> None:
        """Stores O of 64 queries from registers to device memory, in call i's result. h: the call's head."""
        self.results.outs[i].at[b, pl.ds(q_start, 64), h][...] = acc.astype(self.traits.out_dtype)
