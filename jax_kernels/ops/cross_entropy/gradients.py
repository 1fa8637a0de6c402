"""The planned losses, and their sum, with gradients: of each token in the backward, of the sum in the forward."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.inputs.linear_cross_entropy import LossInputs, Statistics
from jax_kernels.ops.cross_entropy.implementations import IMPLEMENTATIONS
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.reference import linear_cross_entropy as reference
from jax_kernels.tracing.derivatives import in_both_modes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["planned_losses", "planned_sum"]


def planned_losses(call: PlannedCall, inputs: LossInputs) -> jax.Array:
    """The loss of each token of a planned call, float32 [...], differentiable. The backward makes the logits again."""
    return _losses(call, inputs)


def planned_sum(call: PlannedCall, inputs: LossInputs, factors: jax.Array) -> jax.Array:
    """The sum of factors * losses, float32. A differentiated call makes all gradients in the forward.

    factors: float32 [...], 0 for tokens that do not count.
    """
    return _sum(call, inputs, factors)


def _statistics(call: PlannedCall, inputs: LossInputs) -> Statistics:
    forward = IMPLEMENTATIONS[call.implementation].forward
    return forward(inputs, call.options, config=call.config, interpret=call.interpret)


def _gradients(call: PlannedCall, inputs: LossInputs, lse: jax.Array, cotangent: jax.Array) -> LossInputs:
    """LossInputs of the gradients. cotangent: of the losses."""
    backward: Any = IMPLEMENTATIONS[call.implementation].backward
    dx, drows = backward(inputs, lse, cotangent, call.options, config=call.config, interpret=call.interpret)
    return LossInputs(x=dx, rows=drows, targets=None)  # type: ignore[arg-type]


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
    return (_gradients(call, inputs, lse, cotangent),)


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
def _sum_backward(call, residuals, cotangent):
    dx, drows, losses, inputs = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None
    times = lambda y, of: None if y is None else (y.astype(jnp.float32) * cotangent).astype(of.dtype)
    found = LossInputs(x=times(dx, inputs.x), rows=times(drows, inputs.rows), targets=None)
    return found, losses * cotangent


_losses = in_both_modes(_plain_losses, _losses_forward, _losses_backward)
_sum = in_both_modes(_plain_sum, _sum_forward, _sum_backward, symbolic_zeros=True)
