"""The scores of a tile in the Triton attention kernels, and a score_mod's operands and gradients.

An operand holds values that a score_mod reads from arrays: [B or 1, H or 1, T or 1, S or 1], T and S not both. A kernel
loads a tile of each operand. The backward returns each operand's gradient as sums over the keys, or, if the operand has
an axis of keys, over the queries. The sums over the other axes are added up outside.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.pallas.attention.triton.arrays import aligned
from jax_kernels.pallas.attention.triton.common import Refs, TracedCall
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.triton.tensors import iota
from jax_kernels.score_mod.trace import ScoreMod, moving, with_moving


def operands_of(call: TracedCall, inputs: AttentionInputs) -> list[jax.Array | None]:
    """The operands of the call's score_mod, with rows of whole 16 bytes (common.aligned); empty without a score_mod.

    Each is [B or 1, H or 1, T or 1, S or 1], float32 or int32.
    """
    if call.mod is None:
        return []
    return [aligned(x) for x in call.mod.operands(needed(inputs.score_mod).arrays, _shape(call, inputs))]


def summed(call: TracedCall, operands: Sequence[jax.Array | Ref | None], *, by_key: bool) -> list[int]:
    """The indices of operands with an axis of keys, if by_key; else of the other operands. Only operands with a
    gradient.

    The gradients of the former are summed over queries, of the latter over keys.
    """
    floats = moving(operands, call.options.score_mod_gradient)
    return [i for i, x in enumerate(floats) if x is not None and (x.shape[-1] > 1) == by_key]


def array_gradients(
    call: TracedCall,
    inputs: AttentionInputs,
    operands: Sequence[jax.Array | None],
    by_query: Iterable[jax.Array],
    by_key: Iterable[jax.Array],
) -> ScoreMod:
    """The gradients of score_mod's arrays, as a ScoreMod that holds them instead of the arrays.

    by_query, by_key: the gradients of the operands without and with an axis of keys, summed over the other axis:
    float32 [B, H, T] and [B, H, S], in the order of the operands.
    """
    assert call.mod is not None
    mod, tiles, of_query, of_key = needed(inputs.score_mod), call.mod, iter(by_query), iter(by_key)

    def of_operand(x):
        whole = next(of_key)[:, :, None] if x.shape[3] > 1 else next(of_query)[..., None]
        return whole.sum(tuple(axis for axis in range(4) if x.shape[axis] == 1), keepdims=True)

    gradients = jax.tree.map(of_operand, moving(operands))
    floats = lambda given: moving(tiles.operands(with_moving(mod.arrays, given), _shape(call, inputs)))
    (given,) = jax.vjp(floats, moving(mod.arrays))[1](gradients)
    return ScoreMod(given, mod.program)


def _shape(call: TracedCall, inputs: AttentionInputs) -> tuple[int, int, int, int]:
    return len(inputs.query), call.heads, call.q_length, call.kv_length


def tile_scores(
    call: TracedCall,
    refs: Refs,
    load: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    at: tuple[Index, ...],
    *,
    transposed: bool = False,
):
    """(the scores of a tile before the mask, their pullback), inside a kernel.

    The scores are float32 [queries, keys], or [keys, queries] if transposed; times TracedCall.factor they are in base
    2, or natural units if TracedCall.may_mask. load(ref) loads this tile of the bias or of an operand of the score_mod:
    [queries or 1, keys or 1]. q, k: the tile's queries and keys, [rows, padded head_dim]. at: the batch entry, the
    head, the first query and the first key.

    pullback: maps P and the gradient of the scores to (the gradient of query @ key^T * scale, the gradients of the
    operands, each in the scores' shape, None for an operand without gradient).
    """
    turned = lambda x: x.T if transposed else x
    product = lambda: call.dot(*((k, q) if transposed else (q, k)), (1, 1))
    if call.mod is None:
        bias = None if refs.bias is None else load(refs.bias).astype(jnp.float32)
        scores, tanh = call.scores(product(), None if bias is None else turned(bias))
        return scores, lambda p, ds: (ds if tanh is None else ds * (1.0 - tanh * tanh), ())
    batch_index, head, first_query, first_key = at
    operands = [turned(load(x)) for x in refs.operands]
    indices = turned((first_query + iota(call.block_q))[:, None]), turned((first_key + iota(call.block_kv))[None, :])
    products = product()
    queries, keys, *operands = (jnp.broadcast_to(x, products.shape) for x in (*indices, *operands))
    function = lambda scores, given: call.mod(scores, batch_index, head, queries, keys, with_moving(operands, given))
    floats = moving(operands, call.options.score_mod_gradient)
    scores, pullback = jax.vjp(function, products * call.options.scale, floats)
    # The derivative of a pair without weight may have any value.
    return scores, lambda p, ds: jax.tree.map(lambda x: jnp.where(p > 0.0, x, 0.0), pullback(ds))
