"""Equal tiles of work on many SMs, where the tiles of the last round are split into parts.

Tiles take ceil(tiles / SMs) rounds, even if few tiles are left for the last round. With few rounds, the SMs without a
tile in the last round lose much time. If the last tiles are split into parts, with one CTA per part, they fill the GPU.
The parts of a tile add their results to sums in device memory. A counter identifies the part that arrives last, which
reads the finished sums.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.pallas.kernel_types import Index

# The extra cost of a part, in steps: its start, and its additions.
OVERHEAD = 2.0
MOST_PARTS = 32
# The smallest fraction of the time that a split must save. With many rounds power is the limit: busy SMs use the power
# that idle SMs do not need.
WORTHWHILE = 0.15


@dataclasses.dataclass(frozen=True)
class SplitTail:
    """The assignment of `tiles` tiles, of `steps` steps each, to CTAs.

    CTAs below `whole` have one tile each. Each tile from index `whole` on is split into `parts` parts, one per CTA.
    """

    tiles: int
    steps: int
    whole: int
    parts: int

    @classmethod
    def none(cls, tiles: int) -> "SplitTail":
        """The assignment of one CTA to each tile, without splits. Its methods about steps have no meaning."""
        return cls(tiles, 1, tiles, 1)

    @classmethod
    def of(cls, tiles: int, steps: int, core_count: int) -> "SplitTail":
        """The assignment with the shortest time, if core_count tiles or parts run at a time.

        No tile is split if that would save less than WORTHWHILE of the time.
        """
        rest = tiles % core_count

        def time(parts: int) -> float:
            rounds = -(-rest * parts // core_count)
            return rounds * (steps / parts + (OVERHEAD if parts > 1 else 0.0))

        parts = min(range(1, min(steps, MOST_PARTS) + 1), key=time)
        saved = (time(1) - time(parts)) / (tiles // core_count * steps + time(1))
        return cls(tiles, steps, tiles - rest, parts) if saved >= WORTHWHILE else cls.none(tiles)

    @property
    def ctas(self) -> int:
        """The number of CTAs: one for each whole tile and for each part."""
        return self.whole + (self.tiles - self.whole) * self.parts

    def tile(self, cta: Index) -> Index:
        """The index, among all tiles of the launch, of the tile of CTA `cta`."""
        if self.parts == 1:
            return cta
        return jnp.where(cta < self.whole, cta, self.whole + lax.div(cta - self.whole, jnp.int32(self.parts)))

    def first(self, cta: Index) -> Index:
        """The index, within its tile, of the first step of CTA `cta`."""
        part = lax.rem(cta - self.whole, jnp.int32(self.parts))
        return jnp.where(cta < self.whole, 0, lax.div(part * self.steps, jnp.int32(self.parts)))

    def count(self, cta: Index) -> Index:
        """The number of steps of CTA `cta`."""
        part = lax.rem(cta - self.whole, jnp.int32(self.parts))
        end = lax.div((part + 1) * self.steps, jnp.int32(self.parts))
        return jnp.where(cta < self.whole, self.steps, end - self.first(cta))

    def shared(self, *shape: int, warpgroups: int) -> dict[str, Any]:
        """New arrays in device memory, zeros, with which the parts of a tile are added: {"sums": ..., "arrived": ...}.

        sums: float32 [split tiles, *shape], to which the parts add their results. arrived: int32 [split tiles,
        warpgroups], in which each warpgroup counts the parts that have added. Both are None if no tile is split. shape:
        of the result of one tile. warpgroups: the number of warpgroups of a CTA that add.
        """
        if self.parts == 1:
            return {"sums": None, "arrived": None}
        split = self.tiles - self.whole
        return {
            "sums": jax.new_ref(jnp.zeros((split, *shape), jnp.float32)),
            "arrived": jax.new_ref(jnp.zeros((split, warpgroups), jnp.int32)),
        }
