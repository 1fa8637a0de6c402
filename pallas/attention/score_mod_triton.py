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
from jax_kernels.score_mod import ScoreMod, moving, with_moving


def operands_of(call: Call, inputs: AttentionInputs) -> list[jax.Array]:
    """The operands of score_mod, aligned."""
    if call.mod is None:
        return []
    return [aligned(x) for x in call.mod.operands(inputs.score_mod.arrays, _shape(call, inputs))]


def summed(call: Call, operands: Any, *, by_key: bool) -> list[int]:
    """Which of the operands have a gradient that is summed over queries (by_key), or over keys."""
    floats = moving(operands, call.options.score_mod_gradient)
    return [i for i, x in enumerate(floats) if x is not None and (x.shape[-1] > 1) == by_key]


def array_gradients(call: Call, inputs: AttentionInputs, operands: Any, by_query: Any, by_key: Any) -> ScoreMod:
    """Of score_mod, from the sums of its operands' for each query [B, H, T], or key [B, H, S], in their order."""
    assert call.mod is not None
    mod, tiles, of_query, of_key = inputs.score_mod, call.mod, iter(by_query), iter(by_key)

    def of_operand(x):
        whole = next(of_key)[:, :, None] if x.shape[3] > 1 else next(of_query)[..., None]
        return whole.sum(tuple(axis for axis in range(4) if x.shape[axis] == 1), keepdims=True)

    gradients = jax.tree.map(of_operand, moving(operands))
    floats = lambda given: moving(tiles.operands(with_moving(mod.arrays, given), _shape(call, inputs)))
    (given,) = jax.vjp(floats, moving(mod.arrays))[1](gradients)
    return ScoreMod(given, mod.program)


def _shape(call: Call, inputs: AttentionInputs) -> tuple[int, int, int, int]:
    return len(inputs.query), call.heads, call.q_length, call.kv_length


def where_alive(p: jax.Array, gradients: Any) -> Any:
    """modified's gradients, 0 where a pair has no weight: the derivative there may be anything."""
    return jax.tree.map(lambda x: jnp.where(p > 0.0, x, 0.0), gradients)


def modified(call: Call, products: jax.Array, place: tuple[Any, Any], queries: Any, keys: Any, operands: Any):
    """(the scores in base 2, from the gradient of the scores that of what score_mod got and those of the operands).

    products: query @ key^T [queries, keys], or if operands and indices stand so, its transpose. place: the batch entry
    and the head. queries, keys: indices that broadcast to products' shape, as operands do. The gradients of operands
    are of products' shape, in the form of `moving`.
    """
    whole = lambda x: jnp.broadcast_to(x, products.shape)
    queries, keys, operands = whole(queries), whole(keys), [whole(x) for x in operands]
    mod, floats = call.mod, moving(operands, call.options.score_mod_gradient)
    assert mod is not None
    function = lambda scores, given: mod(scores, *place, queries, keys, with_moving(operands, given))
    scores, pullback = jax.vjp(function, products * call.options.scale, floats)
    return scores * LOG2E, pullback
