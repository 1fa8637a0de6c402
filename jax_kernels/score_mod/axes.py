"""The axes along which values in a score_mod's program vary, and whether query and key enter only as q - k.

The axes are letters: "b" batch entry, "h" query head, "q" query index, "k" key index, "d" the difference q - k, "s" the
score.
"""

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
    """An int32 as q * query + k * key + rest, in int32 arithmetic with wrap-around; q and k are modulo 2**32.

    others: the axes along which the rest varies. constant: an upper bound on the rest's magnitude, None if unknown. A
    value that is no such sum, or no int32, has q = k = 0, and `others` has all axes along which it varies.
    """

    q: int
    k: int
    others: frozenset[str]
    constant: int | None = None

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which the value varies: "d" instead of "q" and "k" if q + k is 0, modulo 2**32."""
        if (self.q or self.k) and (self.q + self.k) % WRAP == 0:
            return self.others | {"d"}
        return self.others | {name for name, times in (("q", self.q), ("k", self.k)) if times}

    @property
    def wraps(self) -> bool:
        """Whether q * query + k * key + rest may exceed int32, so that int32 arithmetic wraps around."""
        once = all(x in (0, 1, WRAP - 1) for x in (self.q, self.k))
        return not once or self.constant is None or self.constant >= SMALL

    def plus(self, other: "_Sum", times: int = 1) -> "_Sum":
        """The sum self + times * other."""
        constants = self.constant, other.constant
        constant = None if None in constants else sum(x for x in constants if x is not None)
        q, k = self.q + times * other.q, self.k + times * other.k
        return _Sum(q % WRAP, k % WRAP, self.others | other.others, constant)

    def times(self, factor: int) -> "_Sum":
        """The product self * factor."""
        constant = None if self.constant is None else self.constant * abs(factor)
        return _Sum(self.q * factor % WRAP, self.k * factor % WRAP, self.others, constant)


def flat(program: Jaxpr) -> Jaxpr:
    """The same jaxpr with each inner jit replaced by its equations.

    The inner jits may not close over arrays. `lifted` is for programs whose inner jits do.
    """
    found: list[JaxprEqn] = []
    outs = _inline(program, {x: x for x in program.invars}, found, {})
    return program.replace(eqns=found, outvars=outs)


def lifted(closed: Any) -> tuple[tuple[Any, ...], Jaxpr]:
    """(the arrays that a closed jaxpr closes over, a jaxpr with these arrays as its first arguments).

    If a jitted function inside it closes over arrays, these are lifted too, and the jaxpr is flat: without inner jits.
    """
    program, found = closed.jaxpr, list[JaxprEqn]()
    arrays = dict(zip(program.constvars, closed.consts, strict=True))
    if not any(has_constants(x) for equation in program.eqns for x in called(equation)):
        return tuple(arrays.values()), program.replace(constvars=[], invars=[*arrays, *program.invars])
    outs = _inline(program, {x: x for x in (*arrays, *program.invars)}, found, arrays)
    flattened = program.replace(constvars=[], invars=[*arrays, *program.invars], eqns=found, outvars=outs)
    return tuple(arrays.values()), flattened


def _inline(program: Jaxpr, known: dict[Any, Any], found: list[JaxprEqn], arrays: dict[Any, Any]) -> list[Any]:
    """Appends the program's equations to `found`, with new variables, and returns the variables of its results.

    known: maps the program's input variables to the new variables. arrays: receives the arrays that inner jits close
    over, by their new variables.
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
    """Whether a jaxpr, or a jaxpr that it calls, closes over arrays."""
    return any(True for _ in constants_of(program))


def constants_of(program: Any) -> Iterator[Any]:
    """Yields the arrays that a program, and the programs that it calls, close over.

    In JAX, a jitted function inside a program keeps its own constants.
    """
    yield from getattr(program, "consts", ())
    for equation in program.eqns:
        for inner in called(equation):
            yield from constants_of(inner)


def called(equation: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation, i.e. the programs that it calls."""
    is_program = lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    return [x for x in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program) if is_program(x)]


def axes_of(program: Jaxpr, names: dict[Any, str]) -> dict[Any, frozenset[str]]:
    """The axes along which each variable of a flat jaxpr varies, by variable.

    names: the letter of each input variable that is an index or the score; other inputs do not vary. "d" replaces "q"
    and "k" if they enter only as q - k: the variable has one value for all queries and keys with the same difference.
    """
    sums = {x: _Sum(0, 0, frozenset()) for x in program.invars}
    for x, name in names.items():
        sums[x] = _Sum(int(name == "q"), int(name == "k"), frozenset(), 0) if name in "qk" else _of({name})
    for equation in program.eqns:
        inputs = [_constant(x) if isinstance(x, Literal) else sums[x] for x in equation.invars]
        sums |= dict.fromkeys(equation.outvars, _sum_of(equation, inputs))
    return {x: found.axes for x, found in sums.items()}


def _of(axes: Any) -> _Sum:
    """A value, not known to be a sum of the indices, that varies along these axes."""
    return _Sum(0, 0, frozenset(axes))


def _constant(literal: Any) -> _Sum:
    """A constant of a program; its magnitude is known if it is an int32."""
    is_integer = literal.aval.dtype == INT32
    return _Sum(0, 0, frozenset(), abs(int(literal.val)) if is_integer else None)


def _sum_of(equation: Any, inputs: list[_Sum]) -> _Sum:
    """The _Sum of an equation's results, from the _Sums of its inputs.

    Additions, subtractions, products with constants and comparisons of int32 keep the difference q - k; any other
    primitive varies along all axes of its inputs.
    """
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
