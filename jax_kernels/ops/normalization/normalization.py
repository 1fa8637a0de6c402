"""layer_norm and rms_norm: their checks, gradient and table of implementations."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_kernels import dispatch
from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.inputs.normalization import NormGradients, NormInputs, NormOptions, NormResult
from jax_kernels.ops import checks, unsupported
from jax_kernels.ops.planned_op import Blocks, PlannedCall, PlannedOp, kernel, no_calls, with_batch
from jax_kernels.ops.sharding.explicit_axes import as_rows, with_explicit_axes
from jax_kernels.ops.sharding.partitioning import ArrayAxes, Axis, Shares, is_partitioned, partitioned
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.specs import NormBackwardTriton
from jax_kernels.pallas.normalization.sm90 import backward as backward_sm90
from jax_kernels.pallas.normalization.sm90 import forward as forward_sm90
from jax_kernels.pallas.normalization.sm90.traits import cluster_of, row_warps_of
from jax_kernels.pallas.normalization.triton import backward as backward_triton
from jax_kernels.pallas.normalization.triton import forward as forward_triton
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.plain_numbers import with_plain_numbers
from jax_kernels.quantization import FORMATS, QuantizedArray
from jax_kernels.reference import normalization as reference
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["IMPLEMENTATIONS", "NormRequest", "layer_norm", "prepare", "rms_norm", "run"]


@dataclasses.dataclass(frozen=True)
class NormRequest(Request):
    """A call of layer_norm or rms_norm without its arrays.

    rows: the number of rows of x, with `columns` values each. dtype: x's. quantize: the 8-bit format of out, "e4m3" or
    "e5m2"; None for x's dtype.
    """

    rows: int
    columns: int
    dtype: str
    quantize: str | None = None


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
      scale_offset: added to scale.
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
    return OPS[op].call(request, options, implementation), as_varying(inputs, varying_axes(inputs))


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
    if quantize is not None and quantize not in tuple(FORMATS):
        raise ValueError(f"quantize: got {quantize!r}, want 'e4m3', 'e5m2' or None")
    checks.check_implementation(implementation)
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
        raise TypeError(f"{name}: got dtype {weights.dtype}, want x's dtype {x.dtype}, or float32")
    if weights.shape != x.shape[-1:]:
        raise ValueError(f"{name}: got shape {weights.shape}, want [N] = {x.shape[-1:]}")
    return checks.reshaped(weights, weights.shape, weights.dtype)


def _supports_triton(request: NormRequest) -> str | None:
    if reason := unsupported.below(request, (8, 0)):
        return reason
    if request.quantize is not None and (reason := unsupported.below(request, (8, 9))):
        return f"to round to {request.quantize} {reason}"
    if request.rows == 0:
        return "there are no rows"
    if request.quantize is not None and not reaches(request.rows * request.columns, itemsize=1):
        return unsupported.OUT_OF_REACH
    return unsupported.no_gpu(request)


def _supports_mosaic(request: NormRequest) -> str | None:
    """The reason, in words for users, why the Hopper kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_gpu(request) or unsupported.not_hopper(request):
        return reason
    if request.rows == 0:
        return "there are no rows"
    if request.quantize is not None:
        return "it has no quantized output; Triton's kernel has one"
    if request.dtype == "float32":
        return "its rings in shared memory are for rows of bfloat16 and float16, not of float32"
    if row_warps_of(request.columns, 1) is None and not _is_clustered(request):
        return (
            "it needs columns that are a multiple of 128 up to 2048, of 512 up to 8192 or of 1024 up to 16384, "
            f"and these are {request.columns}"
        )
    return unsupported.no_mosaic(request)


def _is_clustered(request: NormRequest) -> bool:
    """Whether the Hopper forward splits each row over the CTAs of a cluster, and the backward is Triton's.

    The block spec for this number of columns decides.
    """
    row, _ = block_specs.norm_row(request.device.compute_capability, "mosaic_gpu", columns=request.columns)
    return cluster_of(request.columns, row.forward) > 1 and isinstance(row.backward, NormBackwardTriton)


def _mosaic_backward(*arrays: Any, config: Any, **statics: Any) -> NormGradients:
    """The NormGradients by the kernel that the block spec names: Triton's for rows that do not fit on an SM.

    arrays: NormInputs, NormOptions, the forward's NormResult, and the cotangents of its out and its total (or None), as
    both kernels take them. config: the block spec of the backward, whose type decides. statics: the kernels' other
    keywords.
    """
    is_triton = isinstance(config, NormBackwardTriton)
    run = backward_triton.norm_backward if is_triton else backward_sm90.norm_backward
    return run(*arrays, config=config, **statics)


def _config(implementation: str, request: NormRequest) -> tuple[Blocks, str]:
    row, source = block_specs.norm_row(request.device.compute_capability, implementation, columns=request.columns)
    return Blocks(forward=row.forward, backward=row.backward, core_count=request.device.core_count), source


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel's function with a vmap that runs the calls one after the other.

    Pallas has no vmap for Mosaic kernels. function: takes (NormInputs, NormOptions, *arrays, **statics), like the
    result. options and statics are hashable, and only inputs and arrays may be mapped.
    """

    def run(inputs: NormInputs, options: NormOptions, *arrays: Any, **statics: Any) -> Any:
        call = lambda inputs, *arrays: function(inputs, options, *arrays, **statics)
        return jax.custom_batching.sequential_vmap(call)(inputs, *arrays)

    return run


def _by_joined_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a forward with a vmap. If all calls share scale and bias, the mapped axis becomes an outer axis of x.

    Otherwise the calls run one after the other.
    """

    def run(inputs: NormInputs, options: NormOptions, **statics: Any) -> NormResult:
        call = jax.custom_batching.custom_vmap(lambda inputs: function(inputs, options, **statics))

        @call.def_vmap
        def _(size: int, moves: Any, inputs: NormInputs):
            if size == 0:
                return no_calls(call, moves, (inputs,))
            mapped = moves[0]
            if mapped.scale or mapped.bias:
                mapped_axes = jax.tree.map(lambda moves: 0 if moves else None, mapped)
                results = jax.vmap(lambda inputs: _one_by_one(function)(inputs, options, **statics), (mapped_axes,))(
                    inputs
                )
            else:
                arrays = {name: x for name in ("x", "residual") if (x := getattr(inputs, name)) is not None}
                joined = {name: with_batch(size, x, getattr(mapped, name)) for name, x in arrays.items()}
                results = call(inputs._replace(**joined))
            return results, jax.tree.map(lambda _: True, results)

        return call(inputs)

    return run


def _of_rows(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with `change` applied to each array that has x's outer axes: to all arrays except scale and bias."""
    if not isinstance(tree, NormInputs | NormGradients):
        return jax.tree.map(change, tree)
    changed = jax.tree.map(change, tree._replace(scale=None, bias=None))
    return changed._replace(scale=tree.scale, bias=tree.bias)


def _by_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel's function of arrays [rows, columns], so that it takes and returns arrays [..., columns].

    function: takes (NormInputs, NormOptions, *arrays, **statics). The outer axes are all axes of the inputs' x but the
    last; arrays and results have them too. scale and bias, and their gradients, are passed as they are.
    """

    def run(inputs: NormInputs, options: NormOptions, *arrays: Any, **statics: Any) -> Any:
        outer = inputs.x.shape[:-1]
        in_rows = lambda x: x.reshape(math.prod(outer), *x.shape[len(outer) :])
        given = [_of_rows(tree, in_rows) for tree in (inputs, *arrays)]
        result = function(given[0], options, *given[1:], **statics)
        return _of_rows(result, lambda x: x.reshape(*outer, *x.shape[1:]))

    return run


def _shared(
    function: Callable[..., Any], with_vmap: Callable[[Any], Any], *, has_vmap: bool = False
) -> Callable[..., Any]:
    """Wraps a kernel's function of [rows, columns] for arrays [..., columns], whose outer axes devices shard under jit.

    with_vmap: adds a vmap to a function. has_vmap: whether the kernel's function has a vmap of its own, which is used
    if XLA does not partition the call. The outer axes are merged only on a device: several sharded axes, merged into
    rows, would have no sharding, and XLA would gather them.
    """
    by_rows = _by_rows(function)
    alone = by_rows if has_vmap else with_vmap(by_rows)

    def of_outer(inputs: NormInputs, options: NormOptions, *arrays: Any, **statics: Any) -> Any:
        lengths = {f"rows{i}": length for i, length in enumerate(inputs.x.shape[:-1])}
        outer = tuple(map(Axis, lengths))

        def axes(tree: Any) -> list[ArrayAxes]:
            has_outer = _of_rows(jax.tree.map(lambda _: False, tree), lambda _: True)
            own = lambda x, has: (*outer, *[None] * (x.ndim - len(outer))) if has else (None,) * x.ndim
            return list(map(own, jax.tree.leaves(tree), jax.tree.leaves(has_outer)))

        shares = Shares(
            arguments=[of for tree in (inputs, *arrays) for of in axes(tree)], results=axes, lengths=lengths
        )
        local = lambda inputs, *arrays: by_rows(inputs, options, *arrays, **statics)
        key = function, options, len(outer), tuple(statics.items())
        return partitioned(local, shares, key)(inputs, *arrays)

    def run(inputs: NormInputs, options: NormOptions, *arrays: Any, **statics: Any) -> Any:
        if not is_partitioned():
            return alone(inputs, options, *arrays, **statics)
        return with_vmap(of_outer)(inputs, options, *arrays, **statics)

    return run


def _xla_forward(inputs, options, *, config, interpret):
    return reference.norm_forward(inputs, options)


def _xla_backward(inputs, options, result, dout, dtotal, *, config, interpret):
    return reference.norm_backward(inputs, options, result, dout, dtotal)


IMPLEMENTATIONS = {
    "triton": Implementation(
        "triton",
        _supports_triton,
        functools.partial(_config, "triton"),
        _shared(kernel(forward_triton.norm_forward, "forward", once=True), _by_joined_rows, has_vmap=True),
        _shared(kernel(backward_triton.norm_backward, "backward", once=True), _one_by_one, has_vmap=True),
    ),
    "mosaic_gpu": Implementation(
        "mosaic_gpu",
        _supports_mosaic,
        functools.partial(_config, "mosaic_gpu"),
        _shared(kernel(forward_sm90.norm_forward, "forward", once=True), _by_joined_rows),
        _shared(kernel(_mosaic_backward, "backward", once=True), _one_by_one),
    ),
    "xla": Implementation("xla", lambda request: None, without_blocks, _xla_forward, _xla_backward),
}


def _order(request: NormRequest) -> tuple[tuple[str, ...], str]:
    return block_specs.norm_order(request.device.compute_capability, columns=request.columns)


OPS = {name: PlannedOp(name, IMPLEMENTATIONS, _order) for name in ("layer_norm", "rms_norm")}
OPS["layer_norm"].explained_by(functools.partial(_check, op="layer_norm"))(layer_norm)
OPS["rms_norm"].explained_by(functools.partial(_check, op="rms_norm"))(rms_norm)


def run(call: PlannedCall, inputs: NormInputs) -> Any:
    """out, or (out, x + residual) with a residual, of a prepared call; differentiable unless out is quantized.

    out is like x; with quantize, it is a QuantizedArray with a scale for each row.
    """
    out: Any
    if call.options.quantize is None:
        out, total = _norm(call, inputs)
    else:
        values, scale, total = _quantized_norm(call, inputs)
        out = QuantizedArray(values=values, scale=scale, scaling="row", axis=-1)
    return out if total is None else (out, total)


def _norm(call: PlannedCall, inputs: NormInputs):
    """(out, x + residual), both like x, differentiable; the second is None without a residual."""
    if call.implementation == "xla":
        return _plain(call, inputs)
    op = "layer_norm" if call.options.is_centred else "rms_norm"
    return _by_kernels(call, in_reverse_mode(inputs, no_forward_mode(op)))


def _results(call, inputs):
    result = _forward(call, inputs)
    return result.out, result.total


def _forward(call: PlannedCall, inputs: NormInputs) -> NormResult:
    implementation = IMPLEMENTATIONS[call.implementation]
    return implementation.forward(inputs, call.options, config=call.config, interpret=call.interpret)


@under_defaults
def _norm_fwd(call, inputs):
    result = _forward(call, inputs)
    if result.total is not None:  # the backward reads only the sum of x and residual
        inputs = inputs._replace(x=result.total, residual=None)
    return (result.out, result.total), (inputs, result._replace(out=None, total=None), result.total is not None)  # type: ignore[arg-type]


@under_defaults
def _norm_bwd(call, residuals, cotangents):
    inputs, result, has_residual = residuals
    dout, dtotal = cotangents
    backward = IMPLEMENTATIONS[call.implementation].backward
    assert backward is not None
    statics = {"config": call.config, "interpret": call.interpret}
    gradients: NormGradients = backward(inputs, call.options, result, dout, dtotal if has_residual else None, **statics)
    dresidual = gradients.x if has_residual else None
    return (NormInputs(x=gradients.x, residual=dresidual, scale=gradients.scale, bias=gradients.bias),)


_by_kernels = jax.custom_vjp(_results, nondiff_argnums=(0,))
_by_kernels.defvjp(_norm_fwd, _norm_bwd)
_plain = in_both_modes(_results, _norm_fwd, _norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized_norm(call: PlannedCall, inputs: NormInputs):
    """(out in 8 bits, float32 scales of its rows, x + residual or None without one). It has no derivative."""
    result = _forward(call, inputs)
    return result.out, result.out_scale, result.total


def _quantized_norm_fwd(call, inputs):
    raise NotImplementedError(
        f"quantize: got {call.options.quantize!r} in a call that is differentiated, want None: an output of 8 bits has "
        "no gradient. For gradients, normalise without quantize and use matmul(..., precision='fp8')"
    )


def _quantized_norm_bwd(call, residuals, cotangents):
    raise AssertionError("the forward raises")


_quantized_norm.defvjp(_quantized_norm_fwd, _quantized_norm_bwd)
