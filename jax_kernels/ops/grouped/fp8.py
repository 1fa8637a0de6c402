"""8-bit grouped matmuls and gated units: the quantization of their operands, in the forward and in the gradient of x.

The forward rounds x and the weights to e4m3, with a scale for each row of x and for each column of each group's
weights. The gradient of x rounds the cotangent to e5m2, with a scale for each row, and the weights to e4m3, with a
scale for each of their rows. In a gated unit both cotangents share the scale of a row, and so do both weights; one
matmul then sums over the columns of both. The gradients of the weights are 16-bit matmuls of values that are not
rounded to 8 bits. In 8 bits both of their operands would need a transpose, with a scale for each column of each group.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions, GroupedResult
from jax_kernels.ops.grouped import gradients
from jax_kernels.ops.matmul.fp8 import DTYPES
from jax_kernels.ops.matmul.gradients import ScaledCotangents, epilogue_gradients
from jax_kernels.ops.matmul.quantized_rows import quantized_rows, quantized_together
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.quantization import QuantizedArray, dequantize, quantize
from jax_kernels.reference import grouped_matmul as reference
from jax_kernels.tracing.derivatives import in_reverse_mode, no_forward_mode, straight_through, without_derivative
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["planned"]


def planned(call: PlannedCall, inputs: GroupedInputs) -> jax.Array:
    """out [M, N] of a planned 8-bit grouped_matmul or grouped_gated_matmul, differentiable.

    inputs: x of 16 or 32 bits, and weights in x's dtype, or in 8 bits with scales. Or all of them in 8 bits.
    Differentiating arrays of 8 bits or their scales raises NotImplementedError.
    """
    name = "grouped_gated_matmul" if inputs.is_gated else "grouped_matmul"
    if inputs.w.dtype in DTYPES:
        inputs = _frozen(inputs, ("w", "w_scale", "w_up", "w_up_scale"), f"{name}: weights")
    if inputs.x.dtype in DTYPES:
        inputs = _frozen(inputs, ("x", "x_scale"), f"{name}: rows")
    if call.implementation == "xla":
        return _plain(call, inputs)
    return _by_kernels(call, in_reverse_mode(inputs, no_forward_mode(name)))


def _frozen(inputs: GroupedInputs, fields: Sequence[str], subject: str) -> GroupedInputs:
    """The inputs; differentiating these fields raises NotImplementedError. subject: of the message."""
    given = {field: getattr(inputs, field) for field in fields}
    reason = f"{subject} of 8 bits have no gradients, want 16- or 32-bit arrays with precision='fp8'"
    return inputs._replace(**without_derivative(given, reason))


def _out(call, inputs):
    return _run(call, inputs, saves=False).out


def _run(call: PlannedCall, inputs: GroupedInputs, *, saves: bool) -> GroupedResult:
    """The GroupedResult of the forward: quantizes the operands and runs the call's implementation.

    saves: whether the result has the preactivation and up.
    """
    options = dataclasses.replace(call.options, transpose_w=True, saves_preactivation=saves)
    x, w = _rows(call, inputs), _weights(call, inputs.w, inputs.w_scale)
    quantized = inputs._replace(x=x.values, x_scale=x.scale, w=w.values, w_scale=w.scale)
    if inputs.w_up is not None:
        w_up = _weights(call, inputs.w_up, inputs.w_up_scale)
        quantized = quantized._replace(w_up=w_up.values, w_up_scale=w_up.scale)
    return gradients.forward_of(dataclasses.replace(call, options=options))(quantized)


def _rows(call: PlannedCall, inputs: GroupedInputs) -> QuantizedArray:
    """x as a QuantizedArray with a scale for each row. 8-bit rows keep their values."""
    if inputs.x_scale is not None:
        return QuantizedArray(values=inputs.x, scale=inputs.x_scale, scaling="row")
    return quantized_rows(call, inputs.x)


def _weights(call: PlannedCall, w: jax.Array, scale: jax.Array | None) -> QuantizedArray:
    """The weights w as a QuantizedArray [G, N, K], with a scale for each column. 8-bit weights keep their values.

    scale: of 8-bit weights, else None.
    """
    turned = w if call.options.transpose_w else w.mT
    if scale is not None:
        return QuantizedArray(values=turned, scale=scale, scaling="row")
    return quantized_rows(call, turned) if call.options.transpose_w else quantize(turned, scaling="row")


@under_defaults
def _forward(call, inputs):
    """(out, (inputs, the GroupedResult without out))."""
    result = _run(call, inputs, saves=call.options.activation is not None or inputs.is_gated)
    return result.out, (inputs, result._replace(out=None))  # type: ignore[arg-type]


@under_defaults
def _backward(call, residuals, dout):
    """(GroupedInputs of the gradients,), with None for arrays of 8 bits. dout: the cotangent of out, [M, N]."""
    inputs, saved = residuals
    dz, dup = epilogue_gradients(call.options, saved, dout.astype(jnp.float32))
    dbias = None
    if inputs.bias is not None:
        dbias = reference.sum_of_rows(dz, inputs.group_sizes).astype(inputs.bias.dtype)
    dx, dw, dw_up = None, None, None
    if inputs.x.dtype not in DTYPES:
        dx = _input_gradient(call, inputs, [y.astype(dout.dtype) for y in (dz, dup) if y is not None])
    if inputs.w.dtype not in DTYPES:
        dw, dw_up = _weight_gradients(call, inputs, dz, dup, dout.dtype)
    return (GroupedInputs(x=dx, w=dw, group_sizes=None, bias=dbias, w_up=dw_up),)  # type: ignore[arg-type]


def _input_gradient(call: PlannedCall, inputs: GroupedInputs, cotangents: list[jax.Array]) -> jax.Array:
    """The gradient of x, in x's shape and dtype: an 8-bit matmul of the cotangents, in e5m2, and weights, in e4m3.

    cotangents: [M, N], of x @ w and, of a gated unit, of x @ w_up. The sum is over the columns of both.
    """
    options = GroupedOptions(out_dtype=str(inputs.x.dtype), transpose_w=True, scaling=call.options.scaling)
    of_rows = quantized_together(call, cotangents, "e5m2")
    weights = _weights_of_rows(call, inputs)
    given = GroupedInputs(
        x=of_rows[0].values,
        w=weights[0].values,
        group_sizes=inputs.group_sizes,
        x_scale=of_rows[0].scale,
        w_scale=weights[0].scale,
    )
    if inputs.is_gated:
        given = given._replace(x_up=of_rows[1].values, w_up=weights[1].values)
    dx = gradients.further(call, given, options).out
    return dx if inputs.gather is None else gradients.scattered(dx, inputs.gather, inputs.x.shape[0])


def _weights_of_rows(call: PlannedCall, inputs: GroupedInputs) -> list[QuantizedArray]:
    """The weights as QuantizedArrays [G, K, N], with a scale for each row of all weights.

    8-bit weights are rounded again: their own scales belong to columns.
    """
    by_xla = dataclasses.replace(call, implementation="xla")
    given: list[Any] = [(inputs.w, inputs.w_scale)]
    if inputs.is_gated:
        given.append((inputs.w_up, inputs.w_up_scale))
    axis = -1 if call.options.transpose_w else -2
    if inputs.w_scale is not None:  # XLA dequantizes and quantizes without a copy in float32
        known = [QuantizedArray(values=w, scale=scale, scaling="row", axis=axis) for w, scale in given]
        weights, call = [dequantize(w) for w in known], by_xla
    else:
        weights = [w for w, _ in given]
    if call.options.transpose_w:
        weights, call = [w.mT for w in weights], by_xla
    return quantized_together(call, weights)


def _weight_gradients(
    call: PlannedCall, inputs: GroupedInputs, dz: jax.Array, dup: jax.Array | None, of_out: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of w and w_up, in their shape and dtype: 16-bit matmuls, in bfloat16 for float32 x.

    dz, dup: float32 [M, N], the cotangents of x @ w and of x @ w_up, or None. of_out: the dtype of out.
    """
    dtype = jnp.dtype(jnp.bfloat16) if inputs.x.dtype == jnp.float32 else inputs.x.dtype
    if dtype == jnp.float16 and of_out == jnp.float32:  # other rows may not set the scale of float16
        dz = gradients.without_other_rows(dz, inputs.group_sizes)
        dup = None if dup is None else gradients.without_other_rows(dup, inputs.group_sizes)
    scaled = ScaledCotangents.of(dz, dup, of_out, dtype)
    rounded = inputs._replace(x=inputs.x.astype(dtype))
    of = lambda y: scaled.back(functools.partial(gradients.weight_gradient, call, rounded, y)).astype(inputs.w.dtype)
    return of(scaled.dz), None if scaled.dup is None else of(scaled.dup)


def _straight_through(call: PlannedCall, inputs: GroupedInputs) -> jax.Array:
    """out [M, N] of the call, computed in float32 from the rounded x and weights. JAX can differentiate it.

    Derivatives treat rounding as the identity ("straight-through"). Scales have no gradients.
    """
    through = lambda x, of: dequantize(of) + (x.astype(jnp.float32) - lax.stop_gradient(x.astype(jnp.float32)))
    fixed = jax.tree.map(lax.stop_gradient, inputs)

    def weights(w: Any, known: Any, scale: Any) -> Any:
        if w is None:
            return None
        of_w = _weights(call, known, scale)
        return dequantize(of_w) if scale is not None else through(w if call.options.transpose_w else w.mT, of_w)

    options = dataclasses.replace(call.options, transpose_w=True, scaling=None, precision="fp32")
    given = inputs._replace(
        x=dequantize(_rows(call, fixed)) if inputs.x_scale is not None else through(inputs.x, _rows(call, fixed)),
        x_scale=None,
        w=weights(inputs.w, fixed.w, fixed.w_scale),
        w_up=weights(inputs.w_up, fixed.w_up, fixed.w_up_scale),
        w_scale=None,
        w_up_scale=None,
    )
    return reference.grouped_matmul(given, options).out


def _straight_gradients(call: PlannedCall, inputs: GroupedInputs, dout: jax.Array) -> tuple[GroupedInputs]:
    """(GroupedInputs of the gradients of the float32 call on rounded values,)."""
    (found,) = jax.vjp(functools.partial(_straight_through, call), inputs)[1](dout)
    return (found._replace(group_sizes=None, gather=None),)


_by_kernels = jax.custom_vjp(_out, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward)


_plain = straight_through(_out, _forward, _backward, _straight_through, _straight_gradients)
