"""The score_mod of a whole sequence, seen by a call that has only some of its queries, keys and heads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.score_mod.trace import ScoreMod, evaluated

__all__ = ["placed"]


def placed(mod: ScoreMod, positions: Callable[..., tuple[Any, Any, Any]], numbers: tuple[Any, ...]) -> ScoreMod:
    """The score_mod of a call with only some of a whole sequence's queries, keys and heads.

    mod: the score_mod of the whole sequence. positions: a function of (h, q, k, *numbers), with the call's indices of a
    head, query and key, that returns their indices (h, q, k) in the whole sequence. numbers: int32 scalars, which may
    be traced; the result's arrays are the arrays of `mod`, then these. The batch entry's index does not change.
    """
    count = len(mod.arrays)
    given = *mod.arrays, *numbers

    def program(*arguments: Any) -> Any:
        *arrays, score, b, h, q, k = arguments
        h, q, k = positions(h, q, k, *arrays[count:])
        return evaluated(mod.program, (*arrays[:count], score, b, h, q, k))

    scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    closed = jax.make_jaxpr(program)(*shapes, scalar(jnp.float32), *[scalar(jnp.int32)] * 4)
    assert not closed.consts, closed.consts
    return ScoreMod(given, closed.jaxpr)
