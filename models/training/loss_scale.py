"""Dynamic loss scaling for float16: a scaled loss keeps small gradients; a step whose gradient overflows is skipped.

float16 has no values below 2**-24 and none from 65520 on. The backward runs on the loss times a scale, and the gradient
is divided by the scale in float32. Micikevicius et al., "Mixed Precision Training" (2018), arXiv:1710.03740.
"""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "FIRST",
    "GROWTH_STEPS",
    "LARGEST",
    "SMALLEST",
    "all_finite",
    "first_state",
    "next_state",
    "scaled_gradient",
    "select",
]

FIRST = 2.0**16
SMALLEST, LARGEST = 2.0**-24, 2.0**24
# The number of consecutive steps without an overflow after which the scale doubles.
GROWTH_STEPS = 2000


def first_state(scale: float) -> dict[str, jax.Array]:
    """The state before the first step: the scale, and the number of steps since its last change or overflow."""
    return {"scale": jnp.float32(scale), "finite_steps": jnp.int32(0)}


def next_state(state: dict[str, jax.Array], is_finite: jax.Array) -> dict[str, jax.Array]:
    """The state after a step. An overflow halves the scale; GROWTH_STEPS steps without one double it."""
    scale, steps = state["scale"], jnp.where(is_finite, state["finite_steps"] + 1, 0)
    grows = steps >= GROWTH_STEPS
    grown = jnp.where(grows, jnp.minimum(2 * scale, LARGEST), scale)
    return {
        "scale": jnp.where(is_finite, grown, jnp.maximum(scale / 2, SMALLEST)),
        "finite_steps": jnp.where(grows, 0, steps),
    }


def all_finite(tree: Any) -> jax.Array:
    """Whether each value of each array is finite: bool []."""
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]))


def select(is_finite: jax.Array, new: Any, old: Any) -> Any:
    """The tree `new` if is_finite, else `old`."""
    return jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), new, old)


def scaled_gradient(loss: Any, scale: jax.Array) -> Any:
    """jax.value_and_grad(loss, has_aux=True), whose backward runs on `scale` times the mean, total / count.

    loss: a function of (params, batch, key) that returns (total, (count, others)).
    """

    def scaled(*args: Any) -> tuple[jax.Array, tuple[jax.Array, Any, jax.Array]]:
        total, (count, others) = loss(*args)
        factor = jax.lax.stop_gradient(scale / jnp.where(count > 0, count, 1))
        return total * factor, (total, (count, others), factor)

    def differentiate(*args: Any) -> tuple[tuple[jax.Array, Any], Any]:
        (_, (total, counted, factor)), gradients = jax.value_and_grad(scaled, has_aux=True)(*args)
        return (total, counted), jax.tree.map(lambda g: (g.astype(jnp.float32) / factor).astype(g.dtype), gradients)

    return differentiate
