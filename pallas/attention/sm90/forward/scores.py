"""From S = Q K^T to P in the 16-bit Hopper forward: softcap, bias, score_mod, mask and softmax."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention import softmax
from jax_kernels.pallas.attention.sm90.features import mask_bits
from jax_kernels.pallas.attention.sm90.features.block_lists import ListedBlocks
from jax_kernels.pallas.attention.sm90.features.segments import span_words
from jax_kernels.pallas.attention.sm90.features.softcap import softcapped_tile, tanh_polynomial
from jax_kernels.pallas.attention.sm90.forward.loop import KvLoop
from jax_kernels.pallas.attention.sm90.forward.state import Arrays, Scratch, Smem, Traits
from jax_kernels.pallas.attention.sm90.forward.step import Accumulators, LoopState, QueryTile, Softmax
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.mosaic.layouts import ROW, WGMMA
from jax_kernels.pallas.mosaic.registers import all_of_warp, as_int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTile16(QueryTile):
    """A compute warpgroup's 64 queries of a work tile, the `turn`-th of the CTA, in bfloat16 or float16.

    q_smem: the queries in shared memory. mod_numbers: for each operand of the score_mod its scalar for the head, or
    None if it varies along queries or keys; None without a score_mod.

    score_bound: an upper bound of the scores in base 2, a float32 scalar of the head, or with config.norms_q_in_kernel
    one per query, [64]. is_small: whether a polynomial can compute the tanh of all scores of the head. is_bounded:
    whether row_max stays after the first block; equal in a warp. Each is None if the launch has no such branch;
    is_bounded also before the first block.
    """

    traits: Traits
    arrays: Arrays[Ref]
    scratch: Scratch
    smem: Smem
    kv_loop: KvLoop
    turn: Index
    q_smem: Ref
    mod_numbers: Any
    score_bound: jax.Array | None
    is_small: jax.Array | None
    is_bounded: jax.Array | None = None

    def issue_scores(self, accs: Accumulators, slot: Index) -> None:
        accs.s_ref[...] = plgpu.layout_cast(jnp.zeros((64, self.traits.config.block_kv), jnp.float32), WGMMA)
        for c in range(self.traits.qk_tiles.count):
            plgpu.wgmma(accs.s_ref, self.q_smem.at[c], self.smem.k.at[slot, c].transpose((1, 0)))

    def issue_values(self, accs: Accumulators, p: jax.Array, slot: Index) -> None:
        v_tiles = self.traits.v_tiles
        for c in range(v_tiles.count):
            acc = accs.acc_ref.at[:, pl.ds(v_tiles.width * c, v_tiles.width)]
            plgpu.wgmma(acc if v_tiles.count > 1 else accs.acc_ref, p, self.smem.v.at[slot, c])

    def scores(self, accs: Accumulators, step: Index, slot: Index, *, is_first: bool) -> jax.Array:
        traits, kv_loop, k_free = self.traits, self.kv_loop, self.pipeline.k_free.at[slot]
        step = as_int32(step)
        words = self._mask_words(step)
        s = plgpu.wgmma_accumulator_load(accs.s_ref, wait_n=0 if is_first else traits.v_tiles.count)
        plgpu.barrier_arrive(k_free)
        s = lax.optimization_barrier(s)
        if is_first or self.is_small is None:  # otherwise softmax_step does it
            s = self._modified(self._capped_and_biased(s), step)
        if kv_loop.has_partial and (is_first or not kv_loop.only_first_partial):
            blocks = self.own.blocks
            if traits.has_segments and traits.is_wide and not is_first:
                # The range is read again, not kept in registers.
                blocks = kv_loop.work_tile(lax.optimization_barrier(self.index)).blocks
            # One loop with a branch: two loops were slower.
            masked = functools.partial(self._masked, step=step, words=words)
            s = lax.cond(blocks.is_partial(step), masked, lambda s: s, s)
        return s

    def first_softmax(self, s: jax.Array, slot: Index) -> tuple["QueryTile16", LoopState]:
        """(the tile with is_bounded, the loop's first state) from the scores s of the first block, which is in
        `slot`.
        """
        traits, tile, dtype = self.traits, self, self.traits.dtype
        p, row_max, row_sum, _ = traits.softmax_step(s, *softmax.start(64, natural=traits.natural))
        if self.score_bound is not None:
            # Whether no later score of the warp's rows can be far above the maximum of the first block.
            is_bounded = all_of_warp(self.score_bound - row_max <= softmax.headroom(dtype))
            tile = dataclasses.replace(self, is_bounded=is_bounded)
            if dtype == jnp.bfloat16:
                rescaled = functools.partial(softmax.rescaled_to_bound, largest=self.score_bound)
                p, row_max, row_sum = lax.cond(is_bounded, rescaled, lambda *state: state, p, row_max, row_sum)
        return tile, LoopState(p=p.astype(dtype), row_max=row_max, row_sum=row_sum, slot=slot)

    def softmax_step(self, s: jax.Array, step: Index, state: LoopState) -> Softmax:
        exponentials: Callable[..., Any] = self._exponentials
        if self.is_small is not None:
            finished = lambda s: self._modified(self._capped_and_biased(s), step)
            full = lambda s, row_max, row_sum: self._exponentials(finished(s), row_max, row_sum)
            short = functools.partial(self._small_exponentials, step)
            exponentials = functools.partial(lax.cond, self.is_small & needed(self.is_bounded), short, full)
        p, row_max, row_sum, alpha = exponentials(s, state.row_max, state.row_sum)
        return Softmax(p=p, row_max=row_max, row_sum=row_sum, alpha=alpha, rescaled=self._rescaled)

    def rescaled_and_rounded(
        self, acc: jax.Array, p: jax.Array, rescaled: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        p = p.astype(self.traits.dtype)
        return rescaled(acc), p

    def _capped_and_biased(self, s: jax.Array) -> jax.Array:
        """The scores after softcap and bias: softcap * tanh(s * scale / softcap) + bias.

        Without a bias the factor softcap is left to the softmax. Without softcap and bias the result is s.
        """
        traits, bias = self.traits, self.scratch.bias
        s = softcapped_tile(s, traits.options.softcap, traits.options.scale) if traits.options.softcap else s
        if bias is not None:
            plgpu.barrier_wait(bias.ready)
            s = bias.added(s, traits.score_factor, 64 * self.w, transposed=False, natural=traits.natural)
            plgpu.commit_smem()
            plgpu.barrier_arrive(bias.free)
        return s

    def _modified(self, s: jax.Array, step: Index, *, small: bool = False) -> jax.Array:
        """The scores after the score_mod; s itself without a score_mod.

        small: all scores of the head are so small that a polynomial computes the program's tanh.
        """
        mod = self.arrays.mod
        if mod is None:
            return s
        here = self.kv_loop.work_tile(lax.optimization_barrier(self.index))
        q_start, kv_start = here.q_start + self.w * 64, self.own.blocks.at(step) * self.traits.config.block_kv
        return mod.on(s, self.mod_numbers, here.b, here.h, q_start, kv_start).scores(by_warp=True, small=small)

    def _mask_words(self, step: Index) -> jax.Array | None:
        """The mask words of a step's block, for `_masked`, int32 [64, PART], one row per query.

        They are read here, while the matmuls run, if the block lists have the words of all blocks. Otherwise the result
        is None, and only a partial block's words are read later.
        """
        if not self.kv_loop.has_words:
            return None
        blocks = cast(ListedBlocks, self.own.blocks)
        return blocks.words(blocks.head, blocks.at(step), self.w * 64, 64)

    def _masked(self, s: jax.Array, *, step: Index, words: jax.Array | None) -> jax.Array:
        """The scores of a partial block with -inf where a query may not attend to a key.

        words: the result of _mask_words for this step.
        """
        if self.kv_loop.has_words:
            return mask_bits.kept(s, words, by_word=True)
        if not self.traits.has_segments:
            return self.kv_loop.masked(s, self.index, step, self.w)
        s = lax.optimization_barrier(mask_bits.kept(s, self._segment_words(step), by_word=not self.traits.is_wide))
        plgpu.commit_smem()  # after the reads: the next copies overwrite this memory
        return s

    def _segment_words(self, step: Index) -> jax.Array:
        """The mask words of a step's block, from segment ids and limits: int32 [64, PART]."""
        own, block_kv = self.own, self.traits.config.block_kv
        if self.traits.is_wide:  # read again, not kept in registers
            own = self.kv_loop.own(self.kv_loop.work_tile(lax.optimization_barrier(self.index)), self.w)
        spans = needed(self.scratch.spans).at[self.traits.q_slot(self.w, self.turn)]
        kv_start = own.blocks.at(step) * block_kv
        first, end = (plgpu.load(spans.at[i], layout=ROW, optimized=False) for i in range(2))
        first, end = needed(own.limits).keys_within(first, end, own.q_start, ROW)
        words = span_words(first - kv_start, end - kv_start, block_kv)
        segments = needed(self.arrays.segments)
        return segments.words(words, spans, own.b, own.q_start, kv_start, block_kv, of_keys=False)

    def _exponentials(self, s: jax.Array, row_max: jax.Array, row_sum: jax.Array) -> tuple[jax.Array, ...]:
        """(P, row_max, row_sum, alpha) of a step, without a search for the maximum if the scores are bounded.

        s: the scores as the softmax takes them. If the scores are bounded, alpha has no meaning.
        """
        full, scale = self.traits.softmax_step, self.traits.softmax_scale
        if self.is_bounded is None:
            return full(s, row_max, row_sum)

        def short(s, row_max, row_sum):
            p, row_sum = softmax.bounded_step(s, row_max, row_sum, scale)
            return p, row_max, row_sum, row_max

        return lax.cond(self.is_bounded, short, full, s, row_max, row_sum)

    def _small_exponentials(
        self, step: Index, s: jax.Array, row_max: jax.Array, row_sum: jax.Array
    ) -> tuple[jax.Array, ...]:
        """(P, row_max, row_sum, alpha) of a step of a head with small scores: a polynomial computes the tanh.

        s: S = Q K^T, before softcap and score_mod. row_max stays, and alpha has no meaning.
        """
        scale, cap = self.traits.options.scale, self.traits.options.softcap
        if cap:  # in base 2, so that the subtraction of the maximum fuses with the last multiplication
            s = tanh_polynomial(s, scale / cap, cap * softmax.LOG2E)
        else:
            s = self._modified(s, step, small=True)
        p, row_sum = softmax.bounded_step(s, row_max, row_sum, softmax.LN2)
        return p, row_max, row_sum, row_max

    def _rescaled(self, acc: jax.Array, alpha: jax.Array) -> jax.Array:
        """O under the new maximum, acc * alpha; acc itself if the scores are bounded."""
        full = lambda acc: acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        return full(acc) if self.is_bounded is None else lax.cond(self.is_bounded, lambda acc: acc, full, acc)
