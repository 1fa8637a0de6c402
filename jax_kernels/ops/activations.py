"""The activations that have names, as elementwise functions that kernels can compute, too."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.pallas.mosaic import elementwise
from jax_kernels.score_mod.tiles import TRITON_ELEMENTWISE, primitives

__all__ = ["ACTIVATIONS", "check_elementwise", "derivative_of", "not_for_mosaic", "not_for_triton"]


# The primitives that make a number of several.
_JOINING = {
    *(f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or", "xor")),
    *(f"cum{name}" for name in ("sum", "prod", "max", "min", "logsumexp")),
    *("argmax", "argmin", "sort", "dot_general", "conv_general_dilated"),
}


def relu(x: jax.Array) -> jax.Array:
    return jnp.where(x <= 0.0, 0.0, x)


def tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x), with the error function to 1.5e-7."""
    size = jnp.abs(x) * 0.7071067811865476
    tail = 0.5 * elementwise.erf_polynomial(size) * jnp.exp(-size * size)  # 1 - Φ(|x|)
    return x * jnp.where(x >= 0, 1.0 - tail, tail)


gelu_tanh, sigmoid, silu = elementwise.gelu_tanh, elementwise.sigmoid, elementwise.silu
ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "sigmoid": sigmoid, "tanh": tanh}


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
    """Φ(x) + x φ(x)."""
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


def check_elementwise(activation: Callable[[Any], Any]) -> None:
    """Raises TypeError or ValueError for a function whose numbers do not each come of one number alone."""
    try:
        program = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct((2, 3), jnp.float32))
    except Exception as error:
        raise TypeError(f"activation: it raised {type(error).__name__} for float32 numbers: {error}") from error
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise ValueError("activation: it closes over an array that JAX traces, want numbers or arrays that are known")
    got = [(x.shape, str(x.dtype)) for x in program.out_avals]
    if len(got) != 1 or got[0][0] != (2, 3) or not got[0][1].startswith(("float", "bfloat")):
        raise ValueError(f"activation: of float32 numbers [2, 3] it gives {got}, want as many floats")
    if joins := sorted(_joins(program.jaxpr, [True])):
        raise ValueError(f"activation: it has {', '.join(joins)}, want a function of each number alone")


def _joins(jaxpr: Any, is_of_numbers: list[bool]) -> set[str]:
    """The primitives that join the function's numbers. is_of_numbers: which arguments depend on these."""
    found: set[str] = set()
    moving = {x for x, moves in zip(jaxpr.invars, is_of_numbers, strict=True) if moves}
    for equation in jaxpr.eqns:
        moves = [not hasattr(x, "val") and x in moving for x in equation.invars]
        if not any(moves):
            continue
        moving.update(equation.outvars)
        if equation.primitive.name in _JOINING:
            found.add(equation.primitive.name)
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner: Any = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                same = len(inner.invars) == len(moves)
                found |= _joins(inner, moves if same else [True] * len(inner.invars))
    return found


@functools.cache
def derivative_of(activation: Any) -> Callable[[jax.Array], jax.Array]:
    """The derivative of an activation, or of none. Mosaic cannot compute what jax.vjp makes of those with names."""
    if activation in _DERIVATIVES:
        return _DERIVATIVES[activation]
    return lambda x: jax.vjp(activation, x)[1](jnp.ones_like(x))[0]


def not_for_triton(activation: Any) -> str | None:
    """Why a Triton kernel cannot compute an activation, a function of float32 numbers or None."""
    if activation is None or activation in (*ACTIVATIONS.values(), *_DERIVATIVES.values()):
        return None
    try:
        program = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:
        return f"its activation raised {type(error).__name__} when traced for a number"
    if program.consts:
        return "its activation closes over arrays"
    unknown = sorted(set(primitives(program.jaxpr.eqns)) - TRITON_ELEMENTWISE)
    return f"of its activation it cannot compute {', '.join(unknown)}" if unknown else None


def not_for_mosaic(activation: Any) -> str | None:
    """Why a Mosaic kernel cannot compute an activation, a function of float32 numbers or None."""
    if activation is None or activation in (*ACTIVATIONS.values(), *_DERIVATIVES.values()):
        return None
    return elementwise.why_not(activation)
