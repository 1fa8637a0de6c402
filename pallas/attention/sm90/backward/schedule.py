"""The blocks of keys that a CTA of the Hopper backward owns, and the order of their blocks of queries.

A work tile is a block of keys of one kv head. Its loop over the queries (q_loop) takes one block of queries of one
query head per step. A persistent CTA processes one work tile after another, and its memory warpgroup runs ahead into
the next work tile.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.sm90.backward.arrays import Arrays
from jax_kernels.pallas.attention.sm90.backward.widths import Widths
from jax_kernels.pallas.attention.sm90.features import head_views
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90
from jax_kernels.pallas.kernel_types import Index
from jax_kernels.pallas.mosaic.registers import as_int32, recomputed
from jax_kernels.pallas.mosaic.smem_tiles import has_odd_length
from jax_kernels.pallas.mosaic.split_tail import SplitTail
from jax_kernels.pallas.mosaic.tile_scheduler import Shape, TileScheduler


class KeyBlock(NamedTuple):
    """The block of keys of a work tile: batch entry, kv head, index of the block. All are traced scalars."""

    b: Index
    kv_head: Index
    kv_index: Index


class StepPlace(NamedTuple):
    """The block of queries that a step visits: query head, index of the block, and whether the block is partial."""

    head: Index
    q_block: Index
    is_partial: bool | jax.Array


class QLoop(NamedTuple):
    """The loop over the queries of a work tile.

    steps: the number of steps. `place(step)`: the step's block of queries; step counts from 0 within the work tile.
    """

    steps: Index
    place: Callable[[Index], StepPlace]


class Stages(NamedTuple):
    """The indices of the shared-memory stages that hold the keys and the values of a work tile."""

    k: Index
    v: Index


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of the work of a launch, as known when its kernel is traced.

    group: query heads per kv head; a q_loop goes over all of them. q_loop_stagger: the distance, in blocks of queries,
    between the starts of the loops of neighbouring blocks of keys, if visits_all or only segments limit them.
    visits_all: whether causality, a window and segments let every block of keys attend to every block of queries.
    split: the division of the last work tiles into parts, so that all SMs have work; in the methods, a part then has
    the number of its CTA as its own work tile number. scheduler: numbers the work tiles before the split.
    is_persistent: whether a CTA processes one work tile after another; otherwise it processes one work tile, or a part
    of it. v_stages: stages for values.
    """

    options: AttentionOptions
    q_length: int
    kv_length: int
    block_q: int
    block_kv: int
    kv_heads: int
    group: int
    q_loop_stagger: int
    visits_all: bool
    split: SplitTail
    scheduler: TileScheduler
    is_persistent: bool
    v_stages: int

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        options: AttentionOptions,
        kv_length: int,
        block_kv: int,
        config: AttentionBackwardSm90,
        core_count: int,
        *,
        bias_gradient: bool,
        interpret: bool,
    ) -> "Schedule":
        """The Schedule of a call, with the choice of persistent CTAs and of a split.

        kv_length: the unpadded number of keys. block_kv: the block of keys. core_count: the number of SMs.
        """
        batch, q_length = arrays.query.shape[:2]
        heads, kv_heads = head_views.head_counts(arrays.query, arrays.key, options)
        group = heads // kv_heads
        # Heads of a group read the same keys, so that more heads run together at the same cost in cache.
        longer = max(1, q_length // config.head_group_max_q_length)
        together = max(1, config.head_group // longer) * group
        visits_all = not (options.is_causal or options.window is not None or arrays.segments is not None)
        shape = Shape.of(batch, kv_heads, kv_length, block_kv)
        scheduler = TileScheduler(
            shapes=(shape,),
            longest_last=False,
            head_group=together,
            dynamic=not interpret,
            core_count=core_count,
        )
        split = SplitTail.none(shape.tiles)
        # A call that adds dquery in order of arrival may add dkey and dvalue in that order, too.
        # At 192 with values of 128, shared memory has no room for the count of the parts.
        has_equal_columns = arrays.query.shape[-1] == arrays.value.shape[-1]
        may_split = visits_all and has_equal_columns and not bias_gradient and arrays.dquery is not None
        if may_split and arrays.lists is None and arrays.bounds is None:
            split = SplitTail.of(shape.tiles, pl.cdiv(q_length, config.block_q) * group, core_count)
        # A persistent CTA issues scores ahead. Two stages of keys do not fit above head_dim 128. The sums of a bias, a
        # softcap and a score_mod leave no spare registers, nor do copies of any number of rows at head_dim 128.
        any_rows = arrays.query.shape[-1] > 64 and has_odd_length(arrays.query, arrays.key)
        has_extra = bias_gradient or any_rows or options.softcap is not None or arrays.mod is not None
        widths = Widths(key=arrays.query.shape[-1], value=arrays.value.shape[-1], block_q=config.block_q)
        can_persist = widths.scores_ahead and split.parts == 1 and not has_extra
        is_persistent = config.persistent and can_persist and shape.tiles > core_count
        return cls(
            options=options,
            q_length=q_length,
            kv_length=kv_length,
            block_q=config.block_q,
            block_kv=block_kv,
            kv_heads=kv_heads,
            group=group,
            q_loop_stagger=config.q_loop_stagger,
            visits_all=visits_all,
            split=split,
            scheduler=scheduler,
            is_persistent=is_persistent,
            v_stages=config.v_stages if is_persistent else 1,
        )

    @property
    def ctas(self) -> int:
        """The number of CTAs to launch."""
        return self.scheduler.ctas if self.is_persistent else self.split.ctas

    @property
    def k_stages(self) -> int:
        """The number of stages for blocks of keys."""
        return 2 if self.is_persistent else 1

    def stages_of(self, turn: Index) -> Stages:
        """The stages of the CTA's `turn`-th work tile."""
        if not self.is_persistent:
            return Stages(0, 0)
        stage = recomputed(turn) & 1
        return Stages(stage, stage if self.v_stages == 2 else recomputed(0))

    def slot_of(self, nth: Index, stages: int) -> Index:
        """The stage of the CTA's step number `nth`, if there are `stages` stages for blocks of queries."""
        if self.is_persistent and stages & (stages - 1) == 0:  # a bit mask, not a signed division
            return nth & (stages - 1)
        return lax.rem(nth, jnp.int32(stages))

    def shared(self, sums: int, head_dim: int, *, warpgroups: int) -> dict[str, Any]:
        """New refs in device memory that all CTAs of a launch use, by their names in Arrays: counter, sums, arrived.

        counter: int32 [1], for persistent CTAs. If work tiles are split: sums, float32 [split work tiles, `sums`,
        block_kv, head_dim], zeros; arrived, int32 [split work tiles, warpgroups], zeros. Refs that the launch does not
        need are None. The argument `sums`: the number of matrices to sum per work tile, 2 for dkey and dvalue.
        warpgroups: the number of compute warpgroups.
        """
        counter = self.scheduler.counter() if self.is_persistent else None
        return {"counter": counter} | self.split.shared(sums, self.block_kv, head_dim, warpgroups=warpgroups)

    def for_each(self, cta: Index, run: Callable, state: Any = 0) -> None:
        """Calls run(tile, turn, state) for each work tile of the CTA; `run` returns (the next tile, the next state).

        turn counts the CTA's work tiles. A CTA that is not persistent has one work tile.
        """
        if self.is_persistent:
            self.scheduler.for_each(recomputed(cta), run, state)
        else:
            run(cta, 0, state)

    def block(self, arrays: Arrays, tile: Index) -> KeyBlock:
        """The block of keys of work tile number `tile`: from the block lists if present, else from the scheduler."""
        if arrays.lists is not None:
            listed = arrays.lists.blocks_of(tile)
            return KeyBlock(listed.b, listed.head, listed.block)
        return KeyBlock(*self.scheduler.place(self.split.tile(tile)))

    def limits(self, arrays: Arrays, b: Index) -> block_ranges.Limits:
        """The limits of the keys of batch entry b."""
        options = self.options
        return block_ranges.limits(
            arrays.bounds, b, options.q_offset, self.kv_length, is_causal=options.is_causal, window=options.window
        )

    def q_loop(self, arrays: Arrays, tile: Index, block: KeyBlock) -> QLoop:
        """The loop over the queries that attend to the block of keys of work tile number `tile`."""
        b, kv_head, kv_index = block
        group, q_blocks = self.group, pl.cdiv(self.q_length, self.block_q)
        if arrays.lists is not None:
            listed = arrays.lists.blocks_of(recomputed(tile))
            of_step = lambda step: StepPlace(*listed.query_place(step, group, q_blocks))
            # The maximum shows the compiler that the loop runs: otherwise it keeps more values in registers.
            return QLoop(jnp.maximum(listed.count, 1), of_step)
        among = None if arrays.segments is None else arrays.segments.among(b, kv_index)
        sizes = self.block_kv, self.block_q, self.q_length
        blocks = self.limits(arrays, b).query_blocks(kv_index * self.block_kv, *sizes, among, in_order=True)
        blocks = blocks.at_least_one()
        is_split = self.split.parts > 1
        has_reach = arrays.bounds is not None and arrays.bounds.shape[1] > 2  # some queries may meet no key
        only_segments = among is not None and not self.options.is_causal and self.options.window is None

        def place(step):
            if is_split:
                step = step + self.split.first(recomputed(tile))
            if group == 1:
                head, nth = kv_head, step
            else:
                head = kv_head * group + lax.div(step, as_int32(blocks.count))
                nth = lax.rem(step, as_int32(blocks.count))
            if self.q_loop_stagger and (only_segments or (self.visits_all and has_reach)):
                nth = lax.rem(nth + kv_index * self.q_loop_stagger, as_int32(blocks.count))
            q_block = blocks.at(nth)
            if self.q_loop_stagger and self.visits_all and not has_reach:
                q_block = lax.rem(q_block + kv_index * self.q_loop_stagger, jnp.int32(q_blocks))
            return StepPlace(head, q_block, blocks.is_partial(nth))

        return QLoop(self.split.count(tile) if is_split else blocks.count * group, place)
