"""A function of the scores, traced to a program of jax primitives and the arrays that it closes over."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jax_kernels.masks.checks import reason_of
from jax_kernels.masks.mask import node, static
from jax_kernels.score_mod.axes import flat, lifted
from jax_kernels.tracing.manual_axes import as_varying, varying_axes

__all__ = ["ScoreMod", "ScoreModFunction", "evaluated", "moving", "trace", "with_moving"]

type ScoreModFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

_WANT = (
    "want an elementwise function score_mod(score, b, h, q_idx, kv_idx) in jnp code: float32 scalar to float32 scalar"
)
_EXPLICIT = (
    "score_mod: got a function that closes over an array on Explicit axes of a mesh, want arrays without such axes: "
    "make the mesh's axes Auto, or call inside jax.sharding.auto_axes, with the array as an argument of its function"
)


def moving(arrays: Any, wanted: bool = True) -> tuple[Any, ...]:
    """The arrays, with None in the position of each integer array, which has no gradient.

    With wanted=False, all entries are None. None is no leaf of a pytree, so a gradient has None in the same positions.
    """
    return tuple(x if wanted and jnp.issubdtype(x.dtype, jnp.inexact) else None for x in arrays)


def with_moving(arrays: Any, given: Any) -> tuple[Any, ...]:
    """The arrays, with each one replaced by the entry of `given` at its position, unless this entry is None."""
    return tuple(x if moved is None else moved for x, moved in zip(arrays, given, strict=True))


@node
class ScoreMod:
    """A traced score_mod: a function of the scores, as a jaxpr and the arrays that it closes over.

    arrays: the leaves of this pytree. program: a jaxpr of (*arrays, score, b, h, q_idx, kv_idx), all scalars but the
    arrays, that returns the new score. jit compiles again for another trace of the same function, since jaxprs are
    compared by identity.
    """

    arrays: tuple[Any, ...]
    program: Any = static()

    def __call__(self, scores: Any, q_idx: Any, *, b: Any = None, h: Any = None, kv_idx: Any = None) -> jax.Array:
        """The new scores, in the shape and dtype of `scores`, [B, H, T, S].

        q_idx, b, h, kv_idx: int32 with one axis, the index of each query, batch entry, head and key. For None, it is
        the index in the array.
        """
        function = lambda score, *indices: evaluated(self.program, (*self.arrays, score, *indices))
        given = (b, h, q_idx, kv_idx)
        axes = [jnp.arange(n, dtype=jnp.int32) if x is None else x for x, n in zip(given, scores.shape, strict=True)]
        for axis in (3, 2, 1, 0):
            function = jax.vmap(function, (0, *(0 if axis == other else None for other in range(4))))
        return function(scores.astype(jnp.float32), *axes).astype(scores.dtype)

    def gradients(
        self, scores: Any, q_idx: Any, dout: Any, *, of_arrays: bool, **indices: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """(gradient of the scores, tuple of the gradient of each array), from `dout`, the cotangent of the new scores.

        scores, q_idx, indices: as in a call of the ScoreMod. The gradient of an integer array is None; of_arrays=False
        makes all of the tuple None.
        """
        changed = lambda given: ScoreMod(with_moving(self.arrays, given), self.program)
        function = lambda scores, given: changed(given)(scores, q_idx, **indices)
        return jax.vjp(function, scores, moving(self.arrays, of_arrays))[1](dout)

    def zeros(self, *, of_arrays: bool) -> tuple[Any, ...]:
        """float32 zeros in the arrays' shapes, to which gradients are added; None for integer arrays, or for all of
        them.

        of_arrays: False if no array's gradient is wanted.
        """
        return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), moving(self.arrays, of_arrays))

    def with_gradients(self, sums: tuple[Any, ...]) -> "ScoreMod":
        """A ScoreMod whose arrays are these gradients in the arrays' dtypes, None where a sum is None."""
        dtypes = (x.dtype for x in self.arrays)
        arrays = tuple(None if x is None else x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True))
        return ScoreMod(arrays, self.program)


def evaluated(program: Any, arguments: tuple[Any, ...]) -> Any:
    """The first result of a jaxpr without constants, for these arguments.

    Inside a jax.shard_map that checks varying axes, all operands of an equation must vary along the same axes. A
    program that was traced for scalars does not ensure this. There its equations run one by one, on operands made to
    vary alike.
    """
    axes = varying_axes(arguments)
    if not axes:
        return jaxpr_as_fun(ClosedJaxpr(program, []))(*arguments)[0]
    program = flat(program)
    known: dict[Any, Any] = dict(zip(program.invars, as_varying(arguments, axes), strict=True))

    def value(x: Any) -> Any:
        of_literal: Any = x.aval
        return as_varying(jnp.asarray(x.val, of_literal.dtype), axes) if isinstance(x, Literal) else known[x]

    for equation in program.eqns:
        given = [value(x) for x in equation.invars]
        if str(equation.primitive) in ("pcast", "pvary"):
            found: Any = given
        else:
            params = equation.primitive.get_bind_params(equation.params)
            functions, params = params if isinstance(params, tuple) else ((), params)  # with JAX 0.11, a pair
            found = equation.primitive.bind(*functions, *given, **params)
        found = found if equation.primitive.multiple_results or found is given else [found]
        known |= dict(zip(equation.outvars, as_varying(found, axes), strict=True))
    return value(program.outvars[0])


def trace(function: Any) -> ScoreMod:
    """The ScoreMod of a function score_mod(score, b, h, q_idx, kv_idx) of scalars.

    A function object is traced once, as by jax.jit: its ScoreMod has the same arrays and program each time.

    Raises TypeError if it is no function, or does not map a float32 and four int32 scalars to float32; ValueError if
    its result is no scalar.
    """
    if not callable(function):
        raise TypeError(f"score_mod: got {type(function).__name__}, {_WANT}")
    scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype)
    try:
        program, result = jax.make_jaxpr(function, return_shape=True)(scalar(jnp.float32), *[scalar(jnp.int32)] * 4)
    except Exception as error:
        if "Explicit" in str(error):  # JAX has no error type for an array on another kind of mesh
            raise TypeError(_EXPLICIT) from error
        raise TypeError(
            f"score_mod: raised {type(error).__name__} when traced, {_WANT} ({reason_of(error)})"
        ) from error
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise TypeError(f"score_mod: got a {type(result).__name__} from it, {_WANT}")
    if result.shape != ():
        raise ValueError(f"score_mod: got shape {result.shape} from it for scalars, {_WANT}")
    if result.dtype != jnp.float32:
        raise TypeError(f"score_mod: got dtype {result.dtype} from it, {_WANT}")
    if program not in _LIFTED:
        _LIFTED[program] = lifted(program)
    return ScoreMod(*_LIFTED[program])


# The arrays and the jaxpr of each traced function. JAX keeps the trace of a function that it has traced before: with
# the same jaxpr, an eager call of this function finds the programs of earlier calls.
_LIFTED: weakref.WeakKeyDictionary[ClosedJaxpr, tuple[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
