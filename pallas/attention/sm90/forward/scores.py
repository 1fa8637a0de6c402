"""From S = Q K^T to the softmax's input in the Hopper forward: softcap, bias, score_mod and mask."""

import dataclasses
import functools
from typing import Any, cast

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.block_ranges import BlockRange
from jax_kernels.pallas.attention.sm90.features import mask_bits
from jax_kernels.pallas.attention.sm90.features.block_lists import ListedBlocks
from jax_kernels.pallas.attention.sm90.features.softcap import softcapped_tile
from jax_kernels.pallas.attention.sm90.forward.loop import KvLoop, WorkTile
from jax_kernels.pallas.attention.sm90.forward.state import Arrays, Scratch, Traits
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.mosaic import layouts


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTile:
    """A warpgroup's 64 queries of work tile `index` of the launch, the `turn`-th of the CTA.

    own: the warpgroup's part of the work tile. q_smem: the queries in shared memory. mod_numbers: for each operand of
    the score_mod its scalar for the head, or None if it varies along queries or keys; None without a score_mod.

    score_bound: an upper bound of the scores in base 2, a float32 scalar of the head, or with config.norms_q_in_kernel
    one per query, [64]. is_small: whether a polynomial can compute the tanh of all scores of the head. is_bounded:
    whether row_max stays after the first block; equal in a warp. Each is None if the launch has no such branch;
    is_bounded also before the first block.
    """

    index: Index
    turn: Index
    own: WorkTile
    q_smem: Ref
    mod_numbers: Any
    score_bound: jax.Array | None
    is_small: jax.Array | None
    is_bounded: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOps:
    """The operations of compute warpgroup w between S = Q K^T and the softmax: softcap, bias, score_mod and mask."""

    traits: Traits
    arrays: Arrays
    scratch: Scratch
    kv_loop: KvLoop
    w: int

    def capped_biased_and_modified(self, tile: QueryTile, s: jax.Array, step: Index) -> jax.Array:
        """The scores of a step after softcap, bias and score_mod, but before the mask. s: S = Q K^T, [64, block_kv]."""
        return self.modified(tile, self.capped_and_biased(s), step)

    def modified(self, tile: QueryTile, s: jax.Array, step: Index, *, small: bool = False) -> jax.Array:
        """The scores after the score_mod; s itself without a score_mod.

        small: all scores of the head are so small that a polynomial computes the program's tanh.
        """
        mod = self.arrays.mod
        if mod is None:
            return s
        here = self.kv_loop.work_tile(lax.optimization_barrier(tile.index))
        q_start, kv_start = here.q_start + self.w * 64, tile.own.blocks.at(step) * self.traits.config.block_kv
        return mod.on(s, tile.mod_numbers, here.b, here.h, q_start, kv_start).scores(by_warp=True, small=small)

    def capped_and_biased(self, s: jax.Array) -> jax.Array:
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

    def mask_words(self, tile: QueryTile, step: Index) -> jax.Array | None:
        """The mask words of a step's block, for `masked_if_partial`, int32 [64, PART], one row per query.

        They are read here, while the matmuls run, if the block lists have the words of all blocks. Otherwise the result
        is None, and only a partial block's words are read later.
        """
        if not self.kv_loop.has_words:
            return None
        blocks = cast(ListedBlocks, tile.own.blocks)
        return blocks.words(blocks.head, blocks.at(step), self.w * 64, 64)

    def masked_if_partial(
        self,
        tile: QueryTile,
        s: jax.Array,
        step: Index,
        words: jax.Array | None,
        slot: Index,
        *,
        blocks: BlockRange | ListedBlocks,
    ) -> jax.Array:
        """The scores with -inf where a query may not attend to a key; s itself in a full block.

        words: the result of mask_words for this step. slot: of the block of keys. blocks: the blocks that the tile
        visits, for a test whether this step's block is partial.
        """
        masked = functools.partial(self._masked, tile, step=step, words=words, slot=slot)
        return lax.cond(blocks.is_partial(step), masked, lambda s: s, s)

    def _masked(self, tile: QueryTile, s: jax.Array, *, step: Index, words: jax.Array | None, slot: Index) -> jax.Array:
        """The scores of a partial block with -inf where a query may not attend to a key."""
        if self.kv_loop.has_words:
            return mask_bits.kept(s, words, by_word=True)
        if not self.traits.has_segments:
            return self.kv_loop.masked(s, tile.index, step, self.w)
        load = functools.partial(plgpu.load, optimized=False)
        kv_ids = load(needed(self.scratch.kv_ids).at[slot], layout=layouts.COLUMN)
        q_ids = load(needed(self.scratch.q_ids).at[self.traits.q_slot(self.w, tile.turn)], layout=layouts.ROW)
        s = lax.optimization_barrier(self.kv_loop.masked(s, tile.index, step, self.w, (q_ids, kv_ids)))
        plgpu.commit_smem()  # after the reads: the next copies overwrite this memory
        return s
