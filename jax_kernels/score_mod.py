"""A function of the scores, traced to a program of jax primitives and the arrays that it closes over."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_kernels.masks.mask import node, static

__all__ = ["ScoreMod", "trace"]

_WANT = (
    "want an elementwise function score_mod(score, b, h, q_idx, kv_idx) in jnp code: float32 scalar to float32 scalar"
)


@node
class ScoreMod:
    """A pytree, whose leaves are the arrays. Another trace of the same function is another program to jit.

    program: a jaxpr of (*arrays, score, b, h, q_idx, kv_idx).
    """

    arrays: tuple[Any, ...]
    program: Any = static()

    def __call__(self, scores: Any, q_idx: Any) -> jax.Array:
        """scores: [B, H, T, S] of queries q_idx [T], which are in range; the same shape and dtype."""
        return self._applied(self.arrays, scores, q_idx)

    def gradients(self, scores: Any, q_idx: Any, dout: Any, *, of_arrays: bool) -> tuple[Any, tuple[Any, ...]]:
        """(of the scores, of each array or None), from the cotangent of what __call__ gives."""
        moving = [i for i, x in enumerate(self.arrays) if of_arrays and jnp.issubdtype(x.dtype, jnp.inexact)]

        def function(scores, given):
            arrays = dict(enumerate(self.arrays)) | dict(zip(moving, given, strict=True))
            return self._applied(tuple(arrays.values()), scores, q_idx)

        dscores, given = jax.vjp(function, scores, [self.arrays[i] for i in moving])[1](dout)
        found = dict(zip(moving, given, strict=True))
        return dscores, tuple(found.get(i) for i in range(len(self.arrays)))

    def zeros(self, *, of_arrays: bool) -> tuple[Any, ...]:
        """What sums of the gradients of arrays begin with, in float32."""
        kinds = (of_arrays and jnp.issubdtype(x.dtype, jnp.inexact) for x in self.arrays)
        return tuple(
            jnp.zeros_like(x, jnp.float32) if moves else None for moves, x in zip(kinds, self.arrays, strict=True)
        )

    def with_gradients(self, sums: tuple[Any, ...]) -> "ScoreMod":
        """The gradients in the place of their arrays, in their dtypes."""
        dtypes = (x.dtype for x in self.arrays)
        arrays = tuple(None if x is None else x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True))
        return ScoreMod(arrays, self.program)

    def _applied(self, arrays: tuple[Any, ...], scores: Any, q_idx: Any) -> jax.Array:
        program = jaxpr_as_fun(ClosedJaxpr(self.program, []))
        function = lambda score, *indices: program(*arrays, score, *indices)[0]
        axes = [jnp.arange(n, dtype=jnp.int32) for n in scores.shape]
        axes[2] = q_idx
        for axis in (3, 2, 1, 0):
            function = jax.vmap(function, (0, *(0 if axis == other else None for other in range(4))))
        return function(scores.astype(jnp.float32), *axes).astype(scores.dtype)


def trace(function: Any) -> ScoreMod:
    """The ScoreMod of a function of scalars. Raises TypeError or ValueError where it is none."""
    if not callable(function):
        raise TypeError(f"score_mod: got {type(function).__name__}, {_WANT}")
    scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype)
    try:
        program, result = jax.make_jaxpr(function, return_shape=True)(scalar(jnp.float32), *[scalar(jnp.int32)] * 4)
    except Exception as error:
        raise TypeError(f"score_mod: raised {type(error).__name__} when traced, {_WANT}") from error
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise TypeError(f"score_mod: got a {type(result).__name__} from it, {_WANT}")
    if result.shape != ():
        raise ValueError(f"score_mod: got shape {result.shape} from it for scalars, {_WANT}")
    if result.dtype != jnp.float32:
        raise TypeError(f"score_mod: got dtype {result.dtype} from it, {_WANT}")
    jaxpr = program.jaxpr
    return ScoreMod(tuple(program.consts), jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]))
