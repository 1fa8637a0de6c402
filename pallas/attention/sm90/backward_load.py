"""What the memory warpgroup of the Hopper backward loads: blocks of keys, and the queries of their schedule."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90 import head_views
from jax_kernels.pallas.attention.sm90.backward_schedule import Schedule
from jax_kernels.pallas.mosaic.registers import recomputed
from jax_kernels.pallas.mosaic.smem_tiles import SmemTiles

KEYS_AT_ONCE = 64


class Staged(NamedTuple):
    """Rows in device memory, [B, T, H, D], with a number for each, [B, H, T], and the stages for blocks of them.

    smem: of copies, [stages, halves, ...]. numbers_smem: [stages, block_q]. ids, ids_smem: of segments, where these are
    loaded as well. steps: of persistent CTAs, where their Step comes with them.
    """

    gmem: Any
    numbers: Any
    smem: Any
    numbers_smem: Any
    ready: Any
    free: Any
    stages: int
    ids: Any = None
    ids_smem: Any = None
    steps: Any = None


class Step(NamedTuple):
    """What a compute warpgroup has to know of a step, int32.

    Of a persistent CTA the memory warpgroup, which has worked it out, leaves it in shared memory with the step's
    queries: to work it out again in each step takes a tenth of the step's instructions, to keep it spills.

    index: within the tile. goes_on: whether the tile has another step.
    """

    entry: Any
    head: Any
    q_block: Any
    kv_block: Any
    index: Any
    is_partial: Any
    goes_on: Any

    @staticmethod
    def scratch(stages: int) -> Any:
        """For pl.run_scoped."""
        return plgpu.SMEM((stages, 8), jnp.int32)

    @classmethod
    def read(cls, smem: Any, slot: Any) -> "Step":
        return cls(*(smem[slot, i] for i in range(len(cls._fields))))

    def leave(self, smem: Any, slot: Any, ready: Any) -> None:
        for i, number in enumerate(self):
            smem[slot, i] = number.astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)


class Handover(NamedTuple):
    """How blocks of keys come to the compute warpgroups, and the room for them back.

    Of a CTA with one tile there is k_ready alone, for its values too. Of a persistent one, k_ready and v_ready are for
    each of their stages, and with the keys comes the number of their tile, but for the first one; behind the last one's
    a number past the tiles. k_free: a tile's first step, as what was stored from the last tile's keys has been read, so
    that the next ones can go there. v_free: its last step, where values have one stage, as they have been read.
    """

    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    tile_smem: Any

    @staticmethod
    def barriers(schedule: Schedule, k_copies: int, v_copies: int, readers: int) -> dict[str, tuple[int, int]]:
        """As Barriers has them. k_copies, v_copies: how many a block takes. readers: compute warpgroups."""
        if not schedule.is_persistent:
            return {"k_ready": (1, k_copies + v_copies)}
        ready = {"k_ready": (schedule.k_stages, k_copies + 1), "v_ready": (schedule.v_stages, v_copies)}
        return ready | {"k_free": (1, readers), "v_free": (1, readers)}


class Loads(NamedTuple):
    """given: the kernel's arrays in device memory, by name. k_smem, v_smem: of copies. bias: a dense Stage, or None.

    halves: of the columns of values, queries and dout, of `width` each; columns, row_groups: see backward_kernel.
    """

    schedule: Schedule
    given: Any
    cta: Any
    k_tiles: SmemTiles
    v_tiles: SmemTiles
    q_tiles: SmemTiles
    k_smem: Any
    v_smem: Any
    handover: Handover
    queries: Staged
    dout: Staged
    bias: Any
    chunks: int
    row_groups: int
    halves: int
    width: int

    def run(self) -> None:
        self.schedule.for_each(self.cta, self._load_tile)

    def _load_block(self, tile: Any, turn: Any, *, keys: bool = True, values: bool = True) -> None:
        """Loads the keys, the values, or both, of the CTA's tile number `turn`."""
        schedule, width, handover = self.schedule, self.width, self.handover
        _, kv_head_of = head_views.head_maps(schedule.options)
        b, kv_head, kv_index = schedule.block(self.given, recomputed(tile))
        kv_head = kv_head_of(kv_head)
        k_stage, v_stage = schedule.stages_of(turn)
        k_ready = v_ready = handover.k_ready.at[k_stage]
        if schedule.is_persistent:
            v_ready = handover.v_ready.at[v_stage]
        for r in range(self.row_groups):
            start = kv_index * schedule.block_kv + KEYS_AT_ONCE * r

            def load(k_gmem, v_gmem, start, r=r):
                rows = pl.ds(start, KEYS_AT_ONCE)
                for c in range(self.chunks if keys else 0):
                    source = k_gmem.at[b, rows, kv_head, pl.ds(64 * c, 64)]
                    self.k_tiles.load(source, self.k_smem.at[k_stage, c, r], k_ready)
                for half in range(self.halves if values else 0):
                    source = v_gmem.at[b, rows, kv_head, pl.ds(width * half, width)]
                    self.v_tiles.load(source, self.v_smem.at[v_stage, r, half], v_ready)

            whole = functools.partial(load, self.given.key, self.given.value, start)
            end = self.given.end
            if end is None:
                whole()
            else:
                end.load(b, start, KEYS_AT_ONCE, whole, functools.partial(load, end.key, end.value, 0))

    def _load_tile(self, tile: Any, turn: Any, first: Any) -> tuple[Any, Any]:
        """Loads the CTA's tile number `turn`, after `first` steps of others: (the following tile, steps so far)."""
        schedule, given, width, handover = self.schedule, self.given, self.width, self.handover
        block, q_loop = functools.partial(schedule.block, given), functools.partial(schedule.q_loop, given, tile)
        q_head_of, _ = head_views.head_maps(schedule.options)
        q_tiles, bias, is_persistent = self.q_tiles, self.bias, schedule.is_persistent
        late_values = is_persistent and schedule.v_stages == 1
        if is_persistent:
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(handover.k_free.at[recomputed(0)]))
            plgpu.barrier_arrive(handover.k_ready.at[turn & 1])
        self._load_block(tile, turn, values=not late_values)
        # Behind the first copies: what it holds and what they need do not fit this warpgroup's registers together.
        b, _, _ = here = block(recomputed(tile))
        steps, place = q_loop(here)

        def load(step, _):
            head, q_block, _ = place(step)
            rows = pl.ds(q_block * schedule.block_q, schedule.block_q)
            nth = first + step

            def place_again():
                """(batch entry, head, queries): the loop of copies leaves no registers to keep them."""
                if not q_tiles.whole:
                    return b, head, rows
                here = block(recomputed(tile))
                head_, q_block_, _ = q_loop(here).place(recomputed(step))
                return here.b, head_, pl.ds(q_block_ * schedule.block_q, schedule.block_q)

            def step_again() -> Step:
                b_, _, kv_index_ = here = block(recomputed(tile))
                steps_, place_ = q_loop(here)
                index = recomputed(step)
                head_, q_block_, is_partial = place_(index)
                return Step(b_, head_, q_block_, kv_index_, index, is_partial, index + 1 < steps_)

            def load_rows(staged: Staged):
                slot = lax.rem(nth, jnp.int32(staged.stages))
                b, head, rows = place_again()

                @pl.when(nth >= staged.stages)
                def _():
                    plgpu.barrier_wait(staged.free.at[slot])

                ready = staged.ready.at[slot]
                for half in range(self.halves):
                    source = staged.gmem.at[b, rows, q_head_of(head), pl.ds(width * half, width)]
                    q_tiles.load(source, staged.smem.at[slot, half], ready)
                b, head, rows = place_again()
                plgpu.copy_gmem_to_smem(staged.numbers.at[b, head, rows], staged.numbers_smem.at[slot], ready)
                if staged.ids is not None:
                    plgpu.copy_gmem_to_smem(staged.ids.at[b, rows], staged.ids_smem.at[slot], ready)
                if staged.steps is not None:
                    step_again().leave(staged.steps, slot, ready)

            load_rows(self.queries)
            load_rows(self.dout)
            if late_values:

                @pl.when(step == 0)
                def _():
                    pl.when(turn > 0)(lambda: plgpu.barrier_wait(handover.v_free.at[recomputed(0)]))
                    self._load_block(tile, turn, keys=False)

            if bias is not None:

                @pl.when(nth > 0)
                def _():
                    plgpu.barrier_wait(bias.free)

                entry, _, of_keys = block(recomputed(tile))
                kv_start = of_keys * schedule.block_kv
                bias.fill(given.dense, entry, head, kv_start, q_block * schedule.block_q, kv_start)

        # An opaque count: unrolled or peeled, the loop would not fit the registers either.
        lax.fori_loop(0, recomputed(steps), load, None)
        if not is_persistent:
            return tile, first
        stage = pl.ds((turn + 1) & 1, 1)
        following = schedule.scheduler.leave_following(given.counter, tile, handover.tile_smem.at[stage])

        @pl.when(following >= schedule.scheduler.count)
        def _end():
            for _copy in range(self.row_groups * self.chunks + 1):  # as if there were keys
                plgpu.barrier_arrive(handover.k_ready.at[(turn + 1) & 1])

        return following, first + steps
