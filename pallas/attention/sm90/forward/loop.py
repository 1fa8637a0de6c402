"""Common parts of the Hopper forward kernels: work tiles, the loop over blocks of keys, and the pipeline of slots.

A CTA's last warpgroup, "memory", loads blocks of keys and values into a pipeline of slots in shared memory. The other
warpgroups, "compute", own 64 queries each of every work tile. They read the same slots, and take turns to issue their
matmuls.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.block_ranges import BlockRange, Limits
from jax_kernels.pallas.attention.sm90.features.block_lists import ListedBlocks, Lists
from jax_kernels.pallas.attention.sm90.features.head_views import LaunchCall, of_call
from jax_kernels.pallas.attention.sm90.features.segments import Segments
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, needed
from jax_kernels.pallas.mosaic.barriers import named_barrier
from jax_kernels.pallas.mosaic.layouts import WGMMA
from jax_kernels.pallas.mosaic.scratch import barrier_ref
from jax_kernels.pallas.mosaic.tile_scheduler import TileScheduler

# Hardware barriers for the turns of the warpgroups; the low numbers belong to the compiler.
FIRST_TURN_BARRIER = 8


def is_short_tile(q_length: int, block_q: int) -> bool:
    """Whether the last of a head's blocks of queries leaves a warpgroup without queries."""
    return 0 < q_length % block_q <= block_q - 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkTile:
    """A block of queries of a head, or a warpgroup's 64 queries of it, with the blocks of keys that they visit.

    b, h: batch entry and head of the call. q_start: the index of the first query. blocks: the blocks of keys, in order.
    call: the index of the call in the launch. q_head, kv_head: the heads in the arrays. limits: None if block lists
    hold all limits.
    """

    b: Index
    h: Index
    q_start: Index
    blocks: BlockRange | ListedBlocks
    limits: Limits | None
    call: Index
    q_head: Index
    kv_head: Index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KvPipeline:
    """The barriers of a pipeline of slots in shared memory. Each slot has room for a block of keys and for a block of
    values.

    *_ready: the block has arrived. *_free: all compute warpgroups have read it, so that it may be overwritten.
    """

    k_ready: Barrier
    v_ready: Barrier
    k_free: Barrier
    v_free: Barrier

    @classmethod
    def scratch(cls, stages: int, readers: int, k_copies: int = 1, v_copies: int = 1) -> "KvPipeline":
        """The scratch specifications of a pipeline, for pl.run_scoped.

        stages: the number of slots. readers: the number of compute warpgroups. k_copies, v_copies: the copies of one
        block.
        """
        barriers = lambda arrivals: barrier_ref(num_arrivals=arrivals, num_barriers=stages)
        return cls(
            k_ready=barriers(k_copies), v_ready=barriers(v_copies), k_free=barriers(readers), v_free=barriers(readers)
        )

    @property
    def stages(self) -> int:
        return self.k_ready.shape[0]

    def following(self, slot: Index) -> Index:
        """The index of the slot after this one; after the last comes the first."""
        if self.stages & (self.stages - 1) == 0:
            return (slot + 1) & (self.stages - 1)
        return jnp.where(slot == self.stages - 1, 0, slot + 1)

    def free(self) -> None:
        """Marks all slots as read, for a compute warpgroup that has read no slot yet."""
        for slot in range(self.stages):
            plgpu.barrier_arrive(self.k_free.at[slot])
            plgpu.barrier_arrive(self.v_free.at[slot])

    def skip(self, slot: Index) -> None:
        """Waits for a slot's block and marks it as read, for a compute warpgroup that does not use it."""
        for ready, free in ((self.k_ready, self.k_free), (self.v_ready, self.v_free)):
            plgpu.barrier_wait(ready.at[slot])  # every wait counts a phase
            plgpu.barrier_arrive(free.at[slot])

    def fill(
        self,
        slot: Index,
        count: Index,
        load_k: Callable[[Index, Index], None],
        load_v: Callable[[Index, Index], None],
        load_more: Callable[[Index], None] = lambda step: None,
    ) -> Index:
        """Loads `count` blocks into this slot and the slots after it, and returns the last slot.

        load_k(step, slot), load_v(step, slot): wait until the slot is free, and load a step's keys or values. The
        values run one step behind the keys: keys 0, keys 1, values 0, keys 2, values 1 ... load_more(step): runs after
        the keys of this step and the values of the step before. slot: of step 0. count: at least 1.
        """

        def load(step, last):  # values run one block behind the keys, in the order of their use
            slot = self.following(last)
            load_k(step, slot)
            load_v(step - 1, last)
            load_more(step)
            return slot

        load_k(jnp.int32(0), slot)
        load_more(jnp.int32(0))
        slot = lax.fori_loop(1, count, load, slot)
        load_v(count - 1, slot)
        return slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class PingPong:
    """The turns in which compute warpgroups issue matmuls: one computes its softmax while another's matmuls run.

    is_on: if False, the methods do nothing. w, in the methods: the index of a compute warpgroup.
    """

    warpgroups: int
    is_on: bool

    @classmethod
    def of(cls, config: AttentionForwardSm90, *, interpret: bool) -> "PingPong":
        """The turns for this block spec row. Off in interpretation and unless config.pingpong."""
        return cls(warpgroups=config.compute_warpgroups, is_on=config.pingpong and not interpret)

    def wait(self, w: int) -> None:
        """Waits until it is compute warpgroup w's turn."""
        if self.is_on:
            named_barrier("sync", FIRST_TURN_BARRIER + w, 256)

    def pass_on(self, w: int) -> None:
        """Gives the turn to the warpgroup after w."""
        if self.is_on:
            named_barrier("arrive", FIRST_TURN_BARRIER + (w + 1) % self.warpgroups, 256)

    def start(self, w: int) -> None:
        """Gives the first turn to the first warpgroup. Each warpgroup calls this once, before its first turn."""
        if w == self.warpgroups - 1:
            self.pass_on(w)

    def end(self, w: int) -> None:
        """Ends the turns: warpgroup 0 takes the turn that is left over. Each warpgroup calls this once, after its last
        turn.
        """
        if w == 0:
            self.wait(w)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvLoop:
    """The loop of each work tile over blocks of keys: which blocks it visits, and which of them are partial.

    calls: the static facts of the launch's calls. bounds: int32 [B, 2 or 3] in device memory, the limits that tracing
    does not know: the position of query 0, the number of keys that count, and with inputs.reach the first query that
    has keys; None if tracing knows all. segments, lists: segment ids and block lists; None: the call has none. w, in
    the methods: the index of a compute warpgroup.
    """

    cta: Index
    scheduler: TileScheduler
    options: AttentionOptions
    calls: tuple[LaunchCall, ...]
    block_q: int
    block_kv: int
    bounds: Ref | None = None
    segments: Segments | None = None
    lists: Lists | None = None

    @property
    def q_offset(self) -> int:
        """The position of query 0 if tracing knows it; 0 if `bounds` holds it."""
        return self.options.q_offset or 0

    @property
    def has_limits(self) -> bool:
        """Whether causality or a window limits the keys."""
        return self.options.is_causal or self.options.window is not None

    @property
    def has_words(self) -> bool:
        """Whether the block lists have the mask words of all blocks, which should be read early."""
        return self.lists is not None and self.lists.has_all_words

    @property
    def may_end(self) -> bool:
        """Whether a block of keys may reach past the last key, and no segment ids show it: ids past the end equal no
        other id.
        """
        reaches_past = any(call.kv_length % self.block_kv != 0 for call in self.calls)
        return self.bounds is not None or (self.segments is None and reaches_past)

    @property
    def has_partial(self) -> bool:
        """Whether any block may be partial."""
        return self.has_limits or self.segments is not None or self.lists is not None or self.may_end

    @property
    def only_first_partial(self) -> bool:
        """Whether only the first block that a warpgroup visits may be partial."""
        if not (self.has_limits or self.segments is not None or self.lists is not None):
            return True
        is_aligned = self.q_offset % 64 == self.block_kv % 64 == 0
        return self.causal_only and self.bounds is None and is_aligned

    @property
    def causal_only(self) -> bool:
        """Whether causality limits the keys, and neither a window nor segments do."""
        return self.options.is_causal and self.options.window is None and self.segments is None

    @property
    def same_blocks(self) -> bool:
        """Whether all compute warpgroups visit the same blocks of keys in a work tile.

        If not, each warpgroup visits only the blocks up to its own queries' positions. This needs a call that is only
        causal, and a known q_offset and lengths: with `bounds`, a range per warpgroup would spill registers. A
        warpgroup without queries visits one block.
        """
        if self.has_idle_warpgroups:
            return False
        if not self.causal_only or self.bounds is not None:
            return True
        return self.q_offset % self.block_q == 0 and self.block_kv % self.block_q == 0

    @property
    def has_idle_warpgroups(self) -> bool:
        """Whether in each head's last work tile a warpgroup has no queries, of a call that visits all keys."""
        if self.has_limits or len(self.calls) > 1 or not (self.bounds is self.segments is self.lists is None):
            return False
        return is_short_tile(self.calls[0].q_length, self.block_q)

    @property
    def may_be_dead(self) -> bool:
        """Whether the limits, segments or block lists may leave a query without a key. It does not regard a bias or a
        score_mod.
        """
        if self.options.window is not None or not (self.bounds is self.segments is self.lists is None):
            return True
        return self.options.is_causal and self.q_offset < 0

    def first_tile(self) -> jax.Array:
        """The index of the CTA's first work tile."""
        # Behind a barrier: otherwise a warpgroup's computations on it are hoisted above the choice of warpgroup.
        return lax.optimization_barrier(self.cta)

    def for_each_tile(self, run: Callable[[Index, Index, Index], tuple[Index, Index]]) -> None:
        """Calls run(index, turn, slot) -> (following work tile, next slot) for each work tile of the CTA.

        index: of the work tile in the launch. turn: its number in the CTA. slot: of its first block, 0 for the first
        call.
        """
        self.scheduler.for_each(self.first_tile(), run)

    def work_tile(self, index: Index) -> WorkTile:
        """Work tile number `index` of the launch, for all compute warpgroups together."""
        if self.lists is not None:
            return self._listed_tile(index)
        options, block_q, block_kv = self.options, self.block_q, self.block_kv
        call = self.scheduler.call(index)
        b, h, q_index, q_head, kv_head, kv_length = self._place(call, index)
        limits = block_ranges.limits(
            self.bounds, b, options.q_offset, kv_length, is_causal=options.is_causal, window=options.window
        ).of_queries(q_index * block_q)
        among = None if self.segments is None else self.segments.among(b, q_index)
        blocks = limits.key_blocks(q_index * block_q, block_q, block_kv, among, in_order=True).at_least_one()
        return WorkTile(
            b=b,
            h=h,
            q_start=q_index * block_q,
            blocks=blocks,
            limits=limits,
            call=call,
            q_head=q_head,
            kv_head=kv_head,
        )

    def _listed_tile(self, index: Index) -> WorkTile:
        """Work tile number `index` of the launch, from the block lists."""
        blocks = needed(self.lists).blocks_of(index)
        q_head, kv_head = self.calls[0].array_heads(blocks.head)
        return WorkTile(
            b=blocks.b,
            h=blocks.head,
            q_start=blocks.block * self.block_q,
            blocks=blocks,
            limits=None,
            call=0,
            q_head=q_head,
            kv_head=kv_head,
        )

    def _place(self, call: int, index: Index) -> tuple[Index, Index, Index, Index, Index, Index]:
        """(batch entry, head, block of queries, query head and key head of the arrays, number of keys) of work tile
        `index`.

        call: the index of its call.
        """
        lengths = {call.kv_length for call in self.calls}

        def place(i: int) -> tuple[Index, ...]:
            b, h, q_index = self.scheduler.place(index, i)
            return b, h, q_index, *self.calls[i].array_heads(h), self.calls[i].kv_length

        # A branch per call, in which it divides by constants.
        as_traced = lambda i: tuple(map(jnp.int32, place(i)))
        *numbers, kv_length = of_call(call, len(self.calls), place if len(self.calls) == 1 else as_traced)
        return *numbers, lengths.pop() if len(lengths) == 1 else kv_length

    def own(self, tile: WorkTile, w: int) -> WorkTile:
        """Warpgroup w's part of a work tile: its 64 queries, with the blocks that they visit.

        A causal tile's rightmost blocks may belong only to the other warpgroups.
        """
        q_start, blocks = tile.q_start + w * 64, tile.blocks
        if self.has_idle_warpgroups:
            count = jnp.where(q_start < self.calls[0].q_length, cast(BlockRange, blocks).count, 1)
            blocks = dataclasses.replace(cast(BlockRange, blocks), count=count)
        elif not self.same_blocks:
            blocks = needed(tile.limits).key_blocks(q_start, 64, self.block_kv).at_least_one()
        return dataclasses.replace(tile, q_start=q_start, blocks=blocks)

    def masked(
        self, s: jax.Array, index: Index, step: Index, w: int, ids: tuple[jax.Array, jax.Array] | None = None
    ) -> jax.Array:
        """The scores of compute warpgroup w in a step of work tile `index`, with -inf where a query may not attend to a
        key.

        s: [64, block_kv]. ids: None, or the segment ids (of the rows, of the columns).
        """
        tile = self.work_tile(lax.optimization_barrier(index))
        if self.lists is not None:
            return cast(ListedBlocks, tile.blocks).masked(s, step, w * 64, by_word=True)
        tile = self.own(tile, w)
        kv_start = tile.blocks.at(step) * self.block_kv
        keep = needed(tile.limits).keep(
            s.shape, kv_start, tile.q_start, layout=WGMMA, kv_axis=1, may_end=self.may_end, ids=ids
        )  # fmt: skip
        return jnp.where(keep, s, -jnp.inf)


def run_warpgroups(
    wg: Index, config: AttentionForwardSm90, compute: Callable[[int], None], memory: Callable[[], None]
) -> None:
    """Runs the calling warpgroup: compute(w) on compute warpgroup w, memory() on the last warpgroup.

    wg: the index of the calling warpgroup. config: AttentionForwardSm90 or AttentionForwardFp8Sm90.
    """
    compute_registers, memory_registers = config.registers

    def as_compute(w: int) -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        compute(w)

    def as_memory() -> None:
        plgpu.set_max_registers(memory_registers, action="decrease")
        memory()

    # One switch, not a chain of branches: the warpgroup's number would live through the first branch.
    of_w = [functools.partial(as_compute, w) for w in range(config.compute_warpgroups)]
    lax.switch(wg, [*of_w, as_memory])
