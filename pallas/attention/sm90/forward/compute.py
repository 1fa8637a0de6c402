"""The compute warpgroups of the Hopper forward kernels: the common part of the 16-bit and the 8-bit forward."""

import abc
import dataclasses

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.features.bias import Stage
from jax_kernels.pallas.attention.sm90.forward.loop import KvLoop, KvPipeline, PingPong, WorkTile
from jax_kernels.pallas.kernel_types import Index
from jax_kernels.pallas.mosaic.tile_scheduler import Fetched


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeWarpgroup(abc.ABC):
    """Compute warpgroup w of a forward kernel, which owns 64 queries of every work tile.

    bias: the shared memory for a step's bias, None without a bias.
    """

    kv_loop: KvLoop
    pingpong: PingPong
    pipeline: KvPipeline
    fetched: Fetched
    w: int
    bias: Stage | None = None

    def run(self) -> None:
        """Computes and stores the warpgroup's queries of all work tiles of the CTA."""
        self.pipeline.free()
        if self.bias is not None:
            plgpu.barrier_arrive(self.bias.free)
        self.pingpong.start(self.w)
        self.load_q(self.kv_loop.first_tile(), 0)
        self.kv_loop.for_each_tile(self.run_tile)
        self.pingpong.end(self.w)
        plgpu.wait_smem_to_gmem(0)

    def own_tile(self, index: Index, slot: Index) -> tuple[WorkTile, Index]:
        """(the warpgroup's part of work tile `index`, the slot of the first block that its queries visit).

        slot: of the first block that any warpgroup visits. Blocks before the warpgroup's own first block are released,
        and the warpgroup passes on its turns for them.
        """
        whole = self.kv_loop.work_tile(index)
        own = self.kv_loop.own(whole, self.w)

        def skip(_, slot):
            self.pingpong.wait(self.w)
            self.pingpong.pass_on(self.w)
            self.pipeline.skip(slot)
            if self.bias is not None:
                plgpu.barrier_wait(self.bias.ready)
                plgpu.barrier_arrive(self.bias.free)
            return self.pipeline.following(slot)

        if self.kv_loop.same_blocks:
            return own, slot
        return own, lax.fori_loop(0, whole.blocks.count - own.blocks.count, skip, slot)

    @abc.abstractmethod
    def load_q(self, index: Index, turn: Index) -> None:
        """Starts the copy of the warpgroup's queries of work tile `index`, the `turn`-th of the CTA."""

    @abc.abstractmethod
    def run_tile(self, index: Index, turn: Index, slot: Index) -> tuple[Index, Index]:
        """Computes and stores work tile `index`, the `turn`-th of the CTA, whose first block is in `slot`.

        Returns (the following work tile, the next slot).
        """
