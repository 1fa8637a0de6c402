"""Stores of dkey and dvalue by a compute warpgroup of the Hopper backward, after the q_loop of a work tile."""

import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward.loop import WorkTile
from jax_kernels.pallas.attention.sm90.backward.state import Kernel, TileRefs
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, Slice, needed
from jax_kernels.pallas.mosaic.barriers import count_up
from jax_kernels.pallas.mosaic.layouts import WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed


def epilogue(work: WorkTile, dk: list[jax.Array], dv: list[jax.Array], dbias: jax.Array | None) -> None:
    """Stores dkey, dvalue and dbias of a work tile, after its last step.

    dk, dv: float32, for 64 keys: a list with one array [64, columns] for each chunk of columns; dk lacks the scale.
    dbias: [64, PART], partial sums for the gradient of a bias with one value per key, or None.
    """
    kernel, traits, smem, barriers = work.kernel, work.kernel.traits, work.kernel.smem, work.kernel.barriers
    if barriers.last_read is not None:  # the other warpgroup may still read K, and V if it has the same keys
        plgpu.barrier_arrive(barriers.last_read.at[0])
    wg = recomputed(kernel.wg)
    key_group, half = (0, wg) if traits.splits_columns else (wg, 0)
    chunks = [half * (traits.width // traits.chunk) + c for c in range(traits.width // traits.chunk)]
    v_chunks = chunks
    if (traits.v_chunk, traits.v_width) != (traits.chunk, traits.width):
        count = traits.v_width // traits.v_chunk
        v_chunks = [half * count + c for c in range(count)]
    if traits.bias_gradient:
        _store_dbias(work, needed(dbias), wg, key_group)
    stages = traits.schedule.stages_of(work.turn)
    k_smem = TileRefs(smem.k.mma.at[stages.k], smem.k.tma.at[stages.k])
    v_smem = None
    if not traits.is_persistent or traits.schedule.v_stages == 2:
        v_smem = TileRefs(smem.v.mma.at[stages.v], smem.v.tma.at[stages.v])
    store = Store(
        kernel=kernel,
        tile=work.tile,
        k_smem=k_smem,
        v_smem=v_smem,
        dk_smem=smem.dq.at[wg],
        dv_smem=smem.dv_of(wg, traits.v_chunk),
        # The exchange of dS also signals that each warpgroup has read K.
        last_read=(barriers.last_read or barriers.ds_free).at[0],
        wg=wg,
        key_group=key_group,
        half=half,
        chunks=chunks,
        v_chunks=v_chunks,
    )
    store.finish(dk, dv)


def _store_dbias(work: WorkTile, dbias: jax.Array, wg: Index, key_group: Index) -> None:
    """Stores the gradient of a bias per key for 64 keys. Warpgroups with the same keys store the same values.

    dbias: [64, PART], partial sums. key_group: which 64 keys of the block of keys.
    """
    kernel = work.kernel
    smem = needed(kernel.smem.dbias)
    smem.at[wg][...] = dbias.sum(axis=1)
    plgpu.commit_smem()
    b, head, kv_index = kernel.block(recomputed(work.tile))
    rows = pl.ds(kv_index * kernel.traits.block_kv + 64 * key_group, 64)
    plgpu.copy_smem_to_gmem(smem.at[wg], needed(kernel.results.dbias).at[b, head, rows])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """The stores of dkey and dvalue of one work tile, by one compute warpgroup.

    They go through the shared memory of its keys (k_smem) and values (v_smem), after the last read of any warpgroup
    (last_read). v_smem: None if the next values are loaded there meanwhile; dvalue then goes through k_smem. dk_smem,
    dv_smem: [64, chunk] and [64, v_chunk] float32, in the same memory, for float32 results and for parts of a work
    tile. key_group, half: which 64 keys, and which half of the columns, the warpgroup has. chunks: indices of its
    chunks of the columns of key. v_chunks: of its chunks of the columns of value.
    """

    kernel: Kernel
    tile: Index
    k_smem: TileRefs
    v_smem: TileRefs | None
    dk_smem: Ref
    dv_smem: Ref
    last_read: Barrier
    wg: Index
    key_group: Index
    half: Index
    chunks: list[Index]
    v_chunks: list[Index]

    def finish(self, dk: list[jax.Array], dv: list[jax.Array]) -> None:
        """Stores dkey and dvalue, or, for a part of a split work tile, adds them to the sums of the other parts.

        dk, dv: float32, lists of arrays [64, columns]; dk lacks the scale.
        """
        split = self.kernel.schedule.split
        if split.parts == 1:
            self.store(dk, dv)
            return
        pl.when(self.tile < split.whole)(lambda: self.store(dk, dv))
        pl.when(self.tile >= split.whole)(lambda: self.store_part(dk, dv))

    def store(self, dk: list[jax.Array], dv: list[jax.Array]) -> None:
        """Stores dkey, times the scale, and dvalue. dk, dv: float32, lists of arrays [64, columns]; dk lacks the
        scale.
        """
        traits, dv_gmem, v_tiles = self.kernel.traits, self.kernel.results.dvalue, self.kernel.traits.v_tiles
        b, kv_head, kv_index = self.kernel.block(recomputed(self.tile))
        key_group, half = self.key_group, self.half
        index = b, pl.ds(kv_index * traits.block_kv + 64 * key_group, 64), kv_head
        dtype = dv_gmem.dtype
        if traits.options.float32_gradients:
            plgpu.barrier_wait(self.last_read)
            of_value = b + dv_gmem.shape[0] // 2, *index[1:]
            self._store_float32(dv, dv_gmem, *of_value, of_value=True)
            self._store_float32([part * traits.options.scale for part in dk], self.kernel.results.dkey, *index)
            return
        if traits.splits_columns or self.v_smem is None:
            plgpu.barrier_wait(self.last_read)
        if self.v_smem is None:
            self._store_through_keys([part.astype(dtype) for part in dv], dv_gmem, *index)
        else:
            v_smem = TileRefs(*(smem.at[key_group, half] for smem in self.v_smem))
            for c in range(v_tiles.count):
                v_smem.mma.at[c][...] = _columns(dv, v_tiles.width * c, v_tiles.width).astype(dtype)
            plgpu.commit_smem()
            target = dv_gmem.at[*index, pl.ds(half * traits.v_width, traits.v_width)]
            v_tiles.store(v_smem.tma, target)
        if not traits.splits_columns and self.v_smem is not None:
            plgpu.barrier_wait(self.last_read)
        dk = [(part * traits.options.scale).astype(dtype) for part in dk]
        if self.v_smem is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._store_through_keys(dk, self.kernel.results.dkey, *index)

    def store_part(self, dk: list[jax.Array], dv: list[jax.Array]) -> None:
        """Adds dk and dv to the work tile's sums in device memory. The part that arrives last stores the sums as the
        results.
        """
        split, arrays = self.kernel.schedule.split, self.kernel.arrays
        arrived_smem, traits = needed(self.kernel.smem.arrived), self.kernel.traits
        nth = split.tile(recomputed(self.tile)) - split.whole
        rows = pl.ds(64 * self.key_group, 64)
        for which, sums in enumerate((dk, dv)):
            columns, smem, chunks = self._sums(of_value=which == 1)
            for c, chunk in enumerate(chunks):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                smem[...] = _columns(sums, columns * c, columns)
                plgpu.commit_smem()
                target = needed(arrays.sums).at[nth, which, rows, pl.ds(columns * chunk, columns)]
                plgpu.copy_smem_to_gmem(smem, target, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)
        plgpu.commit_smem()  # no thread counts up before the thread that waited
        mine = pl.ds(self.wg, 1)
        count_up(needed(arrays.arrived).at[nth, mine], arrived_smem.at[mine], release=True)
        plgpu.commit_smem()

        @pl.when(arrived_smem[self.wg] == split.parts - 1)
        def _store_sums():
            of_key = pl.ds(self.half * traits.width, traits.width)
            of_value = of_key
            if traits.v_width != traits.width:
                of_value = pl.ds(self.half * traits.v_width, traits.v_width)
            load = lambda which, columns: plgpu.load(
                needed(arrays.sums).at[nth, which, rows, columns], layout=WGMMA, optimized=False
            )
            self.store([load(0, of_key)], [load(1, of_value)])

    def _sums(self, *, of_value: bool) -> tuple[int, Ref, list[Index]]:
        """(the columns of a chunk of dkey or dvalue in float32, its shared memory, the indices of the chunks)."""
        if of_value:
            return self.kernel.traits.v_chunk, self.dv_smem, self.v_chunks
        return self.kernel.traits.chunk, self.dk_smem, self.chunks

    def _store_float32(
        self, x: list[jax.Array], gmem: Ref, b: Index, rows: Slice, kv_head: Index, *, of_value: bool = False
    ) -> None:
        """Stores x, a list of arrays of columns, in float32 through the shared memory of dquery. of_value: x is
        dvalue.
        """
        columns, smem, chunks = self._sums(of_value=of_value)
        for c, chunk in enumerate(chunks):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            smem[...] = _columns(x, columns * c, columns)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, gmem.at[b, rows, kv_head, pl.ds(columns * chunk, columns)])

    def _store_through_keys(self, x: list[jax.Array], gmem: Ref, b: Index, rows: Slice, kv_head: Index) -> None:
        """Stores x, a list of 16-bit arrays of columns, through the keys' shared memory."""
        columns = self.kernel.traits.chunk
        for c, chunk in enumerate(self.chunks):
            self.k_smem.mma.at[chunk, self.key_group, 0][...] = _columns(x, columns * c, columns)
        plgpu.commit_smem()
        for chunk in self.chunks:
            target = gmem.at[b, rows, kv_head, pl.ds(columns * chunk, columns)]
            self.kernel.traits.k_tiles.store(self.k_smem.tma.at[chunk, self.key_group], target)


def _columns(parts: list[jax.Array], start: int, count: int) -> jax.Array:
    """Columns start ... start + count - 1 of a matrix, given as a list of arrays of at least `count` columns each."""
    width = parts[0].shape[1]
    part = parts[start // width]
    return part if width == count else part[:, start % width : start % width + count]
