"""Matmuls with low-bit weights: their arguments, and the gradients of all arrays except the weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.inputs.matmul import MatmulInputs
from jax_kernels.ops.matmul import gradients
from jax_kernels.ops.planned_op import PlannedCall, jitted_in_eager_shard_map
from jax_kernels.quantization import QuantizedArray
from jax_kernels.quantization.formats import FORMATS, LowBit, dequantized
from jax_kernels.tracing.derivatives import in_both_modes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["checked_stored", "layout_of", "planned"]


def layout_of(w: Any) -> LowBit | None:
    """The LowBit layout of w if it is a QuantizedArray of low-bit weights, such as int4; None for any other operand."""
    return w.layout if isinstance(w, QuantizedArray) else None


def checked_stored(name: str, w: QuantizedArray, transpose_w: bool, depth: int) -> tuple[Any, Any]:
    """(stored values [N, K] or [N, bytes] if packed, scales) of low-bit weights. Raises ValueError if they do not fit.

    name: of the argument, in messages. depth: K of x. transpose_w: w is [N, K] instead of [K, N]; the stored values are
    [N, K] in both cases.
    """
    layout = w.layout
    assert layout is not None
    if layout.format not in FORMATS:
        raise ValueError(f"{name}: got format {layout.format!r}, want one of {', '.join(map(repr, FORMATS))}")
    axis = -1 if transpose_w else -2
    if w.axis != axis:
        want = "[N, K] (transpose_w)" if transpose_w else "[K, N]"
        raise ValueError(f"{name}: got weights quantized along axis {w.axis}, want axis {axis}, K of {want}")
    if w.ndim != 2 or w.length != depth:
        want = "[N, K]" if transpose_w else "[K, N]"
        raise ValueError(f"{name}: got shape {w.shape}, want {want} with x's K = {depth}")
    columns = w.values.shape[0]
    if w.values.dtype != layout.dtype or w.values.shape[1] != layout.bytes_of(depth):
        got, shape = f"{w.values.dtype}{list(w.values.shape)}", [columns, layout.bytes_of(depth)]
        raise ValueError(f"{name}: got values {got}, want {jnp.dtype(layout.dtype)}{shape}")
    dtypes = (jnp.float8_e8m0fnu, jnp.uint8) if layout.is_mx else (jnp.float32, jnp.bfloat16)  # uint8: from PyTorch
    if w.scale.dtype not in dtypes or w.scale.shape != layout.scale_shape(depth, columns):
        got, names = f"{w.scale.dtype}{list(w.scale.shape)}", " or ".join(str(jnp.dtype(dtype)) for dtype in dtypes)
        raise ValueError(f"{name}: got scale {got}, want {names}{list(layout.scale_shape(depth, columns))}")
    return w.values, w.scale


@jitted_in_eager_shard_map
def planned(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """out [..., N] of a planned matmul of x [..., K] with low-bit weights.

    Differentiable, except in the weights and their scales: their gradients raise NotImplementedError.
    """
    return _plain(call, inputs) if call.implementation == "xla" else _by_kernels(call, gradients.reverse_mode(inputs))


def _out(call, inputs):
    return gradients.batched(call)(inputs).out


@under_defaults
def _forward(call, inputs):
    """(out, residuals): the forward under differentiation.

    Raises NotImplementedError if the weights or their scales are differentiated.
    """
    for name in ("w", "w_scale", "w_up", "w_up_scale"):
        leaf = getattr(inputs, name)
        if leaf is not None and leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact):
            raise NotImplementedError(
                f"matmul: {name} of low-bit weights has no gradient, want it closed over, or behind stop_gradient"
            )
    inputs = jax.tree.map(lambda leaf: leaf.value, inputs, is_leaf=lambda x: hasattr(x, "perturbed"))
    saves = call.options.activation is not None or inputs.w_up is not None
    options = dataclasses.replace(call.options, saves_preactivation=saves)
    result = gradients.batched(dataclasses.replace(call, options=options))(inputs)
    residual = None if inputs.residual is None else inputs.residual.dtype.type(0)  # shows that the residual existed
    return result.out, (inputs._replace(residual=residual), result._replace(out=None))  # type: ignore[arg-type]


@under_defaults
def _backward(call, residuals, dout):
    """(MatmulInputs of the gradients of x, bias and residual,); None for the weights. dout: [..., N]."""
    inputs, saved = residuals
    if isinstance(dout, jax.custom_derivatives.SymbolicZero):
        dout = jnp.zeros(dout.shape, dout.dtype)
    dz, dup = gradients.epilogue_gradients(call.options, saved, dout.astype(jnp.float32))
    dx = _dx(call, inputs, inputs.w, inputs.w_scale, dz, summed=dup is not None)
    if dup is not None:
        dx = (dx + _dx(call, inputs, inputs.w_up, inputs.w_up_scale, dup, summed=True)).astype(inputs.x.dtype)
    found: dict[str, Any] = {"x": dx}
    if inputs.bias is not None:
        found["bias"] = gradients.sum_of_rows(dz).astype(inputs.bias.dtype)
    if inputs.residual is not None:
        found["residual"] = dout
    fields: dict[str, Any] = {name: found.get(name) for name in MatmulInputs._fields}
    return (MatmulInputs(**fields),)


def _dx(call: PlannedCall, inputs: MatmulInputs, w: Any, scale: Any, dz: Any, *, summed: bool) -> jax.Array:
    """dz wᵀ [..., K], the gradient of x, by a matmul with the dequantised weights.

    w, scale: the stored values and their scales. dz: the float32 cotangent of x @ w. summed: True returns float32, for
    a gradient that is a sum of two such matmuls (of a gated unit); False returns x's dtype.
    """
    dtype = inputs.x.dtype
    wide = jnp.float32 if dtype == jnp.float16 else dtype  # float16 lacks the range of the scales
    w = dequantized(w, scale, call.options.low_bit, inputs.x.shape[-1]).astype(wide)
    out_dtype = "float32" if summed else str(dtype)
    if wide != dtype:
        call = dataclasses.replace(call, options=dataclasses.replace(call.options, precision="tf32"))
    return gradients.product(call, dz.astype(wide), w, out_dtype=out_dtype)


_by_kernels = jax.custom_vjp(_out, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward, symbolic_zeros=True)
_plain = in_both_modes(_out, _forward, _backward, symbolic_zeros=True)
