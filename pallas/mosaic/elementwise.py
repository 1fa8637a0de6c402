"""Rewrites a caller's elementwise functions in the primitives that Mosaic has."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal

from jax_kernels.pallas.mosaic import registers
from jax_kernels.score_mod.axes import has_constants
from jax_kernels.score_mod.tile_reads import primitives

__all__ = ["erf_polynomial", "for_tiles", "gelu_tanh", "shortened", "sigmoid", "silu", "why_not"]

# Primitives that Mosaic computes on a tile. Its sin and cos are too inaccurate for large values.
_KNOWN = {
    "abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "div", "eq", "exp", "exp2", "ge", "gt",
    "integer_pow", "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg", "or", "rsqrt", "select_n", "sign",
    "sqrt", "square", "sub", "tanh", "xor",
}  # fmt: skip
# Primitives with inner programs, which are inlined: the parameter that holds the program.
_CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "jit": "jaxpr"}
_DTYPES = jnp.bfloat16, jnp.float16, jnp.float32, bool


def _expm1(x: Any) -> Any:
    """exp(x) - 1. Near 0, where the difference would cancel, by the first terms of the series."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return jnp.where(jnp.abs(x) < 0.4, series, jnp.exp(x) - 1)


def _log1p(x: Any) -> Any:
    """log(1 + x). Near 0, where 1 + x would be rounded, by the series of artanh(x / (2 + x))."""
    y = x / (2 + x)
    square = y * y
    series = 2 * y * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return jnp.where(jnp.abs(x) < 0.5, series, lax.log(1 + x))


# Abramowitz and Stegun (1964), 7.1.26, with an absolute error of 1.5e-7.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def erf_polynomial(size: jax.Array) -> jax.Array:
    """Approximates (1 - erf(size)) / exp(-size * size) for size >= 0, elementwise.

    erf computed from it has an absolute error of at most 1.5e-7.
    """
    t = 1.0 / (1.0 + 0.3275911 * size)
    return t * (_ERF[4] + t * (_ERF[3] + t * (_ERF[2] + t * (_ERF[1] + t * _ERF[0]))))


def gelu_tanh(x: jax.Array) -> jax.Array:
    """gelu, x * Φ(x), elementwise by the tanh approximation of Hendrycks and Gimpel (2016), arXiv:1606.08415."""
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def sigmoid(x: jax.Array) -> jax.Array:
    return lax.logistic(x)


def silu(x: jax.Array) -> jax.Array:
    return x * sigmoid(x)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    """gelu_tanh(x) in five instructions and one tanh per value. gelu_tanh's own form takes eight."""
    half = 0.5 * x
    return half + half * jnp.tanh(x * (0.7978845608028654 + 0.035677408136300125 * (x * x)))


def _sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), for tiles in the layout of wgmma's results.

    It lacks the four instructions of a division that handle the smallest values.
    """
    return registers.reciprocal(1.0 + jnp.exp(-x))


_SHORT: dict[Any, Callable[[Any], Any]] = {
    gelu_tanh: _gelu_tanh,
    sigmoid: _sigmoid,
    silu: lambda x: x * _sigmoid(x),
}


def shortened(function: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """A form of the function that takes fewer instructions; None if there is none.

    Forms exist for gelu_tanh, sigmoid and silu. They take tiles in the layout of wgmma's results.
    """
    return _SHORT.get(function)


def _tail(x: Any) -> Any:
    """1 - erf(|x|), elementwise."""
    size = jnp.abs(x)
    return erf_polynomial(size) * jnp.exp(-size * size)


# Replacements of primitives that Mosaic lacks.
_WRITTEN: dict[str, Callable[..., Any]] = {
    "copy": lambda x: x,
    "erf": lambda x: jnp.where(x >= 0, 1.0 - _tail(x), _tail(x) - 1.0),
    "erfc": lambda x: jnp.where(x >= 0, _tail(x), 2.0 - _tail(x)),
    "expm1": _expm1,
    "log1p": _log1p,
    "not": lambda x: jnp.where(x, 0.0, 1.0) != 0.0,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
    "stop_gradient": lambda x: x,
}


def why_not(function: Callable[[Any], Any] | None) -> str | None:
    """The reason, in words, why a Mosaic kernel cannot compute an elementwise function of float32; None if it can.

    function: an activation of a matmul, or None, which needs no computation.
    """
    if function is None:
        return None
    try:
        program = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:
        return f"its activation raised {type(error).__name__} when traced with a scalar"
    if has_constants(program):
        return "its activation closes over arrays"
    equations = list(_equations(program.jaxpr))
    unknown = sorted({str(equation.primitive) for equation in equations} - _KNOWN - set(_WRITTEN))
    if unknown:
        return f"it cannot compute {', '.join(unknown)} in its activation"
    others = {str(x.aval.dtype) for equation in equations for x in equation.outvars if x.aval.dtype not in _DTYPES}
    return f"its activation computes in {', '.join(sorted(others))}" if others else None


def for_tiles(function: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Returns the elementwise function in a form that uses only primitives that Mosaic has; None for None.

    why_not(function) must be None. Primitives that Mosaic lacks, such as erf, are replaced by others.
    """
    if function is None:
        return None
    names = set(primitives(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), jnp.float32)).eqns))
    if names <= _KNOWN | {"jit"}:
        return function
    return functools.partial(_run, function)


def _run(function: Callable[[Any], Any], x: Any) -> Any:
    """function(x), with primitives that Mosaic lacks replaced by others."""
    program = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    return _evaluate(program.jaxpr, [x])[0]


def _evaluate(program: Jaxpr, inputs: list[Any]) -> list[Any]:
    """The outputs of a program for these inputs, with primitives that Mosaic lacks replaced by others.

    program: without constants. Its calls of inner programs are inlined.
    """
    known = dict(zip(program.invars, inputs, strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else known[atom]
    for equation in program.eqns:
        name, given = str(equation.primitive), [read(atom) for atom in equation.invars]
        if name in _CALLS:
            made = _evaluate(_called(equation), given)
        elif name in _WRITTEN:
            made = [_WRITTEN[name](*given)]
        else:
            made = [equation.primitive.bind(*given, **equation.params)]
        known.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in program.outvars]


def _called(equation: Any) -> Jaxpr:
    """The inner program that an equation calls."""
    return equation.params[_CALLS[str(equation.primitive)]].jaxpr


def _equations(program: Jaxpr) -> Iterator[Any]:
    """Yields the equations of a program.

    An equation that calls an inner program is replaced by the equations of the inner program.
    """
    for equation in program.eqns:
        if str(equation.primitive) in _CALLS:
            yield from _equations(_called(equation))
        else:
            yield equation
