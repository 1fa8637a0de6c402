"""A score_mod in two parts: what it reads of arrays, before a kernel, and what a kernel does to a tile of scores."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jax_kernels.score_mod import ScoreMod

__all__ = ["TileMod", "split", "why_not"]

# What Pallas lowers through Triton for a tile, it and its derivative.
ELEMENTWISE = {
    "abs", "add", "and", "atan", "convert_element_type", "cos", "custom_jvp_call", "div", "eq", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "integer_pow", "jit", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "not", "or", "pow", "rem", "rsqrt", "select_n", "shift_right_arithmetic", "sign", "sin", "sqrt", "square",
    "stop_gradient", "sub", "tanh", "xor",
}  # fmt: skip
# What pallas.attention.score_mod_sm90 computes on a tile, it and its derivative. sin and cos are coarse there, as its
# kernels' mathematics is approximate.
MOSAIC_ELEMENTWISE = ELEMENTWISE - {"atan", "cos", "floor", "pow", "shift_right_arithmetic", "sin"}
# What its kernels had better compute for a row or a column of a tile than read.
MOSAIC_CHEAP = {
    "abs", "add", "convert_element_type", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "neg", "sub",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class TileMod:
    """reads: a program of (*arrays, b, h, q, k) for each operand, a scalar, and what of "bhqk" it depends on.

    program: of (score, b, h, q, k, *operands).
    """

    reads: tuple[tuple[Any, frozenset[str]], ...]
    program: Any

    def operands(self, arrays: tuple[Any, ...], shape: tuple[int, int, int, int]) -> list[jax.Array]:
        """For scores of this shape: [B or 1, H or 1, T or 1, S or 1] each, float32 or int32."""
        return [self._operand(arrays, shape, *read) for read in self.reads]

    def _operand(self, arrays, shape, program, axes):
        function = lambda *indices: jaxpr_as_fun(ClosedJaxpr(program, []))(*arrays, *indices)[0]
        for axis in (3, 2, 1, 0):
            function = jax.vmap(function, tuple(0 if axis == other else None for other in range(4)))
        sizes = (n if name in axes else 1 for name, n in zip("bhqk", shape, strict=True))
        whole = function(*(jnp.arange(n, dtype=jnp.int32) for n in sizes))
        return whole.astype(jnp.float32 if jnp.issubdtype(whole.dtype, jnp.inexact) else jnp.int32)

    def __call__(self, scores: Any, b: Any, h: Any, q: Any, k: Any, operands: Any) -> jax.Array:
        """A tile of scores, float32. b, h: int32 scalars. q, k, int32, and operands: shaped as scores."""

        def function(score, q, k, *operands):
            variables = self.program.invars[5:]
            of_dtype = lambda x, dtype: x != 0 if dtype == jnp.dtype(bool) else x.astype(dtype)
            given = [of_dtype(x, variable.aval.dtype) for x, variable in zip(operands, variables, strict=True)]
            return jaxpr_as_fun(ClosedJaxpr(self.program, []))(score, b, h, q, k, *given)[0]

        return jax.vmap(jax.vmap(function))(scores, q, k, *operands)


def why_not(mod: ScoreMod, *, mosaic: bool = False) -> str | None:
    """Why it has no two parts."""
    try:
        split(mod, mosaic=mosaic)
    except NotImplementedError as error:
        return str(error)
    return None


def split(mod: ScoreMod, *, mosaic: bool = False) -> TileMod:
    """The two parts. Raises NotImplementedError where there are none.

    mosaic: for the kernels that read, not compute, what is of b and h alone, and what is of one more index and not
    cheap.
    """
    program = mod.program
    arrays, (score, *indices) = program.invars[:-5], program.invars[-5:]
    depends: dict[Any, frozenset[str]] = dict.fromkeys(arrays, frozenset())
    depends |= {variable: frozenset({name}) for variable, name in zip((score, *indices), "sbhqk", strict=True)}
    worth_reading = {*arrays, *(indices[:2] if mosaic else ())}
    for equation in program.eqns:
        inputs = _variables(equation.invars)
        of_inputs = frozenset().union(*(depends[x] for x in inputs))
        is_worth = any(x in worth_reading for x in inputs)
        is_worth |= mosaic and (of_inputs <= {"b", "h"} or str(equation.primitive) not in MOSAIC_CHEAP)
        for variable in equation.outvars:
            depends[variable] = of_inputs
            if is_worth:
                worth_reading.add(variable)
    is_read = lambda x: x in worth_reading and "s" not in depends[x] and not depends[x] >= {"q", "k"}
    known = {x for x in depends if is_read(x)}
    equations = _leading_to(program.outvars, program.eqns, known)
    used = [*(x for equation in equations for x in equation.invars), *program.outvars]
    operands = [x for x in dict.fromkeys(_variables(used)) if x in known]
    results = [x for equation in equations for x in equation.outvars]
    if any(x.aval.shape != () for x in (*operands, *results)):
        raise NotImplementedError("of a score_mod it takes look-ups by query or by key, not by both or by the score")
    unknown = sorted(set(_primitives(equations)) - (MOSAIC_ELEMENTWISE if mosaic else ELEMENTWISE))
    if unknown:
        raise NotImplementedError(f"of a score_mod its kernels cannot compute {', '.join(unknown)}")
    before = {x: _leading_to([x], program.eqns, set()) for x in operands}
    whole = lambda x: program.replace(invars=[*arrays, *indices], eqns=before[x], outvars=[x])
    reads = tuple((whole(x), depends[x]) for x in operands)
    return TileMod(reads, program.replace(invars=[score, *indices, *operands], eqns=equations))


def _variables(atoms: Any) -> list[Any]:
    return [x for x in atoms if not isinstance(x, Literal)]


def _primitives(equations: Any) -> Iterator[str]:
    for equation in equations:
        yield str(equation.primitive)
        for parameter in equation.params.values():
            if isinstance(parameter, Jaxpr | ClosedJaxpr):
                yield from _primitives(parameter.eqns)


def _leading_to(variables: Any, equations: Any, known: set[Any]) -> list[Any]:
    """The equations that give these variables, from what is known."""
    needed, found = set(_variables(variables)) - known, []
    for equation in reversed(equations):
        if any(x in needed for x in equation.outvars):
            found.append(equation)
            needed |= set(_variables(equation.invars)) - known
    return found[::-1]
