"""How a warpgroup of the Hopper backward leaves its dkey and dvalue, when its walk has ended."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.backward_walks_sm90 import Walks
from jax_kernels.pallas.attention.hopper import WGMMA, count_up, recomputed


class Store(NamedTuple):
    """given: the kernel's arrays in device memory, by name. dk_gmem, dv_gmem: its results.

    The other fields are shared memory: k_smem and v_smem the block of keys, which the results go through once no
    warpgroup reads it (last_read), sums_smem [64, 64] float32 and arrived_smem [warpgroups] int32 what a part of a tile
    needs. wg: the warpgroup. columns: whether it has half of the columns of all keys, not all columns of half the keys;
    row_group, half: which 64 keys are its, and which half; chunks: their chunks of 64 columns.
    """

    walks: Walks
    given: Any
    dk_gmem: Any
    dv_gmem: Any
    k_smem: Any
    v_smem: Any
    sums_smem: Any
    arrived_smem: Any
    last_read: Any
    cta: Any
    wg: Any
    columns: bool
    row_group: Any
    half: Any
    chunks: list[Any]

    @property
    def width(self) -> int:
        return self.v_smem.shape[-1]

    def _chunk(self, x: Any, c: int) -> Any:
        return x[:, 64 * c : 64 * (c + 1)] if self.width > 64 else x

    def store(self, dk: Any, dv: Any) -> None:
        """dk: without the scale. Both: float32 [64, width]."""
        b, kv_head, kv_index = self.walks.block(self.given, recomputed(self.cta))
        row_group, half = self.row_group, self.half
        rows = pl.ds(kv_index * self.walks.block_kv + 64 * row_group, 64)
        dtype = self.v_smem.dtype
        if self.columns:
            plgpu.barrier_wait(self.last_read)
        self.v_smem.at[row_group, half][...] = dv.astype(dtype)
        plgpu.commit_smem()
        target = self.dv_gmem.at[b, rows, kv_head, pl.ds(half * self.width, self.width)]
        plgpu.copy_smem_to_gmem(self.v_smem.at[row_group, half], target)
        if not self.columns:
            plgpu.barrier_wait(self.last_read)
        dk = (dk * self.walks.options.scale).astype(dtype)
        for c, chunk in enumerate(self.chunks):
            self.k_smem.at[chunk, row_group][...] = self._chunk(dk, c)
        plgpu.commit_smem()
        for chunk in self.chunks:
            target = self.dk_gmem.at[b, rows, kv_head, pl.ds(64 * chunk, 64)]
            plgpu.copy_smem_to_gmem(self.k_smem.at[chunk, row_group], target)

    def store_part(self, dk: Any, dv: Any) -> None:
        """Adds dk and dv to those of the tile's other parts; the last one to do so stores the sums."""
        split, w = self.walks.split, self.wg
        nth = split.tile(recomputed(self.cta)) - split.whole
        rows = pl.ds(64 * self.row_group, 64)
        for which, sums in enumerate((dk, dv)):
            for c, chunk in enumerate(self.chunks):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.sums_smem[...] = self._chunk(sums, c)
                plgpu.commit_smem()
                target = self.given["sums"].at[nth, which, rows, pl.ds(64 * chunk, 64)]
                plgpu.copy_smem_to_gmem(self.sums_smem, target, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)
        plgpu.commit_smem()  # no thread counts before the one that waited
        count_up(self.given["arrived"].at[nth, pl.ds(w, 1)], self.arrived_smem.at[pl.ds(w, 1)], release=True)
        plgpu.commit_smem()

        @pl.when(self.arrived_smem[w] == split.parts - 1)
        def _():
            columns = pl.ds(self.half * self.width, self.width)
            load = lambda which: plgpu.load(
                self.given["sums"].at[nth, which, rows, columns], layout=WGMMA, optimized=False
            )
            self.store(load(0), load(1))

    def finish(self, dk: Any, dv: Any) -> None:
        if self.walks.split.parts == 1:
            self.store(dk, dv)
            return
        pl.when(self.cta < self.walks.split.whole)(lambda: self.store(dk, dv))
        pl.when(self.cta >= self.walks.split.whole)(lambda: self.store_part(dk, dv))
