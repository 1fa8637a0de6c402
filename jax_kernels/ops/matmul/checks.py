"""The checks of matmul's and gated_matmul's arguments."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kernels import dispatch
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.ops import checks
from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.ops.matmul import fp8, low_bit
from jax_kernels.ops.matmul.elementwise import check_elementwise
from jax_kernels.ops.matmul.implementations import MatmulRequest, request_of
from jax_kernels.plain_numbers import dtype_of, dtype_text
from jax_kernels.quantization import QuantizedArray

__all__ = [
    "PRECISIONS",
    "ROUNDED",
    "bias_in",
    "check",
    "check_gated",
    "checked_activation",
    "checked_bias",
    "checked_out_dtype",
    "checked_residual",
    "told_as",
]

DTYPES = (*checks.DTYPES, *fp8.DTYPES)
ROUNDED = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
PRECISIONS = ("fp32", "tf32", *ROUNDED, "fp8")


def check(
    *, x, w, bias=None, activation=None, residual=None, x_scale=None, w_scale=None, transpose_w=False, out_dtype=None,
    precision=None, scaling=None, implementation=None,
) -> tuple[MatmulRequest, MatmulInputs, MatmulOptions]:  # fmt: skip
    """(request, arrays, options) of a matmul call. Raises the errors that matmul documents.

    In the arrays, x and residual keep their outer axes, x and w are rounded if precision is "bf16" or "fp16", and
    QuantizedArrays are taken apart into values and scales.
    """
    checks.check_flags(transpose_w=transpose_w)
    checks.check_names(precision=precision, scaling=scaling, implementation=implementation)
    if low_bit.layout_of(w) is not None:
        _check_no_scales(x, x_scale, w_scale, scaling)
        return _checked_low_bit(x, w, bias, activation, residual, transpose_w, out_dtype, precision)
    x, x_scale, of_x = fp8.as_arrays("x", x, x_scale, -1)
    w, w_scale, of_w = fp8.as_arrays("w", w, w_scale, -1 if transpose_w else -2)
    given = getattr(x, "dtype", None)
    x, w, precision = _rounded(x, w, precision)
    x, w = _checked_operands(x, w, transpose_w, keeps_x=w_scale is not None)
    is_quantized = x.dtype in fp8.DTYPES
    precision = _checked_precision(precision, w.dtype)
    scales: dict[str, Any] = {"scaling": None}
    if precision == "fp8":
        fp8.check_device(dispatch.target_device(x), implementation)
        scaling = _one_of(scaling, of_x, of_w)
        scales = fp8.checked_scales(x, w, x_scale, w_scale, scaling, transpose_w)
    elif any(given is not None for given in (x_scale, w_scale, scaling)):
        raise ValueError("x_scale, w_scale, scaling: got one without precision='fp8' or arrays of 8 bits, want None")
    default = jnp.dtype(jnp.bfloat16) if is_quantized else given
    out_dtype = default if out_dtype is None else checked_out_dtype(out_dtype)
    depth, columns = reversed(w.shape) if transpose_w else w.shape
    options = MatmulOptions(
        out_dtype=str(out_dtype),
        transpose_w=bool(transpose_w),
        activation=checked_activation(activation),
        precision=None if precision == "fp8" else precision,
        scaling=scales.pop("scaling"),
    )
    inputs = MatmulInputs(
        x=x,
        w=w,
        bias=None if bias is None else checked_bias(bias, x.dtype, columns, given=given),
        residual=None if residual is None else checked_residual(residual, out_dtype, (*x.shape[:-1], columns)),
        **scales,
    )
    sizes = math.prod(x.shape[:-1]), columns, depth
    return request_of(options, x.dtype, sizes, dispatch.target_device(x)), inputs, options


def _check_no_scales(x: Any, x_scale: Any, w_scale: Any, scaling: Any) -> None:
    """Raises TypeError or ValueError for scales, a scaling, or a quantised x in a call with low-bit weights."""
    if isinstance(x, QuantizedArray):
        raise TypeError("x: got a QuantizedArray with low-bit weights, want bfloat16, float16 or float32")
    if not (x_scale is None and w_scale is None and scaling is None):
        raise ValueError("x_scale, w_scale, scaling: got one with low-bit weights, which have their own; want None")


def _checked_low_bit(
    x: Any, w: QuantizedArray, bias: Any, activation: Any, residual: Any, transpose_w: bool, out_dtype: Any,
    precision: Any,
) -> tuple[MatmulRequest, MatmulInputs, MatmulOptions]:  # fmt: skip
    """(request, arrays, options) of a matmul with low-bit weights w. Raises TypeError or ValueError."""
    x = checks.checked_array("x", x)
    if x.dtype not in checks.DTYPES:
        raise TypeError(f"x: got dtype {x.dtype} with low-bit weights, want bfloat16, float16 or float32")
    if x.ndim == 0:
        raise ValueError("x: got shape (), want [..., K]")
    if precision == "fp8":
        raise ValueError("precision: got 'fp8' with low-bit weights, want another precision or None")
    given = x.dtype
    x, _, precision = _rounded(x, None, precision)
    precision = _checked_precision(precision, x.dtype)
    values, scale = low_bit.checked_stored("w", w, transpose_w, x.shape[-1])
    out_dtype = given if out_dtype is None else checked_out_dtype(out_dtype)
    options = MatmulOptions(
        out_dtype=str(out_dtype),
        transpose_w=True,  # the layout of the stored values
        activation=checked_activation(activation),
        precision=precision,
        low_bit=w.layout,
    )
    columns = values.shape[0]
    inputs = MatmulInputs(
        x=x,
        w=values,
        bias=None if bias is None else checked_bias(bias, x.dtype, columns, given=given),
        residual=None if residual is None else checked_residual(residual, out_dtype, (*x.shape[:-1], columns)),
        w_scale=scale,
    )
    sizes = math.prod(x.shape[:-1]), columns, x.shape[-1]
    return request_of(options, x.dtype, sizes, dispatch.target_device(x)), inputs, options


def check_gated(
    *, x, w_gate, w_up, activation="silu", w_gate_scale=None, w_up_scale=None, transpose_w=False, **arguments
) -> tuple[MatmulRequest, MatmulInputs, MatmulOptions]:
    """(request, arrays, options) of a gated_matmul call. Raises the errors that gated_matmul documents.

    In the arrays, w is w_gate and w_up is w_up. arguments: the other arguments of gated_matmul, by name.
    """
    checks.check_flags(transpose_w=transpose_w)
    arguments |= {"x": x, "activation": activation, "transpose_w": transpose_w}
    if low_bit.layout_of(w_gate) is not None or low_bit.layout_of(w_up) is not None:
        return _check_gated_low_bit(w_gate, w_up, w_gate_scale, w_up_scale, arguments)
    axis = -1 if transpose_w else -2
    found = ("w_gate", w_gate, w_gate_scale), ("w_up", w_up, w_up_scale)
    (_, gate, of_w_gate), (_, up, of_w_up) = found
    (w_gate, gate_scale, of_gate), (w_up, up_scale, of_up) = (fp8.as_arrays(*given, axis) for given in found)
    w_gate, w_up = (checks.checked_array(*given, DTYPES) for given in (("w_gate", w_gate), ("w_up", w_up)))
    if (w_up.shape, w_up.dtype, of_up) != (w_gate.shape, w_gate.dtype, of_gate):
        got, want = (f"{w.dtype}{list(w.shape)}" for w in (w_up, w_gate))
        raise ValueError(f"w_up: got {got}, want w_gate's dtype, shape and scaling: {want}")
    got_shape, want_shape = (None if x is None else np.shape(x) for x in (up_scale, gate_scale))
    if got_shape != want_shape:
        raise ValueError(f"w_up_scale: got shape {got_shape}, want w_gate_scale's {want_shape}")
    with told_as("w_gate"):
        request, inputs, options = check(w=gate, w_scale=of_w_gate, **arguments)
    if w_up.dtype != inputs.w.dtype:
        w_up = checks.converted(w_up, inputs.w.dtype)
    if options.scaling is not None and up_scale is not None:
        with told_as("w_up"):
            _, of_second, _ = check(w=up, w_scale=of_w_up, **arguments)
        inputs = inputs._replace(w_up_scale=of_second.w_scale)
    elif inputs.w_scale is not None:
        inputs = inputs._replace(w_up_scale=inputs.w_scale)  # 8-bit arrays without scales
    return dataclasses.replace(request, op="gated_matmul", is_gated=True), inputs._replace(w_up=w_up), options


def _check_gated_low_bit(
    w_gate: Any, w_up: Any, gate_scale: Any, up_scale: Any, arguments: dict[str, Any]
) -> tuple[MatmulRequest, MatmulInputs, MatmulOptions]:
    """check_gated for low-bit weights: w_gate and w_up must have one format, shape and dtype of scales."""
    kinds = [
        (w.layout, w.shape, str(w.scale.dtype)) if low_bit.layout_of(w) is not None else getattr(w, "dtype", type(w))
        for w in (w_gate, w_up)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(f"w_up: got {kinds[1]}, want w_gate's layout, shape and dtype of scales: {kinds[0]}")
    with told_as("w_up"):
        _, of_second, _ = check(w=w_up, w_scale=up_scale, **arguments)
    with told_as("w_gate"):
        request, inputs, options = check(w=w_gate, w_scale=gate_scale, **arguments)
    inputs = inputs._replace(w_up=of_second.w, w_up_scale=of_second.w_scale)
    return dataclasses.replace(request, op="gated_matmul", is_gated=True), inputs, options


@contextlib.contextmanager
def told_as(name: str) -> Iterator[None]:
    """A context in which TypeErrors and ValueErrors about the arguments w and w_scale name `name` instead of w."""
    try:
        yield
    except (TypeError, ValueError) as error:
        arguments, colon, told = str(error).partition(":")
        raise type(error)(re.sub(r"\bw(?=_scale\b|\b)", name, arguments) + colon + told) from None


def _rounded(x: Any, w: Any, precision: str | None) -> tuple[Any, Any, str | None]:
    """(x, w, precision): x and w rounded if precision is "bf16" or "fp16", the precision of the matmul that is left.

    The returned precision is then None; for other precisions all three are returned as they are. w may be None. Raises
    ValueError for 8-bit arrays.
    """
    if precision not in ROUNDED:
        return x, w, precision
    dtype = ROUNDED[precision]
    for name, y in {"x": x, "w": w}.items():
        if getattr(y, "dtype", None) in fp8.DTYPES and not isinstance(y, QuantizedArray):
            raise ValueError(f"precision: got {precision!r} with {name} of dtype {y.dtype}, want 'fp8' or None")
    is_float = lambda y: getattr(y, "dtype", None) in checks.DTYPES
    return *(checks.converted(y, dtype) if is_float(y) else y for y in (x, w)), None


def _checked_operands(x: Any, w: Any, transpose_w: bool, *, keeps_x: bool) -> tuple[Any, Any]:
    """(x, w) as jax.Arrays with dtypes and shapes that fit. Raises TypeError or ValueError.

    keeps_x: whether a w of 8 bits may come with an x of 16 or 32 bits: True if w has a scale.
    """
    x, w = checks.checked_array("x", x, DTYPES), checks.checked_array("w", w, DTYPES)
    if x.dtype not in DTYPES:
        raise TypeError(f"x: got dtype {x.dtype}, want bfloat16, float16, float32, float8_e4m3fn or float8_e5m2")
    if w.dtype != x.dtype and not (w.dtype in fp8.DTYPES and (keeps_x or x.dtype in fp8.DTYPES)):
        raise TypeError(f"w: got dtype {w.dtype}, want x's dtype {x.dtype}")
    if x.ndim == 0 or w.ndim != 2:
        raise ValueError(f"x, w: got shapes {x.shape} and {w.shape}, want [..., K] and two axes")
    if x.shape[-1] != w.shape[1 if transpose_w else 0]:
        want = "[N, K]" if transpose_w else "[K, N]"
        raise ValueError(f"w: got shape {w.shape}, want {want} with x's K = {x.shape[-1]}")
    return x, w


def _checked_precision(precision: str | None, dtype: Any) -> str | None:
    """The precision of a matmul of x in `dtype`: "fp8", "fp32" or "tf32", or None for a 16-bit matmul.

    precision: the argument, None for the default: "fp32" for float32, "fp8" for 8-bit arrays. Raises ValueError.
    """
    if precision not in (None, "fp32", "tf32", "fp8"):
        raise ValueError(f"precision: got {precision!r}, want {', '.join(map(repr, PRECISIONS))} or None")
    if dtype in fp8.DTYPES or precision == "fp8":
        if precision not in (None, "fp8"):
            raise ValueError(f"precision: got {precision!r} with {dtype} inputs, want 'fp8' or None")
        return "fp8"
    if precision is not None and dtype != jnp.float32:
        raise ValueError(
            f"precision: got {precision!r} with {dtype} inputs, want 'bf16', 'fp16', 'fp8' or None: it is for float32"
        )
    return (precision or "fp32") if dtype == jnp.float32 else None


def _one_of(scaling: str | None, of_x: str | None, of_w: str | None) -> str | None:
    """The scaling of a call: the one value other than None among the argument's, x's and w's. None if all are None.

    Raises ValueError if they differ.
    """
    found = {x for x in (scaling, of_x, of_w) if x is not None}
    if len(found) > 1:
        raise ValueError(f"scaling: got {scaling!r} with x's {of_x!r} and w's {of_w!r}, want one for all")
    return found.pop() if found else None


def checked_bias(bias: Any, dtype: Any, columns: int, name: str = "bias", *, given: Any = None) -> Any:
    """The bias [columns] as a jax.Array, as by bias_in.

    dtype, given: as in bias_in. Raises TypeError or ValueError for a bad dtype or shape.
    """
    bias = bias_in(checks.checked_array(name, bias), dtype, name, given=given)
    if bias.shape != (columns,):
        raise ValueError(f"{name}: got shape {bias.shape}, want [N] = {(columns,)}")
    return bias


def bias_in(bias: Any, dtype: Any, name: str = "bias", *, given: Any = None) -> Any:
    """The bias in x's dtype or in float32, without a rounding. With an x of 8 bits it keeps its dtype.

    dtype: x's. given: x's before it was rounded to `dtype` by a precision; None if it was not. Raises TypeError for a
    dtype that is neither of these, nor float32.
    """
    given = dtype if given is None else given
    if bias.dtype not in checks.DTYPES:
        raise TypeError(f"{name}: got dtype {bias.dtype}, want bfloat16, float16 or float32")
    if dtype in fp8.DTYPES or bias.dtype in (dtype, jnp.dtype(jnp.float32)):
        return bias
    if bias.dtype != given:
        other = "" if given == jnp.float32 else ", or float32"
        raise TypeError(f"{name}: got dtype {bias.dtype}, want x's dtype {given}{other}")
    return checks.converted(bias, jnp.float32)


def checked_residual(residual: Any, out_dtype: Any, shape: tuple[int, ...]) -> Any:
    """The residual as a jax.Array. Raises TypeError or ValueError unless it has this out_dtype and shape."""
    residual = checks.checked_array("residual", residual)
    if residual.dtype != out_dtype:
        raise TypeError(f"residual: got dtype {residual.dtype}, want out_dtype {out_dtype}")
    if residual.shape != shape:
        raise ValueError(f"residual: got shape {residual.shape}, want [..., N] = {shape}")
    return residual


def checked_out_dtype(dtype: Any) -> Any:
    """The argument out_dtype as a NumPy dtype. Raises TypeError unless it is bfloat16, float16 or float32."""
    found = dtype_of(dtype)
    if found not in checks.DTYPES:
        raise TypeError(f"out_dtype: got {dtype_text(dtype)}, want bfloat16, float16, float32 or None")
    return found


def checked_activation(activation: Any) -> Callable[[Any], Any] | None:
    """The function of an activation that is given by name or as a function; None stays None.

    Raises TypeError or ValueError for an unknown name, and for a function that has no hash or is not elementwise.
    """
    if activation is None:
        return None
    if callable(activation):
        if getattr(activation, "__hash__", None) is None:
            raise TypeError(f"activation: got {type(activation).__name__}, which has no hash, want a function with one")
        if activation in ACTIVATIONS.values():
            return activation
        check_elementwise(activation)
        return activation
    if not isinstance(activation, str):
        raise TypeError(f"activation: got {type(activation).__name__}, want a name, a function or None")
    if activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation: got {activation!r}, want a function or one of {known}")
    return ACTIVATIONS[activation]
