"""What the kernels of the attention forward on Hopper share: the walk over tiles and blocks, and the ring of slots.

A CTA's last warpgroup, "memory", loads blocks of keys and values into a ring of slots in shared memory. The others,
"compute", own 64 queries each of every tile; they read the same slots, and take turns to issue their products.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.attention_inputs import AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.sm90.head_views import Call, of_call
from jax_kernels.pallas.mosaic.barriers import named_barrier
from jax_kernels.pallas.mosaic.layouts import WGMMA
from jax_kernels.pallas.mosaic.tile_scheduler import TileScheduler

# Hardware barriers that the warpgroups take turns on; the low numbers belong to the compiler.
FIRST_TURN_BARRIER = 8


class Tile(NamedTuple):
    """Some queries of a head, with the blocks of keys to visit. limits: None where a mask's lists say it all.

    call: which of the launch's calls it is of. q_head, kv_head: the head among those of its call's arrays.
    """

    b: Any
    h: Any
    q_start: Any
    blocks: Any
    limits: Any
    call: Any
    q_head: Any
    kv_head: Any


class Ring(NamedTuple):
    """The barriers of a ring of slots, of which each has room for a block of keys and for a block of values."""

    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any

    @classmethod
    def scratch(cls, stages: int, readers: int, k_copies: int = 1, v_copies: int = 1) -> "Ring":
        """For pl.run_scoped. readers: compute warpgroups. k_copies, v_copies: how many a block takes."""
        barriers = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
        return cls(barriers(k_copies), barriers(v_copies), barriers(readers), barriers(readers))

    @property
    def stages(self) -> int:
        return self.k_ready.shape[0]

    def following(self, slot: Any) -> Any:
        """The slot after this one."""
        if self.stages & (self.stages - 1) == 0:
            return (slot + 1) & (self.stages - 1)
        return jnp.where(slot == self.stages - 1, 0, slot + 1)

    def free(self) -> None:
        """Frees all slots, for a compute warpgroup that has read none yet."""
        for slot in range(self.stages):
            plgpu.barrier_arrive(self.k_free.at[slot])
            plgpu.barrier_arrive(self.v_free.at[slot])

    def skip(self, slot: Any) -> None:
        """For a compute warpgroup that needs nothing of a slot."""
        for ready, free in ((self.k_ready, self.k_free), (self.v_ready, self.v_free)):
            plgpu.barrier_wait(ready.at[slot])  # every wait counts a phase
            plgpu.barrier_arrive(free.at[slot])

    def fill(
        self,
        slot: Any,
        count: Any,
        load_k: Callable[[Any, Any], None],
        load_v: Callable[[Any, Any], None],
        load_more: Callable[[Any], None] = lambda step: None,
    ) -> Any:
        """Loads so many blocks, into this slot and those after it, and returns the last slot.

        load_k, load_v(step, slot): wait until the slot is free, and load a step's block. load_more(step): behind that.
        """

        def load(step, last):  # values run one block behind the keys, as they are used
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


@dataclasses.dataclass(frozen=True)
class Walk:
    """A CTA's walk.

    given: the kernel's arrays in device memory, by name; of "bounds", "segments", "dense", "lists" and "mod" those that
    the call has. config: AttentionForwardSm90 or AttentionForwardFp8Sm90. w, below: a compute warpgroup.
    """

    given: Mapping[str, Any]
    scheduler: TileScheduler
    options: AttentionOptions
    calls: tuple[Call, ...]
    config: Any
    interpret: bool
    wg: Any
    cta: Any

    @classmethod
    def of(cls, given, scheduler, options, calls: tuple[Call, ...], *, config, interpret: bool) -> "Walk":
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        return cls(given, scheduler, options, calls, config, interpret, wg, cta)

    def has(self, name: str) -> bool:
        return self.given.get(name) is not None

    @property
    def q_offset(self) -> int:
        """That of the call, 0 where it is in the bounds."""
        return self.options.q_offset or 0

    @property
    def has_limits(self) -> bool:
        """Whether the predicate has causality or a window in it."""
        return self.options.is_causal or self.options.window is not None

    @property
    def has_words(self) -> bool:
        """Whether words of a mask are to be read early."""
        return self.has("lists") and self.given["lists"].has_all_words

    @property
    def may_end(self) -> bool:
        """Whether a block may reach past the keys."""
        return self.has("bounds") or any(call.kv_length % self.config.block_kv != 0 for call in self.calls)

    @property
    def predicate(self) -> bool:
        """Whether any block may need it."""
        return self.has_limits or self.has("segments") or self.has("lists") or self.may_end

    @property
    def causal_only(self) -> bool:
        return self.options.is_causal and self.options.window is None and not self.has("segments")

    @property
    def only_first(self) -> bool:
        """Whether no block, beside the first that a warpgroup visits, can need the predicate."""
        if not (self.has_limits or self.has("segments") or self.has("lists")):
            return True
        return self.causal_only and not self.has("bounds") and self.q_offset % 64 == 0

    @property
    def same_blocks(self) -> bool:
        """Whether all warpgroups of a tile visit the same blocks. With bounds, what tells them apart would spill."""
        if not self.causal_only or self.has("bounds"):
            return True
        block_q, block_kv = self.config.block_q, self.config.block_kv
        return self.q_offset % block_q == 0 and block_kv % block_q == 0

    @property
    def may_be_dead(self) -> bool:
        """Whether a query may attend to nothing."""
        if self.options.window is not None or any(map(self.has, ("bounds", "segments", "dense", "lists", "mod"))):
            return True
        return self.options.is_causal and self.q_offset < 0

    def first_tile(self) -> Any:
        # Behind a barrier: what a warpgroup computes of it is not hoisted above the choice of warpgroup.
        return lax.optimization_barrier(self.cta)

    def tile(self, index: Any) -> Tile:
        block_q, options = self.config.block_q, self.options
        if self.has("lists"):
            walk = self.given["lists"].walk(index)
            q_head, kv_head = self.calls[0].array_heads(walk.head)
            return Tile(walk.b, walk.head, walk.block * block_q, walk, None, 0, q_head, kv_head)
        call = self.scheduler.call(index)
        b, h, q_index, q_head, kv_head, kv_length = self._of_call(call, index)
        bounds, is_causal, window = self.given["bounds"], options.is_causal, options.window
        limits = block_ranges.limits(bounds, b, options.q_offset, kv_length, is_causal=is_causal, window=window)
        among = self.given["segments"].among(b, q_index) if self.has("segments") else None
        block_kv = self.config.block_kv
        blocks = limits.key_blocks(q_index * block_q, block_q, block_kv, among, in_order=True).at_least_one()
        return Tile(b, h, q_index * block_q, blocks, limits, call, q_head, kv_head)

    def _of_call(self, call: Any, index: Any) -> tuple[Any, ...]:
        """(batch entry, head, block of queries, query's and key's head of the arrays, keys) of a tile."""
        lengths = {call.kv_length for call in self.calls}

        def place(i: int) -> tuple[Any, ...]:
            b, h, q_index = self.scheduler.place(index, i)
            return b, h, q_index, *self.calls[i].array_heads(h), self.calls[i].kv_length

        # A branch for each call, in which it divides by constants.
        as_traced = lambda i: tuple(map(jnp.int32, place(i)))
        *numbers, kv_length = of_call(call, len(self.calls), place if len(self.calls) == 1 else as_traced)
        return *numbers, lengths.pop() if len(lengths) == 1 else kv_length

    def own(self, tile: Tile, w: int) -> Tile:
        """A warpgroup's part of a tile: the blocks right of its last key are the other warpgroups' alone."""
        q_start, blocks = tile.q_start + w * 64, tile.blocks
        if not self.same_blocks:
            blocks = tile.limits.key_blocks(q_start, 64, self.config.block_kv).at_least_one()
        return tile._replace(q_start=q_start, blocks=blocks)

    def masked(self, scores: Any, index: Any, step: Any, w: int, ids: Any = None) -> Any:
        """A warpgroup's scores in a step of a tile, -inf where the predicate is False.

        ids: of segments, of the rows and of the columns.
        """
        tile = self.tile(lax.optimization_barrier(index))
        if self.has("lists"):
            return tile.blocks.masked(scores, step, w * 64, by_word=True)
        tile = self.own(tile, w)
        block_kv, limits = self.config.block_kv, tile.limits
        kv_start = tile.blocks.at(step) * block_kv
        keep = limits.keep(
            scores.shape, kv_start, tile.q_start, layout=WGMMA, kv_axis=1, may_end=self.may_end, ids=ids
        )  # fmt: skip
        return jnp.where(keep, scores, -jnp.inf)

    def skip_others(self, tile: Tile, own: Tile, ring: Ring, slot: Any, w: int, bias: Any = None) -> Any:
        """Skips the tile's blocks that are not the warpgroup's own: the slot of its first one. bias: a dense Stage."""

        def skip(_, slot):
            self.wait_turn(w)
            self.pass_turn(w)
            ring.skip(slot)
            if bias is not None:
                plgpu.barrier_wait(bias.ready)
                plgpu.barrier_arrive(bias.free)
            return ring.following(slot)

        return slot if self.same_blocks else lax.fori_loop(0, tile.blocks.count - own.blocks.count, skip, slot)

    def wait_turn(self, w: int) -> None:
        if self.config.take_turns and not self.interpret:
            named_barrier("sync", FIRST_TURN_BARRIER + w, 256)

    def pass_turn(self, w: int) -> None:
        if self.config.take_turns and not self.interpret:
            named_barrier("arrive", FIRST_TURN_BARRIER + (w + 1) % self.config.compute_warpgroups, 256)

    def start_turns(self, w: int) -> None:
        """The first turn is the first warpgroup's."""
        if w == self.config.compute_warpgroups - 1:
            self.pass_turn(w)

    def end_turns(self, w: int) -> None:
        """Takes the turn that the last warpgroup passed."""
        if w == 0:
            self.wait_turn(w)

    def run(self, compute: Callable[[int], None], memory: Callable[[], None]) -> None:
        """compute(w) on the compute warpgroups, and memory()."""

        def as_compute(w: int) -> None:
            plgpu.set_max_registers(self.config.registers[0], action="increase")
            compute(w)

        def as_memory() -> None:
            plgpu.set_max_registers(self.config.registers[1], action="decrease")
            memory()

        # One choice, not one after the other: the number of the warpgroup would live through the first one's work.
        of_w = [functools.partial(as_compute, w) for w in range(self.config.compute_warpgroups)]
        lax.switch(self.wg, [*of_w, as_memory])
