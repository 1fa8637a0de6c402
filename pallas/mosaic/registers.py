"""Operations on registers that Pallas does not have."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import ROW, WGMMA


def as_int32(x):
    """A Python int as an int32 scalar array; anything else unchanged."""
    return jnp.int32(x) if isinstance(x, int) else x


def recomputed(index):
    """Returns the index, an int or a traced int32, such that LLVM recomputes arithmetic on it in each turn of a loop.

    LLVM would otherwise hoist the arithmetic out of the loop, where its results would spill.
    """
    return lax.optimization_barrier(as_int32(index))


def zeros_stay() -> None:
    """Makes wgmmas start from zeros without a write of zero to each accumulator. Call it after such a wgmma.

    It uses the constant zero once more. Without a later use LLVM reuses the zero's register as an accumulator. ptxas
    then does not see that the wgmma starts from zeros, and writes a zero to each register.
    """
    if interpreter.INTERPRETED:
        return

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def use(_):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        zero = utils.c(0, ir.IntegerType.get_signless(32))
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [zero], "// $0", "r", has_side_effects=True)

    use()


def all_of_warp(rows) -> jax.Array:
    """Whether all 16 rows of the calling warp are True: a scalar bool, which may differ between warps.

    rows: bool [64], the rows of a warpgroup; a warp has 16 of them. A branch on the result must not contain operations
    of a whole warpgroup. The interpreter returns whether all 64 rows are True.
    """
    if interpreter.INTERPRETED:
        return jnp.all(rows)

    @plgpu.inline_mgpu(
        arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    )
    def vote(_, numbers):
        from jax.experimental.mosaic.gpu import fragmented_array
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        mine = [vector.extract(x, dynamic_position=[], static_position=[0]) for x in numbers.registers.reshape(-1)]
        both = functools.reduce(arith.andi, mine)
        assembly = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.all.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        result = llvm.inline_asm(i32, [both], assembly, "=r,r", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(result, (), is_signed=True)

    return vote(jnp.where(rows, 1, 0).astype(jnp.int32)) != 0


def any_of_warp_above(numbers, rows) -> jax.Array:
    """Whether any value in the calling warp's 16 rows is NaN or above its row's limit: a scalar bool.

    numbers: float32 [64, n] in the layout of wgmma's results. rows: float32 [64], the limit of each row. The result may
    differ between warps, so a branch on it must not contain operations of a whole warpgroup. The interpreter looks at
    all 64 rows.
    """
    if interpreter.INTERPRETED:
        return jnp.any(~(numbers <= rows[:, None]))

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, ROW), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    )
    def vote(_, numbers, rows):
        from jax.experimental.mosaic.gpu import fragmented_array
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        element = lambda x, i: vector.extract(x, dynamic_position=[], static_position=[i])
        limits = [element(x, 0) for x in rows.registers.reshape(-1)]
        above = [
            arith.cmpf(arith.CmpFPredicate.UGT, element(x, i), limit)
            for of_row in numbers.registers.reshape(-1, len(limits))
            for x, limit in zip(of_row, limits, strict=True)
            for i in range(2)
        ]
        mine = arith.extui(i32, functools.reduce(arith.ori, above))
        assembly = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        result = llvm.inline_asm(i32, [mine], assembly, "=r,r", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(result, (), is_signed=True)

    return vote(numbers, rows) != 0


def reciprocal(x):
    """1 / x, approximately, for float32 x [64, n] in the layout of wgmma's results.

    x must be at least 2^-126. For x above 2^126 the result is 0.

    This is one instruction. A division has four more, which handle the smallest values.
    """
    if interpreter.INTERPRETED:
        return 1 / x

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA))
    def approximate(_, x):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array
        from jaxlib.mlir.dialects import nvvm, vector

        def of_pair(pair):
            elements = (vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2))
            return vector.from_elements(pair.type, [nvvm.rcp_approx_ftz_f(element) for element in elements])

        registers = np.empty(x.registers.shape, dtype=object)
        for place, pair in np.ndenumerate(x.registers):
            registers[place] = of_pair(pair)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return approximate(x)


def as_float32(x, layout):
    """x in float32. layout: the register layout of x, which the result keeps.

    Each bfloat16 value takes one instruction. LLVM's conversion takes two for every second value.
    """
    if interpreter.INTERPRETED or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout))
    def widen(_, x):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def of_vector(numbers):
            count = ir.VectorType(numbers.type).shape[0]
            pairs = vector.bitcast(ir.VectorType.get((count // 2,), i32), numbers)
            bits = []
            for i in range(count // 2):
                pair = vector.extract(pairs, dynamic_position=[], static_position=[i])
                bits += [arith.shli(pair, utils.c(16, i32)), arith.andi(pair, utils.c(-65536, i32))]
            return vector.bitcast(
                ir.VectorType.get((count,), f32), vector.from_elements(ir.VectorType.get((count,), i32), bits)
            )

        registers = np.empty(x.registers.shape, dtype=object)
        for place, numbers in np.ndenumerate(x.registers):
            registers[place] = of_vector(numbers)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return widen(x)


def kept(x, layout):
    """Returns x, such that LLVM does not hoist its conversion to float32 out of a loop, where it takes more registers.

    layout: the register layout of x, with vectors of 4 values. lax.optimization_barrier does this for float32, but it
    permutes 16-bit vectors of more than two values.
    """
    if interpreter.INTERPRETED or x.dtype.itemsize != 2:
        return lax.optimization_barrier(x)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))
    def keep(_, x):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        i64 = ir.IntegerType.get_signless(64)
        registers = np.empty(x.registers.shape, dtype=object)
        for place, numbers in np.ndenumerate(x.registers):
            same = llvm.inline_asm(i64, [utils.bitcast(numbers, i64)], "", "=l,0", has_side_effects=True)
            registers[place] = utils.bitcast(same, numbers.type)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return keep(x)


def store_narrow(gmem: Ref, index: Any, values: jax.Array) -> None:
    """gmem[index] = values, of any width.

    From JAX 0.12 on, an assignment raises an error if it writes parts of 32-byte sectors of device memory.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(gmem.at[index], values, optimized=False)
    else:
        gmem[index] = values
