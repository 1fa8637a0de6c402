"""The axes of a matmul's arrays that the devices of a mesh may share out: rows, columns, and the depth of a product."""

from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.matmul_inputs import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.ops.partitioning import ArrayAxes, Axis, Shares, is_partitioned, partitioned

__all__ = ["shared_matmul"]

ROWS, COLUMNS, DEPTH = (Axis(name) for name in ("rows", "columns", "depth"))


def shared_matmul(function: Callable[[MatmulInputs], MatmulResult], options: MatmulOptions) -> Callable[..., Any]:
    """A kernel's function, whose work devices share out under jit. Operands with a scale for each block are gathered.

    Devices that share the depth add up their products, each in the call's out_dtype. A product with an epilogue, which
    belongs behind the sum, does not share it.
    """

    def run(inputs: MatmulInputs) -> MatmulResult:
        if not is_partitioned() or options.scaling == "block":
            return function(inputs)
        fields = _fields(options)
        shares = Shares(
            arguments=[_of(fields.get(name), x) for name, x in inputs._asdict().items() if x is not None],
            results=lambda result: [(ROWS, COLUMNS)] * len(jax.tree.leaves(result)),
            lengths=_lengths(inputs, options),
        )
        return partitioned(function, shares)(inputs)

    return run


def _fields(options: MatmulOptions) -> dict[str, ArrayAxes]:
    of_x = (DEPTH, ROWS) if options.transpose_x else (ROWS, DEPTH)
    of_w: ArrayAxes = (COLUMNS, DEPTH) if options.transpose_w else (DEPTH, COLUMNS)
    of_scale: ArrayAxes = (COLUMNS,)
    if options.low_bit is not None:  # stored values, whose scales lie as their layout has them
        of_w, of_scale = (None, None), (None, None)
    of_out = (ROWS, COLUMNS)
    found = {"x": of_x, "x_up": of_x, "w": of_w, "w_up": of_w, "bias": (COLUMNS,), "x_scale": (ROWS,)}
    found |= {"w_scale": of_scale, "w_up_scale": of_scale}
    return found | dict.fromkeys(("residual", "preactivation", "up"), of_out)


def _of(axes: ArrayAxes | None, x: Any) -> ArrayAxes:
    return (None,) * x.ndim if axes is None or len(axes) != x.ndim else axes


def _lengths(inputs: MatmulInputs, options: MatmulOptions) -> dict[str, int]:
    rows, columns, depth = options.sizes(inputs)
    if options.low_bit is not None:
        return {"rows": rows}
    epilogue = inputs.bias, inputs.residual, inputs.preactivation, options.activation, options.scaling
    is_product = all(x is None for x in epilogue) and not inputs.is_gated
    return {"rows": rows, "columns": columns} | ({"depth": depth} if is_product else {})
