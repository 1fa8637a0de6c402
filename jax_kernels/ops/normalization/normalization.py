"""layer_norm and rms_norm, and their checks."""

import functools
import math
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_kernels import dispatch
from jax_kernels.inputs.normalization import NormInputs, NormOptions
from jax_kernels.ops import checks
from jax_kernels.ops.normalization.implementations import OPS, NormRequest
from jax_kernels.ops.normalization.vjp import run
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.explicit_axes import as_rows, with_explicit_axes
from jax_kernels.plain_numbers import with_plain_numbers
from jax_kernels.quantization import FORMATS, QuantizedArray
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["layer_norm", "prepare", "rms_norm"]


@overload
def layer_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    bias: Float[Array, " N"] | None = ...,
    *,
    residual: None = ...,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: None = ...,
    implementation: str | None = ...,
) -> Float[Array, "*M N"]: ...
@overload
def layer_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    bias: Float[Array, " N"] | None = ...,
    *,
    residual: Float[Array, "*M N"],
    eps: float = ...,
    scale_offset: float = ...,
    quantize: None = ...,
    implementation: str | None = ...,
) -> tuple[Float[Array, "*M N"], Float[Array, "*M N"]]: ...
@overload
def layer_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    bias: Float[Array, " N"] | None = ...,
    *,
    residual: None = ...,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: str,
    implementation: str | None = ...,
) -> QuantizedArray: ...
@overload
def layer_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    bias: Float[Array, " N"] | None = ...,
    *,
    residual: Float[Array, "*M N"],
    eps: float = ...,
    scale_offset: float = ...,
    quantize: str,
    implementation: str | None = ...,
) -> tuple[QuantizedArray, Float[Array, "*M N"]]: ...
@overload
def layer_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    bias: Float[Array, " N"] | None = ...,
    *,
    residual: Float[Array, "*M N"] | None = ...,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "*M N"] | QuantizedArray | tuple[Float[Array, "*M N"] | QuantizedArray, Float[Array, "*M N"]]: ...
@with_plain_numbers("eps", "scale_offset")
@with_explicit_axes(as_rows)
@under_defaults
@jax.named_scope("layer_norm")
def layer_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = None,
    bias: Float[Array, " N"] | None = None,
    *,
    residual: Float[Array, "*M N"] | None = None,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    quantize: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "*M N"] | QuantizedArray | tuple[Float[Array, "*M N"] | QuantizedArray, Float[Array, "*M N"]]:
    """Layer normalisation over the last axis, after the addition of an optional residual.

    Equivalent to the following JAX code, with statistics in float32::

        x = x if residual is None else x + residual
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        out = (x - mean) / jnp.sqrt(variance + eps) * (scale + scale_offset) + bias
        out = out if residual is None else (out, x)

    The variance is computed from the differences from the mean, so that it is accurate if the mean is much larger. The
    Triton forward reads x once from device memory. The Triton backward reads x and the gradient of out once, and twice
    if N is above 8192. It sums the gradients of scale and bias in float32.

    Args:
      x: [..., N], bfloat16, float16 or float32.
      scale, bias: [N], in x's dtype or float32. None leaves it out.
      residual: like x, added to it, rounded to x's dtype.
      eps: added to the variance; 0 or more.
      scale_offset: added to scale; 0.0 if scale is None.
      quantize: "e4m3" or "e5m2" rounds out to 8 bits in the same pass. The result equals
        quantize(out, quantize, scaling="row") with out in float32: each row has a scale, namely its largest magnitude
        before any rounding divided by the format's largest value. None leaves out in x's dtype.
      implementation: "triton", "mosaic_gpu" or "xla"; None picks the device's first that supports the call.

    Returns:
      out, like x; with a residual, (out, x + residual). With quantize, out is a QuantizedArray with scaling="row" and
      axis=-1, which matmul takes directly. Its rows with a NaN or an infinity become NaN.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason), or a call with
        quantize is differentiated.

    Source: Ba et al., "Layer Normalization" (2016), arXiv:1607.06450.
    """
    call, inputs = prepare(
        x=x,
        scale=scale,
        bias=bias,
        residual=residual,
        eps=eps,
        scale_offset=scale_offset,
        quantize=quantize,
        implementation=implementation,
        op="layer_norm",
    )
    return run(call, inputs)


@overload
def rms_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    *,
    residual: None = ...,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: None = ...,
    implementation: str | None = ...,
) -> Float[Array, "*M N"]: ...
@overload
def rms_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    *,
    residual: Float[Array, "*M N"],
    eps: float = ...,
    scale_offset: float = ...,
    quantize: None = ...,
    implementation: str | None = ...,
) -> tuple[Float[Array, "*M N"], Float[Array, "*M N"]]: ...
@overload
def rms_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    *,
    residual: None = ...,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: str,
    implementation: str | None = ...,
) -> QuantizedArray: ...
@overload
def rms_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    *,
    residual: Float[Array, "*M N"],
    eps: float = ...,
    scale_offset: float = ...,
    quantize: str,
    implementation: str | None = ...,
) -> tuple[QuantizedArray, Float[Array, "*M N"]]: ...
@overload
def rms_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = ...,
    *,
    residual: Float[Array, "*M N"] | None = ...,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "*M N"] | QuantizedArray | tuple[Float[Array, "*M N"] | QuantizedArray, Float[Array, "*M N"]]: ...
@with_plain_numbers("eps", "scale_offset")
@with_explicit_axes(as_rows)
@under_defaults
@jax.named_scope("rms_norm")
def rms_norm(
    x: Float[Array, "*M N"],
    scale: Float[Array, " N"] | None = None,
    *,
    residual: Float[Array, "*M N"] | None = None,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    quantize: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "*M N"] | QuantizedArray | tuple[Float[Array, "*M N"] | QuantizedArray, Float[Array, "*M N"]]:
    """Normalisation by the root mean square of the last axis, after the addition of an optional residual.

    Equivalent to the following JAX code, in float32::

        x = x if residual is None else x + residual
        out = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * (scale + scale_offset)
        out = out if residual is None else (out, x)

    Args:
      x: [..., N], bfloat16, float16 or float32.
      scale: [N], in x's dtype or float32. None leaves it out.
      residual: like x, added to it, rounded to x's dtype.
      eps: added to the mean square; 0 or more.
      scale_offset: added to scale: 1.0 for weights that are stored as differences from 1, such as Gemma's.
      quantize: "e4m3" or "e5m2" rounds out to 8 bits in the same pass. The result equals
        quantize(out, quantize, scaling="row") with out in float32: each row has a scale. None leaves out in x's dtype.
      implementation: "triton", "mosaic_gpu" or "xla"; None picks the device's first that supports the call.

    Returns:
      out, like x; with a residual, (out, x + residual). With quantize, out is a QuantizedArray with scaling="row" and
      axis=-1, which matmul takes directly. Its rows with a NaN or an infinity become NaN.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason), or a call with
        quantize is differentiated.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), arXiv:1910.07467.
    """
    call, inputs = prepare(
        x=x,
        scale=scale,
        bias=None,
        residual=residual,
        eps=eps,
        scale_offset=scale_offset,
        quantize=quantize,
        implementation=implementation,
        op="rms_norm",
    )
    return run(call, inputs)


def prepare(
    *,
    op: str,
    eps: float,
    scale_offset: float,
    implementation: str | None,
    quantize: str | None = None,
    **arrays: Any,
) -> tuple[PlannedCall, NormInputs]:
    """(planned call, inputs) of a layer_norm or rms_norm, the arguments of `run`. Raises the op's errors.

    op: "layer_norm" or "rms_norm". arrays: x, scale, bias and residual, by name; all but x may be None.
    """
    request, inputs = _check(
        op=op, eps=eps, scale_offset=scale_offset, quantize=quantize, implementation=implementation, **arrays
    )
    capability = request.device.compute_capability
    options = NormOptions(
        is_centred=op == "layer_norm",
        eps=float(eps),
        scale_offset=float(scale_offset),
        quantize=quantize,
        quantizes_by_half=quantize is not None and capability is not None and capability < (9, 0),
    )
    inputs = as_varying(inputs, varying_axes(inputs))
    moving = tuple(name for name in ("x", "scale", "bias") if getattr(inputs, name) is not None)
    return OPS[op].tuned(
        OPS[op].call(request, options, implementation),
        request,
        run,
        inputs,
        implementation,
        moving=() if quantize is not None else moving,
    )


def _check(
    *, x, scale, residual, eps, scale_offset, implementation, op, quantize=None, bias=None
) -> tuple[NormRequest, NormInputs]:
    """(request, arrays) of a call of `op`. Raises the errors that layer_norm documents."""
    x = checks.checked_array("x", x)
    if x.dtype not in checks.DTYPES:
        raise TypeError(f"x: got dtype {x.dtype}, want bfloat16, float16 or float32")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {x.shape}, want [..., N] with N above 0")
    if residual is not None:
        residual = checks.checked_array("residual", residual)
        if (residual.shape, residual.dtype) != (x.shape, x.dtype):
            got = f"{residual.dtype}{list(residual.shape)}"
            raise ValueError(f"residual: got {got}, want x's dtype and shape {x.dtype}{list(x.shape)}")
    scale, bias = (_weights(name, weights, x) for name, weights in (("scale", scale), ("bias", bias)))
    checks.check_number("eps", eps)
    checks.check_number("scale_offset", scale_offset)
    if eps is None or eps < 0:
        raise ValueError(f"eps: got {eps}, want a number of 0 or more")
    if scale_offset is None or (scale_offset and scale is None):
        raise ValueError(f"scale_offset: got {scale_offset} with scale={scale}, want 0.0, or a scale to add it to")
    checks.check_names(implementation=implementation)
    if quantize is not None and not (isinstance(quantize, str) and quantize in FORMATS):
        raise ValueError(f"quantize: got {quantize!r}, want 'e4m3', 'e5m2' or None")
    request = NormRequest(
        op=op,
        device=dispatch.target_device(x),
        rows=math.prod(x.shape[:-1]),
        columns=x.shape[-1],
        dtype=str(x.dtype),
        quantize=quantize,
    )
    return request, NormInputs(x=x, residual=residual, scale=scale, bias=bias)


def _weights(name: str, weights: Any, x: Any) -> Any:
    """The argument scale or bias as a jax.Array [N]; None stays None.

    Raises TypeError or ValueError if its type, dtype or shape does not fit x.
    """
    if weights is None:
        return None
    if not isinstance(weights, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"{name}: got {type(weights).__name__}, want an array")
    if weights.dtype not in (x.dtype, jnp.dtype(jnp.float32)):
        other = "" if x.dtype == jnp.float32 else ", or float32"
        raise TypeError(f"{name}: got dtype {weights.dtype}, want x's dtype {x.dtype}{other}")
    if weights.shape != x.shape[-1:]:
        raise ValueError(f"{name}: got shape {weights.shape}, want [N] = {x.shape[-1:]}")
    return checks.reshaped(weights, weights.shape, weights.dtype)


OPS["layer_norm"].explained_by(functools.partial(_check, op="layer_norm"))(layer_norm)
OPS["rms_norm"].explained_by(functools.partial(_check, op="rms_norm"))(rms_norm)
