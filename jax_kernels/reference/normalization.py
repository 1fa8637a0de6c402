"""layer_norm and rms_norm in plain jnp: the implementation "xla", and the equations of the kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.inputs.normalization import NormGradients, NormInputs, NormOptions, NormResult
from jax_kernels.quantization import quantize

__all__ = ["norm_backward", "norm_forward"]


def norm_forward(inputs: NormInputs, options: NormOptions) -> NormResult:
    """The NormResult of a call, by the equations in NormOptions' docstring. Everything is computed in float32."""
    total = None if inputs.residual is None else _rounded_sum(inputs.x, inputs.residual)
    x = (inputs.x if total is None else total).astype(jnp.float32)
    mean = x.mean(axis=-1) if options.is_centred else None
    centred = x if mean is None else x - mean[..., None]
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1) + options.eps)
    out = centred * inverse[..., None]
    if (weight := _weight(inputs, options)) is not None:
        out = out * weight
    if inputs.bias is not None:
        out = out + inputs.bias.astype(jnp.float32)
    if options.quantize is not None:
        quantized = quantize(out, options.quantize, scaling="row")
        return NormResult(out=quantized.values, out_scale=quantized.scale, total=total, mean=mean, inverse=inverse)
    return NormResult(out=out.astype(inputs.x.dtype), total=total, mean=mean, inverse=inverse)


def norm_backward(
    inputs: NormInputs, options: NormOptions, result: NormResult, dout: Any, dtotal: Any = None
) -> NormGradients:
    """The gradients of x, scale and bias, in their dtypes.

    result: of the forward. dout: the cotangent of out, shaped like x. dtotal: the cotangent of total (x + residual), or
    None.
    """
    x = (inputs.x if result.total is None else result.total).astype(jnp.float32)
    assert result.inverse is not None
    dout = dout.astype(jnp.float32)
    normed = (x if result.mean is None else x - result.mean[..., None]) * result.inverse[..., None]
    weight = _weight(inputs, options)
    # With g = dout * weight: dx = (g - mean(g) - normed * mean(g * normed)) * inverse
    g = dout if weight is None else dout * weight
    dx = g - normed * (g * normed).mean(axis=-1, keepdims=True)
    if options.is_centred:
        dx = dx - g.mean(axis=-1, keepdims=True)
    dx = dx * result.inverse[..., None]
    if dtotal is not None:
        dx = dx + dtotal.astype(jnp.float32)
    outer = tuple(range(x.ndim - 1))
    dscale = None if inputs.scale is None else (dout * normed).sum(axis=outer).astype(inputs.scale.dtype)
    dbias = None if inputs.bias is None else dout.sum(axis=outer).astype(inputs.bias.dtype)
    return NormGradients(x=dx.astype(inputs.x.dtype), scale=dscale, bias=dbias)


def _rounded_sum(x: Any, y: Any) -> Any:
    """x + y, rounded to x's dtype. Without reduce_precision, XLA drops the rounding to 16 bits and goes on in
    float32.
    """
    total, info = x.astype(jnp.float32) + y.astype(jnp.float32), jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(total, info.nexp, info.nmant).astype(x.dtype)


def _weight(inputs: NormInputs, options: NormOptions) -> Any:
    """The factor of each column, scale + scale_offset, in float32; None without a scale."""
    return None if inputs.scale is None else inputs.scale.astype(jnp.float32) + options.scale_offset
