"""A planned norm with its gradient."""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels import chunks
from jax_kernels.chunks import Need
from jax_kernels.inputs.normalization import NormGradients, NormInputs, NormResult
from jax_kernels.ops.normalization.implementations import IMPLEMENTATIONS
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.quantization import QuantizedArray
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["RESIDUALS", "run", "with_input"]

# Names for policies of jax.checkpoint: the norm's result, x + residual, and the statistics of the rows.
RESIDUALS = "norm_out", "norm_total", "norm_statistics"


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


def with_input(call: PlannedCall, inputs: NormInputs) -> tuple[Any, jax.Array]:
    """(out, x) of a prepared call without a residual and without quantize, differentiable.

    x is for further use by the caller: its cotangent is added by the norm's backward, instead of a pass of its own.
    """
    if call.implementation == "xla":
        return _plain(call, inputs)[0], inputs.x
    op = "layer_norm" if call.options.is_centred else "rms_norm"
    return _with_input(call, in_reverse_mode(inputs, no_forward_mode(op)))


def _results(call, inputs):
    result = _forward(call, inputs)
    return result.out, result.total


def _forward(call: PlannedCall, inputs: NormInputs) -> NormResult:
    """The NormResult of the call's implementation; in chunks of rows, if it ran out of memory."""
    forward = IMPLEMENTATIONS[call.implementation].forward
    rows = {name: x for name in ("x", "residual") if (x := getattr(inputs, name)) is not None}

    def part(of: tuple[slice, ...]) -> NormResult:
        given = inputs._replace(**{name: x[of] for name, x in rows.items()}) if of else inputs
        return forward(given, call.options, config=call.config, interpret=call.interpret)

    *shape, _ = inputs.x.shape
    need = Need(kept=0, temporary=0, most=chunks.known_rows(shape), axes="rows")
    name = "layer_norm" if call.options.is_centred else "rms_norm"
    return chunks.by_rows(name, need, inputs.x, part, is_partitioned(), shape)


def _named(result: NormResult) -> NormResult:
    """The result, with names for policies of jax.checkpoint."""
    out, total, statistics = RESIDUALS
    names = {"out": out, "total": total, "mean": statistics, "inverse": statistics}
    arrays = {field: x for field in names if (x := getattr(result, field)) is not None}
    return result._replace(**{field: checkpoint_name(x, names[field]) for field, x in arrays.items()})


@under_defaults
def _norm_fwd(call, inputs):
    result = _named(_forward(call, inputs))
    if result.total is not None:  # the backward reads only the sum of x and residual
        inputs = inputs._replace(x=result.total, residual=None)
    return (result.out, result.total), (inputs, result._replace(out=None, total=None), result.total is not None)  # type: ignore[arg-type]


@under_defaults
def _norm_bwd(call, residuals, cotangents):
    inputs, result, has_residual = residuals
    dout, dtotal = cotangents
    gradients = _gradients(call, inputs, result, dout, dtotal if has_residual else None)
    dresidual = gradients.x if has_residual else None
    return (NormInputs(x=gradients.x, residual=dresidual, scale=gradients.scale, bias=gradients.bias),)


def _gradients(call: PlannedCall, inputs: NormInputs, result: NormResult, dout: Any, dtotal: Any) -> NormGradients:
    """The NormGradients of the call's implementation. dtotal: the cotangent of x for other uses of it, or None."""
    backward = IMPLEMENTATIONS[call.implementation].backward
    assert backward is not None
    return backward(inputs, call.options, result, dout, dtotal, config=call.config, interpret=call.interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_input(call: PlannedCall, inputs: NormInputs):
    return _forward(call, inputs).out, inputs.x


@under_defaults
def _with_input_fwd(call, inputs):
    result = _named(_forward(call, inputs))
    return (result.out, inputs.x), (inputs, result._replace(out=None))  # type: ignore[arg-type]


@under_defaults
def _with_input_bwd(call, residuals, cotangents):
    gradients = _gradients(call, *residuals, *cotangents)
    return (NormInputs(x=gradients.x, scale=gradients.scale, bias=gradients.bias),)


_with_input.defvjp(_with_input_fwd, _with_input_bwd)
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
