"""Copies of tiles by cp.async, for GPUs without the tensor memory accelerator (sm_80, sm_86, sm_89).

Newer GPUs also run them. plgpu.copy_gmem_to_smem issues cp.async below sm_90 too, but only for tiles that lie inside
the array. The copies below take any length: rows past the end of the array become zeros, and are not stored.

The 128 threads of a warpgroup copy a tile together.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import SWIZZLED
from jax_kernels.pallas.mosaic.registers import as_int32

SCALAR = plgpu.Layout.WG_SPLAT(())


def load_rows(gmem: Ref, start: Index, end: Index, smem: Ref) -> None:
    """Starts the copy of rows start, start + 1, ... of a 16-bit array to a tile. Rows from `end` on become zeros.

    gmem: [length, columns] in device memory, each row aligned to 16 bytes. end: at most length. smem: [rows, columns]
    in shared memory, in the layout SWIZZLED; rows is a multiple of 32, columns of 64.
    """
    if interpreter.INTERPRETED:
        _interpreted_load(gmem.at[pl.ds(as_int32(start), smem.shape[0])], end - start, smem)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, plgpu.RefType(SWIZZLED)), return_type=None)
    def copy(_, gmem, start, end, smem):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, nvvm

        i32 = ir.IntegerType.get_signless(32)

        def load(gmem_ptr, smem_ptr, exists):
            size = arith.select(exists, utils.c(16, i32), utils.c(0, i32))  # cp.async writes zeros for the rest
            nvvm.cp_async_shared_global(smem_ptr, gmem_ptr, 16, nvvm.LoadCacheModifierKind.CG, cp_size=size)

        _each_16_bytes(gmem, start.registers.item(), end.registers.item(), smem, load)

    copy(gmem, as_int32(start), as_int32(end), smem)


def store_rows(smem: Ref, gmem: Ref, start: Index) -> None:
    """Copies a tile to rows start, start + 1, ... of a 16-bit array; rows past the array's end are left out.

    smem, gmem: as in load_rows. The stores of other threads to smem must be visible.
    """
    if interpreter.INTERPRETED:
        _interpreted_store(smem, gmem.at[pl.ds(as_int32(start), smem.shape[0])])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.RefType(), SCALAR), return_type=None)
    def copy(_, smem, gmem, start):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        gmem_type = ir.MemRefType(gmem.type)
        vector_type = ir.VectorType.get((8,), gmem_type.element_type)
        end = utils.c(gmem_type.shape[0], ir.IntegerType.get_signless(32))

        def store(gmem_ptr, smem_ptr, exists):
            values = llvm.load(vector_type, smem_ptr)
            with utils.when(exists):
                llvm.store(values, gmem_ptr)

        _each_16_bytes(gmem, start.registers.item(), end, smem, store)

    copy(smem, gmem, as_int32(start))


def store_column(smem: Ref, gmem: Ref, start: Index) -> None:
    """Copies float32 values to start, start + 1, ... of an array; values past the array's end are left out.

    smem: [rows] in shared memory, rows at most 128. gmem: [length] in device memory. The stores of other threads to
    smem must be visible.
    """
    if interpreter.INTERPRETED:
        _interpreted_store(smem, gmem.at[pl.ds(as_int32(start), smem.shape[0])])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=None)
    def copy(_, smem, gmem, start):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, memref

        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        (rows,), (length,) = ir.MemRefType(smem.type).shape, ir.MemRefType(gmem.type).shape
        thread = arith.remui(utils.thread_idx(), utils.c(utils.WARPGROUP_SIZE, i32))
        row = arith.addi(start.registers.item(), thread)
        below = lambda x, limit: arith.cmpi(arith.CmpIPredicate.ult, x, utils.c(limit, i32))
        with utils.when(arith.andi(below(thread, rows), below(row, length))):
            memref.store(memref.load(smem, [arith.index_castui(index, thread)]), gmem, [arith.index_castui(index, row)])

    copy(smem, gmem, as_int32(start))


def commit() -> None:
    """Ends a group of copies: the copies that the warpgroup started since the last call."""
    _issue("cp.async.commit_group;")


def wait(in_flight: int, warpgroups: int = 1) -> None:
    """Waits until at most `in_flight` groups of copies are in flight, and all threads of the CTA have arrived.

    warpgroups: of the CTA. Afterwards each thread sees the copies and earlier stores of all threads.
    """
    _issue(f"cp.async.wait_group {in_flight}; bar.sync 1, {128 * warpgroups};")


def barrier(warpgroups: int = 1) -> None:
    """Waits for all threads of a CTA of `warpgroups`. Afterwards each thread sees the earlier stores of all threads."""
    _issue(f"bar.sync 1, {128 * warpgroups};")


def _issue(assembly: str) -> None:
    if interpreter.INTERPRETED:
        return

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def issue(_):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], assembly, "~{memory}", has_side_effects=True)

    issue()


def _each_16_bytes(gmem: Any, start: Any, end: Any, smem: Any, copy: Callable[[Any, Any, Any], None]) -> None:
    """Calls copy(pointer into gmem, pointer into smem, whether the row is below `end`) for each 16 bytes of a thread.

    gmem, start, end, smem: MLIR values. smem: [rows / 8, columns / 64, 8, 64], swizzled.
    """
    from jax.experimental.mosaic.gpu import fragmented_array, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    gmem_type, (row_tiles, column_tiles, *_) = ir.MemRefType(gmem.type), ir.MemRefType(smem.type).shape
    (row_stride, _), _ = gmem_type.get_strides_and_offset()
    layout = fragmented_array.tiled_copy_smem_gmem_layout(row_tiles, column_tiles, 128, 16)

    def of_thread(strides: tuple[int, int]) -> Any:
        """The dot product of `strides` and the thread's first (row, column)."""
        tiled = [utils.c(stride, i32) for stride in layout.tiling.tile_strides(strides)[2:]]
        return arith.addi(utils.dyn_dot(layout.lane_indices(), tiled), utils.dyn_dot(layout.warp_indices(), tiled))

    row = arith.addi(start, of_thread((1, 0)))
    offset = arith.muli(arith.extsi(i64, row), utils.c(row_stride, i64))
    offset = arith.addi(offset, arith.extsi(i64, of_thread((0, 1))))
    base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(gmem))
    base = utils.getelementptr(base, [offset], gmem_type.element_type)
    shape = 8 * row_tiles, 64 * column_tiles
    transfers = fragmented_array.FragmentedArray.transfer_tiled(smem, 128, layout, shape, optimized=False)
    for _get, _update, first_of_transfer, smem_ptr in transfers:
        more_rows, more_columns = (int(x) for x in first_of_transfer())
        gmem_ptr = utils.getelementptr(base, [more_rows * row_stride + more_columns], gmem_type.element_type)
        exists = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(row, utils.c(more_rows, i32)), end)
        copy(gmem_ptr, smem_ptr, exists)


def _interpreted_load(gmem: Ref, count: Index, smem: Ref) -> None:
    """Copies `count` rows; the other rows of smem become zeros."""

    def copy(arrived):
        plgpu.copy_gmem_to_smem(gmem, smem, arrived)
        plgpu.barrier_wait(arrived)

    pl.run_scoped(copy, plgpu.Barrier(), collective_axes="wg")
    rows = smem[...]
    smem[...] = jnp.where(lax.broadcasted_iota(jnp.int32, rows.shape, 0) < count, rows, 0)


def _interpreted_store(smem: Ref, gmem: Ref) -> None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, gmem)
    plgpu.wait_smem_to_gmem(0)
