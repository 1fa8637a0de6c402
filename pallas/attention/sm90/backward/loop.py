"""The work tile and the step of a compute warpgroup of the Hopper backward.

A step is one iteration of q_loop, the loop over the queries that attend to a block of keys.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward.schedule import KeyBlock, QLoop, StepPlace
from jax_kernels.pallas.attention.sm90.backward.state import Kernel, StepNumbers
from jax_kernels.pallas.attention.sm90.backward.traits import Traits
from jax_kernels.pallas.attention.sm90.features import mask_bits, score_mod
from jax_kernels.pallas.attention.sm90.features.segments import span_words
from jax_kernels.pallas.kernel_types import Index, needed
from jax_kernels.pallas.mosaic.layouts import PART, ROW, WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkTile:
    """Work tile number `tile` of the launch, the `turn`-th of the CTA, as a compute warpgroup sees it.

    first: the number of steps in the CTA's earlier work tiles. block: its block of keys. q_loop: its loop over queries.
    first_key: index of the first of the warpgroup's 64 keys.
    """

    kernel: Kernel
    tile: Index
    turn: Index
    first: Index
    block: KeyBlock
    q_loop: QLoop
    first_key: Index

    def steps_again(self) -> Index:
        """The number of steps of the work tile, recomputed if Traits.recomputes."""
        kernel = self.kernel
        if kernel.traits.has_lists:
            return kernel.q_loop(self.tile, self.block).steps
        if kernel.traits.recomputes:
            tile = recomputed(self.tile)
            return kernel.q_loop(tile, kernel.block(tile)).steps
        return self.q_loop.steps

    def block_again(self) -> KeyBlock:
        """The block of keys, recomputed."""
        return self.kernel.block(recomputed(self.tile))

    def first_key_again(self) -> Index:
        """The index of the first of the warpgroup's keys, recomputed."""
        return first_key(self.kernel, self.block_again(), recomputed(self.kernel.wg))

    def place_again(self, index: Index) -> StepPlace:
        """The block of queries of step number `index`, recomputed."""
        return self.kernel.q_loop(self.tile, self.block_again()).place(index)


def first_key(kernel: Kernel, block: KeyBlock, wg: Index) -> Index:
    """The index within the sequence of the first of a warpgroup's 64 keys of a block of keys."""
    return block.kv_index * kernel.traits.block_kv + (0 if kernel.traits.splits_columns else 64 * wg)


class DqBlock(NamedTuple):
    """A block of dquery: the columns of chunk number `chunk`, and 64 queries from 64 * row on, counted within the
    step's block of queries.
    """

    chunk: Any
    row: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class QStep:
    """One step of the loop over queries: a block of queries of one head. The rows of its scores are keys.

    wg: the warpgroup. key_group, half: index of the warpgroup's 64 keys in the work tile, and of its half of the
    columns. row: the first of these keys within the work tile. nth: number of the step; a persistent CTA counts from
    its first work tile. index: number of the step within the work tile. k_stage, v_stage, slot, do_slot: the stages of
    keys, values, queries and dout. head, q_block, q_start: query head, index of the block of queries, first query.
    words: the mask words of the step's pairs, None unless the block lists have the words of all blocks. early_words:
    the result of segment_words for a partial block if `with_early_words` computed it, otherwise None.
    """

    transposed: ClassVar[bool] = True

    work: WorkTile
    wg: Index
    key_group: Index
    row: Index
    half: Index
    nth: Index
    index: Index
    k_stage: Index
    v_stage: Index
    slot: Index
    do_slot: Index
    head: Index
    q_block: Index
    q_start: Index
    is_partial: bool | jax.Array
    words: jax.Array | None
    early_words: jax.Array | None = None

    @classmethod
    def of(cls, work: WorkTile, i: Index) -> "QStep":
        """Step number `i`, after waiting for its loads. i: counts as `nth` in a persistent CTA, as `index`
        otherwise.
        """
        kernel, traits, schedule = work.kernel, work.kernel.traits, work.kernel.schedule
        config, is_persistent = traits.config, schedule.is_persistent
        wg = recomputed(kernel.wg)
        key_group, half = (recomputed(0), wg) if traits.splits_columns else (wg, 0)
        nth = i if is_persistent else work.first + i
        stages = schedule.stages_of(work.turn)
        slot = schedule.slot_of(nth, config.q_stages)
        do_slot = schedule.slot_of(nth, config.do_stages) if config.do_stages > 1 else recomputed(0)
        index = StepNumbers.read(needed(kernel.smem.steps), slot).index if is_persistent else i
        keeps = not (traits.recomputes or is_persistent)
        place = work.q_loop.place(index) if keeps else _place_again(work, slot, index)
        if keeps and traits.has_segments:  # whether the block is partial depends on more numbers than its index
            place = place._replace(is_partial=_place_again(work, slot, index).is_partial)
        q_start = place.q_block * traits.block_q
        words, lists = None, kernel.arrays.lists
        if lists is not None and traits.has_words:
            listed = lists.blocks_of(recomputed(work.tile))
            words = listed.words(place.head, place.q_block, 64 * key_group, 64)
        _wait_for_loads(kernel, slot, do_slot)
        return cls(
            work=work,
            wg=wg,
            key_group=key_group,
            row=64 * key_group,
            half=half,
            nth=nth,
            index=index,
            k_stage=stages.k,
            v_stage=stages.v,
            slot=slot,
            do_slot=do_slot,
            head=place.head,
            q_block=place.q_block,
            q_start=q_start,
            is_partial=place.is_partial,
            words=words,
        )

    @property
    def kernel(self) -> Kernel:
        return self.work.kernel

    @property
    def traits(self) -> Traits:
        return self.work.kernel.traits

    def numbers(self) -> StepNumbers:
        """The step's block of queries and flags, which the memory warpgroup of a persistent CTA wrote, read once
        more.
        """
        return StepNumbers.read(needed(self.kernel.smem.steps), self.slot)

    def place_again(self) -> StepPlace:
        """The position of the step's block of queries (no data), read again from shared memory or recomputed."""
        return _place_again(self.work, self.slot, self.index)

    def b_again(self) -> Index:
        """The batch entry of the step, read again or recomputed."""
        if self.traits.is_persistent:
            return self.numbers().b
        return self.work.block_again().b

    def first_key(self) -> Index:
        """The index within the sequence of the first of the warpgroup's keys."""
        if self.traits.is_persistent:
            return self.numbers().kv_block * self.traits.block_kv + 64 * recomputed(self.kernel.wg)
        if self.traits.recomputes and self.traits.has_segments:
            return self.work.first_key_again()
        return self.work.first_key

    def score_mod_tile(self, s: jax.Array) -> score_mod.Tile:
        """The call's score_mod on the step's scores. s: K Q^T without the scale, [64 keys, queries]."""
        b, mod = self.b_again(), needed(self.kernel.arrays.mod)
        numbers = mod.of_head(b, self.head)
        return mod.on(s, numbers, b, self.head, self.q_start, self.first_key(), transposed=True)

    def drop_pairs(self, s: jax.Array) -> jax.Array:
        """The scores of a partial block, -inf for pairs that limits, segments or block lists drop."""
        kernel, traits = self.kernel, self.traits
        if kernel.arrays.lists is not None:
            listed = kernel.arrays.lists.blocks_of(recomputed(self.work.tile))
            return listed.masked(s, self.index, self.row, by_word=False)
        if traits.has_segments:
            words = self.segment_words() if self.early_words is None else self.early_words
            return mask_bits.kept(s, words, by_word=True)
        limits = kernel.schedule.limits(kernel.arrays, self.b_again())
        keep = limits.keep(s.shape, self.first_key(), self.q_start, layout=WGMMA, kv_axis=0, may_end=traits.may_end)
        return jnp.where(keep, s, -jnp.inf)

    def segment_words(self) -> jax.Array:
        """The mask words [64, PART] of a partial block of a call with segment ids: limits and equal ids."""
        kernel, columns, q_start = self.kernel, self.traits.block_q, self.q_start
        b, segments = self.b_again(), needed(kernel.arrays.segments)
        limits = kernel.schedule.limits(kernel.arrays, b)
        spans = needed(kernel.smem.spans).at[self.k_stage, :, pl.ds(self.row, 64)]
        first, end = (plgpu.load(spans.at[i], layout=ROW, optimized=False) for i in range(2))
        first, end = limits.queries_within(first, end, self.first_key(), ROW)
        words = span_words(first - q_start, end - q_start, columns)
        return segments.words(words, spans, b, self.first_key(), q_start, columns, of_keys=True)

    def with_early_words(self) -> "QStep":
        """The step with the mask words of segment ids, if the call has these ids and Traits.recomputes.

        Before the scores there are registers to compute the words, which the scores occupy later if Traits.late_dp.
        """
        if not (self.traits.has_segments and self.traits.recomputes):
            return self
        unused = lambda: plgpu.layout_cast(jnp.zeros((64, PART), jnp.int32), WGMMA)
        return dataclasses.replace(self, early_words=lax.cond(self.is_partial, self.segment_words, unused))

    def dq_blocks(self) -> list[DqBlock]:
        """The blocks of the step's dquery that this warpgroup computes and stores."""
        traits = self.traits
        if traits.splits_columns:
            return [DqBlock(self.wg * traits.dq_blocks + i, 0) for i in range(traits.dq_blocks)]
        return [DqBlock(self.wg, 0)] if traits.q_chunks == 1 else [DqBlock(0, self.wg)]


def _wait_for_loads(kernel: Kernel, slot: Index, do_slot: Index) -> None:
    """Waits until a step's queries, dout and bias have arrived.

    It does not wait for the queries if Traits.scores_ahead: the step before has done so. It does not wait for dout if
    Traits.waits_late: the step does so after it issued the scores. slot, do_slot: the stages of queries and of dout.

    All waits come before the accumulators: a wait between zeroing and matmul makes ptxas add a fence (its note C7519).
    """
    traits, barriers, bias = kernel.traits, kernel.barriers, kernel.smem.bias
    if not traits.scores_ahead:
        plgpu.barrier_wait(barriers.q_ready.at[slot])
    if not traits.waits_late:
        plgpu.barrier_wait(barriers.do_ready.at[do_slot])
    if bias is not None:
        plgpu.barrier_wait(bias.ready)


def _place_again(work: WorkTile, slot: Index, index: Index) -> StepPlace:
    """The block of queries of a step, which is not kept in registers: read from shared memory, or recomputed.

    slot: the step's stage of queries. index: its number within the work tile.
    """
    if not work.kernel.traits.is_persistent:
        return work.place_again(index)
    read = lambda: StepNumbers.read(needed(work.kernel.smem.steps), slot)
    return StepPlace(read().head, read().q_block, read().is_partial != 0)
