"""The axes of a matmul's arrays that the devices of a mesh may shard: M's, N and K's, as MatmulInputs names them."""

import math
from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.matmul_inputs import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.ops.partitioning import ArrayAxes, Axis, Shares, is_partitioned, partitioned
from jax_kernels.pallas.matmul.passes.both_ways import BothWays
from jax_kernels.quantization import BLOCK

__all__ = ["both_ways_of_outer", "by_rows", "shared_matmul"]

ROWS, COLUMNS, DEPTH = "rows", "columns", "depth"


def by_rows(
    function: Callable[[MatmulInputs], MatmulResult], options: MatmulOptions
) -> Callable[[MatmulInputs], MatmulResult]:
    """The function of a kernel, which takes matrices, for arrays whose M and K are several axes."""

    def run(inputs: MatmulInputs) -> MatmulResult:
        if inputs.x.ndim == inputs.w.ndim == 2:
            return function(inputs)
        (rows, _), (m, n, k) = options.axes(inputs), options.sizes(inputs)
        x, w = (k, m) if options.transpose_x else (m, k), (n, k) if options.transpose_w else (k, n)
        shapes = {"x": x, "x_up": x, "w": w, "w_up": w, "residual": (m, n), "preactivation": (m, n), "up": (m, n)}
        if options.scaling == "row":
            shapes["x_scale"] = (m,)
        elif options.scaling == "block":
            of_blocks = lambda shape: tuple(-(-size // BLOCK) for size in shape)
            shapes |= {"x_scale": of_blocks(x), "w_scale": of_blocks(w), "w_up_scale": of_blocks(w)}
        if options.low_bit is not None:  # stored values
            del shapes["w"], shapes["w_up"]
        arrays = {name: y for name in shapes if (y := getattr(inputs, name)) is not None}
        result = function(inputs._replace(**{name: y.reshape(shapes[name]) for name, y in arrays.items()}))
        return jax.tree.map(lambda y: y.reshape(*rows, n), result)

    return run


def shared_matmul(function: Callable[[MatmulInputs], MatmulResult], options: MatmulOptions) -> Callable[..., Any]:
    """A kernel's function, which the devices of a mesh run on their shards under jit.

    Devices that shard K sum their matmuls, each in the call's out_dtype. A matmul with an epilogue, which belongs
    behind the sum, does not shard K. Where 128 x 128 values have a scale, devices hold whole blocks.
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
    """The kernel of x [M, N] and its factors, or None, that rounds x and its transpose, for an x [..., N].

    The transpose is [N, ...]. Under jit the devices of a mesh run it on their shards.
    """
    blocks = lambda size: -(-size // BLOCK)

    def of_rows(x: jax.Array, factors: Any) -> BothWays:
        *outer, columns = x.shape
        rows = math.prod(outer)
        factors = None if factors is None else tuple(y.reshape(-1) for y in factors)
        found = function(x.reshape(rows, columns), factors)
        scale = found.scale
        if scale is not None:
            scale = scale.reshape(*outer[:-1], blocks(outer[-1]), blocks(columns))
        return BothWays(found.values.reshape(x.shape), found.transposed.reshape(columns, *outer), scale)

    def run(x: jax.Array, factors: Any) -> BothWays:
        if x.size <= jax.device_count():  # the kernel takes one row's and one column's factors for those of a tensor
            return of_rows(x, factors)
        group = _block(scaling)
        rows, columns = _several(ROWS, x.ndim - 1, group), Axis(COLUMNS, group)
        of_factors: list[ArrayAxes] = [rows, (columns,)] if scaling == "row" else [(), ()]
        of_scale: ArrayAxes = tuple(Axis(axis.name) for axis in (*rows, columns))
        shares = Shares(
            arguments=[(*rows, columns), *([] if factors is None else of_factors)],
            results=lambda result: [(*rows, columns), (columns, *rows), of_scale][: len(jax.tree.leaves(result))],
            lengths=_whole(ROWS, x.shape[:-1], group) | _whole(COLUMNS, x.shape[-1:], group),
        )
        return partitioned(of_rows, shares)(x, factors)

    return jax.custom_batching.sequential_vmap(run) if is_partitioned() else of_rows


def _block(scaling: str | None) -> int:
    return BLOCK if scaling == "block" else 1


def _several(name: str, count: int, block: int) -> tuple[Axis, ...]:
    """The axes of one name, of which the last has blocks."""
    return tuple(Axis(_numbered(name, i), block if i == count - 1 else 1) for i in range(count))


def _numbered(name: str, number: int) -> str:
    return name if name == COLUMNS else f"{name}{number}"


def _whole(name: str, lengths: tuple[int, ...], block: int) -> dict[str, int]:
    """The lengths of the axes of one name, that of the last in blocks. One without whole blocks is not sharded."""
    found = {_numbered(name, i): length for i, length in enumerate(lengths)}
    if found:
        last, length = found.popitem()
        found |= {last: length // block} if length % block == 0 else {}
    return found


def _fields(inputs: MatmulInputs, options: MatmulOptions) -> dict[str, ArrayAxes]:
    block, lengths = _block(options.scaling), options.axes(inputs)
    rows, depth = (_several(name, len(of), block) for name, of in zip((ROWS, DEPTH), lengths, strict=True))
    columns = Axis(COLUMNS, block)
    of_x: ArrayAxes = (*depth, *rows) if options.transpose_x else (*rows, *depth)
    of_w: ArrayAxes = (columns, *depth) if options.transpose_w else (*depth, columns)
    of_x_scale: ArrayAxes = rows
    of_w_scale: ArrayAxes = (columns,)
    if options.scaling == "block":
        of_x_scale, of_w_scale = (tuple(Axis(axis.name) for axis in axes if axis) for axes in (of_x, of_w))
    if options.low_bit is not None:  # stored values, whose scales lie as their layout has them
        of_w, of_w_scale = (None, None), (None, None)
    found = {"x": of_x, "x_up": of_x, "w": of_w, "w_up": of_w, "bias": (columns,), "x_scale": of_x_scale}
    found |= {"w_scale": of_w_scale, "w_up_scale": of_w_scale}
    return found | dict.fromkeys(("residual", "preactivation", "up"), (*rows, columns))


def _of(axes: ArrayAxes | None, x: Any) -> ArrayAxes:
    return (None,) * x.ndim if axes is None or len(axes) != x.ndim else axes


def _lengths(inputs: MatmulInputs, options: MatmulOptions) -> dict[str, int]:
    (rows, depth), (_, columns, _) = options.axes(inputs), options.sizes(inputs)
    block = _block(options.scaling)
    if options.low_bit is not None:
        return _whole(ROWS, rows, block)
    epilogue = inputs.bias, inputs.residual, inputs.preactivation, options.activation
    is_product = all(x is None for x in epilogue) and not inputs.is_gated
    found = _whole(ROWS, rows, block) | _whole(COLUMNS, (columns,), block)
    return found | (_whole(DEPTH, depth, block) if is_product else {})
