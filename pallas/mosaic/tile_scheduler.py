"""The order in which persistent CTAs take their tiles. A tile is a (batch entry, head, block of rows).

A launch may serve several calls. The tiles of the calls follow one after another.

Tiles are assigned round-robin. If dynamic, a CTA gets its next tile from a counter in device memory, one tile ahead,
which balances long and short tiles.
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
    """Shared memory for two tile indices from the counter, of the next two tiles, with barriers."""

    smem: Any
    ready: Any
    free: Any


class Shape(NamedTuple):
    """The tiles of a call. blocks: the number of row blocks of a head. Rows are queries or keys."""

    batch: int
    heads: int
    blocks: int

    @classmethod
    def of(cls, batch: int, heads: int, length: int, block: int) -> "Shape":
        return cls(batch, heads, pl.cdiv(length, block))

    @property
    def tiles(self) -> int:
        return self.blocks * self.batch * self.heads


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """shapes: one for each call. heads_together: as in AttentionForwardSm90. core_count: CTAs that run at a time.

    is_causal: the rows are queries of a causal call, so that the last blocks have the most keys.
    """

    shapes: tuple[Shape, ...]
    is_causal: bool
    heads_together: int
    dynamic: bool
    core_count: int

    @property
    def count(self) -> int:
        return sum(shape.tiles for shape in self.shapes)

    @property
    def ctas(self) -> int:
        return min(self.core_count, self.count)

    @property
    def fetches(self) -> bool:
        """Whether there is a counter. If each CTA has one tile, no counter is needed."""
        return self.dynamic and self.count > self.core_count

    def counter(self) -> Ref | None:
        """A new counter for a launch; None without a counter."""
        return cast(Ref, jax.new_ref(jnp.zeros((1,), jnp.int32))) if self.fetches else None

    def scratch(self, warpgroups: int) -> Fetched:
        """The memory of Fetched, for pl.run_scoped. Its fields are None without a counter."""
        if not self.fetches:
            return Fetched(None, None, None)
        barrier = functools.partial(barrier_ref, num_barriers=2)
        return Fetched(smem_ref((2,), jnp.int32), barrier(num_arrivals=1), barrier(num_arrivals=warpgroups))

    @property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(shape.tiles for shape in self.shapes))

    def call(self, index):
        """The index of the call of tile `index`."""
        if len(self.shapes) == 1:
            return 0
        return sum((index >= end).astype(jnp.int32) for end in self._ends[:-1])

    def place(self, index, call: int = 0):
        """(batch entry, head, block) of tile `index`, a tile of this call."""
        shape = self.shapes[call]
        index = index - self._ends[call - 1] if call else index
        # With several calls, the heads that alternate are of one batch entry, and adjacent in memory: four groups of
        # 8192 tokens take 0.066 ms, with heads of several batch entries 0.0705 ms.
        alternating = shape.heads if len(self.shapes) > 1 else shape.batch * shape.heads
        together = math.gcd(self.heads_together, alternating)
        round_, within = lax.div(index, shape.blocks * together), lax.rem(index, shape.blocks * together)
        batch_head = round_ * together + lax.rem(within, together)
        b, h = lax.div(batch_head, shape.heads), lax.rem(batch_head, shape.heads)
        block = lax.div(within, together)
        if self.is_causal:  # the longest tiles first, so that the last tiles to start are short
            block = shape.blocks - 1 - block
        return b, h, block

    def fetch(self, counter, fetched: Fetched, turn) -> None:
        """Fetches the tile after the CTA's tile `turn`. One warpgroup calls this, once per tile."""
        if not self.fetches:
            return
        slot = (turn + 1) & 1

        @pl.when(turn >= 2)
        def _():
            plgpu.barrier_wait(fetched.free.at[slot])

        count_up(counter, fetched.smem.at[pl.ds(slot, 1)], self.ctas)
        plgpu.barrier_arrive(fetched.ready.at[slot])

    def following(self, fetched: Fetched, index, turn):
        """The tile after `index`, the CTA's tile `turn`. Every warpgroup calls this once per tile."""
        if not self.fetches:
            return index + self.ctas
        slot = (turn + 1) & 1
        plgpu.barrier_wait(fetched.ready.at[slot])
        following = fetched.smem[slot]
        plgpu.barrier_arrive(fetched.free.at[slot])
        return following

    def leave_following(self, counter, index, smem) -> jax.Array:
        """The tile after `index`. One warpgroup calls this; smem [1] then holds the tile for the other warpgroups."""
        if self.fetches:
            count_up(counter, smem, self.ctas)
        else:
            smem[0] = index + self.ctas
        plgpu.commit_smem()
        return smem[0]

    def for_each(self, first, run, state=0) -> None:
        """Calls run(index, turn, state) -> (following tile, state) for the CTA's tiles. first: the CTA's first tile.

        state: the state of the first tile, carried from one tile to the next, such as a slot.
        """

        def body(carry):
            index, turn, state = carry
            index, state = run(index, turn, state)
            return index, turn + 1, state

        start = first, jnp.int32(0), jax.tree.map(as_int32, state)
        lax.while_loop(lambda carry: carry[0] < self.count, body, start)
