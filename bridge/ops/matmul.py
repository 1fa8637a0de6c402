"""matmul, gated_matmul, mlp and linear on PyTorch tensors."""

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments import autocast, dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import in_float32
from jax_kernels.bridge.jax_functions.api import JaxOp
from jax_kernels.bridge.jax_functions.argument_checks import (
    advice,
    check_optional_tensors,
    check_scales,
    check_tensors,
    type_name,
)
from jax_kernels.bridge.jax_functions.argument_names import under_names
from jax_kernels.bridge.ops.quantization import Facts, QuantizedTensor, Stored, on_stored, stored
from jax_kernels.bridge.translate.activations import Activation, applied, name_of, with_functions
from jax_kernels.bridge.translate.snapshots import key_of
from jax_kernels.ops.matmul import matmul as ops
from jax_kernels.ops.matmul import mlp as mlp_ops
from jax_kernels.quantization import check_scaling
from jax_kernels.spelling import with_name_hints

__all__ = [
    "EIGHT_BITS",
    "PRECISION_SETTING",
    "MatmulOptions",
    "activate",
    "check_scaling_option",
    "dtype_name",
    "gated_matmul",
    "linear",
    "matmul",
    "mlp",
    "operands_under_autocast",
    "taken_precision",
    "without_gradient",
]

PRECISION_SETTING = torch.get_float32_matmul_precision
_matmul = JaxOp(with_functions(on_stored(ops.matmul)), is_opaque=True, settings=PRECISION_SETTING)
_gated_matmul = JaxOp(with_functions(on_stored(ops.gated_matmul)), is_opaque=True, settings=PRECISION_SETTING)
_activate = JaxOp(applied, is_opaque=True)
_mlp = JaxOp(with_functions(mlp_ops.mlp), is_opaque=True, settings=PRECISION_SETTING)
type Weights = torch.Tensor | QuantizedTensor

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@with_name_hints
def matmul(
    x: torch.Tensor,
    w: Weights,
    *,
    bias: torch.Tensor | None = None,
    activation: str | Activation | None = None,
    residual: torch.Tensor | None = None,
    x_scale: torch.Tensor | float | None = None,
    w_scale: torch.Tensor | float | None = None,
    transpose_w: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    scaling: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """jax_kernels.matmul on PyTorch tensors: activation(x @ w + bias) + residual, with gradients of these tensors.

    See bridge.from_jax for torch.compile, derivatives and CUDA graphs. Autocast casts x, w and bias as for
    torch.matmul, also with precision="fp8"; 8-bit tensors stay unchanged.

    Args:
      x: [..., K], bfloat16, float16 or float32, on a CPU or a CUDA device; or, forward only, float8_e4m3fn or
        float8_e5m2.
      w: [K, N], or [N, K] with transpose_w, in x's dtype and on its device; if x has 8 bits, or if w has a w_scale, any
        8-bit dtype. Or low-bit weights: a bridge.QuantizedTensor that is quantized along K, with axis=-2, or axis=-1
        with transpose_w. Low-bit weights have no gradients and no w_scale. With weights of 8 bits, x of 16 or 32 bits
        is rounded in each call, and has a gradient.
      bias: [N], in x's dtype or float32. If x has 8 bits, in bfloat16, float16 or float32.
      activation: None, "relu", "gelu" (exact), "gelu_tanh", "silu", "sigmoid" or "tanh". Or an elementwise function of
        one value, in torch's elementwise operations (torch.nn.functional.mish, torch.nn.ReLU6()) or in jnp code, that
        reads no tensors. Functions that are created anew for each call share a program if they are alike.
      residual: [..., N] in out_dtype, added last. Under autocast, without an out_dtype, any float dtype: the result has
        the dtype of the sum in PyTorch, which is float32 for a float32 residual.
      x_scale, w_scale: of 8-bit matmuls, the factors of the 8-bit values; float32 tensors or numbers, with the shapes
        that `scaling` gives. None is 1 for 8-bit tensors; tensors that precision="fp8" rounds get scales from their
        largest values. JAX compiles a program for each number. A scale of 8-bit values that requires a gradient raises
        NotImplementedError; other scales get none, since rounding is differentiated as the identity.
      out_dtype: torch.bfloat16, torch.float16 or torch.float32; None is x's dtype, or torch.bfloat16 if x has 8 bits.
      precision: for float32 inputs, "fp32" or "tf32"; None follows torch.set_float32_matmul_precision. For all inputs,
        "fp8": x and w are rounded to e4m3, and multiplied as 8-bit values; "bf16" or "fp16": x and w are rounded to
        this dtype first.
      scaling: of 8-bit matmuls, the values that share a scale. "tensor": all values. "row": the rows of x and the
        columns of w, x_scale [...] and w_scale [N]. "block": 128 x 128 values. None: from the scales' shapes, or
        "tensor".
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.

    Returns:
      out [..., N] in out_dtype: activation(x @ w + bias) + residual.

    It raises the errors of jax_kernels.matmul, or of bridge.from_jax if they differ.
    """
    call = _matmul.lookup(
        (x, *_parts(w), bias, residual, x_scale, w_scale),
        (key_of(activation), transpose_w, out_dtype, precision, scaling, implementation),
    )
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(x=x)
    _check_weights(w=w)
    check_optional_tensors(bias=bias, residual=residual)
    check_scales(x_scale=x_scale, w_scale=w_scale)
    if dtensors.are_in(x, w, bias, residual):
        own: dict[str, Any] = {
            "activation": activation,
            "transpose_w": transpose_w,
            "out_dtype": out_dtype,
            "precision": precision,
        }
        own |= {"scaling": scaling, "implementation": implementation, "x_scale": x_scale, "w_scale": w_scale}
        return _on_shards(matmul, {"x": x, "w": w, "bias": bias, "residual": residual}, own)
    x, w, bias = operands_under_autocast(x, w, bias)
    residual, out_dtype = _with_wide_residual(x, residual, out_dtype)
    return _matmul.run(
        call,
        x,
        _argument("w", w),
        bias=bias,
        activation=name_of(activation),
        residual=residual,
        x_scale=without_gradient("x_scale", x_scale, x),
        w_scale=without_gradient("w_scale", w_scale, w),
        transpose_w=transpose_w,
        out_dtype=dtype_name(out_dtype),
        precision=_of_weights(precision, x, w),
        scaling=scaling,
        implementation=implementation,
    )


@with_name_hints
def gated_matmul(
    x: torch.Tensor,
    w_gate: Weights,
    w_up: Weights,
    activation: str | Activation = "silu",
    *,
    residual: torch.Tensor | None = None,
    x_scale: torch.Tensor | float | None = None,
    w_gate_scale: torch.Tensor | float | None = None,
    w_up_scale: torch.Tensor | float | None = None,
    transpose_w: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    scaling: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """jax_kernels.gated_matmul on PyTorch tensors: activation(x @ w_gate) * (x @ w_up) + residual, with gradients.

    Returns [..., N] in out_dtype. The gradients are of x, both weights and residual. The arguments are as in
    bridge.matmul, and raise the same errors. w_gate, w_up: [K, N], or [N, K] with transpose_w, like torch.nn.Linear's
    weights; two tensors, or two QuantizedTensors of one layout. w_gate_scale, w_up_scale: as w_scale.
    """
    call = _gated_matmul.lookup(
        (x, *_parts(w_gate), *_parts(w_up), residual, x_scale, w_gate_scale, w_up_scale),
        (key_of(activation), transpose_w, out_dtype, precision, scaling, implementation),
    )
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(x=x)
    _check_weights(w_gate=w_gate, w_up=w_up)
    check_optional_tensors(residual=residual)
    check_scales(x_scale=x_scale, w_gate_scale=w_gate_scale, w_up_scale=w_up_scale)
    if dtensors.are_in(x, w_gate, w_up, residual):
        own: dict[str, Any] = {
            "activation": activation,
            "transpose_w": transpose_w,
            "out_dtype": out_dtype,
            "precision": precision,
        }
        own |= {"scaling": scaling, "implementation": implementation}
        own |= {"x_scale": x_scale, "w_gate_scale": w_gate_scale, "w_up_scale": w_up_scale}
        return _on_shards(gated_matmul, {"x": x, "w_gate": w_gate, "w_up": w_up, "residual": residual}, own)
    x, w_gate, w_up = operands_under_autocast(x, w_gate, w_up)
    residual, out_dtype = _with_wide_residual(x, residual, out_dtype)
    return _gated_matmul.run(
        call,
        x,
        _argument("w_gate", w_gate),
        _argument("w_up", w_up),
        activation=name_of(activation),
        residual=residual,
        x_scale=without_gradient("x_scale", x_scale, x),
        w_gate_scale=without_gradient("w_gate_scale", w_gate_scale, w_gate),
        w_up_scale=without_gradient("w_up_scale", w_up_scale, w_up),
        transpose_w=transpose_w,
        out_dtype=dtype_name(out_dtype),
        precision=_of_weights(precision, x, w_gate),
        scaling=scaling,
        implementation=implementation,
    )


@with_name_hints
def mlp(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    w_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    bias_down: torch.Tensor | None = None,
    activation: str | Activation = "silu",
    residual: torch.Tensor | None = None,
    transpose_w: bool = False,
    precision: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """jax_kernels.mlp on PyTorch tensors, with gradients of all tensors. Returns [..., N] in x's dtype.

    Equivalent to hidden @ w_down + bias_down + residual, where hidden is activation(x @ w_up + bias_up), or, with
    w_gate, activation(x @ w_gate) * (x @ w_up). Between forward and backward it keeps x and the results of the first
    matmuls, but not `hidden`. Autocast casts x, the weights and the biases.

    Args:
      x: [..., K]. w_up, w_gate: [K, H]; w_down: [H, N]; with transpose_w [H, K] and [N, H], like torch.nn.Linear's.
      bias_up: [H], without w_gate. bias_down: [N].
      residual: [..., N] in x's dtype, added last. Under autocast any float dtype: the result has the dtype of the sum
        in PyTorch.
      activation, implementation: as in bridge.matmul.
      precision: for float32 inputs, "fp32" or "tf32"; None follows torch.set_float32_matmul_precision.
    """
    call = _mlp.lookup(
        (x, w_up, w_down, w_gate, bias_up, bias_down, residual),
        (key_of(activation), transpose_w, precision, implementation),
    )
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(x=x, w_up=w_up, w_down=w_down)
    check_optional_tensors(w_gate=w_gate, bias_up=bias_up, bias_down=bias_down, residual=residual)
    if dtensors.are_in(x, w_up, w_down, w_gate, bias_up, bias_down, residual):
        tensors = {"x": x, "w_up": w_up, "w_down": w_down, "w_gate": w_gate, "bias_up": bias_up, "bias_down": bias_down}
        own: dict[str, Any] = {"activation": activation, "transpose_w": transpose_w, "precision": precision}
        return _on_shards(mlp, tensors | {"residual": residual}, own | {"implementation": implementation})
    x, w_up, w_down, w_gate, bias_up, bias_down = operands_under_autocast(x, w_up, w_down, w_gate, bias_up, bias_down)
    residual, out_dtype = _with_wide_residual(x, residual, None)
    wide = residual if out_dtype not in (None, x.dtype) else None  # the op has no out_dtype
    out = _mlp.run(
        call if wide is None else None,
        x,
        w_up,
        w_down,
        w_gate=w_gate,
        bias_up=bias_up,
        bias_down=bias_down,
        activation=name_of(activation),
        residual=residual if wide is None else None,
        transpose_w=transpose_w,
        precision=taken_precision(precision, x),
        implementation=implementation,
    )
    return out if wide is None else wide + out


def _on_shards(op: Callable[..., torch.Tensor], tensors: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
    """Runs `op` on DTensors. Returns a DTensor, with gradients.

    Rows of x may be sharded; for matmul and gated_matmul, columns of the weights too.

    op: matmul, gated_matmul or mlp. tensors: its tensor arguments by name, or None. options: its other arguments.
    Raises NotImplementedError for low-bit weights, and raises for 8-bit matmuls.
    """
    for name, x in tensors.items():
        if isinstance(x, QuantizedTensor):
            raise NotImplementedError(f"{name}: got low-bit weights with a DTensor, want only DTensors")
    is_eight = options["precision"] == "fp8" or tensors["x"].dtype in EIGHT_BITS
    if is_eight or any(x is not None for name, x in options.items() if name.endswith("_scale")):
        dtensors.refuse(f"{op.__name__} in 8 bits", **tensors)
    rows, of_hidden = dtensors.rows_roles(tensors["x"]), op is mlp
    columns = None if of_hidden else "columns"
    weights = (columns, None) if options["transpose_w"] else (None, columns)
    out = (*rows[:-1], columns)
    roles = dict.fromkeys(tensors, weights) | {"x": rows, "residual": out, "bias": (columns,)}
    roles |= {"bias_up": (None,), "bias_down": (None,)}
    return dtensors.on_shards(op, tensors, roles, (out,), options)


def _parts(w: Weights) -> tuple[torch.Tensor | Facts, ...]:
    """Returns weights in a form for the key of a cached call.

    The result is (w,) for a tensor; for a QuantizedTensor its two tensors and a tuple of its other fields.
    """
    return (w.values, w.scale, w.facts) if isinstance(w, QuantizedTensor) else (w,)


def _check_weights(**weights: Any) -> None:
    """Raises TypeError for weights that are neither a tensor nor a QuantizedTensor."""
    for name, w in weights.items():
        if not isinstance(w, torch.Tensor | QuantizedTensor):
            raise TypeError(f"{name}: got {type_name(w)}, want a torch.Tensor or a bridge.QuantizedTensor{advice(w)}")


def _argument(name: str, w: Weights) -> torch.Tensor | Stored:
    """Returns weights as an argument of the JAX op: a tensor unchanged, a QuantizedTensor as a dict of its fields."""
    return stored(name, w) if isinstance(w, QuantizedTensor) else w


def without_gradient(name: str, scale: torch.Tensor | float | None, values: Weights) -> torch.Tensor | float | None:
    """Returns the scale of an operand in the form that the JAX op takes, without a gradient.

    A tensor is detached, and one without axes is cast to float32. Another library's number becomes a Python number.
    None stays None. name: the argument's, such as x_scale. values: the operand, such as x.

    Raises NotImplementedError for a scale of 8-bit values that requires a gradient, under torch.enable_grad. A scale
    with which precision="fp8" rounds values has the gradient 0, since rounding is differentiated as the identity.
    """
    if not isinstance(scale, torch.Tensor):
        return in_float32(scale)
    is_stored = isinstance(values, torch.Tensor) and values.dtype in EIGHT_BITS
    if is_stored and scale.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name}: got a tensor that requires a gradient, want a detached one: a scale of 8-bit values has no "
            "gradient"
        )
    return in_float32(scale.detach())


def dtype_name(out_dtype: torch.dtype | None) -> str | None:
    """Returns the name of out_dtype, such as "bfloat16", or None for None. Raises TypeError for another dtype."""
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in _NAMES):
        got = out_dtype if isinstance(out_dtype, torch.dtype | str) else type_name(out_dtype)
        raise TypeError(f"out_dtype: got {got}, want torch.bfloat16, torch.float16, torch.float32 or None")
    return None if out_dtype is None else _NAMES[out_dtype]


def _of_weights(precision: str | None, x: torch.Tensor, w: Weights) -> str | None:
    """Returns taken_precision of a matmul of x and w; None stays None with weights of 8 bits."""
    is_eight = isinstance(w, torch.Tensor) and w.dtype in EIGHT_BITS
    return precision if is_eight else taken_precision(precision, x)


def taken_precision(precision: str | None, x: torch.Tensor) -> str | None:
    """Returns the precision, with "tf32" instead of None for float32 x if PyTorch's settings allow tf32."""
    return "tf32" if precision is None and x.dtype == torch.float32 and _takes_tf32() else precision


@torch_internals.constant_in_graph
def _takes_tf32() -> bool:
    """Whether torch.set_float32_matmul_precision allows tf32. torch.compile keeps the setting of compile time."""
    return torch.get_float32_matmul_precision() != "highest"


def activate(x: torch.Tensor, activation: str | Activation) -> torch.Tensor:
    """Returns activation(x), elementwise, in x's dtype, with its gradient. activation: as in bridge.matmul."""
    call = _activate.lookup((x,), (key_of(activation),))
    if call and call.cached:
        return call.cached(call.tensors)
    return _activate.run(call, x, activation=name_of(activation))


class MatmulOptions(TypedDict, total=False):
    """The keyword arguments of bridge.matmul except bias and transpose_w, for type checkers."""

    activation: str | Activation | None
    residual: torch.Tensor | None
    x_scale: torch.Tensor | float | None
    w_scale: torch.Tensor | float | None
    out_dtype: torch.dtype | None
    precision: str | None
    scaling: str | None
    implementation: str | None


@with_name_hints
def linear(
    x: torch.Tensor, weight: Weights, bias: torch.Tensor | None = None, **arguments: Unpack[MatmulOptions]
) -> torch.Tensor:
    """Returns activation(x @ weight.T + bias) + residual: torch.nn.functional.linear with bridge.matmul's options.

    x: [..., K]. weight: [N, K], or low-bit weights, bridge.quantize(weight, "int4", axis=-1). bias: [N]. arguments: the
    other keyword arguments of bridge.matmul, except transpose_w. The result is [..., N]. It raises bridge.matmul's
    errors.
    """
    if "transpose_w" in arguments:
        raise TypeError(
            "transpose_w: got the argument with linear, whose weight is [N, K], want bridge.matmul for other layouts"
        )
    return under_names({"w": "weight"}, matmul, x, weight, bias=bias, transpose_w=True, **arguments)


def operands_under_autocast(*tensors: Any) -> list[Any]:
    """Returns the tensors cast to autocast's dtype if autocast is on, else unchanged.

    None, QuantizedTensors, integers, 8-bit tensors and float64 tensors stay unchanged.
    """
    stays = lambda x: x is None or isinstance(x, QuantizedTensor) or x.dtype in EIGHT_BITS
    return [x if stays(x) else autocast.under_autocast(x) for x in tensors]


def check_scaling_option(scaling: str | None, precision: str | None) -> None:
    """Raises ValueError for an unknown scaling, or a scaling with a precision other than "fp8".

    precision=None passes, because the tensors of a call may have 8 bits.
    """
    if scaling is None:
        return
    check_scaling(scaling)
    if precision not in (None, "fp8"):  # None: the tensors of a call may have 8 bits
        raise ValueError(f"scaling: got {scaling!r} with precision={precision!r}, want None, or precision='fp8'")


def _with_wide_residual(
    x: torch.Tensor, residual: Any, out_dtype: torch.dtype | None
) -> tuple[torch.Tensor | None, torch.dtype | None]:
    """Returns (residual, out_dtype), where autocast may widen a result whose out_dtype was not given.

    Under autocast, a missing out_dtype becomes the dtype of x + residual in PyTorch, and residual is cast to it.
    Otherwise both are returned unchanged.

    x: the matmul's input after autocast's cast.
    """
    is_open = isinstance(residual, torch.Tensor) and out_dtype is None
    if not is_open or autocast.autocast_dtype(x.device) is None:
        return residual, out_dtype
    wide = torch.promote_types(torch.bfloat16 if x.dtype in EIGHT_BITS else x.dtype, residual.dtype)
    return (residual.to(wide), wide) if residual.is_floating_point() and wide in _NAMES else (residual, out_dtype)
