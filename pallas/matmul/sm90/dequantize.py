"""Unpacks low-bit weights to 16-bit values in registers, in the layout of wgmma's first operand."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.matmul.triton.dequantize import assembly
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import WGMMA
from jax_kernels.quantization import formats
from jax_kernels.quantization.formats import LowBit

__all__ = ["unpacked"]

TOGETHER = 16  # bytes of a row in which a thread owns two pairs: the columns of two neighbouring tiles of 8


def unpacked(stored: jax.Array, layout: LowBit, dtype: jnp.dtype, *, byte: int, half: int, width: int) -> jax.Array:
    """Unpacks `width` bytes of each column of low-bit weights, from `byte` on, to values [columns, width] in `dtype`.

    stored: [columns, bytes] uint8, in the register layout of wgmma's results, which is also the result's. half: with
    two 4-bit values in a byte, 0 unpacks the low 4 bits of each byte, 1 the high 4 bits; otherwise 0.
    """
    columns = stored.shape[0]
    if interpreter.INTERPRETED:
        unit = jax.lax.bitcast_convert_type(stored[:, byte : byte + width], layout.dtype)
        return formats.numbers(unit, layout)[half].astype(dtype)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((columns, width), dtype, layout=WGMMA))
    def unpack(_, stored):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
        element = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        pair = ir.VectorType.get((2,), element)
        both = ir.Type.parse("!llvm.struct<(i32, i32)>")
        program = assembly(layout.format, str(jnp.dtype(dtype)), half)
        # Axes: 16 bytes of a row, 8 of these bytes, and 8 rows. A register has two bytes.
        pieces = stored.registers.reshape(-1, 2, 2)[byte // TOGETHER : (byte + width) // TOGETHER]
        found = np.empty(pieces.shape, dtype=object)
        for piece, row in np.ndindex(found.shape[0], 2):
            low, high = (arith.extui(i32, utils.bitcast(pieces[piece, i, row], i16)) for i in range(2))
            word = arith.ori(low, arith.shli(high, utils.c(16, i32)))
            numbers = llvm.inline_asm(both, [word], program, "=r,=r,r")
            for i in range(2):
                found[piece, i, row] = utils.bitcast(llvm.extractvalue(i32, numbers, [i]), pair)
        shape = stored.layout.registers_shape((columns, width))
        return fragmented_array.FragmentedArray(_registers=found.reshape(shape), _layout=stored.layout, _is_signed=None)

    return unpack(stored)
