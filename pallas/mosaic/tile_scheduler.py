"""The order in which persistent CTAs take their tiles. A tile is a (batch entry, head, block of rows).

A launch may serve several calls. The tiles of the calls follow one after another.

Tiles are assigned round-robin. If dynamic, a CTA gets its next tile from a counter in device memory, one tile ahead,
which balances long and short tiles. With at most two tiles per CTA it would not, because all CTAs would take their
second tile when they start. If lengths differ, the CTA with the longest first tile then gets the shortest second tile.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.mosaic.barriers import count_up
from jax_kernels.pallas.mosaic.registers import as_int32
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref


class Fetched(NamedTuple):
    """Shared memory in which a CTA receives the indices of its next tiles from the counter, in two slots.

    smem: int32 [2]. ready, free: [2] barriers: a slot's index has arrived, or has been read by all warpgroups. All are
    None if there is no counter.
    """

    smem: Any
    ready: Any
    free: Any


class Shape(NamedTuple):
    """The numbers of batch entries, of heads, and of blocks of rows in a head, of one call.

    Rows are queries or keys. Each block of each head is a tile.
    """

    batch: int
    heads: int
    blocks: int

    @classmethod
    def of(cls, batch: int, heads: int, length: int, block: int) -> "Shape":
        """The shape of a call with `length` rows in blocks of `block` rows; the last block may be shorter."""
        return cls(batch, heads, pl.cdiv(length, block))

    @property
    def tiles(self) -> int:
        """The number of tiles of the call."""
        return self.blocks * self.batch * self.heads


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """The order in which the CTAs of a launch take tiles: blocks of rows of one head of one batch entry.

    shapes: the tiles of each call of the launch. Tile indices run through all calls. longest_last: whether the last
    blocks of a head take the longest, as queries of a causal call do; they are taken first. head_group: the number of
    heads whose tiles alternate. dynamic: whether CTAs get tiles from a counter in device memory instead of round-robin.
    core_count: the number of CTAs that run at a time. short_last: whether the last block of each head takes less time
    than the others; these blocks of all heads are taken last. Only for one call, and not together with longest_last.
    """

    shapes: tuple[Shape, ...]
    longest_last: bool
    head_group: int
    dynamic: bool
    core_count: int
    short_last: bool = False

    @property
    def count(self) -> int:
        """The number of tiles of the launch, over all attention calls that it runs."""
        return sum(shape.tiles for shape in self.shapes)

    @property
    def ctas(self) -> int:
        """The number of CTAs of the launch. CTA i begins with tile i."""
        return min(self.core_count, self.count)

    @property
    def is_mirrored(self) -> bool:
        """Whether the second tiles are assigned in the reverse order of the first tiles, from long to short.

        It needs tiles in the order of their lengths, and at most two for each CTA.
        """
        return self.longest_last and self.core_count < self.count <= 2 * self.core_count

    @property
    def fetches(self) -> bool:
        """Whether CTAs get tiles from a counter. If each CTA has one tile, or is_mirrored, no counter is needed."""
        return self.dynamic and self.count > self.core_count and not self.is_mirrored

    def counter(self) -> Ref | None:
        """A new counter for a launch, int32 [1] in device memory, of value 0; None if `fetches` is False."""
        return cast(Ref, jax.new_ref(jnp.zeros((1,), jnp.int32))) if self.fetches else None

    def scratch(self, warpgroups: int) -> Fetched:
        """The request for a CTA's Fetched, for pl.run_scoped. Its fields are None if there is no counter.

        warpgroups: the number of warpgroups that read the indices.
        """
        if not self.fetches:
            return Fetched(None, None, None)
        barrier = functools.partial(barrier_ref, num_barriers=2)
        return Fetched(smem_ref((2,), jnp.int32), barrier(num_arrivals=1), barrier(num_arrivals=warpgroups))

    @property
    def _ends(self) -> list[int]:
        """For each call, the index after its last tile."""
        return list(itertools.accumulate(shape.tiles for shape in self.shapes))

    def call(self, index):
        """The index, in `shapes`, of the call that has tile `index`."""
        if len(self.shapes) == 1:
            return 0
        return sum((index >= end).astype(jnp.int32) for end in self._ends[:-1])

    def place(self, index, call: int = 0):
        """(batch entry, head, index of the block of rows) of tile `index`.

        call: the index, in `shapes`, of the call that has the tile; a Python int.
        """
        shape = self.shapes[call]
        index = index - self._ends[call - 1] if call else index
        # With several calls, the heads that alternate are of one batch entry, and adjacent in memory: four groups of
        # 8192 tokens take 0.066 ms, with heads of several batch entries 0.0705 ms.
        alternating = shape.heads if len(self.shapes) > 1 else shape.batch * shape.heads
        together = math.gcd(self.head_group, alternating)
        blocks = shape.blocks - self.short_last
        round_, within = lax.div(index, blocks * together), lax.rem(index, blocks * together)
        batch_head = round_ * together + lax.rem(within, together)
        first_short = blocks * shape.batch * shape.heads
        if self.short_last:
            batch_head = jnp.where(index < first_short, batch_head, index - first_short)
        b, h = lax.div(batch_head, shape.heads), lax.rem(batch_head, shape.heads)
        block = lax.div(within, together)
        if self.short_last:
            block = jnp.where(index < first_short, block, blocks)
        if self.longest_last:  # the longest tiles first, so that the last tiles to start are short
            block = shape.blocks - 1 - block
        return b, h, block

    def fetch(self, counter, fetched: Fetched, turn) -> None:
        """Gets the index of the CTA's next tile from the counter, and puts it into `fetched`.

        It does nothing if `fetches` is False. turn: the number of tiles that the CTA has finished. One warpgroup calls
        this, once per tile.
        """
        if not self.fetches:
            return
        slot = (turn + 1) & 1

        @pl.when(turn >= 2)
        def _():
            plgpu.barrier_wait(fetched.free.at[slot])

        count_up(counter, fetched.smem.at[pl.ds(slot, 1)], self.ctas)
        plgpu.barrier_arrive(fetched.ready.at[slot])

    def following(self, fetched: Fetched, index, turn):
        """The index of the CTA's tile after tile `index`; self.count or more if none is left.

        turn: the number of tiles that the CTA has finished. Every warpgroup calls this once per tile; one of them also
        calls `fetch` for the same turn.
        """
        if not self.fetches:
            return self._following(index)
        slot = (turn + 1) & 1
        plgpu.barrier_wait(fetched.ready.at[slot])
        following = fetched.smem[slot]
        plgpu.barrier_arrive(fetched.free.at[slot])
        return following

    def _following(self, index):
        """The index of the CTA's tile after tile `index` without a counter; self.count or more if none is left."""
        if not self.is_mirrored:
            return index + self.ctas
        return jnp.where(index < self.ctas, 2 * self.ctas - 1 - index, self.count)

    def leave_following(self, counter, index, smem) -> jax.Array:
        """The index of the CTA's tile after tile `index`, which it also leaves in smem for the other warpgroups.

        The index is self.count or more if no tile is left. One warpgroup calls this. counter: int32 [1] in device
        memory, or None. smem: int32 [1] in shared memory.
        """
        if self.fetches:
            count_up(counter, smem, self.ctas)
        else:
            smem[0] = self._following(index)
        plgpu.commit_smem()
        return smem[0]

    def for_each(self, first, run, state=0) -> None:
        """Calls run(index, turn, state) -> (index of the CTA's next tile, new state) for each tile of the CTA.

        index: of the tile. turn: the number of the CTA's earlier tiles. first: the index of the CTA's first tile.
        state: a tree of integers or arrays for the first tile, carried from one tile to the next, such as a slot.
        """

        def body(carry):
            index, turn, state = carry
            index, state = run(index, turn, state)
            return index, turn + 1, state

        start = first, jnp.int32(0), jax.tree.map(as_int32, state)
        lax.while_loop(lambda carry: carry[0] < self.count, body, start)
