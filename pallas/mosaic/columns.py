"""A choice of columns of a tile of registers, with the columns as constants of the instructions.

An array of column indices would take a register for every two values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import PART, ROW, WGMMA

__all__ = ["picked"]


def picked(z: jax.Array, column: jax.Array) -> jax.Array:
    """float32 [64, PART], whose rows sum to z[i, column[i]]; to 0 if z has no such column.

    z: float32 [64, n] in the layout of wgmma's results. column: int32 [64].
    """
    if interpreter.INTERPRETED:
        found = jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 1) == column[:, None], z, 0.0)
        return found.reshape(z.shape[0], -1, PART).sum(axis=1)

    of_type = plgpu.ShapeDtypeStruct((z.shape[0], PART), jnp.float32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA, ROW), return_type=of_type)
    def pick(_, z, column):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        first = _first_column()
        wanted = [arith.subi(vector.extract(x, dynamic_position=[], static_position=[0]), first) for x in _flat(column)]
        zero = utils.c(0.0, ir.F32Type.get())
        found = [zero] * len(wanted)
        for nth, of_row, pair in _pairs(z, len(wanted)):
            for i in range(2):
                is_it = arith.cmpi(arith.CmpIPredicate.eq, wanted[of_row], _constant(nth * PART + i))
                value = vector.extract(pair, dynamic_position=[], static_position=[i])
                found[of_row] = arith.select(is_it, value, found[of_row])
        registers = np.empty(z.layout.registers_shape((z.shape[0], PART)), dtype=object)
        pair_type = _flat(z)[0].type
        for index, value in zip(np.ndindex(registers.shape), found, strict=True):
            registers[index] = vector.from_elements(pair_type, [value, zero])
        return fragmented_array.FragmentedArray(_registers=registers, _layout=z.layout, _is_signed=None)

    return pick(z, column)


def _first_column() -> Any:
    """The calling thread's first column of each PART."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith

    return arith.muli(arith.andi(utils.thread_idx(), _constant(3)), _constant(2))


def _constant(value: int) -> Any:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    return utils.c(value, ir.IntegerType.get_signless(32))


def _flat(x: Any) -> Any:
    """The registers of a fragmented array, in order."""
    return x.registers.reshape(-1)


def _pairs(z: Any, rows: int) -> Any:
    """(index of the PART, index of the row, the two values) of each register of z. rows: of a thread."""
    return ((nth // rows, nth % rows, pair) for nth, pair in enumerate(_flat(z)))
