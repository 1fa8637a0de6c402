"""Checks whether a caller's function is elementwise: each value of its result depends on one value of its argument."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.score_mod.axes import called, constants_of

__all__ = ["check_elementwise"]

# Primitives that only reshape or repeat join no values, since no primitive here selects values from a larger array.
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow",
    "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul",
    "mulhi", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "optimization_barrier", "or", "polygamma",
    "population_count", "pow", "pvary", "random_gamma_grad", "real", "reduce_precision", "regularized_incomplete_beta",
    "rem", "reshape", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
}  # fmt: skip
# Primitives with the caller's own code, which JAX does not trace.
_OPAQUE = {"debug_callback", "debug_print", "ffi_call", "io_callback", "pallas_call", "pure_callback"}

# The kinds of arrays, by their values.
_ONE = "one"  # all values are equal
_PLACED = "placed"  # different values that do not depend on the function's argument
_MOVING = "moving"  # each value depends on one value of the function's argument


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """A traced JAX program.

    code: its Jaxpr. constants: the arrays that it closes over, in the order of code.constvars.
    """

    code: Any
    constants: Sequence[Any]

    @classmethod
    def of(cls, jaxpr: Any) -> "_Program":
        """The _Program of a Jaxpr or a ClosedJaxpr; in newer versions of JAX these are one class."""
        return cls(code=getattr(jaxpr, "jaxpr", jaxpr), constants=getattr(jaxpr, "consts", ()))

    def called_by(self, equation: Any) -> "list[_Program]":
        """The inner programs that an equation calls, such as the body of a scan; empty for most equations."""
        return [_Program.of(x) for x in called(equation)]

    def literals(self) -> Iterator[Any]:
        """Yields the values of the scalar literals in the program and in its inner programs, in order."""
        for equation in self.code.eqns:
            yield from (x.val for x in equation.invars if hasattr(x, "val") and np.ndim(x.val) == 0)
            for inner in self.called_by(equation):
                yield from inner.literals()


def check_elementwise(activation: Callable[[Any], Any]) -> None:
    """Raises unless `activation` is elementwise: each value of its result depends on one value of its argument.

    ValueError: it is not, it depends on its argument's shape, or it closes over traced arrays. TypeError: it raises
    when traced for a float32 array.
    """
    traced = _traced(activation, (2, 3))
    got = [(x.shape, str(x.dtype)) for x in traced.out_avals]
    if len(got) != 1 or got[0][0] != (2, 3) or not got[0][1].startswith(("float", "bfloat")):
        raise ValueError(
            f"activation: got a function that returns {got} for float32 [2, 3], want floats of the same shape"
        )
    program = _Program.of(traced)
    if any(isinstance(x, jax.core.Tracer) for x in constants_of(traced)):
        raise ValueError("activation: got a function that closes over a traced array, want known arrays or numbers")
    if joins := sorted(_joins(program, [_MOVING])[0]):
        raise ValueError(f"activation: got a function with {', '.join(joins)}, want an elementwise function")
    numbers = program.literals(), _Program.of(_traced(activation, (4, 6))).literals()
    if any(x != y and not (x != x and y != y) for x, y in itertools.zip_longest(*numbers)):
        raise ValueError(
            "activation: got a function that depends on its argument's shape, want an elementwise function"
        )


def _traced(activation: Callable[[Any], Any], shape: tuple[int, ...]) -> Any:
    """The activation's ClosedJaxpr for a float32 argument of this shape. Raises TypeError if tracing raises."""
    try:
        return jax.make_jaxpr(activation)(jax.ShapeDtypeStruct(shape, jnp.float32))
    except Exception as error:
        got = f"it raised {type(error).__name__} for a float32 argument"
        raise TypeError(f"activation: {got}, want an elementwise function: {error}") from error


def _joins(program: _Program, arguments: Sequence[str]) -> tuple[set[str], list[str]]:
    """(names of the primitives that are not elementwise in the program's argument, the kind of each result).

    Such a primitive combines several values of the argument, or treats values by their index in the array. arguments:
    the kind of each of the program's arguments. A kind is _ONE (all values of the array are equal), _PLACED (its values
    differ, but do not depend on the caller's argument) or _MOVING (each value depends on one value of the caller's
    argument).
    """
    found: set[str] = set()
    constants = [_ONE if np.size(x) == 1 else _PLACED for x in program.constants]
    code = program.code
    kinds = dict(zip((*code.constvars, *code.invars), (*constants, *arguments), strict=True))
    kind_of = lambda x: _ONE if hasattr(x, "val") else kinds[x]
    for equation in code.eqns:
        joins, results = _joins_of(program, equation, [kind_of(x) for x in equation.invars])
        found |= joins
        kinds.update(zip(equation.outvars, results, strict=True))
    return found, [kind_of(x) for x in code.outvars]


def _joins_of(program: _Program, equation: Any, given: list[str]) -> tuple[set[str], list[str]]:
    """(names of primitives that are not elementwise, the kind of each result), for one equation of the program.

    given: the kinds of the equation's arguments: _ONE, _PLACED or _MOVING, as for `_joins`. An equation with an inner
    program, such as a scan, gives the names that are found in it. Results of an equation with a _MOVING argument are
    _MOVING. Callbacks and kernels, which JAX does not trace, are taken to be elementwise.
    """
    name, sizes = equation.primitive.name, [x.aval.size for x in equation.outvars]
    moving = [_MOVING] * len(sizes)
    if _MOVING not in given:
        is_one = name in _ELEMENTWISE and _PLACED not in given
        return set(), [_ONE if is_one or size == 1 else _PLACED for size in sizes]
    if name in _OPAQUE:
        return set(), moving
    if called := program.called_by(equation):
        return set().union(*(_joins(x, _arguments(equation, x.code, given))[0] for x in called)), moving
    if name == "gather":  # from a table, by indices
        return (set() if given[0] != _MOVING else {name}), moving
    if name in _ELEMENTWISE:
        return ({f"{name} with an array"} if _PLACED in given else set()), moving
    return {name}, moving


def _arguments(equation: Any, code: Any, given: list[str]) -> list[str]:
    """The kinds of the arguments of an inner program that an equation calls, such as the body of a scan.

    code: the inner program's Jaxpr. given: the kinds of the equation's arguments: _ONE, _PLACED or _MOVING, as for
    `_joins`. A loop's body gets one value of a _PLACED array at a time, which is _ONE. A larger _ONE array is _MOVING
    in a loop: it may be carried, and depend on the argument after a step. All kinds are _MOVING if the two lists of
    arguments do not match.
    """
    name = equation.primitive.name
    if name == "cond":
        return given[1:]
    if len(code.invars) != len(given):
        return [_MOVING] * len(code.invars)
    if name not in ("scan", "while"):
        return given
    kinds = []
    for kind, outer, inner in zip(given, equation.invars, code.invars, strict=True):
        if kind == _PLACED and inner.aval.size == 1:  # one step's value of an array
            kind = _ONE
        elif kind == _ONE and outer.aval.size > 1:  # a carry, which may depend on the argument from the first step on
            kind = _MOVING
        kinds.append(kind)
    return kinds
