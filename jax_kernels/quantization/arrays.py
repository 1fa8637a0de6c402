"""Values in 4 or 8 bits with scales: quantize, its result QuantizedArray, and dequantize."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Num

from jax_kernels.plain_numbers import dtype_of, dtype_text, plain, plain_of
from jax_kernels.quantization import formats, scale_blocks
from jax_kernels.quantization.formats import LowBit
from jax_kernels.quantization.scales import (
    check_scaling,
    checked_scale,
    largest_along,
    quantization_scale,
    scale_of,
    scale_shape,
    spread_scale,
)
from jax_kernels.tracing.derivatives import without_derivative
from jax_kernels.tracing.explicit_mesh import explicit_mesh, on_auto_axes, with_auto_axes

__all__ = ["QuantizedArray", "dequantize", "quantize", "quantize_fp8"]

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
_NO_DERIVATIVE = (
    "quantize: rounding to few bits has no derivative. Pass it y = jax.lax.stop_gradient(x). To let x's own gradient "
    "through: x + (dequantize(quantize(y)) - y)"
)
_NO_DERIVATIVE_OF_VALUES = (
    "dequantize: 8-bit values have no gradients. Differentiate with respect to the scale, or to the unrounded array"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedArray:
    """An array in few bits: its values are `values` * `scale`, with each scale repeated for the values that share it.

    values: float8_e4m3fn or float8_e5m2. scale: float32, with a shape set by scaling. "tensor": one scale for the
    array, []. "row": a scale for all values along `axis` (-1, the last, or -2), values' shape without that axis.
    "block": a scale for 128 x 128 values of the last two axes, [..., ceil(rows / 128), ceil(columns / 128)].

    Low-bit weights have a layout, a LowBit. `length` is K, the array's size along `axis`. K is always the last axis of
    `values`: int8 [..., N, K padded], float8_e4m3fn likewise (mxfp8), or uint8 [..., N, K padded / 2] (int4, mxfp4).
    Their scaling is "group", scale [..., K padded / group, N], or "row", scale [..., N]; the scale is float32, bfloat16
    or float8_e8m0fnu (MX). `shape` is the shape of the array, not of `values`.
    """

    values: Num[Array, "..."]
    scale: Float[Array, "..."]
    scaling: str = dataclasses.field(default="tensor", metadata={"static": True})
    axis: int = dataclasses.field(default=-1, metadata={"static": True})
    layout: LowBit | None = dataclasses.field(default=None, metadata={"static": True})
    length: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        if self.layout is None:
            return self.values.shape
        *outer, columns, _ = self.values.shape
        depth = self.length or 0
        return (*outer, columns, depth) if self.axis == -1 else (*outer, depth, columns)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of `values`."""
        return self.values.dtype


def quantize(
    x: Float[Array, "..."] | Float[np.ndarray, "..."],
    format: str = "e4m3",
    *,
    scaling: str | None = None,
    axis: int | None = None,
    scale: Float32[Array, "..."] | float | None = None,
    group_size: int | None = None,
    scale_dtype: DTypeLike | None = None,
) -> QuantizedArray:
    """Rounds x to 8 or 4 bits, with scales that map its largest values to the largest value of the format.

    Equivalent to the following JAX code, for scaling="row"::

        largest = jnp.abs(x).max(axis, keepdims=True)
        scale = where(largest > 0, largest / finfo(float8_e4m3fn).max, 1)
        values = (x * (1 / scale)).astype(float8_e4m3fn)

    Integers are symmetric: int8 is rounded to [-127, 127], int4 to [-7, 7]. The scales of the MX formats are powers of
    two, 2 ** (floor(log2(largest)) - 8) for mxfp8 and - 2 for mxfp4; values beyond 448 and 6 times the scale saturate.

    Args:
      x: a float array. "block" and low-bit weights need at least two axes, "row" at least one. Float64 is rounded to
        float32 first.
      format: for operands of 8-bit matmuls, "e4m3" (float8_e4m3fn: 3 mantissa bits, up to 448) or "e5m2" (2 bits, up to
        57,344). For weights that are multiplied by 16-bit or 32-bit values, "int8", "int4", "mxfp8" (e4m3) or "mxfp4"
        (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6).
      scaling: the values that share a scale: all ("tensor", the default), all along `axis` ("row"), or 128 x 128 of
        the last two axes ("block"). For low-bit weights: group_size values along `axis` ("group", the default), or,
        for integers, all values along `axis` ("row").
      axis: for "row" and low-bit weights, -1 or -2: the axis that a matmul sums over. None is -1, and -2 for low-bit
        weights, the K axis of matmul's w [K, N].
      scale: a known scale ("delayed scaling"), positive float32 of the shape that scaling gives. Values beyond its
        range become the largest value of the format, with their sign. Not for low-bit weights.
      group_size: for "group", 32, 64, 128 or 256; None is 128. The MX formats have 32.
      scale_dtype: for the scales of integers, float32 (None) or bfloat16.

    Returns:
      A QuantizedArray. Values that share a scale with a NaN or an infinity become NaN. With a given scale, NaN stays
      NaN, and an infinity stays infinite in e5m2 and becomes NaN in e4m3. The scale of zeros, or of no values, is 1.

    Raises:
      TypeError: x is no float array, or scale no float32 array.
      ValueError: format, scaling, axis, group_size, scale_dtype or scale's shape is wrong.
      NotImplementedError: a gradient with respect to x is taken. The message says how to let it through.

    Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433; "OCP Microscaling Formats
    (MX) Specification", version 1.0 (2023).
    """
    x = _checked(x)
    if not isinstance(format, str) or (format not in FORMATS and format not in formats.FORMATS):
        known = ", ".join(map(repr, (*FORMATS, *formats.FORMATS)))
        raise ValueError(f"format: got {format!r}, want one of {known}")
    axis, group_size = plain(axis), plain(group_size)
    if axis is not None and (type(axis) is not int or axis not in (-1, -2)):
        raise ValueError(f"axis: got {axis!r}, want -1 or -2")
    if format in formats.FORMATS:
        layout = _layout(format, scaling, group_size, scale, scale_dtype)
        summed = -2 if axis is None else axis
        if x.ndim < 2:
            raise ValueError(f"x: got shape {x.shape}, want two axes or more, for {layout.format!r}")
        return _on_auto_axes(lambda given: _weights(given[0], layout, summed, scale_dtype), [x], _specs_of_rounded)
    if group_size is not None or scale_dtype is not None:
        raise ValueError(f"group_size, scale_dtype: got a value with format {format!r}, want None")
    axis = -1 if axis is None else axis
    scaling = "tensor" if scaling is None else scaling
    check_scaling(scaling)
    if x.ndim < {"tensor": 0, "row": -axis, "block": 2}[scaling]:
        raise ValueError(f"x: got shape {x.shape}, want more axes for scaling={scaling!r}, axis={axis}")
    if scale is not None:
        scale = checked_scale("scale", scale, scale_shape(x.shape, scaling, axis))
    rounded = lambda given: _rounded(*given, format=format, scaling=scaling, axis=axis)
    return _on_auto_axes(rounded, [x, scale], _specs_of_rounded)


def quantize_columns(x: jax.Array, format: str) -> QuantizedArray:
    """x's transpose [N, ...] in 8 bits, with one scale for each column of x [..., N].

    x [M, N] gives quantize(x.T, format, scaling="row"): values [N, M], scale float32 [N].
    """
    axes = tuple(range(1, x.ndim))
    found = _rounded(jnp.moveaxis(_checked(x), -1, 0), None, format=format, scaling="row", axis=axes)
    return dataclasses.replace(found, axis=-1)


def quantize_blocks(x: jax.Array, format: str, sizes: Sequence[int], scale: Any = None) -> QuantizedArray:
    """x in 8 bits, with one scale for each block of `sizes` values along its axes: a QuantizedArray with
    scaling="block".

    sizes: the length of a block along each axis of x. scale: known positive float32 scales, one for each block, or None
    to find them. format: "e4m3" or "e5m2".
    """
    dtype, x, is_given = jnp.dtype(FORMATS[format]), _checked(x).astype(jnp.float32), scale is not None
    if not is_given:
        scale = scale_of(scale_blocks.largest(x, sizes, largest_along), dtype)
    values = _values(x, scale_blocks.spread(scale, sizes, x.shape), dtype, is_given)
    return QuantizedArray(values=values, scale=scale, scaling="block")


@functools.partial(jax.jit, static_argnames=("format", "scaling", "axis"), inline=True)
def _rounded(x: jax.Array, scale: Any, *, format: str, scaling: str, axis: Any) -> QuantizedArray:
    """x in 8 bits as a QuantizedArray, with the given scale, or if scale is None with scales from x's largest values.

    axis: for scaling="row", the axis, or a tuple of axes, along which values share a scale.
    """
    dtype, x, is_given = jnp.dtype(FORMATS[format]), x.astype(jnp.float32), scale is not None
    if not is_given:
        scale = quantization_scale(x, dtype, scaling, axis)
    values = _values(x, spread_scale(scale, scaling, axis, x.shape), dtype, is_given)
    return QuantizedArray(values=values, scale=scale, scaling=scaling, axis=axis)


def _values(x: jax.Array, spread: jax.Array, dtype: Any, is_given: bool) -> jax.Array:
    """x divided by its scales, rounded to the 8-bit `dtype`.

    spread: the scales, in a shape that broadcasts to x's. is_given: the scales are the caller's, so values beyond their
    range saturate; otherwise they come from x, and a scale that is not finite makes its values NaN.

    It multiplies by the reciprocal, as a compiled division by a scalar does; an exact division rounds otherwise.
    """
    scaled = x * (1 / spread)
    if is_given:
        return _kept(_saturated(scaled, dtype))
    return _kept(jnp.where(jnp.isfinite(spread), scaled, jnp.nan).astype(dtype))


def _layout(format: str, scaling: Any, group_size: Any, scale: Any, scale_dtype: Any) -> LowBit:
    """The LowBit of low-bit weights, from quantize's arguments. Raises ValueError if they do not fit the format."""
    is_mx = LowBit(format=format, group=None).is_mx
    scalings = ("group",) if is_mx else ("group", "row")
    if scaling is not None and not (isinstance(scaling, str) and scaling in scalings):
        want = " or ".join(map(repr, scalings))
        raise ValueError(f"scaling: got {scaling!r} with format {format!r}, want {want}")
    if scale is not None:
        raise ValueError(f"scale: got a value with format {format!r}, want None: quantize finds its scales")
    sizes: tuple[int, ...] = (formats.MX_BLOCK,) if is_mx else formats.GROUPS
    if scaling == "row":
        sizes = ()
    if group_size is not None and (type(group_size) is not int or group_size not in sizes):
        want = f"None or one of {', '.join(map(str, sizes))}" if sizes else "None"
        raise ValueError(f"group_size: got {group_size!r} with format {format!r}, want {want}")
    if scale_dtype is not None and (is_mx or dtype_of(scale_dtype) not in (jnp.float32, jnp.bfloat16)):
        want = "None" if is_mx else "float32, bfloat16 or None"
        raise ValueError(f"scale_dtype: got {scale_dtype} with format {format!r}, want {want}")
    group = formats.MX_BLOCK if is_mx else None if scaling == "row" else group_size or 128
    return LowBit(format=format, group=group)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _weights(x: jax.Array, layout: LowBit, axis: int, scale_dtype: Any) -> QuantizedArray:
    """x as low-bit weights, a QuantizedArray. axis: x's K axis, which a matmul sums over, -1 or -2."""
    x = x.astype(jnp.float32) if axis == -1 else jnp.swapaxes(x, -1, -2).astype(jnp.float32)
    *outer, columns, depth = x.shape
    group = layout.padded(depth) if layout.group is None else layout.group
    groups = 1 if layout.group is None else -(-layout.padded(depth) // group)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * group - depth)])
    grouped = padded.reshape(*outer, columns, groups, group)
    scale = formats.scale_of(largest_along(grouped, -1), layout, scale_dtype or jnp.float32)
    scaled = (grouped / formats.unpack_scale(scale)[..., None]).reshape(padded.shape)
    return QuantizedArray(
        values=_kept(formats.pack(scaled[..., : layout.padded(depth)], layout)),
        scale=scale[..., 0] if layout.group is None else jnp.swapaxes(scale, -1, -2),
        scaling="row" if layout.group is None else "group",
        axis=axis,
        layout=layout,
        length=depth,
    )


def dequantize(x: QuantizedArray, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
    """The array values * scale, rounded to dtype once.

    It has gradients with respect to the scale.

    Raises:
      TypeError: x is no QuantizedArray, or dtype is no float dtype.
      NotImplementedError: a gradient with respect to the values is taken.
    """
    if not isinstance(x, QuantizedArray):
        raise TypeError(f"x: got {type(x).__name__}, want a QuantizedArray")
    _check_float(dtype)
    x = dataclasses.replace(x, values=without_derivative(x.values, _NO_DERIVATIVE_OF_VALUES))
    return _on_auto_axes(lambda x: _wide(x, jnp.dtype(dtype)), x, lambda spec, _: _in_order(x, spec))


def _on_auto_axes(function: Callable[..., Any], given: Any, specs_of: Callable[..., Any]) -> Any:
    """function(given), with the mesh's Explicit axes turned into Auto axes if the first array is on such axes.

    given: a pytree of arrays. specs_of(spec, results): the PartitionSpecs of the results, where spec is a list with the
    first array's sharding of each axis, and results are ShapeDtypeStructs.
    """
    first, *_ = jax.tree.leaves(given)
    mesh = explicit_mesh(first)
    if mesh is None:
        return function(given)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    spec = [*jax.typeof(first).sharding.spec, *[None] * first.ndim][: first.ndim]
    specs = specs_of(spec, jax.eval_shape(function, shapes))
    if AxisType.Manual in mesh.axis_types:
        return on_auto_axes(function, given, lambda _: specs)
    return with_auto_axes(function, given, mesh, specs)


def _specs_of_rounded(spec: list[Any], x: QuantizedArray) -> Any:
    """A QuantizedArray of PartitionSpecs for x, whose unrounded array has the sharding `spec`, a list with an entry per
    axis.

    Scales shard like their values. In low-bit weights the axis that a matmul sums over is not sharded. The scales of
    blocks are not sharded along the last two axes, because the number of devices need not divide the number of blocks.
    """
    if x.layout is not None:
        *outer, first, last = spec
        columns = first if x.axis == -1 else last
        values, scale = [*outer, columns, None], [*outer, *([] if x.scaling == "row" else [None]), columns]
    else:
        at = len(spec) + x.axis
        values = spec
        scale = {"tensor": [], "row": [*spec[:at], *spec[at + 1 :]], "block": spec[:-2]}[x.scaling]
    return jax.tree.unflatten(jax.tree.structure(x), [PartitionSpec(*values), PartitionSpec(*scale)])


def _in_order(x: QuantizedArray, spec: list[Any]) -> PartitionSpec:
    """The PartitionSpec of x's dequantized array. spec: the sharding of x.values, a list with an entry per axis."""
    if x.layout is None:
        return PartitionSpec(*spec)
    *outer, columns, _ = spec
    return PartitionSpec(*outer, columns, None) if x.axis == -1 else PartitionSpec(*outer, None, columns)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _wide(x: QuantizedArray, dtype: Any) -> jax.Array:
    """values * scale, computed in float32 and rounded to dtype, in the array's own order of axes."""
    if x.layout is not None:
        found = formats.dequantized(x.values, x.scale, x.layout, x.length or 0).astype(dtype)
        return found if x.axis == -1 else jnp.swapaxes(found, -1, -2)
    return (x.values.astype(jnp.float32) * spread_scale(x.scale, x.scaling, x.axis, x.shape)).astype(dtype)


def _check_float(dtype: Any) -> None:
    """Raises TypeError unless `dtype` is a float dtype."""
    found = dtype_of(dtype)
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"dtype: got {dtype_text(dtype)}, want a float dtype")


def _saturated(x: jax.Array, dtype: Any) -> jax.Array:
    """x in this dtype. Finite values beyond the dtype's range become its largest value, with their sign."""
    top = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -top, top), x).astype(dtype)


def _checked(x: Any) -> jax.Array:
    """x as a jax.Array; differentiating it raises NotImplementedError. Raises TypeError unless x is a float array."""
    if isinstance(x, QuantizedArray) or not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"x: got {type(x).__name__}, want a float array of JAX or NumPy")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: got {x.dtype}, want a float array")
    return without_derivative(jnp.asarray(x), _NO_DERIVATIVE)


def quantize_fp8(
    x: Float[Array, "..."] | Float[np.ndarray, "..."], axis: int | Sequence[int] | None = None
) -> tuple[Float8e4m3fn[Array, "..."], Float32[Array, "..."]]:
    """Rounds x to float8_e4m3fn. Returns (values, scales), with x ≈ values * scales.

    Equivalent to the following JAX code::

        largest = jnp.abs(x).max(axis)
        scales = where(largest > 0, largest / 448, 1)  # 448 is e4m3's largest value
        values = (x / jnp.expand_dims(scales, axis)).astype(float8_e4m3fn)

    The relative error of a value is at most 2**-4. For a value below 2**-14 times the largest value that shares its
    scale, the absolute error is at most 2**-18 times the largest value.

    Args:
      x: a float array, of any shape.
      axis: the axes along which values share a scale; None is all axes. (1, 3) gives each batch entry and head of x
        [B, T, H, D] a scale.

    Returns:
      values: float8_e4m3fn, of x's shape. scales: positive float32, of x's shape without `axis`. Values that share a
      scale with a NaN or an infinity become NaN.

    Raises:
      TypeError: x is no float array.
      ValueError: x lacks an axis of `axis`, or `axis` repeats an axis.
      NotImplementedError: a gradient with respect to x is taken.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433.
    """
    x = _checked(x)
    axes = tuple(range(x.ndim)) if axis is None else _axes(axis)
    shared = {a % x.ndim for a in axes if -x.ndim <= a < x.ndim}
    if len(shared) != len(axes):
        raise ValueError(f"axis: got {axis}, want different axes of an array of shape {x.shape}")
    x = x.astype(jnp.float32)
    scales = scale_of(largest_along(x, axes, keepdims=True), jnp.float8_e4m3fn)
    values = jnp.where(jnp.isfinite(scales), x / scales, jnp.nan).astype(jnp.float8_e4m3fn)
    return _kept(values), jnp.squeeze(scales, tuple(shared))


def _kept(values: jax.Array) -> jax.Array:
    """The same values. Without the barrier, XLA on GPUs drops a conversion to 8 bits and back."""
    return jax.lax.optimization_barrier(values)


def _axes(axis: Any) -> tuple[int, ...]:
    """The axes as a tuple of ints, from an int of any kind, or from a sequence of ints. Raises TypeError otherwise."""
    axis = plain_of("axis", axis)
    try:
        return (operator.index(axis),) if hasattr(axis, "__index__") else tuple(operator.index(x) for x in axis)
    except TypeError:
        raise TypeError(f"axis: got {axis!r}, want an int or a sequence of ints") from None
