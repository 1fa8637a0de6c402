"""The planned losses, and their sum, with gradients: of each token in the backward, of the sum in the forward."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jax_kernels.inputs.linear_cross_entropy import LossInputs, Statistics
from jax_kernels.ops.cross_entropy.implementations import IMPLEMENTATIONS
from jax_kernels.ops.cross_entropy.partitioning import shared_gradients, shared_statistics
from jax_kernels.ops.planned_op import MOST_CALLS, PlannedCall
from jax_kernels.reference import linear_cross_entropy as reference
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["planned_losses", "planned_sum"]


def planned_losses(call: PlannedCall, inputs: LossInputs) -> jax.Array:
    """The loss of each token of a planned call, float32 [...], differentiable. The backward makes the logits again."""
    if call.implementation == "xla":
        return _losses(call, inputs)
    flat, shape = _flat(inputs), inputs.targets.shape
    return _losses_by_kernels(call, _reverse(flat)).reshape(shape)


def planned_sum(call: PlannedCall, inputs: LossInputs, factors: jax.Array) -> jax.Array:
    """The sum of factors * losses, float32. A differentiated call makes all gradients in the forward.

    factors: float32 [...], 0 for tokens that do not count.
    """
    if call.implementation == "xla":
        return _sum(call, inputs, factors)
    return _sum_by_kernels(call, *_reverse((_flat(inputs), factors.reshape(-1))))


def _flat(inputs: LossInputs) -> LossInputs:
    """The inputs with one axis of tokens, as kernels take them."""
    return inputs._replace(x=inputs.x.reshape(-1, inputs.x.shape[-1]), targets=inputs.targets.reshape(-1))


def _reverse[Tree](tree: Tree) -> Tree:
    return in_reverse_mode(tree, no_forward_mode("linear_cross_entropy"))


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


def _losses_of(call: PlannedCall, inputs: LossInputs, found: Statistics) -> jax.Array:
    return reference.losses_of(found, inputs.targets, call.options, inputs.rows.shape[0])


def _plain_losses(call: PlannedCall, inputs: LossInputs) -> jax.Array:
    return _losses_of(call, inputs, _statistics(call, inputs))


@under_defaults
def _losses_forward(call, inputs):
    found = _statistics(call, inputs)
    return _losses_of(call, inputs, found), (inputs, found.lse)


@under_defaults
def _losses_backward(call, residuals, cotangent):
    inputs, lse = residuals
    dx, drows = _gradients(call, inputs, lse, cotangent)
    return (inputs._replace(x=dx.astype(inputs.x.dtype), rows=drows.astype(inputs.rows.dtype), targets=None),)


def _plain_sum(call: PlannedCall, inputs: LossInputs, factors: jax.Array) -> jax.Array:
    return (_plain_losses(call, inputs) * factors).sum()


@under_defaults
def _sum_forward(call, inputs, factors):
    """inputs, factors: trees of CustomVJPPrimal."""
    wanted = inputs.x.perturbed, inputs.rows.perturbed
    inputs, factors = jax.tree.map(lambda y: y.value, (inputs, factors))
    losses, dx, drows = reference.losses_and_gradients(inputs, factors, call.options, wanted)
    return (losses * factors).sum(), (dx, drows, losses, inputs)


@under_defaults
def _kernels_sum_forward(call, inputs, factors):
    found = _statistics(call, inputs)
    losses = _losses_of(call, inputs, found)
    dx, drows = _gradients(call, inputs, found.lse, factors)
    if inputs.x.dtype != jnp.float16:  # in float16 a later cotangent may bring the gradient into range
        dx = dx.astype(inputs.x.dtype)
    return (losses * factors).sum(), (dx, drows, losses, inputs)


@under_defaults
def _sum_backward(call, residuals, cotangent):
    dx, drows, losses, inputs = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None
    times = lambda y, of: None if y is None else (y.astype(jnp.float32) * cotangent).astype(of.dtype)
    return inputs._replace(x=times(dx, inputs.x), rows=times(drows, inputs.rows), targets=None), losses * cotangent


_losses = in_both_modes(_plain_losses, _losses_forward, _losses_backward)
_sum = in_both_modes(_plain_sum, _sum_forward, _sum_backward, symbolic_zeros=True)
_losses_by_kernels = jax.custom_vjp(_plain_losses, nondiff_argnums=(0,))
_losses_by_kernels.defvjp(_losses_forward, _losses_backward)
_sum_by_kernels = jax.custom_vjp(_plain_sum, nondiff_argnums=(0,))
_sum_by_kernels.defvjp(_kernels_sum_forward, _sum_backward)
