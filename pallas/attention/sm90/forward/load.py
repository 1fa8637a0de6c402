"""The memory warpgroup of the Hopper forward: it loads the blocks of keys and values that work tiles visit."""

import dataclasses
import functools

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.features.head_views import of_call
from jax_kernels.pallas.attention.sm90.forward.loop import KvLoop, WorkTile
from jax_kernels.pallas.attention.sm90.forward.state import Arrays, Scratch, Smem, Traits
from jax_kernels.pallas.kernel_types import Index, needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader:
    """The memory warpgroup of a CTA: it loads the blocks of keys, values and bias that work tiles visit."""

    traits: Traits
    arrays: Arrays
    scratch: Scratch
    smem: Smem
    kv_loop: KvLoop

    def run(self) -> None:
        self.kv_loop.for_each_tile(self._load_tile)

    def _load_tile(self, index: Index, turn: Index, slot: Index) -> tuple[Index, Index]:
        """Loads the blocks of work tile `index`, the `turn`-th of the CTA, from `slot` on.

        Returns (the following work tile, the next slot).
        """
        scheduler, fetched, pipeline = self.traits.scheduler, self.scratch.fetched, self.scratch.pipeline
        scheduler.fetch(self.arrays.counter, fetched, turn)
        tile = self.kv_loop.work_tile(index)
        load_k, load_v, load_bias = (
            functools.partial(load, tile) for load in (self._load_k, self._load_v, self._load_bias)
        )
        slot = pipeline.fill(slot, tile.blocks.count, load_k, load_v, load_bias)
        return scheduler.following(fetched, index, turn), pipeline.following(slot)

    def _kv_start(self, tile: WorkTile, step: Index) -> Index:
        return tile.blocks.at(step) * self.traits.config.block_kv

    def _load_k(self, tile: WorkTile, step: Index, slot: Index) -> None:
        """Loads a step's block of keys, after `slot` is free."""
        scratch, ready = self.scratch, self.scratch.pipeline.k_ready.at[slot]
        rows = pl.ds(self._kv_start(tile, step), self.traits.config.block_kv)
        plgpu.barrier_wait(scratch.pipeline.k_free.at[slot])

        def load(i: int) -> None:
            keys = self.arrays.key[i].at[tile.b, rows, tile.kv_head]
            self.traits.qk_tiles.load(keys, self.smem.k_copied.at[slot], ready)

        of_call(tile.call, len(self.traits.calls), load)

    def _load_v(self, tile: WorkTile, step: Index, slot: Index) -> None:
        """Loads a step's block of values, after `slot` is free."""
        pipeline, end, block_kv = self.scratch.pipeline, self.arrays.end, self.traits.config.block_kv
        load = functools.partial(
            self.traits.v_tiles.load, smem=self.smem.v_copied.at[slot], barrier=pipeline.v_ready.at[slot]
        )

        def load_whole() -> None:
            rows = pl.ds(self._kv_start(tile, step), block_kv)
            plgpu.barrier_wait(pipeline.v_free.at[slot])
            values = self.arrays.value
            of_call(tile.call, len(self.traits.calls), lambda i: load(values[i].at[tile.b, rows, tile.kv_head]))

        def load_end() -> None:
            plgpu.barrier_wait(pipeline.v_free.at[slot])
            load(needed(end).value.at[tile.b, :, tile.kv_head])

        if end is None:
            load_whole()
        else:
            end.load(tile.b, self._kv_start(tile, step), block_kv, load_whole, load_end)

    def _load_bias(self, tile: WorkTile, step: Index) -> None:
        """Loads a step's bias, if there is one.

        It runs after the loads of keys and values, because it waits until the last step's bias has been read.
        """
        bias, stage = self.arrays.bias, self.scratch.bias
        if bias is not None and stage is not None:
            plgpu.barrier_wait(stage.free)
            kv_start = self._kv_start(tile, step)
            stage.fill(bias, tile.b, tile.h, tile.q_start, kv_start, kv_start)
