"""The axes of a matmul's arrays that the devices of a mesh may share out: rows, columns, and the depth of a product."""

from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.matmul_inputs import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.ops.partitioning import ArrayAxes, Axis, Shares, is_partitioned, partitioned
from jax_kernels.quantization import BLOCK

__all__ = ["shared_both_ways", "shared_matmul"]

ROWS, COLUMNS, DEPTH = "rows", "columns", "depth"


def shared_matmul(function: Callable[[MatmulInputs], MatmulResult], options: MatmulOptions) -> Callable[..., Any]:
    """A kernel's function, whose work devices share out under jit.

    Devices that share the depth add up their products, each in the call's out_dtype. A product with an epilogue, which
    belongs behind the sum, does not share it. Where 128 x 128 numbers have a scale, devices share whole blocks.
    """

    def run(inputs: MatmulInputs) -> MatmulResult:
        if not is_partitioned():
            return function(inputs)
        fields, block = _fields(options), _block(options.scaling)
        out = Axis(ROWS, block), Axis(COLUMNS, block)
        shares = Shares(
            arguments=[_of(fields.get(name), x) for name, x in inputs._asdict().items() if x is not None],
            results=lambda result: [out] * len(jax.tree.leaves(result)),
            lengths=_lengths(inputs, options),
        )
        return partitioned(function, shares)(inputs)

    return run


def shared_both_ways(function: Callable[..., Any], scaling: str) -> Callable[..., Any]:
    """The kernel of x [M, N] and its factors, or None, that rounds x and its transpose, as shared_matmul."""

    def run(x: jax.Array, factors: Any) -> Any:
        if x.size <= jax.device_count():  # the kernel takes one row's and one column's factors for those of a tensor
            return function(x, factors)
        group = _block(scaling)
        rows, columns = Axis(ROWS, group), Axis(COLUMNS, group)
        of_scale = Axis(ROWS), Axis(COLUMNS)
        of_factors = [(axis if scaling == "row" else None,) for axis in (rows, columns)]
        shares = Shares(
            arguments=[(rows, columns), *([] if factors is None else of_factors)],
            results=lambda result: [(rows, columns), (columns, rows), of_scale][: len(jax.tree.leaves(result))],
            lengths=_whole({ROWS: x.shape[0], COLUMNS: x.shape[1]}, group),
        )
        return partitioned(function, shares)(x, factors)

    return jax.custom_batching.sequential_vmap(run) if is_partitioned() else function


def _block(scaling: str | None) -> int:
    return BLOCK if scaling == "block" else 1


def _whole(lengths: dict[str, int], block: int) -> dict[str, int]:
    """The numbers of blocks of the axes that consist of whole ones."""
    return {name: length // block for name, length in lengths.items() if length % block == 0}


def _fields(options: MatmulOptions) -> dict[str, ArrayAxes]:
    block = _block(options.scaling)
    rows, columns, depth = (Axis(name, block) for name in (ROWS, COLUMNS, DEPTH))
    of_x = (depth, rows) if options.transpose_x else (rows, depth)
    of_w: ArrayAxes = (columns, depth) if options.transpose_w else (depth, columns)
    of_x_scale: ArrayAxes = (rows,)
    of_w_scale: ArrayAxes = (columns,)
    if options.scaling == "block":
        of_x_scale, of_w_scale = (tuple(Axis(axis.name) for axis in axes if axis) for axes in (of_x, of_w))
    if options.low_bit is not None:  # stored values, whose scales lie as their layout has them
        of_w, of_w_scale = (None, None), (None, None)
    of_out = (rows, columns)
    found = {"x": of_x, "x_up": of_x, "w": of_w, "w_up": of_w, "bias": (columns,), "x_scale": of_x_scale}
    found |= {"w_scale": of_w_scale, "w_up_scale": of_w_scale}
    return found | dict.fromkeys(("residual", "preactivation", "up"), of_out)


def _of(axes: ArrayAxes | None, x: Any) -> ArrayAxes:
    return (None,) * x.ndim if axes is None or len(axes) != x.ndim else axes


def _lengths(inputs: MatmulInputs, options: MatmulOptions) -> dict[str, int]:
    rows, columns, depth = options.sizes(inputs)
    if options.low_bit is not None:
        return {ROWS: rows}
    epilogue = inputs.bias, inputs.residual, inputs.preactivation, options.activation
    is_product = all(x is None for x in epilogue) and not inputs.is_gated
    found = {ROWS: rows, COLUMNS: columns} | ({DEPTH: depth} if is_product else {})
    return _whole(found, _block(options.scaling))
