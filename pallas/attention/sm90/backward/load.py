"""The memory warpgroup of the Hopper backward: it loads blocks of keys, and the queries that attend to them."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward.state import Kernel, StepNumbers
from jax_kernels.pallas.attention.sm90.features import head_views
from jax_kernels.pallas.kernel_types import Index, Ref, Slice, needed
from jax_kernels.pallas.mosaic.barriers import BarrierSlice
from jax_kernels.pallas.mosaic.registers import recomputed
from jax_kernels.pallas.mosaic.smem_tiles import SmemTiles

KEYS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLoads:
    """An array of rows that the memory warpgroup loads, e.g. the queries, with its stages in shared memory.

    gmem: the rows in device memory, [B, T, H, columns]. width: the columns of a part of them. tiles: their layout in
    shared memory. numbers: one value per row, [B, H, T], lse or delta. smem, numbers_smem: [stages, ...] in shared
    memory. ready, free: the barriers of the stages. steps_smem: for queries in a persistent CTA, the shared memory to
    which the memory warpgroup writes each step's StepNumbers; else None.
    """

    gmem: Ref
    width: int
    tiles: SmemTiles
    numbers: Ref
    smem: Ref
    numbers_smem: Ref
    ready: BarrierSlice
    free: BarrierSlice
    stages: int
    steps_smem: Ref | None = None

    @classmethod
    def of_queries(cls, kernel: Kernel) -> "RowLoads":
        """The loads of query, with lse."""
        arrays, smem, barriers = kernel.arrays, kernel.smem, kernel.barriers
        return cls(
            gmem=arrays.query,
            width=kernel.traits.width,
            tiles=kernel.traits.q_tiles,
            numbers=arrays.lse,
            smem=smem.q.tma,
            numbers_smem=smem.lse,
            ready=barriers.q_ready,
            free=barriers.q_free,
            stages=kernel.traits.config.q_stages,
            steps_smem=smem.steps,
        )

    @classmethod
    def of_dout(cls, kernel: Kernel) -> "RowLoads":
        """The loads of dout, with delta."""
        arrays, smem, barriers = kernel.arrays, kernel.smem, kernel.barriers
        return cls(
            gmem=arrays.dout,
            width=kernel.traits.v_width,
            tiles=kernel.traits.do_tiles,
            numbers=arrays.delta,
            smem=smem.do.tma,
            numbers_smem=smem.delta,
            ready=barriers.do_ready,
            free=barriers.do_free,
            stages=kernel.traits.config.do_stages,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLoads:
    """The loads of one step of a work tile.

    tile: the work tile. nth: number of the step in the CTA. step: its number in the work tile. b, head, rows: its block
    of queries.
    """

    kernel: Kernel
    tile: Index
    nth: Index
    step: Index
    b: Index
    head: Index
    rows: Slice

    def numbers_again(self) -> StepNumbers:
        """The step's block of queries and flags, which the compute warpgroups read from shared memory, recomputed."""
        block = self.kernel.block(recomputed(self.tile))
        q_loop = self.kernel.q_loop(self.tile, block)
        index = recomputed(self.step)
        place = q_loop.place(index)
        return StepNumbers(
            b=block.b,
            head=place.head,
            q_block=place.q_block,
            kv_block=block.kv_index,
            index=index,
            is_partial=place.is_partial,
            goes_on=index + 1 < q_loop.steps,
        )

    def load(self, loads: RowLoads) -> None:
        """Loads the step's block of rows, once the earlier step that used its stage has freed it."""
        traits = self.kernel.traits
        slot = lax.rem(self.nth, jnp.int32(loads.stages))
        b, head, rows = self.b, self.head, self.rows

        @pl.when(self.nth >= loads.stages)
        def _wait():
            plgpu.barrier_wait(loads.free.at[slot])

        ready = loads.ready.at[slot]
        q_head_of, _ = head_views.head_maps(traits.options)
        for half in range(traits.halves):
            source = loads.gmem.at[b, rows, q_head_of(head), pl.ds(loads.width * half, loads.width)]
            loads.tiles.load(source, loads.smem.at[slot, half], ready)
        plgpu.copy_gmem_to_smem(loads.numbers.at[b, head, rows], loads.numbers_smem.at[slot], ready)
        if loads.steps_smem is not None:
            self.numbers_again().leave(loads.steps_smem, slot, ready)


def load_tiles(kernel: Kernel) -> None:
    """Runs the memory warpgroup: loads all work tiles of the CTA, one after another."""
    kernel.schedule.for_each(kernel.cta, functools.partial(_load_tile, kernel))


def _load_tile(kernel: Kernel, tile: Index, turn: Index, first: Index) -> tuple[Index, Index]:
    """Loads work tile number `tile`, the `turn`-th of the CTA, after `first` earlier steps.

    Returns (the next work tile, the number of steps so far); both are only meaningful for a persistent CTA.
    """
    schedule, barriers = kernel.schedule, kernel.barriers
    is_persistent = schedule.is_persistent
    late_values = is_persistent and schedule.v_stages == 1
    queries, dout = RowLoads.of_queries(kernel), RowLoads.of_dout(kernel)
    if is_persistent:
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(needed(barriers.k_free).at[recomputed(0)]))
        plgpu.barrier_arrive(barriers.k_ready.at[turn & 1])
    _load_block(kernel, tile, turn, values=not late_values)
    # After the first copies: q_loop's values and the values of these copies together do not fit the registers.
    block = kernel.block(recomputed(tile))
    q_loop = kernel.q_loop(tile, block)

    def load_step(step, _):
        place = q_loop.place(step)
        rows = pl.ds(place.q_block * schedule.block_q, schedule.block_q)
        nth = first + step
        loads = StepLoads(kernel=kernel, tile=tile, nth=nth, step=step, b=block.b, head=place.head, rows=rows)
        loads.load(queries)
        loads.load(dout)
        if late_values:

            @pl.when(step == 0)
            def _load_values():
                pl.when(turn > 0)(lambda: plgpu.barrier_wait(needed(barriers.v_free).at[recomputed(0)]))
                _load_block(kernel, tile, turn, keys=False)

        if kernel.smem.bias is not None:
            _load_bias(kernel, tile, nth, place.head, place.q_block)

    # The count is opaque: unrolled or peeled, the loop would not fit the registers, either.
    lax.fori_loop(0, recomputed(q_loop.steps), load_step, None)
    return _following(kernel, tile, turn, first, q_loop.steps) if is_persistent else (tile, first)


def _load_block(kernel: Kernel, tile: Index, turn: Index, *, keys: bool = True, values: bool = True) -> None:
    """Loads the keys, the values, or both, of work tile number `tile`, the `turn`-th of the CTA."""
    traits, schedule, arrays, smem = kernel.traits, kernel.schedule, kernel.arrays, kernel.smem
    _, kv_head_of = head_views.head_maps(traits.options)
    b, kv_head, kv_index = kernel.block(recomputed(tile))
    kv_head = kv_head_of(kv_head)
    stages = schedule.stages_of(turn)
    k_ready = v_ready = kernel.barriers.k_ready.at[stages.k]
    if schedule.is_persistent:
        v_ready = needed(kernel.barriers.v_ready).at[stages.v]
    if keys and arrays.segments is not None:
        rows = pl.ds(kv_index * schedule.block_kv, schedule.block_kv)
        plgpu.copy_gmem_to_smem(arrays.segments.spans.at[b, :, rows], needed(smem.spans).at[stages.k], k_ready)
    for r in range(traits.key_groups):
        start = kv_index * schedule.block_kv + KEYS_AT_ONCE * r

        def load(k_gmem, v_gmem, start, r=r):
            rows = pl.ds(start, KEYS_AT_ONCE)
            for c in range(traits.chunks if keys else 0):
                source = k_gmem.at[b, rows, kv_head, pl.ds(traits.chunk * c, traits.chunk)]
                traits.k_tiles.load(source, smem.k.tma.at[stages.k, c, r], k_ready)
            for half in range(traits.halves if values else 0):
                source = v_gmem.at[b, rows, kv_head, pl.ds(traits.v_width * half, traits.v_width)]
                traits.v_tiles.load(source, smem.v.tma.at[stages.v, r, half], v_ready)

        whole = functools.partial(load, arrays.key, arrays.value, start)
        end = arrays.end
        if end is None:
            whole()
        else:
            end.load(b, start, KEYS_AT_ONCE, whole, functools.partial(load, end.key, end.value, 0))


def _load_bias(kernel: Kernel, tile: Index, nth: Index, head: Index, q_block: Index) -> None:
    """Loads the bias of step number `nth` of the CTA, after the previous step's bias has been read.

    head, q_block: the step's query head and block of queries.
    """
    schedule, stage, bias = kernel.schedule, kernel.smem.bias, kernel.arrays.bias
    assert stage is not None
    assert bias is not None

    @pl.when(nth > 0)
    def _wait():
        plgpu.barrier_wait(stage.free)

    block = kernel.block(recomputed(tile))
    kv_start = block.kv_index * schedule.block_kv
    stage.fill(bias, block.b, head, kv_start, q_block * schedule.block_q, kv_start)


def _following(kernel: Kernel, tile: Index, turn: Index, first: Index, steps: Index) -> tuple[Index, Index]:
    """(the next work tile of a persistent CTA, the number of its steps so far).

    It also writes the next work tile to shared memory for the compute warpgroups. `first`: steps before this work tile.
    `steps`: steps of this work tile.
    """
    scheduler, k_ready = kernel.schedule.scheduler, kernel.barriers.k_ready
    stage = pl.ds((turn + 1) & 1, 1)
    following = scheduler.leave_following(kernel.arrays.counter, tile, needed(kernel.smem.tile).at[stage])

    @pl.when(following >= scheduler.count)
    def _end():
        traits = kernel.traits
        for _copy in range(traits.key_groups * traits.chunks + traits.has_segments + 1):  # instead of copies of keys
            plgpu.barrier_arrive(k_ready.at[(turn + 1) & 1])

    return following, first + steps
