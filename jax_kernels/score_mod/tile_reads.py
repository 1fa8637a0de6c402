"""Splits a score_mod in two: reads of arrays, done before a kernel, and a program for a tile of scores, in the
kernel.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jax_kernels.score_mod.axes import axes_of, called, flat
from jax_kernels.score_mod.trace import ScoreMod, evaluated

__all__ = ["TRITON_ELEMENTWISE", "TileMod", "primitives", "split", "why_not"]

# Primitives that Pallas lowers through Triton for a tile, with their derivatives.
TRITON_ELEMENTWISE = {
    "abs", "add", "and", "atan", "convert_element_type", "cos", "custom_jvp_call", "div", "eq", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "integer_pow", "jit", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "not", "or", "pow", "rem", "rsqrt", "select_n", "shift_right_arithmetic", "sign", "sin", "sqrt", "square",
    "stop_gradient", "sub", "tanh", "xor",
}  # fmt: skip
# Primitives that pallas.attention.sm90.score_mod computes on a tile, with their derivatives. sin and cos would be
# coarse there, because its kernels use approximate mathematics.
MOSAIC_ELEMENTWISE = TRITON_ELEMENTWISE - {"atan", "cos", "floor", "pow", "shift_right_arithmetic", "sin"}
# Primitives whose results its kernels compute faster than they read them, for a row or a column of a tile.
MOSAIC_CHEAP = {
    "abs", "add", "convert_element_type", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "neg", "sub",
}  # fmt: skip
# The same for each pair of a tile, for values that depend on q and k only as q - k.
CHEAP_OF_PAIRS = MOSAIC_CHEAP | {"and", "not", "or", "select_n", "sign", "square", "stop_gradient", "xor"}


@dataclasses.dataclass(frozen=True, eq=False)
class TileMod:
    """A score_mod in two parts: reads of its arrays into operands, and a program that needs only scores and operands.

    reads: for each operand, (program, axes). The program is a jaxpr of (*arrays, b, h, q, k) that returns a scalar. The
    axes are the letters of "bhqkd" on which the scalar depends; "d" is the difference q - k, for a scalar that depends
    on q and k only as q - k.

    program: a jaxpr of the scalars (score, b, h, q, k, *operands) that returns the new score.
    """

    reads: tuple[tuple[Any, frozenset[str]], ...]
    program: Any

    def operands(self, arrays: tuple[Any, ...], shape: tuple[int, int, int, int]) -> list[jax.Array]:
        """The operands for scores of shape (B, H, T, S): float32 or int32 [B or 1, H or 1, T or 1, S or 1] each.

        An operand that depends on q - k is [B or 1, H or 1, T + S - 1]; its entries are for the differences 1 - S to T
        - 1. arrays: the score_mod's arrays.
        """
        return [self._operand(arrays, shape, *read) for read in self.reads]

    def _operand(self, arrays, shape, program, axes):
        """One operand: float32 or int32 [B or 1, H or 1, T or 1, S or 1], or [B or 1, H or 1, T + S - 1] with axis "d".

        arrays: the score_mod's arrays. shape: (B, H, T, S) of the scores. program: a jaxpr of (*arrays, b, h, q, k)
        that returns a scalar. axes: the letters of "bhqkd" on which the scalar depends; "d" is q - k.
        """
        function: Any = lambda *indices: evaluated(program, (*arrays, *indices))
        sizes = (n if name in axes else 1 for name, n in zip("bhqk", shape, strict=True))
        indices = [jnp.arange(n, dtype=jnp.int32) for n in sizes]
        if "d" in axes:  # of all pairs with a difference, the pair with key 0
            of_pair, indices = function, [*indices[:2], jnp.arange(1 - shape[3], shape[2], dtype=jnp.int32)]
            function = lambda b, h, difference: of_pair(b, h, difference, jnp.int32(0))
        for axis in reversed(range(len(indices))):
            function = jax.vmap(function, tuple(0 if axis == other else None for other in range(len(indices))))
        whole = function(*indices)
        return whole.astype(jnp.float32 if jnp.issubdtype(whole.dtype, jnp.inexact) else jnp.int32)

    def __call__(self, scores: Any, b: Any, h: Any, q: Any, k: Any, operands: Any) -> jax.Array:
        """The new scores of a tile, float32 [rows, columns].

        scores: float32 [rows, columns]. b, h: int32 scalars. q, k: int32, the indices of query and key, shaped as
        scores. operands: the tile's entries of each operand, shaped as scores.
        """
        function = lambda score, q, k, *operands: self.of_pair(score, b, h, q, k, operands)
        return jax.vmap(jax.vmap(function))(scores, q, k, *operands)

    def of_pair(self, score: Any, b: Any, h: Any, q: Any, k: Any, operands: Any) -> jax.Array:
        """The new score of one pair, a float32 scalar. All arguments are scalars, and operands a sequence of
        scalars.
        """
        of_dtype = lambda x, dtype: x != 0 if dtype == jnp.dtype(bool) else x.astype(dtype)
        given = [of_dtype(x, of.aval.dtype) for x, of in zip(operands, self.program.invars[5:], strict=True)]
        return jaxpr_as_fun(ClosedJaxpr(self.program, []))(score, b, h, q, k, *given)[0]


def why_not(mod: ScoreMod, *, mosaic: bool = False) -> str | None:
    """The reason in words why `split` cannot split a score_mod into reads and a program; None if it can.

    mosaic: whether it is split for the kernels of "mosaic_gpu", else for the kernels of "triton".
    """
    try:
        split(mod, mosaic=mosaic)
    except NotImplementedError as error:
        return str(error)
    return None


def split(mod: ScoreMod, *, mosaic: bool = False) -> TileMod:
    """The TileMod of a score_mod. Raises NotImplementedError, with the reason, if the score_mod cannot be split.

    mosaic: split for the kernels of "mosaic_gpu". They read from memory the values that depend only on b and h, and the
    values that depend on one more index (q, k or the difference q - k) and are not cheap to compute. False: for
    "triton", whose kernels compute all values that need no look-up.
    """
    program = flat(mod.program)
    arrays, (score, *indices) = program.invars[:-5], program.invars[-5:]
    axes = axes_of(program, dict(zip((score, *indices), "sbhqk", strict=True)))
    if not mosaic:
        axes = {x: of_x - {"d"} | {"q", "k"} if "d" in of_x else of_x for x, of_x in axes.items()}
    worth_reading = {*arrays, *(indices[:2] if mosaic else ())}
    constants: set[Any] = set()
    equation: Any
    for equation in program.eqns:
        inputs, of_outputs = _variables(equation.invars), frozenset().union(*(axes[x] for x in equation.outvars))
        is_scalar = all(x.aval.shape == () for x in equation.outvars)
        if mosaic and is_scalar and constants.issuperset(inputs) and str(equation.primitive) in MOSAIC_ELEMENTWISE:
            constants.update(equation.outvars)
            continue
        if "d" in of_outputs:  # a head's value times the difference is not worth a read
            is_worth = any(x in worth_reading and "d" in axes[x] for x in inputs)
            is_worth |= not (is_scalar and _is_cheap_of_pairs(equation))
        else:
            is_worth = any(x in worth_reading for x in inputs)
            is_worth |= mosaic and (of_outputs <= {"b", "h"} or str(equation.primitive) not in MOSAIC_CHEAP)
        if is_worth:
            worth_reading.update(equation.outvars)
    is_read = lambda x: x in worth_reading and "s" not in axes[x] and len(axes[x] & {"q", "k", "d"}) <= 1
    known = {x for x in axes if is_read(x)}
    equations = _leading_to(program.outvars, program.eqns, known)
    used = [*(x for equation in equations for x in equation.invars), *program.outvars]
    operands = [x for x in dict.fromkeys(_variables(used)) if x in known]
    results = [x for equation in equations for x in equation.outvars]
    if any(x.aval.shape != () for x in (*operands, *results)):
        by = "query, by key or by their difference, not by both otherwise" if mosaic else "query or by key, not by both"
        raise NotImplementedError(f"in a score_mod it takes look-ups by {by} or by the score")
    unknown = sorted(set(primitives(equations)) - (MOSAIC_ELEMENTWISE if mosaic else TRITON_ELEMENTWISE))
    if unknown:
        raise NotImplementedError(f"in a score_mod its kernels cannot compute {', '.join(unknown)}")
    before = {x: _leading_to([x], program.eqns, set()) for x in operands}
    whole = lambda x: program.replace(invars=[*arrays, *indices], eqns=before[x], outvars=[x])
    reads = tuple((whole(x), axes[x]) for x in operands)
    return TileMod(reads, program.replace(invars=[score, *indices, *operands], eqns=equations))


def _is_cheap_of_pairs(equation: Any) -> bool:
    """Whether a kernel of "mosaic_gpu" computes the equation for each pair faster than it reads its result."""
    kind = str(equation.primitive)
    if kind == "div":
        is_float = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
        return is_float and isinstance(equation.invars[1], Literal)
    return kind in CHEAP_OF_PAIRS or (kind == "integer_pow" and equation.params["y"] in range(1, 5))


def _variables(atoms: Any) -> list[Any]:
    """The atoms that are variables, not literals."""
    return [x for x in atoms if not isinstance(x, Literal)]


def primitives(equations: Any) -> Iterator[str]:
    """Yields the names of the primitives in a program's equations and in the programs that they call, with
    repetitions.
    """
    for equation in equations:
        yield str(equation.primitive)
        for program in called(equation):
            yield from primitives(program.eqns)


def _leading_to(variables: Any, equations: Any, known: set[Any]) -> list[Any]:
    """The equations that compute `variables` from the `known` variables and the program's inputs, in the program's
    order.
    """
    needed, found = set(_variables(variables)) - known, []
    for equation in reversed(equations):
        if any(x in needed for x in equation.outvars):
            found.append(equation)
            needed |= set(_variables(equation.invars)) - known
    return found[::-1]
