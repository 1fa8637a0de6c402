"""The activations that have names, as elementwise functions that kernels can compute, too."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.score_mod.tiles import TRITON_ELEMENTWISE, primitives

__all__ = ["ACTIVATIONS", "not_for_triton"]


def relu(x: jax.Array) -> jax.Array:
    return jnp.where(x <= 0.0, 0.0, x)


def sigmoid(x: jax.Array) -> jax.Array:
    return jax.lax.logistic(x)


def silu(x: jax.Array) -> jax.Array:
    return x * sigmoid(x)


def tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """x Φ(x) by Hendrycks and Gimpel's approximation (2016), arXiv:1606.08415."""
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


# Abramowitz and Stegun (1964), 7.1.26.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x), with the error function to 1.5e-7."""
    size = jnp.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * size)
    polynomial = t * (_ERF[4] + t * (_ERF[3] + t * (_ERF[2] + t * (_ERF[1] + t * _ERF[0]))))
    tail = 0.5 * polynomial * jnp.exp(-size * size)  # 1 - Φ(|x|)
    return x * jnp.where(x >= 0, 1.0 - tail, tail)


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "sigmoid": sigmoid, "tanh": tanh}


def not_for_triton(activation: Any) -> str | None:
    """Why a Triton kernel cannot compute an activation, a function of float32 numbers or None."""
    if activation is None or activation in ACTIVATIONS.values():
        return None
    try:
        program = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:
        return f"its activation raised {type(error).__name__} when traced for a number"
    if program.consts:
        return "its activation closes over arrays"
    unknown = sorted(set(primitives(program.jaxpr.eqns)) - TRITON_ELEMENTWISE)
    return f"of its activation it cannot compute {', '.join(unknown)}" if unknown else None
