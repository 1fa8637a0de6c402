"""grouped_matmul and grouped_gated_matmul on PyTorch tensors."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import in_int32, plain_of
from jax_kernels.bridge.jax_functions.api import JaxOp
from jax_kernels.bridge.jax_functions.argument_checks import check_optional_tensors, check_tensors
from jax_kernels.bridge.ops.matmul import (
    EIGHT_BITS,
    PRECISION_SETTING,
    dtype_name,
    operands_under_autocast,
    taken_precision,
    without_gradient,
)
from jax_kernels.bridge.translate.activations import Activation, name_of, with_functions
from jax_kernels.bridge.translate.snapshots import key_of
from jax_kernels.ops.checks import check_flags
from jax_kernels.ops.grouped import grouped_matmul as ops
from jax_kernels.quantization import QuantizedArray, checked_scale, scale_shape
from jax_kernels.spelling import with_name_hints

__all__ = ["grouped_gated_matmul", "grouped_matmul"]

_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")))


def _on_scales[Result](op: Callable[..., Result]) -> Callable[..., Result]:
    """Returns an op of JAX arrays that takes the scales of 8-bit arrays as arguments: x_scale, and w_scale, or of a
    gated unit w_gate_scale and w_up_scale.

    op: takes QuantizedArrays. The result has op's method `plan`, wrapped in the same way. It raises ValueError for
    8-bit arrays without scales, and for scales of other arrays, and TypeError for dtypes that the op does not take.
    """

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Result:
        return op(**_quantized(*args, **kwargs))

    call.plan = lambda *args, **kwargs: op.plan(**_quantized(*args, **kwargs))  # type: ignore[attr-defined]
    return call


def _quantized(*arrays: Any, transpose_w: bool = False, **given: Any) -> dict[str, Any]:
    """The op's arguments by name, with a QuantizedArray for each array that has a scale.

    arrays: x, the weights, one or two, and group_sizes.
    """
    x, *weights, group_sizes = arrays
    operands = {"x": x} | dict(zip(("w",) if len(weights) == 1 else ("w_gate", "w_up"), weights, strict=True))
    found: dict[str, Any] = {}
    for name, y in operands.items():
        scale, axis = given.pop(f"{name}_scale", None), -1 if transpose_w or name == "x" else -2
        if y.dtype not in _DTYPES:
            want = f"bfloat16, float16, float32, or float8_e4m3fn or float8_e5m2 with {name}_scale"
            raise TypeError(f"{name}: got dtype {y.dtype}, want {want}")
        if (scale is not None) != (y.dtype.itemsize == 1):
            axes = "[M]" if name == "x" else "[G, N]"
            got, want = ("None", f"float32 {axes}") if scale is None else ("a scale", "None")
            raise ValueError(f"{name}_scale: got {got} with {name} of dtype {y.dtype}, want {want}")
        if scale is not None and y.ndim >= -axis:
            scale = checked_scale(f"{name}_scale", scale, scale_shape(y.shape, "row", axis))
        if scale is None and isinstance(found.get("x"), QuantizedArray):
            raise TypeError(f"{name}: got dtype {y.dtype} with x of 8 bits, want 8 bits with {name}_scale")
        found[name] = y if scale is None else QuantizedArray(values=y, scale=scale, scaling="row", axis=axis)
    return found | given | {"group_sizes": group_sizes, "transpose_w": transpose_w}


_grouped_matmul = JaxOp(with_functions(_on_scales(ops.grouped_matmul)), is_opaque=True, settings=PRECISION_SETTING)
_grouped_gated_matmul = JaxOp(
    with_functions(_on_scales(ops.grouped_gated_matmul)), is_opaque=True, settings=PRECISION_SETTING
)


@with_name_hints
def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | Activation | None = None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    gather_indices: torch.Tensor | None = None,
    transpose_w: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """jax_kernels.grouped_matmul on PyTorch tensors, for mixtures of experts: each group of rows has its own weights.

    Returns [M, N] in out_dtype: activation(x[i] @ w[g] + bias[g]) for a row i of group g, and 0 for rows past the last
    group. The gradients are of x, w and bias. Autocast casts x, w and bias.

    Args:
      x: [M, K], bfloat16, float16 or float32, its rows sorted by group. Or, if w has 8 bits, values of 8 bits with
        x_scale, as bridge.quantize(x, scaling="row") and bridge.rms_norm(quantize="e4m3") return them; x then has no
        gradient, and out_dtype None is bfloat16.
      w: [G, K, N], or [G, N, K] with transpose_w, in x's dtype and on its device; or values of 8 bits with w_scale, as
        bridge.quantize(w, scaling="row", axis=-2) returns them, with transpose_w axis=-1. Then precision is "fp8". The
        gradients are of x and bias.
      group_sizes: int32 or int64 [G], the number of rows of each group. The host does not read them: the call needs
        no synchronisation, and CUDA graphs can capture it. For the offsets that torch._grouped_mm takes, they are
        offs.diff(prepend=offs.new_zeros(1)).
      bias: [G, N], in x's dtype or float32.
      x_scale, w_scale: float32 [M] and [G, N], the factors of x's rows and of w's columns if they have 8 bits;
        otherwise None. One that requires a gradient raises NotImplementedError.
      gather_indices: int32 or int64 [M], with x [T, K]: row i of the call is x[gather_indices[i]], and 0 for an index
        outside of x.
      activation, out_dtype, implementation: as in bridge.matmul.
      precision: for float32 inputs, "fp32" or "tf32"; None follows torch.set_float32_matmul_precision. For all inputs,
        "bf16" or "fp16": x and w are rounded to this dtype first; "fp8": to 8 bits, as in jax_kernels.grouped_matmul.

    It raises the errors of jax_kernels.grouped_matmul, or of bridge.from_jax if they differ.
    """
    group_sizes, gather_indices = in_int32(group_sizes), in_int32(gather_indices)
    call = _grouped_matmul.lookup(
        (x, w, group_sizes, bias, x_scale, w_scale, gather_indices),
        (key_of(activation), transpose_w, out_dtype, precision, implementation),
    )
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(x=x, w=w, group_sizes=group_sizes)
    transpose_w = plain_of("transpose_w", transpose_w)
    check_flags(transpose_w=transpose_w)
    check_optional_tensors(bias=bias, x_scale=x_scale, w_scale=w_scale, gather_indices=gather_indices)
    tensors = {"x": x, "w": w, "group_sizes": group_sizes, "bias": bias, "x_scale": x_scale, "w_scale": w_scale}
    tensors["gather_indices"] = gather_indices
    if dtensors.are_in(*tensors.values()):
        own = {"activation": activation, "transpose_w": transpose_w, "out_dtype": out_dtype, "precision": precision}
        weights = (None, "columns", None) if transpose_w else (None, None, "columns")
        roles = {
            "x": (None, None),
            "w": weights,
            "group_sizes": (None,),
            "bias": (None, "columns"),
            "x_scale": (None,),
            "w_scale": (None, "columns"),
            "gather_indices": (None,),
        }
        results = ((None, "columns"),)
        return dtensors.on_shards(grouped_matmul, tensors, roles, results, own | {"implementation": implementation})
    x, w, bias = operands_under_autocast(x, w, bias)
    return _grouped_matmul.run(
        call,
        x,
        w,
        group_sizes,
        bias=bias,
        activation=name_of(activation),
        x_scale=without_gradient("x_scale", x_scale, x),
        w_scale=without_gradient("w_scale", w_scale, w),
        gather_indices=gather_indices,
        transpose_w=transpose_w,
        out_dtype=dtype_name(out_dtype),
        precision=_precision(precision, x, w),
        implementation=implementation,
    )


def _precision(precision: str | None, x: torch.Tensor, w: torch.Tensor) -> str | None:
    """Returns taken_precision, but None for None with w of 8 bits, whose matmuls have 8 bits."""
    return precision if w.dtype in EIGHT_BITS else taken_precision(precision, x)


@with_name_hints
def grouped_gated_matmul(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    group_sizes: torch.Tensor,
    activation: str | Activation = "silu",
    *,
    x_scale: torch.Tensor | None = None,
    w_gate_scale: torch.Tensor | None = None,
    w_up_scale: torch.Tensor | None = None,
    gather_indices: torch.Tensor | None = None,
    transpose_w: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """jax_kernels.grouped_gated_matmul on PyTorch tensors: the first matmuls of a mixture of gated experts.

    Returns [M, N] in out_dtype: activation(x[i] @ w_gate[g]) * (x[i] @ w_up[g]) for a row i of group g, and 0 for rows
    past the last group. The gradients are of x and both weights. The arguments are as in bridge.grouped_matmul, and
    raise the same errors. w_gate, w_up: [G, K, N], or [G, N, K] with transpose_w; both in x's dtype, or both of 8 bits
    with w_gate_scale and w_up_scale, as w_scale.
    """
    group_sizes, gather_indices = in_int32(group_sizes), in_int32(gather_indices)
    call = _grouped_gated_matmul.lookup(
        (x, w_gate, w_up, group_sizes, x_scale, w_gate_scale, w_up_scale, gather_indices),
        (key_of(activation), transpose_w, out_dtype, precision, implementation),
    )
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(x=x, w_gate=w_gate, w_up=w_up, group_sizes=group_sizes)
    transpose_w = plain_of("transpose_w", transpose_w)
    check_flags(transpose_w=transpose_w)
    check_optional_tensors(x_scale=x_scale, w_gate_scale=w_gate_scale, w_up_scale=w_up_scale)
    check_optional_tensors(gather_indices=gather_indices)
    tensors = {"x": x, "w_gate": w_gate, "w_up": w_up, "group_sizes": group_sizes, "gather_indices": gather_indices}
    tensors |= {"x_scale": x_scale, "w_gate_scale": w_gate_scale, "w_up_scale": w_up_scale}
    if dtensors.are_in(*tensors.values()):
        own = {"activation": activation, "transpose_w": transpose_w, "out_dtype": out_dtype, "precision": precision}
        weights = (None, "columns", None) if transpose_w else (None, None, "columns")
        roles = {
            "x": (None, None),
            "w_gate": weights,
            "w_up": weights,
            "group_sizes": (None,),
            "gather_indices": (None,),
            "x_scale": (None,),
            "w_gate_scale": (None, "columns"),
            "w_up_scale": (None, "columns"),
        }
        own |= {"implementation": implementation}
        return dtensors.on_shards(grouped_gated_matmul, tensors, roles, ((None, "columns"),), own)
    x, w_gate, w_up = operands_under_autocast(x, w_gate, w_up)
    return _grouped_gated_matmul.run(
        call,
        x,
        w_gate,
        w_up,
        group_sizes,
        activation=name_of(activation),
        x_scale=without_gradient("x_scale", x_scale, x),
        w_gate_scale=without_gradient("w_gate_scale", w_gate_scale, w_gate),
        w_up_scale=without_gradient("w_up_scale", w_up_scale, w_up),
        gather_indices=gather_indices,
        transpose_w=transpose_w,
        out_dtype=dtype_name(out_dtype),
        precision=_precision(precision, x, w_gate),
        implementation=implementation,
    )
