"""A score_mod in the Triton attention kernels: its operands, its tiles, and the gradients of both.

An operand is what score_mod reads of arrays, [B or 1, H or 1, T or 1, S or 1], T and S not both. A kernel loads a tile
of each. The backward gives the gradient of each as sums over the keys, or over the queries where the operand has an
axis of keys, which are added up outside.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.attention_inputs import AttentionInputs
from jax_kernels.pallas.attention.shared_triton import Call, aligned
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.score_mod import ScoreMod
from jax_kernels.score_mod_tiles import split


def operands_of(inputs: AttentionInputs):
    """The operands of score_mod, aligned, and from the gradients of those in float32 the ScoreMod of its arrays'."""
    mod = inputs.score_mod
    if mod is None:
        return [], lambda gradients: None
    shape = (*inputs.query.shape[:3:2], inputs.query.shape[1], inputs.key.shape[1])
    tiles = split(mod)
    moving = [i for i, x in enumerate(mod.arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def floats(given):
        arrays = dict(enumerate(mod.arrays)) | dict(zip(moving, given, strict=True))
        return [x for x in tiles.operands(tuple(arrays.values()), shape) if x.dtype == jnp.float32]

    def of_arrays(gradients):
        given = [mod.arrays[i] for i in moving]
        found = dict(zip(moving, jax.vjp(floats, given)[1](gradients)[0], strict=True))
        return ScoreMod(tuple(found.get(i) for i in range(len(mod.arrays))), mod.program)

    return [aligned(x) for x in tiles.operands(mod.arrays, shape)], of_arrays


def summed(call: Call, operands: Any, *, by_key: bool) -> list[int]:
    """Which of the operands in float32 have a gradient that is summed over queries (by_key), or over keys."""
    if not call.options.score_mod_gradient:
        return []
    floats = [x for x in operands if x.dtype == jnp.float32]
    return [i for i, x in enumerate(floats) if (x.shape[-1] > 1) == by_key]


def operand_gradients(operands: Any, by_query: list[Any], by_key: list[Any]) -> list[jax.Array]:
    """Of the operands in float32, from the sums for each query [B, H, T], or key [B, H, S], in their order."""
    gradients, of_query, of_key = [], iter(by_query), iter(by_key)
    for x in operands:
        if x.dtype != jnp.float32:
            continue
        whole = next(of_key)[:, :, None] if x.shape[3] > 1 else next(of_query)[..., None]
        broadcast = tuple(axis for axis in range(4) if x.shape[axis] == 1)
        gradients.append(whole.sum(broadcast, keepdims=True))
    return gradients


def where_alive(p: jax.Array, gradients: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
    """modified's gradients, 0 where a pair has no weight: the derivative there may be anything."""
    return jax.tree.map(lambda x: jnp.where(p > 0.0, x, 0.0), gradients)


def modified(call: Call, products: jax.Array, place: tuple[Any, Any], queries: Any, keys: Any, operands: Any):
    """(the scores in base 2, from the gradient of the scores that of what score_mod got and those of the operands).

    products: query @ key^T [queries, keys], or if operands and indices stand so, its transpose. place: the batch entry
    and the head. queries, keys: indices that broadcast to products' shape, as operands do. The gradients of operands
    are those in float32, each of products' shape; none if they are not asked for.
    """
    whole = lambda x: jnp.broadcast_to(x, products.shape)
    queries, keys, operands = whole(queries), whole(keys), [whole(x) for x in operands]
    mod, wanted = call.mod, call.options.score_mod_gradient
    assert mod is not None
    moving = [i for i, x in enumerate(operands) if wanted and x.dtype == jnp.float32]

    def function(scores, given):
        every = dict(enumerate(operands)) | dict(zip(moving, given, strict=True))
        return mod(scores, *place, queries, keys, list(every.values()))

    scores, pullback = jax.vjp(function, products * call.options.scale, [operands[i] for i in moving])
    return scores * LOG2E, pullback
