"""Values that depend on q - k in the Hopper kernels: a thread loads the values of its own pairs into registers.

A tile has one value per diagonal. A thread has two rows, 8 apart, of every 8 columns. The second row's values in some
columns equal the first row's values in the 8 columns before, so that half of the values are loaded.

Loads that are marked as reading invariant memory are issued before the wait for the matmuls, and overlap with them.
Half of a tile's loads are marked: all of them do not fit the registers of the forward at head_dim 64.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import PART, WGMMA


def load(
    ref: Ref, start: Index, shape: tuple[int, ...], first: int, before: jax.Array | None, *, transposed: bool
) -> jax.Array:
    """The values of q - k for PART (8) columns of a tile, in registers: [rows, PART], for the columns from `first` on.

    ref: values in device memory, one per difference q - k, ascending. start: the index in ref of the value for row 0
    and column 0 of the tile. shape: (rows, columns) of the tile. before: the result for the PART columns before
    `first`, from which half of the values are taken; None: all are loaded. transposed: rows are keys.
    """
    rows, columns = shape
    # The pair at (row, column) has index sign * (row - column) + last in the window of the tile's values.
    sign, last = (-1, rows - 1) if transposed else (1, columns - 1)
    window = ref.at[pl.ds(start - last, rows + columns - 1)]
    if interpreter.INTERPRETED:
        iota = lambda axis: lax.broadcasted_iota(jnp.int32, (rows, PART), axis)
        return window[...][sign * (iota(0) - iota(1) - first) + last]
    is_early = 2 * first < columns
    given = (window,) if before is None else (window, before)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), WGMMA)[: len(given)],
        return_type=plgpu.ShapeDtypeStruct((rows, PART), ref.dtype, layout=WGMMA),
    )
    def read(_, window, *before):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32, number = ir.IntegerType.get_signless(32), ir.MemRefType(window.type).element_type
        layout = WGMMA.to_mgpu()
        row, column = (arith.index_cast(i32, x) for x in next(iter(layout.thread_idxs((rows, PART)))))
        mine = arith.subi(*((column, row) if transposed else (row, column)))
        # One address for the whole tile, and a constant offset for each value.
        pointer = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), utils.memref_ptr(window))
        pointer = utils.getelementptr(pointer, [mine], number)

        def at(row, column):
            place = utils.getelementptr(pointer, [sign * (row - column - first) + last], number)
            return llvm.load(number, place, invariant=is_early)

        pair = lambda row: vector.from_elements(ir.VectorType.get((2,), number), [at(row, 0), at(row, 1)])
        upper = pair(0)
        lower = before[0].registers.reshape(-1)[0] if before else pair(8)
        registers = np.array([upper, lower], dtype=object).reshape(layout.registers_shape((rows, PART)))
        is_signed = utils.is_signed(ref.dtype)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)

    return read(*given)
