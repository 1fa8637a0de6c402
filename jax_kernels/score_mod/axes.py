"""The indices along which values in a score_mod's program vary, and whether query and key enter only as q - k."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

__all__ = ["axes_of", "called", "constants_of", "flat", "has_constants", "lifted"]

INT32 = jnp.dtype(jnp.int32)
WRAP = 1 << 32
# Primitives that return the same integer, perhaps in another shape.
SAME = {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze", "stop_gradient"}
COMPARISONS = {"eq", "ge", "gt", "le", "lt", "ne"}
# Lengths are below this, and so are constants that may be compared with an index.
SMALL = 1 << 29


class _Sum(NamedTuple):
    """An int32 equal to q * query + k * key + a rest that varies along `others`, in int32 arithmetic with wrap-around.

    For any other value, q and k are 0, and `others` has all axes along which it varies. constant: a bound on the
    magnitude of the rest, if known.
    """

    q: int
    k: int
    others: frozenset[str]
    constant: int | None = None

    @property
    def axes(self) -> frozenset[str]:
        if (self.q or self.k) and (self.q + self.k) % WRAP == 0:
            return self.others | {"d"}
        return self.others | {name for name, times in (("q", self.q), ("k", self.k)) if times}

    @property
    def wraps(self) -> bool:
        """Whether int32 may wrap around, so that the value differs from the sum of unbounded integers."""
        once = all(x in (0, 1, WRAP - 1) for x in (self.q, self.k))
        return not once or self.constant is None or self.constant >= SMALL

    def plus(self, other: "_Sum", times: int = 1) -> "_Sum":
        constants = self.constant, other.constant
        constant = None if None in constants else sum(x for x in constants if x is not None)
        q, k = self.q + times * other.q, self.k + times * other.k
        return _Sum(q % WRAP, k % WRAP, self.others | other.others, constant)

    def times(self, factor: int) -> "_Sum":
        constant = None if self.constant is None else self.constant * abs(factor)
        return _Sum(self.q * factor % WRAP, self.k * factor % WRAP, self.others, constant)


def flat(program: Jaxpr) -> Jaxpr:
    """The same program, with each inner jit replaced by its equations."""
    found: list[JaxprEqn] = []
    outs = _inline(program, {x: x for x in program.invars}, found, {})
    return program.replace(eqns=found, outvars=outs)


def lifted(closed: Any) -> tuple[tuple[Any, ...], Jaxpr]:
    """(the arrays that a program closes over, the program with these arrays in front of its arguments).

    The result is flat if a jitted function in the program closes over arrays.
    """
    program, found = closed.jaxpr, list[JaxprEqn]()
    arrays = dict(zip(program.constvars, closed.consts, strict=True))
    if not any(has_constants(x) for equation in program.eqns for x in called(equation)):
        return tuple(arrays.values()), program.replace(constvars=[], invars=[*arrays, *program.invars])
    outs = _inline(program, {x: x for x in (*arrays, *program.invars)}, found, arrays)
    flattened = program.replace(constvars=[], invars=[*arrays, *program.invars], eqns=found, outvars=outs)
    return tuple(arrays.values()), flattened


def _inline(program: Jaxpr, known: dict[Any, Any], found: list[JaxprEqn], arrays: dict[Any, Any]) -> list[Any]:
    """The program's results. Its equations, with new variables, are appended to `found`.

    known: the new variables of its invars. arrays: receives the arrays that jitted functions close over, by their new
    variables.
    """
    atom = lambda x: x if isinstance(x, Literal) else known[x]
    equation: Any
    for equation in program.eqns:
        inputs, closed = [atom(x) for x in equation.invars], equation.params.get("jaxpr")
        if str(equation.primitive) == "jit":
            own = [Var(x.aval) for x in closed.jaxpr.constvars]
            arrays |= zip(own, closed.consts, strict=True)
            inner = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*own, *inputs), strict=True))
            outs = _inline(closed.jaxpr, inner, found, arrays)
        else:
            outs = [Var(x.aval) for x in equation.outvars]
            found.append(equation.replace(invars=inputs, outvars=outs))
        known |= dict(zip(equation.outvars, outs, strict=True))
    return [atom(x) for x in program.outvars]


def has_constants(program: Any) -> bool:
    """Whether a program, or a program that it calls, closes over arrays."""
    return any(True for _ in constants_of(program))


def constants_of(program: Any) -> Iterator[Any]:
    """The arrays that a program and the programs that it calls close over. In JAX a jitted function keeps its own."""
    yield from getattr(program, "consts", ())
    for equation in program.eqns:
        for inner in called(equation):
            yield from constants_of(inner)


def called(equation: Any) -> list[Any]:
    """The programs that an equation calls."""
    is_program = lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    return [x for x in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program) if is_program(x)]


def axes_of(program: Jaxpr, names: dict[Any, str]) -> dict[Any, frozenset[str]]:
    """The axes of each variable of a flat program: names of invars; "d" replaces "q" and "k" that enter only as q - k.

    A variable with "d" and neither "q" nor "k" has one value for all queries and keys with the same difference.
    """
    sums = {x: _Sum(0, 0, frozenset()) for x in program.invars}
    for x, name in names.items():
        sums[x] = _Sum(int(name == "q"), int(name == "k"), frozenset(), 0) if name in "qk" else _of({name})
    for equation in program.eqns:
        inputs = [_constant(x) if isinstance(x, Literal) else sums[x] for x in equation.invars]
        sums |= dict.fromkeys(equation.outvars, _sum_of(equation, inputs))
    return {x: found.axes for x, found in sums.items()}


def _of(axes: Any) -> _Sum:
    return _Sum(0, 0, frozenset(axes))


def _constant(literal: Any) -> _Sum:
    is_integer = literal.aval.dtype == INT32
    return _Sum(0, 0, frozenset(), abs(int(literal.val)) if is_integer else None)


def _sum_of(equation: Any, inputs: list[_Sum]) -> _Sum:
    kind = str(equation.primitive)
    if all(x.aval.dtype == INT32 for x in equation.invars):
        if kind in COMPARISONS and not any(x.wraps for x in inputs):
            return _of(inputs[0].plus(inputs[1], -1).axes)
        if kind in ("add", "sub"):
            return inputs[0].plus(inputs[1], 1 if kind == "add" else -1)
        if kind == "neg":
            return inputs[0].times(-1)
        if kind == "mul":
            literals = [i for i, x in enumerate(equation.invars) if isinstance(x, Literal)]
            if literals:
                return inputs[1 - literals[0]].times(int(equation.invars[literals[0]].val))
        if kind in SAME and equation.outvars[0].aval.dtype == INT32:
            return inputs[0]
    return _of(frozenset().union(*(x.axes for x in inputs)))
