"""The addition of a work tile's splits inside the kernel of the low-bit matmul, and the epilogue.

The CTAs of a cluster have parts of the inner dimension. Warpgroup w of each CTA stores its sums in the shared memory of
CTA w % CTAs of the cluster, whose warpgroup w adds the sums in order. Each thread adds the values of the threads with
its own index, so that the sums keep their layout: [columns of w, rows of x], the transpose of out.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.matmul import MatmulOptions, MatmulResult
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, Slice, needed
from jax_kernels.pallas.matmul.refs import MatmulInputRefs, MatmulResultRefs
from jax_kernels.pallas.matmul.sm90.low_bit_traits import COLUMNS
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.barriers import cluster_barrier
from jax_kernels.pallas.mosaic.elementwise import for_tiles
from jax_kernels.pallas.mosaic.layouts import ROW, WGMMA

__all__ = ["epilogue", "exchange_sums", "joined_sums", "results_of"]

THREADS = 128


def results_of(options: MatmulOptions, m: int, n: int, is_gated: bool) -> MatmulResult:
    """The shapes and dtypes of the arrays that a call writes, as a MatmulResult whose other fields are None."""
    out: Any = jax.ShapeDtypeStruct((m, n), jnp.dtype(options.out_dtype))
    saves = options.saves_preactivation
    return MatmulResult(out=out, preactivation=out if saves else None, up=out if saves and is_gated else None)


def exchange_sums(
    totals: list[jax.Array], exchange: Ref, ready: Barrier | None, wg: Index, split: Index, splits: int
) -> None:
    """Sends warpgroup wg's sums to the shared memory of CTA wg % splits of the cluster, and waits for all CTAs' sums.

    totals: for each matmul, float32 [64 columns, rows]. exchange: the calling CTA's shared memory for received sums,
    [matmuls, warpgroups whose sums this CTA adds, CTAs that send, pairs of values of a thread, threads, 2]. split: the
    calling CTA's index in the cluster. splits: the number of CTAs. ready: None; in the interpreter, a barrier of the
    cluster, and exchange is device memory [matmuls, splits, columns of the work tile, rows].
    """
    if interpreter.INTERPRETED:
        for i, total in enumerate(totals):
            exchange[i, split, pl.ds(wg * COLUMNS, COLUMNS)] = total
        plgpu.barrier_arrive(needed(ready))
        plgpu.barrier_wait(needed(ready))
        return
    for i, total in enumerate(totals):
        _send(total, exchange.at[i, lax.div(wg, jnp.int32(splits)), split], splits)
    cluster_barrier()


def joined_sums(exchange: Ref, wg: Index, splits: int, rows: int) -> list[jax.Array]:
    """Adds the sums that the cluster's CTAs have sent with exchange_sums, in the order of the CTAs.

    Only warpgroup `wg` of CTA wg % splits may call it. Returns, for each matmul, float32 [64 columns, rows].
    """
    if interpreter.INTERPRETED:
        read = lambda i, part: exchange[i, part, pl.ds(wg * COLUMNS, COLUMNS)]
    else:
        read = lambda i, part: _received(exchange.at[i, lax.div(wg, jnp.int32(splits)), part], rows)
    return [functools.reduce(operator.add, [read(i, part) for part in range(splits)]) for i in range(exchange.shape[0])]


def _send(numbers: jax.Array, to: Ref, splits: int) -> None:
    """Stores the calling warpgroup's sums in the shared memory of the CTA that adds them: warpgroup index % splits.

    to: a ref [pairs of values of a thread, threads, 2] in the calling CTA's shared memory; the sums go to the same
    address in the other CTA.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=None)
    def store(_, numbers, to):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        void = ir.Type.parse("!llvm.void")
        rank = arith.remui(utils.warpgroup_idx(sync=False), utils.c(splits, i32))
        mine = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(to)), arith.muli(_thread(), utils.c(8, i32)))
        there = llvm.inline_asm(i32, [mine, rank], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r")
        for i, pair in enumerate(numbers.registers.reshape(-1)):
            both = [vector.extract(pair, dynamic_position=[], static_position=[j]) for j in range(2)]
            assembly = f"st.shared::cluster.v2.f32 [$0 + {i * THREADS * 8}], {{$1, $2}};"
            llvm.inline_asm(void, [there, *both], assembly, "r,f,f,~{memory}", has_side_effects=True)

    store(numbers, to)


def _received(place: Ref, rows: int) -> jax.Array:
    """Loads the sums that one CTA has sent, as float32 [64 columns, rows] in the register layout of wgmma's results.

    `place`: a ref [pairs of values of a thread, threads, 2] in this CTA's shared memory.
    """
    result = plgpu.ShapeDtypeStruct((COLUMNS, rows), jnp.float32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(_, place):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F32Type.get())
        pointer = utils.memref_ptr(place)
        start = arith.addi(llvm.ptrtoint(i32, pointer), arith.muli(_thread(), utils.c(8, i32)))
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((COLUMNS, rows)), dtype=object)
        for i, index in enumerate(np.ndindex(registers.shape)):
            address = arith.addi(start, utils.c(i * THREADS * 8, i32))
            registers[index] = llvm.load(pair, llvm.inttoptr(pointer.type, address))
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(place)


def _thread() -> Any:
    """The index of the calling thread in its warpgroup, an MLIR value."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.remui(utils.thread_idx(), utils.c(THREADS, ir.IntegerType.get_signless(32)))


def epilogue(
    options: MatmulOptions, inputs: MatmulInputRefs, results: MatmulResultRefs, sums: list[jax.Array], columns: Slice
) -> None:
    """Computes the epilogue of a warpgroup's 64 columns in float32, and stores the results in device memory.

    inputs: bias and residual, which may be None. sums: x @ w, and x @ w_up of a gated unit, each [64 columns, rows].
    columns: the slice of the results' columns.
    """
    z, *up = sums
    if inputs.bias is not None:
        bias = plgpu.load(inputs.bias.at[columns], layout=ROW, optimized=False).astype(jnp.float32)
        z = z + lax.broadcast_in_dim(bias, z.shape, [0])
    activation = for_tiles(options.activation)
    out = z if activation is None else activation(z)
    if up:
        out = out * up[0]
    if inputs.residual is not None:
        out = out + _load(inputs.residual, columns, z.shape[1]).astype(jnp.float32)
    written = [(results.out, out), (results.preactivation, z), *((results.up, y) for y in up)]
    for ref, numbers in written:
        if ref is not None:
            _store(numbers.astype(ref.dtype), ref, columns)


def _store(numbers: jax.Array, ref: Ref, columns: Slice) -> None:
    """Stores the transpose of values [64 columns, rows] in the columns of a ref [m, n] in device memory.

    Rows from m on are not stored.
    """
    if interpreter.INTERPRETED:
        ref[:, columns] = numbers[:, : ref.shape[0]].T
        return
    m, n = ref.shape

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=None)
    def store(_, numbers, ref):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        void, size = ir.Type.parse("!llvm.void"), utils.bytewidth(numbers.mlir_dtype)
        bits = ir.IntegerType.get_signless(8 * size)
        operands = f"r,l,{'h' if size == 2 else 'r'},~{{memory}}"
        assembly = f"{{ .reg .pred p; setp.lt.s32 p, $0, {m}; @p st.global.b{8 * size} [$1], $2; }}"
        for pair, places in zip(numbers.registers.reshape(-1), _places(ref, numbers.shape[1], n, size), strict=True):
            for i, (row, address) in enumerate(places):
                number = utils.bitcast(vector.extract(pair, dynamic_position=[], static_position=[i]), bits)
                llvm.inline_asm(void, [row, address, number], assembly, operands, has_side_effects=True)

    store(numbers, ref.at[:, columns])


def _load(ref: Ref, columns: Slice, rows: int) -> jax.Array:
    """Loads 64 columns of a ref [m, n] in device memory, transposed to [64 columns, rows]; 0 for rows from m on."""
    if interpreter.INTERPRETED:
        return jnp.pad(ref[:, columns].T, ((0, 0), (0, rows - ref.shape[0])))
    m, n = ref.shape
    result = plgpu.ShapeDtypeStruct((COLUMNS, rows), ref.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(_, ref):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        element = ir.MemRefType(ref.type).element_type
        size = utils.bytewidth(element)
        bits, kind = ir.IntegerType.get_signless(8 * size), "h" if size == 2 else "r"
        assembly = (
            f"{{ .reg .pred p; setp.lt.s32 p, $1, {m}; mov.b{8 * size} $0, 0; @p ld.global.b{8 * size} $0, [$2]; }}"
        )
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((COLUMNS, rows)), dtype=object)
        for index, places in zip(np.ndindex(registers.shape), _places(ref, rows, n, size), strict=True):
            found = [
                utils.bitcast(
                    llvm.inline_asm(bits, list(place), assembly, f"={kind},r,l", has_side_effects=True), element
                )
                for place in places
            ]
            registers[index] = vector.from_elements(ir.VectorType.get((2,), element), found)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref.at[:, columns])


def _places(ref: Any, rows: int, n: int, size: int) -> list[list[tuple[Any, Any]]]:
    """For each pair of values that a thread has of an array [64 columns, rows]: [(row, address)] of the two values.

    row: the value's row in ref, i32. address: the value's address in device memory, i64. Both are MLIR values of the
    calling thread. ref: [m, 64 columns] in device memory, with a row stride of n values of `size` bytes.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    constant = lambda x: utils.c(x, i32)
    lane, warp = arith.remui(_thread(), constant(32)), arith.divui(_thread(), constant(32))
    first_row = arith.muli(arith.remui(lane, constant(4)), constant(2))
    first_column = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
    start = llvm.ptrtoint(i64, utils.memref_ptr(ref))
    found = []
    for eight in range(rows // 8):
        for half in range(2):  # 8 columns on
            places = []
            for i in range(2):
                row = arith.addi(first_row, constant(8 * eight + i))
                column = arith.addi(first_column, constant(8 * half))
                offset = arith.muli(arith.addi(arith.muli(row, constant(n)), column), constant(size))
                places.append((row, arith.addi(start, arith.extui(i64, offset))))
            found.append(places)
    return found
