"""The axes of a matmul's arrays that the devices of a mesh may shard: the axes of M and of K, and N."""

import math
from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.ops.sharding.partitioning import ArrayAxes, Axis, Shares, is_partitioned, partitioned
from jax_kernels.pallas.matmul.passes.quantize_with_transpose import BothWays
from jax_kernels.quantization.scale_blocks import BLOCK, counts, sizes_of

__all__ = ["both_ways_of_outer", "by_rows", "shared_matmul"]

ROWS, COLUMNS, DEPTH = "rows", "columns", "depth"


def by_rows(
    function: Callable[[MatmulInputs], MatmulResult], options: MatmulOptions
) -> Callable[[MatmulInputs], MatmulResult]:
    """Wraps a kernel's function, which takes matrices, so that it takes arrays whose M and K are several axes.

    function: takes MatmulInputs of matrices. The wrapped function merges the axes of M, and of K, of all arrays, and
    reshapes each array of the result from [M, N] to [*axes of M, N].
    """

    def run(inputs: MatmulInputs) -> MatmulResult:
        if inputs.x.ndim == inputs.w.ndim == 2:
            return function(inputs)
        (rows, _), (m, n, k) = options.axes(inputs), options.sizes(inputs)
        x, w = (k, m) if options.transpose_x else (m, k), (n, k) if options.transpose_w else (k, n)
        shapes: dict[str, tuple[int, ...]] = {"x": x, "x_up": x, "w": w, "w_up": w}
        shapes |= dict.fromkeys(("residual", "preactivation", "up"), (m, n))
        if options.scaling == "row":
            shapes["x_scale"] = (m,)
        elif options.scaling == "block":
            of_blocks = lambda shape: counts(shape, (BLOCK, BLOCK))
            shapes |= {"x_scale": of_blocks(x), "w_scale": of_blocks(w), "w_up_scale": of_blocks(w)}
        if options.low_bit is not None:  # stored values
            del shapes["w"], shapes["w_up"]
        arrays = {name: y for name in shapes if (y := getattr(inputs, name)) is not None}
        result = function(inputs._replace(**{name: y.reshape(shapes[name]) for name, y in arrays.items()}))
        return jax.tree.map(lambda y: y.reshape(*rows, n), result)

    return run


def shared_matmul(function: Callable[[MatmulInputs], MatmulResult], options: MatmulOptions) -> Callable[..., Any]:
    """Returns the kernel's function with its work sharded over the devices of a mesh under jit.

    Devices that shard K sum their matmuls, each in the call's out_dtype. A matmul with an epilogue, which belongs
    after the sum, does not shard K. If blocks of 128 x 128 values have a scale, devices hold whole blocks.
    """

    def run(inputs: MatmulInputs) -> MatmulResult:
        if not is_partitioned():
            return function(inputs)
        fields = _fields(inputs, options)
        shares = Shares(
            arguments=[_of(fields.get(name), x) for name, x in inputs._asdict().items() if x is not None],
            results=lambda result: [fields["residual"]] * len(jax.tree.leaves(result)),
            lengths=_lengths(inputs, options),
        )
        return partitioned(function, shares)(inputs)

    return run


def both_ways_of_outer(function: Callable[..., Any], scaling: str) -> Callable[..., Any]:
    """Wraps the kernel that rounds x [M, N] and its transpose, so that it takes x [..., N] and shards its work.

    function(x, factors): returns BothWays(values [M, N], transposed [N, M], scale). factors: None, or the reciprocals
    of (x's scale, the transpose's scale). The result's transposed is [N, ...]. scaling: "tensor", "row" or "block".
    Under jit the devices of a mesh run it on their shards.
    """

    def of_rows(x: jax.Array, factors: Any) -> BothWays:
        *outer, columns = x.shape
        rows = math.prod(outer)
        factors = None if factors is None else tuple(y.reshape(-1) for y in factors)
        found = function(x.reshape(rows, columns), factors)
        scale = found.scale
        if scale is not None:
            scale = scale.reshape(counts(x.shape, (*sizes_of(outer), BLOCK)))
        transposed = found.transposed.reshape(columns, *outer)
        return BothWays(found.values.reshape(x.shape), transposed, scale, found.largest)

    def run(x: jax.Array, factors: Any) -> BothWays:
        if x.size <= jax.device_count():  # for the kernel, factors of one row or column look like a tensor's
            return of_rows(x, factors)
        rows, (columns,) = _axes(ROWS, x.shape[:-1], scaling), _axes(COLUMNS, x.shape[-1:], scaling)
        of_factors: list[ArrayAxes] = [rows, (columns,)] if scaling == "row" else [(), ()]
        of_scale: ArrayAxes = tuple(Axis(axis.name) for axis in (*rows, columns))
        shares = Shares(
            arguments=[(*rows, columns), *([] if factors is None else of_factors)],
            results=lambda result: [(*rows, columns), (columns, *rows), of_scale][: len(jax.tree.leaves(result))],
            lengths=_whole(rows, x.shape[:-1]) | _whole((columns,), x.shape[-1:]),
        )
        return partitioned(of_rows, shares)(x, factors)

    return jax.custom_batching.sequential_vmap(run) if is_partitioned() else of_rows


def _axes(name: str, lengths: tuple[int, ...], scaling: str | None) -> tuple[Axis, ...]:
    """Named Axis objects for the axes of M, N or K with these lengths. name: ROWS, COLUMNS or DEPTH.

    With scaling="block" the group of an Axis is the extent of a block along it, so that devices hold whole blocks.
    """
    sizes = sizes_of(lengths) if scaling == "block" else (1,) * len(lengths)
    return tuple(Axis(f"{name}{i}", size) for i, size in enumerate(sizes))


def _whole(axes: tuple[Axis, ...], lengths: tuple[int, ...]) -> dict[str, int]:
    """The lengths of axes by name, for Shares: the numbers of parts that devices can divide among them.

    A part is a block of an axis with block scales, else a value. Axes with a partial block are missing, since devices
    cannot shard them. axes, lengths: in the same order.
    """
    every = zip(axes, lengths, strict=True)
    return {axis.name: length // axis.group for axis, length in every if length % axis.group == 0}


def _axes_of(inputs: MatmulInputs, options: MatmulOptions) -> tuple[tuple[Axis, ...], ...]:
    """(Axis objects of M, of N, of K). M and K may be several axes, N is one."""
    (m, k), (_, n, _) = options.axes(inputs), options.sizes(inputs)
    return tuple(_axes(name, of, options.scaling) for name, of in ((ROWS, m), (COLUMNS, (n,)), (DEPTH, k)))


def _fields(inputs: MatmulInputs, options: MatmulOptions) -> dict[str, ArrayAxes]:
    """The axes of each field of MatmulInputs, by the field's name.

    All arrays of a MatmulResult have the axes of "residual": the axes of M, then N. With low-bit weights, the axes of
    w, w_up and their scales are None, so they are not sharded. With scaling="tensor", a scale has no axes, and its axes
    here are not used (`_of`).
    """
    rows, columns, depth = _axes_of(inputs, options)
    of_x: ArrayAxes = (*depth, *rows) if options.transpose_x else (*rows, *depth)
    of_w: ArrayAxes = (*columns, *depth) if options.transpose_w else (*depth, *columns)
    of_x_scale: ArrayAxes = rows
    of_w_scale: ArrayAxes = columns
    if options.scaling == "block":
        of_x_scale, of_w_scale = (tuple(Axis(axis.name) for axis in axes if axis) for axes in (of_x, of_w))
    if options.low_bit is not None:  # stored values; the scales follow their layout
        of_w, of_w_scale = (None, None), (None, None)
    found = {"x": of_x, "x_up": of_x, "w": of_w, "w_up": of_w, "bias": columns, "x_scale": of_x_scale}
    found |= {"w_scale": of_w_scale, "w_up_scale": of_w_scale}
    return found | dict.fromkeys(("residual", "preactivation", "up"), (*rows, *columns))


def _of(axes: ArrayAxes | None, x: Any) -> ArrayAxes:
    """`axes` if x has as many axes; else None for each axis of x, as for a scale that is one number."""
    return (None,) * x.ndim if axes is None or len(axes) != x.ndim else axes


def _lengths(inputs: MatmulInputs, options: MatmulOptions) -> dict[str, int]:
    """The lengths of the axes that devices may shard, by name. K is missing for a matmul with an epilogue."""
    (m, k), (_, n, _) = options.axes(inputs), options.sizes(inputs)
    rows, columns, depth = _axes_of(inputs, options)
    if options.low_bit is not None:
        return _whole(rows, m)
    epilogue = inputs.bias, inputs.residual, inputs.preactivation, options.activation
    is_product = all(x is None for x in epilogue) and not inputs.is_gated
    return _whole(rows, m) | _whole(columns, (n,)) | (_whole(depth, k) if is_product else {})
