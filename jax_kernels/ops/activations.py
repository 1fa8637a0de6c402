"""The named activations, as elementwise functions that kernels can also compute."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.ops.planned_op import MOST_CALLS
from jax_kernels.pallas.mosaic import elementwise
from jax_kernels.score_mod.axes import has_constants
from jax_kernels.score_mod.tile_reads import TRITON_ELEMENTWISE, primitives

__all__ = ["ACTIVATIONS", "derivative_of", "has_known_activation", "not_for_mosaic", "not_for_triton"]


def relu(x: jax.Array) -> jax.Array:
    return jnp.where(x <= 0.0, 0.0, x)


def tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU, x Φ(x), elementwise. Its error function is a polynomial, accurate to 1.5e-7."""
    size = jnp.abs(x) * 0.7071067811865476
    tail = 0.5 * elementwise.erf_polynomial(size) * jnp.exp(-size * size)  # 1 - Φ(|x|)
    return x * jnp.where(x >= 0, 1.0 - tail, tail)


gelu_tanh, sigmoid, silu = elementwise.gelu_tanh, elementwise.sigmoid, elementwise.silu
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "sigmoid": sigmoid,
    "tanh": tanh,
}


def has_known_activation(options: Any) -> bool:
    """Whether the activation of a call's options is None or a function of ACTIVATIONS, not the caller's."""
    activation = getattr(options, "activation", None)
    return activation is None or activation in ACTIVATIONS.values()


def _d_sigmoid(x: jax.Array) -> jax.Array:
    y = sigmoid(x)
    return y * (1.0 - y)


def _d_silu(x: jax.Array) -> jax.Array:
    y = sigmoid(x)
    return y * (1.0 + x * (1.0 - y))


def _d_tanh(x: jax.Array) -> jax.Array:
    y = jnp.tanh(x)
    return 1.0 - y * y


def _d_gelu_tanh(x: jax.Array) -> jax.Array:
    y = jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return 0.5 * (1.0 + y) + 0.5 * x * (1.0 - y * y) * slope


def _d_gelu(x: jax.Array) -> jax.Array:
    """The derivative of gelu, Φ(x) + x φ(x), elementwise."""
    size = jnp.abs(x) * 0.7071067811865476
    polynomial = elementwise.erf_polynomial(size)
    density = jnp.exp(-size * size)
    tail = 0.5 * polynomial * density
    return jnp.where(x >= 0, 1.0 - tail, tail) + 0.3989422804014327 * x * density


def _d_relu(x: jax.Array) -> jax.Array:
    return jnp.where(x <= 0.0, 0.0, 1.0)


def _d_nothing(x: jax.Array) -> jax.Array:
    return jnp.ones_like(x)


_DERIVATIVES = {
    None: _d_nothing,
    relu: _d_relu,
    gelu: _d_gelu,
    gelu_tanh: _d_gelu_tanh,
    silu: _d_silu,
    sigmoid: _d_sigmoid,
    tanh: _d_tanh,
}


@functools.lru_cache(maxsize=MOST_CALLS)
def derivative_of(activation: Any) -> Callable[[jax.Array], jax.Array]:
    """A function x -> f'(x), elementwise, for an activation f. None is the identity, so its derivative is 1.

    The named activations have written derivatives, because Mosaic cannot compute their jax.vjp. Other functions are
    differentiated by jax.vjp.
    """
    if activation in _DERIVATIVES:
        return _DERIVATIVES[activation]
    return lambda x: jax.vjp(lambda x: activation(x).astype(jnp.float32), x)[1](jnp.ones_like(x))[0]


def not_for_triton(activation: Any) -> str | None:
    """The reason, in words for users, why a Triton kernel cannot compute an activation; None if it can.

    activation: an elementwise function of float32 values, or None for no activation.
    """
    if activation is None or activation in (*ACTIVATIONS.values(), *_DERIVATIVES.values()):
        return None
    try:
        program = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:
        return f"its activation raised {type(error).__name__} when traced for a scalar"
    if has_constants(program):
        return "its activation closes over arrays"
    unknown = sorted(set(primitives(program.jaxpr.eqns)) - TRITON_ELEMENTWISE)
    return f"it cannot compute {', '.join(unknown)}, which its activation uses" if unknown else None


def not_for_mosaic(activation: Any) -> str | None:
    """The reason, in words for users, why a Mosaic kernel cannot compute an activation; None if it can.

    activation: an elementwise function of float32 values, or None for no activation.
    """
    if activation is None or activation in (*ACTIVATIONS.values(), *_DERIVATIVES.values()):
        return None
    return elementwise.why_not(activation)
