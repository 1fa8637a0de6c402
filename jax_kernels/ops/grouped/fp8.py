"""8-bit grouped matmuls: the quantization of their operands, in the forward and in the gradient of x.

The forward rounds x and w to e4m3, with a scale for each row of x and for each column of each group's weights. The
gradient of x rounds the cotangent to e5m2, with a scale for each row, and w to e4m3, with a scale for each of its rows.
The gradient of w is a 16-bit matmul of values that are not rounded to 8 bits. In 8 bits both of its operands would need
a transpose, with a scale for each column of each group.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions, GroupedResult
from jax_kernels.ops.grouped import gradients
from jax_kernels.ops.matmul.fp8 import DTYPES
from jax_kernels.ops.matmul.gradients import ScaledCotangents, epilogue_gradients
from jax_kernels.ops.matmul.quantized_rows import quantized_rows
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.quantization import QuantizedArray, dequantize, quantize
from jax_kernels.reference import grouped_matmul as reference
from jax_kernels.tracing.derivatives import in_reverse_mode, no_forward_mode, straight_through
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["planned"]


def planned(call: PlannedCall, inputs: GroupedInputs) -> jax.Array:
    """out [M, N] of a planned 8-bit grouped_matmul, differentiable unless w has 8 bits.

    inputs: x of 16 or 32 bits, and w in x's dtype, or in 8 bits with w_scale.
    """
    if call.implementation == "xla":
        return _plain(call, inputs)
    return _by_kernels(call, in_reverse_mode(inputs, no_forward_mode("grouped_matmul")))


def _out(call, inputs):
    return _run(call, inputs, saves=False).out


def _run(call: PlannedCall, inputs: GroupedInputs, *, saves: bool) -> GroupedResult:
    """The GroupedResult of the forward: quantizes the operands and runs the call's implementation.

    saves: whether the result has the preactivation.
    """
    options = dataclasses.replace(call.options, transpose_w=True, saves_preactivation=saves)
    x, w = quantized_rows(call, inputs.x), _weights(call, inputs)
    quantized = inputs._replace(x=x.values, x_scale=x.scale, w=w.values, w_scale=w.scale)
    return gradients.forward_of(dataclasses.replace(call, options=options))(quantized)


def _weights(call: PlannedCall, inputs: GroupedInputs) -> QuantizedArray:
    """The weights as a QuantizedArray [G, N, K], with a scale for each column of w. 8-bit weights keep their values."""
    w = inputs.w if call.options.transpose_w else inputs.w.mT
    if inputs.w_scale is not None:
        return QuantizedArray(values=w, scale=inputs.w_scale, scaling="row")
    return quantized_rows(call, w) if call.options.transpose_w else quantize(w, scaling="row")


@under_defaults
def _forward(call, inputs):
    """(out, (inputs, the GroupedResult without out)). Raises NotImplementedError if w has 8 bits."""
    if inputs.w.dtype in DTYPES:
        raise NotImplementedError(
            "grouped_matmul: weights of 8 bits have no gradients, want 16- or 32-bit weights with precision='fp8'"
        )
    result = _run(call, inputs, saves=call.options.activation is not None)
    return result.out, (inputs, result._replace(out=None))  # type: ignore[arg-type]


@under_defaults
def _backward(call, residuals, dout):
    """(GroupedInputs of the gradients,). dout: the cotangent of out, [M, N]."""
    inputs, saved = residuals
    dz, _ = epilogue_gradients(call.options, saved, dout.astype(jnp.float32))
    dbias = None
    if inputs.bias is not None:
        dbias = reference.sum_of_rows(dz, inputs.group_sizes).astype(inputs.bias.dtype)
    dx = _input_gradient(call, inputs, dz.astype(dout.dtype))
    dw = _weight_gradient(call, inputs, dz, dout.dtype)
    return (GroupedInputs(x=dx, w=dw, group_sizes=None, bias=dbias),)  # type: ignore[arg-type]


def _input_gradient(call: PlannedCall, inputs: GroupedInputs, dz: jax.Array) -> jax.Array:
    """The gradient of x, in x's shape and dtype: an 8-bit matmul of dz [M, N], in e5m2, and each group's w, in e4m3."""
    options = GroupedOptions(out_dtype=str(inputs.x.dtype), transpose_w=True, scaling=call.options.scaling)
    of_rows = quantized_rows(call, dz, "e5m2")
    is_turned = call.options.transpose_w
    w = quantize(inputs.w.mT, scaling="row") if is_turned else quantized_rows(call, inputs.w)
    given = GroupedInputs(
        x=of_rows.values, w=w.values, group_sizes=inputs.group_sizes, x_scale=of_rows.scale, w_scale=w.scale
    )
    dx = gradients.further(call, given, options).out
    return dx if inputs.gather is None else gradients.scattered(dx, inputs.gather, inputs.x.shape[0])


def _weight_gradient(call: PlannedCall, inputs: GroupedInputs, dz: jax.Array, of_out: Any) -> jax.Array:
    """The gradient of w, in its shape and dtype: a 16-bit matmul of x and dz, in bfloat16 for float32 x.

    dz: float32 [M, N]. of_out: the dtype of out.
    """
    dtype = jnp.dtype(jnp.bfloat16) if inputs.x.dtype == jnp.float32 else inputs.x.dtype
    if dtype == jnp.float16 and of_out == jnp.float32:  # other rows may not set the scale of float16
        dz = gradients.without_other_rows(dz, inputs.group_sizes)
    scaled = ScaledCotangents.of(dz, None, of_out, dtype)
    rounded = inputs._replace(x=inputs.x.astype(dtype))
    dw = scaled.back(functools.partial(gradients.weight_gradient, call, rounded, scaled.dz))
    return dw.astype(inputs.w.dtype)


def _straight_through(call: PlannedCall, inputs: GroupedInputs) -> jax.Array:
    """out [M, N] of the call, computed in float32 from the rounded x and weights. JAX can differentiate it.

    Derivatives treat rounding as the identity ("straight-through"). Scales have no gradients.
    """
    through = lambda x, of: dequantize(of) + (x.astype(jnp.float32) - lax.stop_gradient(x.astype(jnp.float32)))
    fixed = jax.tree.map(lax.stop_gradient, inputs)
    of_w = _weights(call, fixed)
    w = dequantize(of_w) if inputs.w_scale is not None else inputs.w if call.options.transpose_w else inputs.w.mT
    options = dataclasses.replace(call.options, transpose_w=True, scaling=None, precision="fp32")
    given = inputs._replace(x=through(inputs.x, quantize(fixed.x, scaling="row")), w=through(w, of_w), w_scale=None)
    return reference.grouped_matmul(given, options).out


def _straight_gradients(call: PlannedCall, inputs: GroupedInputs, dout: jax.Array) -> tuple[GroupedInputs]:
    """(GroupedInputs of the gradients of the float32 call on rounded values,)."""
    (found,) = jax.vjp(functools.partial(_straight_through, call), inputs)[1](dout)
    return (found._replace(group_sizes=None, gather=None),)


_by_kernels = jax.custom_vjp(_out, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward)


_plain = straight_through(_out, _forward, _backward, _straight_through, _straight_gradients)
