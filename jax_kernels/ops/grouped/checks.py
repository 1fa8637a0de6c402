"""The checks of grouped_matmul's and grouped_gated_matmul's arguments."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import dispatch
from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions
from jax_kernels.ops import checks
from jax_kernels.ops.grouped.implementations import GroupedRequest, request_of
from jax_kernels.ops.matmul import fp8
from jax_kernels.ops.matmul.checks import (
    PRECISIONS,
    ROUNDED,
    bias_in,
    checked_activation,
    checked_out_dtype,
    told_as,
)
from jax_kernels.quantization import QuantizedArray, checked_scale, scale_shape

__all__ = ["check", "check_gated", "refuse_quantized"]


def check(
    *, x, w, group_sizes, bias=None, activation=None, gather_indices=None, transpose_w=False,
    out_dtype=None, precision=None, implementation=None,
) -> tuple[GroupedRequest, GroupedInputs, GroupedOptions]:  # fmt: skip
    """(request, arrays, options) of a grouped_matmul call. Raises the errors that grouped_matmul documents.

    In the arrays, x and w are rounded if precision is "bf16" or "fp16", and group_sizes is int32. QuantizedArrays are
    taken apart into values and scales.
    """
    checks.check_flags(transpose_w=transpose_w)
    checks.check_names(precision=precision, implementation=implementation)
    x, x_scale = _taken_apart("x", x, ["M", "K"], axis=-1)
    w, w_scale = _taken_apart("w", w, _weight_axes(transpose_w), axis=-1 if transpose_w else -2)
    x, w = _checked_operands(x, w, x_scale, w_scale, transpose_w)
    given = jnp.dtype(jnp.bfloat16) if x_scale is not None else x.dtype
    groups, columns = w.shape[0], w.shape[1 if transpose_w else 2]
    precision = _checked_precision(precision, x.dtype, w.dtype)
    if precision == "fp8":
        fp8.check_device(dispatch.target_device(x), implementation)
    if precision in ROUNDED:
        x, w = (checks.converted(y, ROUNDED[precision]) for y in (x, w))
    options = GroupedOptions(
        out_dtype=str(given if out_dtype is None else checked_out_dtype(out_dtype)),
        transpose_w=bool(transpose_w),
        activation=checked_activation(activation),
        precision=precision if precision in ("fp32", "tf32") else None,
        scaling="row" if precision == "fp8" else None,
    )
    gather = None if gather_indices is None else _checked_indices(gather_indices, x.shape[0])
    inputs = GroupedInputs(
        x=x,
        w=w,
        group_sizes=_checked_sizes(group_sizes, groups, (x if gather is None else gather).shape[0]),
        bias=None if bias is None else _checked_bias(bias, x.dtype, (groups, columns), given),
        gather=gather,
        x_scale=x_scale,
        w_scale=w_scale,
    )
    return request_of(options, inputs, dispatch.target_device(x)), inputs, options


def check_gated(
    *, x, w_gate, w_up, group_sizes, activation="silu", **options
) -> tuple[GroupedRequest, GroupedInputs, GroupedOptions]:
    """(request, arrays, options) of a grouped_gated_matmul call. Raises the errors that grouped_gated_matmul documents.

    In the arrays, w is w_gate. options: the other arguments of grouped_gated_matmul, by name.
    """
    kinds = [isinstance(w, QuantizedArray) for w in (w_gate, w_up)]
    if kinds[0] != kinds[1]:
        got, want = ("quantized weights" if kind else "unquantized weights" for kind in kinds[::-1])
        raise TypeError(f"w_up: got {got}, want {want}, as w_gate")
    with told_as("w_gate"):
        arrays = {"x": x, "w": w_gate, "group_sizes": group_sizes}
        request, inputs, found = check(**arrays, activation=activation, **options)
    w_up, scale = _taken_apart("w_up", w_up, _weight_axes(found.transpose_w), axis=-1 if found.transpose_w else -2)
    dtypes = *checks.DTYPES, *fp8.DTYPES
    w_gate = getattr(w_gate, "values", w_gate)
    w_gate, w_up = checks.checked_array("w_gate", w_gate, dtypes), checks.checked_array("w_up", w_up, dtypes)
    if (w_up.shape, w_up.dtype) != (w_gate.shape, w_gate.dtype):
        got, want = (f"{w.dtype}{list(w.shape)}" for w in (w_up, w_gate))
        raise ValueError(f"w_up: got {got}, want w_gate's dtype and shape: {want}")
    w_up = checks.converted(w_up, inputs.w.dtype) if w_up.dtype != inputs.w.dtype else w_up
    request = dataclasses.replace(request, op="grouped_gated_matmul", is_gated=True)
    return request, inputs._replace(w_up=w_up, w_up_scale=scale), found


def refuse_quantized(**arrays: Any) -> None:
    """Raises TypeError for a QuantizedArray."""
    for name, y in arrays.items():
        if isinstance(y, QuantizedArray):
            raise TypeError(f"{name}: got a QuantizedArray, want bfloat16, float16 or float32")


def _weight_axes(transpose_w: bool) -> list[str]:
    """The names of the weights' axes."""
    return ["G", "N", "K"] if transpose_w else ["G", "K", "N"]


def _taken_apart(name: str, x: Any, axes: list[str], axis: int) -> tuple[Any, Any]:
    """(values, scales) of a QuantizedArray in 8 bits; (x, None) of another x. Raises TypeError or ValueError.

    The QuantizedArray has a scale for all values along K: for each row of x, or each column of each group's weights.
    name: of the argument, in messages. axes: the names of its axes. axis: of K.
    """
    if not isinstance(x, QuantizedArray):
        return x, None
    if x.layout is not None:
        want = "bfloat16, float16, float32 or a QuantizedArray of 8-bit floats"
        raise TypeError(f"{name}: got a QuantizedArray in {x.layout.format!r}, want {want}; matmul takes these")
    if (x.scaling, x.axis) != ("row", axis):
        got = f"a QuantizedArray with scaling={x.scaling!r}, axis={x.axis}"
        raise ValueError(f"{name}: got {got}, want scaling='row' and axis={axis}, the summed axis")
    if x.ndim != len(axes):
        raise ValueError(f"{name}: got shape {x.shape}, want [{', '.join(axes)}]")
    return x.values, checked_scale(f"{name}.scale", x.scale, scale_shape(x.shape, "row", axis))


def _checked_operands(x: Any, w: Any, x_scale: Any, w_scale: Any, transpose_w: bool) -> tuple[Any, Any]:
    """(x, w) as jax.Arrays with dtypes and shapes that fit. Raises TypeError or ValueError.

    x_scale, w_scale: the scales of 8-bit values, or None.
    """
    x, w = (checks.checked_array(name, y, (*checks.DTYPES, *fp8.DTYPES)) for name, y in (("x", x), ("w", w)))
    if x.dtype not in checks.DTYPES and x_scale is None:
        raise TypeError(f"x: got dtype {x.dtype}, want bfloat16, float16, float32 or a QuantizedArray")
    if x_scale is not None and w_scale is None:
        raise TypeError(f"w: got dtype {w.dtype} with a QuantizedArray x, want a QuantizedArray")
    if w.dtype != x.dtype and w_scale is None:
        raise TypeError(f"w: got dtype {w.dtype}, want x's dtype {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x: got shape {x.shape}, want [M, K]")
    if w.ndim != 3 or w.shape[2 if transpose_w else 1] != x.shape[1]:
        want = ", ".join(_weight_axes(transpose_w))
        raise ValueError(f"w: got shape {w.shape}, want [{want}] with x's K = {x.shape[1]}")
    return x, w


def _checked_precision(precision: str | None, dtype: Any, of_w: Any) -> str | None:
    """The precision of a call. Raises ValueError.

    precision: the argument, one of PRECISIONS; None becomes "fp8" for 8-bit weights, and else "fp32" for float32.
    dtype: x's. of_w: w's.
    """
    names = lambda found: ", ".join(map(repr, found))
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision: got {precision!r}, want {names(PRECISIONS)} or None")
    if of_w in fp8.DTYPES:
        if precision not in (None, "fp8"):
            raise ValueError(f"precision: got {precision!r} with w of dtype {of_w}, want 'fp8' or None")
        return "fp8"
    if precision in ("fp32", "tf32") and dtype != jnp.float32:
        rest = [name for name in PRECISIONS if name not in ("fp32", "tf32")]
        raise ValueError(f"precision: got {precision!r} with {dtype} inputs, want {names(rest)} or None")
    return "fp32" if precision is None and dtype == jnp.float32 else precision


def _checked_sizes(group_sizes: Any, groups: int, rows: int) -> Any:
    """group_sizes as int32 [G]. Values of an array on a device are not read. Raises TypeError or ValueError."""
    if not isinstance(group_sizes, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"group_sizes: got {type(group_sizes).__name__}, want an array of integers")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes: got dtype {group_sizes.dtype}, want int32")
    if group_sizes.shape != (groups,):
        raise ValueError(f"group_sizes: got shape {group_sizes.shape}, want [G] = {(groups,)}, a size for each of w")
    if isinstance(group_sizes, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(group_sizes.shape, jnp.dtype(jnp.int32))
    if jnp.iinfo(group_sizes.dtype).bits >= 32:  # no group has more than all rows, and int32 holds their number
        group_sizes = (np if isinstance(group_sizes, np.ndarray) else jnp).minimum(group_sizes, rows)
        if jnp.iinfo(group_sizes.dtype).min < 0:
            group_sizes = (np if isinstance(group_sizes, np.ndarray) else jnp).maximum(group_sizes, 0)
    return jnp.asarray(group_sizes).astype(jnp.int32)


def _checked_indices(indices: Any, rows: int) -> Any:
    """gather_indices as int32 [M]. rows: of x. Values outside of x become -1. Raises TypeError or ValueError."""
    if not isinstance(indices, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"gather_indices: got {type(indices).__name__}, want an array of integers")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"gather_indices: got dtype {indices.dtype}, want int32")
    if indices.ndim != 1:
        raise ValueError(f"gather_indices: got shape {indices.shape}, want [M]")
    if isinstance(indices, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(indices.shape, jnp.dtype(jnp.int32))
    if indices.dtype == jnp.int32:
        return jnp.asarray(indices)
    where: Any = np.where if isinstance(indices, np.ndarray) else jnp.where
    limit = min(rows, jnp.iinfo(indices.dtype).max)
    return jnp.asarray(where((indices >= 0) & (indices <= limit), indices, indices.dtype.type(limit)), jnp.int32)


def _checked_bias(bias: Any, dtype: Any, shape: tuple[int, int], given: Any) -> Any:
    """The bias [G, N] as a jax.Array, as by bias_in. Raises TypeError or ValueError for a bad dtype or shape."""
    bias = bias_in(checks.checked_array("bias", bias), dtype, given=given)
    if bias.shape != shape:
        raise ValueError(f"bias: got shape {bias.shape}, want [G, N] = {shape}")
    return bias
