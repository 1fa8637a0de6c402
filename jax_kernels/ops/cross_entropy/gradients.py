"""The planned losses, and their sum, with gradients: of each token in the backward, of the sum in the forward."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jax_kernels.inputs.linear_cross_entropy import LossGradients, LossInputs, Statistics
from jax_kernels.ops.cross_entropy.implementations import IMPLEMENTATIONS, WITH_GRADIENTS
from jax_kernels.ops.cross_entropy.partitioning import (
    shared_gradients,
    shared_losses_and_gradients,
    shared_statistics,
)
from jax_kernels.ops.planned_op import MOST_CALLS, PlannedCall
from jax_kernels.reference import linear_cross_entropy as reference
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode, with_plain_derivative
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["LossArrays", "planned", "planned_losses", "planned_sum", "reduced"]


class LossArrays(NamedTuple):
    """The arrays of a call, as planned_losses and planned_sum take them. factors: None for the loss of each token."""

    x: jax.Array
    w: jax.Array
    targets: jax.Array
    factors: jax.Array | None = None


def _one_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function(call, *arrays): an eager call of "xla" runs as one program, not as a program for each operation.

    Under jit the wrapper has no effect.
    """
    compiled = jax.jit(function, static_argnums=0, inline=True)
    return lambda call, *arrays: (compiled if call.implementation == "xla" else function)(call, *arrays)


def _with_exact_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function(call, *arrays): to JAX, logits of 8-bit values have the derivatives of exact logits."""

    def plain(call: PlannedCall, *arrays: Any) -> Any:
        options = dataclasses.replace(call.options, is_differentiable=True)
        return function(dataclasses.replace(call, options=options), *arrays)

    rounded = with_plain_derivative(function, plain)
    return lambda call, *arrays: (function if call.options.precision is None else rounded)(call, *arrays)


def planned(call: PlannedCall, arrays: LossArrays) -> jax.Array:
    """The losses of a planned call, or with factors their sum."""
    x, w, targets, factors = arrays
    return planned_losses(call, x, w, targets) if factors is None else planned_sum(call, x, w, targets, factors)


def reduced(
    call: PlannedCall,
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
    reduction: str,
    tuned: Callable[[LossArrays], tuple[PlannedCall, LossArrays]] | None = None,
) -> jax.Array:
    """The losses of a planned call, times the weights, and their sum or mean: float32 [...] or a scalar.

    weights: [...], or None for 1. reduction: "none", "sum" or "mean". tuned: PlannedOp.tuned of this call, or None to
    leave the call as it is. Other arguments are as in planned_losses.
    """
    # Inside shard_map the transpose of this cast sums the gradients of a replicated array over the devices.
    given = x, w, targets, weights
    axes = varying_axes(given)
    x, w, targets, weights = as_varying(given, axes)
    run = lambda arrays: planned(*(tuned(arrays) if tuned else (call, arrays)))
    if reduction == "none":
        losses = run(LossArrays(x=x, w=w, targets=targets))
        return losses if weights is None else losses * _factors(targets, weights, False)
    factors = _factors(targets, weights, reduction == "mean")
    return run(LossArrays(x=x, w=w, targets=targets, factors=as_varying(factors, axes)))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _factors(targets: jax.Array, weights: jax.Array | None, is_mean: bool) -> jax.Array:
    """The factor of each token's loss in the sum, or in the mean: float32 [...], 0 for tokens that do not count."""
    factors = jnp.float32(1) if weights is None else weights.astype(jnp.float32)
    factors = jnp.where(targets >= 0, factors, 0)
    return factors / jnp.where((factors != 0).any(), factors.sum(), 1) if is_mean else factors


def planned_losses(call: PlannedCall, x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss of each token of a planned call, float32 [...], differentiable. The backward makes the logits again.

    w: [D, V], or [V, D] with call.options.transpose_w; the backward keeps it as it is. targets: as in LossInputs.
    """
    if call.implementation == "xla":
        return _losses(call, x, w, targets)
    return _losses_by_kernels(call, *_flat(x, w, targets)).reshape(targets.shape)


def planned_sum(call: PlannedCall, x: jax.Array, w: jax.Array, targets: jax.Array, factors: jax.Array) -> jax.Array:
    """The sum of factors * losses, float32. A differentiated call makes all gradients in the forward.

    w, targets: as in planned_losses. factors: float32 [...], 0 for tokens that do not count.
    """
    if call.implementation == "xla":
        return _sum(call, x, w, targets, factors)
    return _sum_by_kernels(call, *_flat(x, w, targets, factors))


def _flat(x: jax.Array, w: jax.Array, *of_tokens: jax.Array) -> list[jax.Array]:
    """The arrays with one axis of tokens, as kernels take them. They have derivatives in reverse mode only."""
    arrays = [x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w, *(y.reshape(-1) for y in of_tokens)]
    return in_reverse_mode(arrays, no_forward_mode("linear_cross_entropy"))


def _inputs(call: PlannedCall, x: jax.Array, w: jax.Array, targets: jax.Array) -> LossInputs:
    return LossInputs(x=x, rows=w if call.options.transpose_w else w.T, targets=targets)


def _of_w(call: PlannedCall, drows: jax.Array) -> jax.Array:
    """The gradient of w, from the gradient of its rows."""
    return drows if call.options.transpose_w else drows.T


def _statistics(call: PlannedCall, inputs: LossInputs) -> Statistics:
    return _forward_of(call)(inputs)


def _gradients(
    call: PlannedCall, inputs: LossInputs, lse: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of (x, rows), in their dtypes, or in float32. cotangent: of the losses."""
    if call.implementation == "xla":
        return _run(call, "backward", inputs, lse, cotangent)
    cotangent, scale = reference.in_range(inputs, reference.counted(inputs, cotangent))
    found = _backward_of(call)(inputs, lse, cotangent)
    return found if scale is None else (found[0] * scale, found[1] * scale)


def _run(call: PlannedCall, direction: str, inputs: LossInputs, *arrays: jax.Array) -> Any:
    function = getattr(IMPLEMENTATIONS[call.implementation], direction)
    return function(inputs, call.options, *arrays, config=call.config, interpret=call.interpret)


@functools.lru_cache(maxsize=MOST_CALLS)
def _forward_of(call: PlannedCall) -> Callable[[LossInputs], Statistics]:
    """A function from LossInputs to the Statistics by the call's implementation."""
    run = functools.partial(_run, call, "forward")
    return run if call.implementation == "xla" else sequential_vmap(shared_statistics(run))


@functools.lru_cache(maxsize=MOST_CALLS)
def _backward_of(call: PlannedCall) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A function of (LossInputs, lse, cotangent), the gradients of (x, rows) by the call's kernels."""
    return sequential_vmap(shared_gradients(functools.partial(_run, call, "backward")))


@functools.lru_cache(maxsize=MOST_CALLS)
def _both_of(call: PlannedCall) -> Callable[[LossInputs, jax.Array], LossGradients]:
    """A function of (LossInputs, cotangent), the LossGradients by the call's kernels."""

    def run(inputs: LossInputs, cotangent: jax.Array) -> LossGradients:
        function = WITH_GRADIENTS[call.implementation]
        return function(inputs, call.options, cotangent, config=call.config, interpret=call.interpret)

    return sequential_vmap(shared_losses_and_gradients(run))


def _both(call: PlannedCall, inputs: LossInputs, cotangent: jax.Array) -> LossGradients:
    """The LossGradients by the call's kernels. cotangent: of the losses."""
    if call.implementation in WITH_GRADIENTS:
        cotangent, scale = reference.in_range(inputs, reference.counted(inputs, cotangent))
        both = _both_of(call)(inputs, cotangent)
        return both if scale is None else both._replace(dx=both.dx * scale, drows=both.drows * scale)
    found = _statistics(call, inputs)
    dx, drows = _gradients(call, inputs, found.lse, cotangent)
    return LossGradients(statistics=found, dx=dx, drows=drows)


def _losses_of(call: PlannedCall, inputs: LossInputs, found: Statistics) -> jax.Array:
    return reference.losses_of(found, inputs.targets, call.options, inputs.rows.shape[0])


@_with_exact_derivative
@_one_program
def _losses_and_lse(call: PlannedCall, x: jax.Array, w: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    inputs = _inputs(call, x, w, targets)
    found = _statistics(call, inputs)
    return _losses_of(call, inputs, found), found.lse


@_with_exact_derivative
@_one_program
def _gradients_of_arrays(
    call: PlannedCall, x: jax.Array, w: jax.Array, targets: jax.Array, lse: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of (x, w), in their dtypes. cotangent: of the losses."""
    dx, drows = _gradients(call, _inputs(call, x, w, targets), lse, cotangent)
    return dx.astype(x.dtype), _of_w(call, drows).astype(w.dtype)


def _plain_losses(call: PlannedCall, x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    return _losses_and_lse(call, x, w, targets)[0]


@under_defaults
def _losses_forward(call, x, w, targets):
    losses, lse = _losses_and_lse(call, x, w, targets)
    return losses, (x, w, targets, lse)


@under_defaults
def _losses_backward(call, residuals, cotangent):
    return *_gradients_of_arrays(call, *residuals, cotangent), None


@_one_program
def _plain_sum(call: PlannedCall, x: jax.Array, w: jax.Array, targets: jax.Array, factors: jax.Array) -> jax.Array:
    return (_plain_losses(call, x, w, targets) * factors).sum()


@under_defaults
def _sum_forward(call, *arrays):
    """arrays: CustomVJPPrimal of x, w, targets and factors."""
    wanted = arrays[0].perturbed, arrays[1].perturbed
    x, w, targets, factors = (y.value for y in arrays)
    total, losses, dx, drows = _sum_and_gradients_of(wanted)(call, x, w, targets, factors)
    return total, (dx, drows, losses, x, w)


@functools.cache
def _sum_and_gradients_of(wanted: tuple[bool, bool]) -> Callable[..., Any]:
    """_sum_and_gradients for these wanted gradients, as a function(call, *arrays) with exact derivatives."""
    return _with_exact_derivative(functools.partial(_sum_and_gradients, wanted))


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _sum_and_gradients(
    wanted: tuple[bool, bool],
    call: PlannedCall,
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array, Any, Any]:
    """The sum, the losses, and the gradients of x and of w's rows by "xla": in eager calls one program."""
    inputs = _inputs(call, x, w, targets)
    losses, dx, drows = reference.losses_and_gradients(inputs, factors, call.options, wanted)
    return (losses * factors).sum(), losses, dx, drows


@under_defaults
def _kernels_sum_forward(call, x, w, targets, factors):
    inputs = _inputs(call, x, w, targets)
    found, dx, drows = _both(call, inputs, factors)
    losses = _losses_of(call, inputs, found)
    if x.dtype != jnp.float16:  # in float16 a later cotangent may bring the gradient into range
        dx = dx.astype(x.dtype)
    return (losses * factors).sum(), (dx, drows, losses, x, w)


@under_defaults
def _sum_backward(call, residuals, cotangent):
    dx, drows, losses, x, w = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    times = lambda y, of: (y.astype(jnp.float32) * cotangent).astype(of.dtype)
    dw = None if drows is None else _of_w(call, times(drows, w))
    return None if dx is None else times(dx, x), dw, None, losses * cotangent


_losses = in_both_modes(_plain_losses, _losses_forward, _losses_backward)
_sum = in_both_modes(_plain_sum, _sum_forward, _sum_backward, symbolic_zeros=True)
_losses_by_kernels = jax.custom_vjp(_plain_losses, nondiff_argnums=(0,))
_losses_by_kernels.defvjp(_losses_forward, _losses_backward)
_sum_by_kernels = jax.custom_vjp(_plain_sum, nondiff_argnums=(0,))
_sum_by_kernels.defvjp(_kernels_sum_forward, _sum_backward)
