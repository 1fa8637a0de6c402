"""What the Hopper backward does beside its products: it zeroes the sums of dquery ahead of their use, and rounds them.

dquery is added up in float32 in device memory. Zeroed before the kernel and rounded after it, at memory bandwidth, that
array costs a backward 2 to 4 %; the kernel itself leaves most of that bandwidth unused. So its CTAs do both, by the
tensor memory accelerator and a few registers of the warpgroup that loads.

CTAs are started in the order of their numbers, those of a round read and add to the same heads. A CTA zeroes its share
of the heads that are used `lag` rounds later, and rounds its share of those that were complete `lag` rounds before.
Counters say which rounds are ready; a CTA waits for some of lower number alone, which have all been started. What is
left, the first rounds' zeros and the last rounds' rounding, XLA does.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.backward_walks_sm90 import Walks
from jax_kernels.pallas.attention.hopper import await_count, count_up, recomputed

UNIT = 64  # queries that are zeroed, or rounded, by one CTA, or none of them
CHUNK = 1024  # numbers that are rounded at a time
ZEROS = 4096  # numbers that are zeroed by a copy


@dataclasses.dataclass(frozen=True)
class Beside:
    """units: blocks of UNIT queries of the heads of a kv head. share: how many of them a CTA has."""

    walks: Walks
    batch: int
    head_dim: int
    dtype: Any
    rounds: int
    lag: int
    units: int
    share: int

    @classmethod
    def of(cls, walks: Walks, batch: int, head_dim: int, dtype: Any, core_count: int) -> "Beside | None":
        """None where there are too few rounds, or CTAs are in no order that is known here."""
        per_round = pl.cdiv(walks.kv_length, walks.block_kv) * walks.together
        rounds = batch * walks.kv_heads // walks.together
        lag = 1 + pl.cdiv(core_count, per_round)
        if walks.split.parts > 1 or head_dim > 128 or rounds < 2 * lag:
            return None
        units = walks.group * pl.cdiv(walks.q_length, UNIT)
        share = pl.cdiv(units, pl.cdiv(walks.kv_length, walks.block_kv))
        return cls(walks, batch, head_dim, dtype, rounds, lag, units, share)

    @property
    def chunk_rows(self) -> int:
        return CHUNK // self.head_dim

    @property
    def chunks(self) -> int:
        """Of a CTA's share."""
        return self.share * UNIT // self.chunk_rows

    @property
    def steps(self) -> int:
        """How many calls of `round` a CTA needs: a chunk is loaded in one of them, and rounded in the next."""
        return self.chunks + 1

    def _heads_of(self, first: int, last: int) -> list[tuple[int, slice]]:
        """(batch entry, its query heads) of rounds."""
        kv_heads, together, group = self.walks.kv_heads, self.walks.together, self.walks.group
        start, stop = first * together, last * together
        parts = []
        for b in range(start // kv_heads, pl.cdiv(stop, kv_heads)):
            low, high = max(start - b * kv_heads, 0), min(stop - b * kv_heads, kv_heads)
            parts.append((b, slice(low * group, high * group)))
        return parts

    def arrays(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """What the kernel needs: sums of dquery, zeroed for the first rounds, and counters."""
        sums = lax.empty(shape, jnp.float32)
        for b, heads in self._heads_of(0, self.lag):
            sums = sums.at[b, :, heads].set(0)
        ready = jnp.zeros((self.rounds,), jnp.int32)
        return {"dquery": jax.new_ref(sums), "zeroed": jax.new_ref(ready), "added": jax.new_ref(ready)}

    def finish(self, sums: jax.Array, dquery: jax.Array) -> jax.Array:
        """dquery, of which the kernel rounded all but the last rounds."""
        # XLA would have the kernel write into the updated array, which depends on its other results.
        sums, dquery = lax.optimization_barrier((sums, dquery))
        for b, heads in self._heads_of(self.rounds - self.lag, self.rounds):
            dquery = dquery.at[b, :, heads].set((sums[b, :, heads] * self.walks.options.scale).astype(self.dtype))
        return dquery

    def scratch(self) -> tuple[Any, ...]:
        rows = self.chunk_rows
        return (
            plgpu.SMEM((ZEROS // self.head_dim, self.head_dim), jnp.float32),
            plgpu.SMEM((2, rows, self.head_dim), jnp.float32),
            plgpu.SMEM((rows, self.head_dim), self.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
        )

    def _round(self, given: Any, cta: Any) -> Any:
        per_round = pl.cdiv(self.walks.kv_length, self.walks.block_kv) * self.walks.together
        return lax.div(recomputed(cta), jnp.int32(per_round))

    def _place(self, given: Any, cta: Any, rounds: int, nth: Any) -> tuple[Any, Any, Any, Any]:
        """(batch entry, head, first query, whether it is one) of the CTA's nth unit, so many rounds later."""
        b, kv_head, kv_index = self.walks.block(given, recomputed(cta))
        kv_head = b * self.walks.kv_heads + kv_head + rounds * self.walks.together
        unit = kv_index * self.share + nth
        of_head = jnp.int32(pl.cdiv(self.walks.q_length, UNIT))
        head = lax.rem(kv_head, jnp.int32(self.walks.kv_heads)) * self.walks.group + lax.div(unit, of_head)
        b = lax.div(kv_head, jnp.int32(self.walks.kv_heads))
        return b, head, lax.rem(unit, of_head) * UNIT, unit < self.units

    def await_zeros(self, given: Any, cta: Any) -> None:
        """Until the CTA may add to dquery."""
        round_ = self._round(given, cta)

        @pl.when(round_ >= self.lag)
        def _():
            per_round = pl.cdiv(self.walks.kv_length, self.walks.block_kv) * self.walks.together
            await_count(given["zeroed"].at[pl.ds(round_, 1)], per_round)

    def zero(self, given: Any, cta: Any, scratch: Any) -> None:
        """Starts to zero the CTA's share of a later round."""
        zeros = scratch[0]

        @pl.when(self._round(given, cta) + self.lag < self.rounds)
        def _():
            zeros[...] = plgpu.layout_cast(
                jnp.zeros(zeros.shape, jnp.float32), plgpu.Layout.WG_STRIDED(zeros.shape, vec_size=4)
            )
            plgpu.commit_smem()
            copies = UNIT // zeros.shape[0]

            def copy(i, _):
                b, head, row, is_one = self._place(given, cta, self.lag, lax.div(i, jnp.int32(copies)))
                row = row + lax.rem(i, jnp.int32(copies)) * zeros.shape[0]

                @pl.when(is_one)
                def _():
                    plgpu.copy_smem_to_gmem(zeros, given["dquery"].at[b, pl.ds(row, zeros.shape[0]), head])

            lax.fori_loop(0, recomputed(self.share * copies), copy, None)

    def leave(self, given: Any, cta: Any, scratch: Any) -> None:
        """Behind the last step: says that the share is zeroed."""
        del scratch
        round_ = self._round(given, cta) + self.lag
        plgpu.wait_smem_to_gmem(0)

        @pl.when(round_ < self.rounds)
        def _():
            plgpu.commit_smem()
            count_up(given["zeroed"].at[pl.ds(round_, 1)], release=True)

    def added(self, given: Any, cta: Any) -> None:
        """Of a warpgroup that has added all it has to dquery."""
        plgpu.commit_smem()  # no thread counts before the one that waited
        count_up(given["added"].at[pl.ds(self._round(given, cta), 1)], release=True)

    def round(self, given: Any, dquery: Any, cta: Any, scratch: Any, i: Any, warpgroups: int) -> None:
        """Step i, from 0 to `steps`, of rounding the CTA's share of an earlier round."""
        _, loaded, rounded, ready = scratch
        rows = self.chunk_rows
        per_unit = UNIT // rows
        round_ = self._round(given, cta) - self.lag

        def place(i):
            b, head, row, is_one = self._place(given, cta, -self.lag, lax.div(i, jnp.int32(per_unit)))
            return b, head, row + lax.rem(i, jnp.int32(per_unit)) * rows, is_one

        @pl.when(round_ >= 0)
        def _():
            @pl.when(i == 0)
            def _():
                per_round = pl.cdiv(self.walks.kv_length, self.walks.block_kv) * self.walks.together
                await_count(given["added"].at[pl.ds(round_, 1)], per_round * warpgroups)

            @pl.when(i < self.chunks)
            def _():
                b, head, row, is_one = place(i)

                @pl.when(is_one)
                def _():
                    slot = i & 1
                    plgpu.copy_gmem_to_smem(
                        given["dquery"].at[b, pl.ds(row, rows), head], loaded.at[slot], ready.at[slot]
                    )

            @pl.when(i > 0)
            def _():
                b, head, row, is_one = place(i - 1)

                @pl.when(is_one)
                def _():
                    slot = (i - 1) & 1
                    plgpu.barrier_wait(ready.at[slot])
                    x = plgpu.load(
                        loaded.at[slot], layout=plgpu.Layout.WG_STRIDED(rounded.shape, vec_size=4), optimized=False
                    )
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    rounded[...] = (x * self.walks.options.scale).astype(self.dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(rounded, dquery.at[b, pl.ds(row, rows), head])
