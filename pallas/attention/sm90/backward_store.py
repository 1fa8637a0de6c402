"""How a warpgroup of the Hopper backward leaves its dkey and dvalue, when its walk has ended."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward_schedule import Schedule
from jax_kernels.pallas.mosaic.barriers import count_up
from jax_kernels.pallas.mosaic.layouts import WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed
from jax_kernels.pallas.mosaic.smem_tiles import SmemTiles


class Store(NamedTuple):
    """given: the kernel's arrays in device memory, by name. dk_gmem, dv_gmem: its results.

    The other fields are shared memory: k_smem and v_smem the block of keys (for stores, for copies), which the results
    go through once no warpgroup reads it (last_read), v_smem None where the next values come there meanwhile;
    sums_smem [64, 64] float32 and arrived_smem [warpgroups] int32 what a part of a tile needs. wg: the warpgroup.
    columns: whether it has half of the columns of all keys, not all columns of half the keys; row_group, half: which 64
    keys are its, and which half; chunks: its chunks of 64 columns.
    """

    schedule: Schedule
    given: Any
    dk_gmem: Any
    dv_gmem: Any
    k_tiles: SmemTiles
    v_tiles: SmemTiles
    k_smem: tuple[Any, Any]
    v_smem: tuple[Any, Any] | None
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
        return self.v_tiles.width * self.v_tiles.count

    def _columns(self, parts: list[Any], start: int, count: int) -> Any:
        """Of what stands in arrays of some columns each, as many or more."""
        width = parts[0].shape[1]
        part = parts[start // width]
        return part if width == count else part[:, start % width : start % width + count]

    def _store_through_keys(self, x: list[Any], gmem: Any, b: Any, rows: Any, kv_head: Any) -> None:
        k_smem, k_copied = self.k_smem
        for c, chunk in enumerate(self.chunks):
            k_smem.at[chunk, self.row_group, 0][...] = self._columns(x, 64 * c, 64)
        plgpu.commit_smem()
        for chunk in self.chunks:
            target = gmem.at[b, rows, kv_head, pl.ds(64 * chunk, 64)]
            self.k_tiles.store(k_copied.at[chunk, self.row_group], target)

    def store(self, dk: list[Any], dv: list[Any]) -> None:
        """dk: without the scale. Both: float32 [64, width], in one or more arrays of columns."""
        b, kv_head, kv_index = self.schedule.block(self.given, recomputed(self.cta))
        row_group, half = self.row_group, self.half
        place = b, pl.ds(kv_index * self.schedule.block_kv + 64 * row_group, 64), kv_head
        dtype = self.dv_gmem.dtype
        if self.columns or self.v_smem is None:
            plgpu.barrier_wait(self.last_read)
        if self.v_smem is None:
            self._store_through_keys([part.astype(dtype) for part in dv], self.dv_gmem, *place)
        else:
            v_smem, v_copied = (smem.at[row_group, half] for smem in self.v_smem)
            for c in range(self.v_tiles.count):
                v_smem.at[c][...] = self._columns(dv, self.v_tiles.width * c, self.v_tiles.width).astype(dtype)
            plgpu.commit_smem()
            target = self.dv_gmem.at[*place, pl.ds(half * self.width, self.width)]
            self.v_tiles.store(v_copied, target)
        if not self.columns and self.v_smem is not None:
            plgpu.barrier_wait(self.last_read)
        dk = [(part * self.schedule.options.scale).astype(dtype) for part in dk]
        if self.v_smem is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._store_through_keys(dk, self.dk_gmem, *place)

    def store_part(self, dk: list[Any], dv: list[Any]) -> None:
        """Adds dk and dv to those of the tile's other parts; the last one to do so stores the sums."""
        split, w = self.schedule.split, self.wg
        nth = split.tile(recomputed(self.cta)) - split.whole
        rows = pl.ds(64 * self.row_group, 64)
        for which, sums in enumerate((dk, dv)):
            for c, chunk in enumerate(self.chunks):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.sums_smem[...] = self._columns(sums, 64 * c, 64)
                plgpu.commit_smem()
                target = self.given.sums.at[nth, which, rows, pl.ds(64 * chunk, 64)]
                plgpu.copy_smem_to_gmem(self.sums_smem, target, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)
        plgpu.commit_smem()  # no thread counts before the one that waited
        count_up(self.given.arrived.at[nth, pl.ds(w, 1)], self.arrived_smem.at[pl.ds(w, 1)], release=True)
        plgpu.commit_smem()

        @pl.when(self.arrived_smem[w] == split.parts - 1)
        def _():
            columns = pl.ds(self.half * self.width, self.width)
            load = lambda which: plgpu.load(
                self.given.sums.at[nth, which, rows, columns], layout=WGMMA, optimized=False
            )
            self.store([load(0)], [load(1)])

    def finish(self, dk: list[Any], dv: list[Any]) -> None:
        if self.schedule.split.parts == 1:
            self.store(dk, dv)
            return
        pl.when(self.cta < self.schedule.split.whole)(lambda: self.store(dk, dv))
        pl.when(self.cta >= self.schedule.split.whole)(lambda: self.store_part(dk, dv))
