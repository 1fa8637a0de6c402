"""The gradients of the arrays that a score_mod closes over, by the blocks in which a query may attend to a key.

The mathematics of reference.attention.backward, for a number of live blocks at a time, wherever they stand: those that
are masked out are not visited.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_kernels.attention_inputs import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.checks import offset as offset_of
from jax_kernels.masks.limits import whole_mask
from jax_kernels.masks.lists import block_status
from jax_kernels.reference import attention as reference
from jax_kernels.score_mod import ScoreMod, moving, with_moving

# Queries, and keys, of a block.
BLOCK = 128


class _Blocks(NamedTuple):
    """A chunk of blocks, each of one batch entry, or head of query, where the mask tells these apart, else of all.

    b, h: int32 [chunk], or None for all. q, k: int32 [chunk, block], indices in range.
    keep: bool [chunk, block_q, block_kv], none of a pair that is out of range.
    """

    b: Any
    h: Any
    q: Any
    k: Any
    keep: Any


def array_gradients(inputs: AttentionInputs, options: AttentionOptions, lse, delta, dout) -> ScoreMod:
    """The score_mod with the gradients of its arrays in their place; they are summed in float32 over the chunks.

    lse, delta: reference.row_terms.
    """
    mod, lengths = inputs.score_mod, (inputs.query.shape[1], inputs.key.shape[1])
    sums = mod.zeros(of_arrays=True)
    if 0 in lengths or not jax.tree.leaves(sums):
        return mod.with_gradients(sums)
    mask, blocks = whole_mask(inputs, options), tuple(min(BLOCK, length) for length in lengths)
    static_offset, offset = offset_of(first_position(inputs, options))
    alive, _ = block_status(mask, offset, lengths=lengths, blocks=blocks, static_offset=static_offset)
    together = [1 if told > 1 else of_all for told, of_all in zip(alive.shape, inputs.query.shape[::2], strict=False)]
    chunk = max(1, min(alive.size, reference.CHUNK_BYTES // (4 * math.prod((*together, *blocks)))))
    # How many are live is known on the device alone: there is room for all, and the loop ends after those that are.
    room = -(-alive.size // chunk) * chunk
    places = jnp.flatnonzero(alive, size=room, fill_value=alive.size).astype(jnp.int32)

    def one(index, sums):
        place = lax.dynamic_slice(places, (index * chunk,), (chunk,))
        found = _blocks_at(place, mask, offset, alive.shape, lengths, blocks)
        return jax.tree.map(jnp.add, sums, _of_chunk(found, inputs, options, lse, delta, dout))

    count = jnp.sum(alive, dtype=jnp.int32)
    return mod.with_gradients(lax.fori_loop(0, (count + chunk - 1) // chunk, one, sums))


def _blocks_at(place, mask: Mask, offset, shape: tuple[int, ...], lengths, blocks) -> _Blocks:
    """The blocks at these places of all blocks, of this shape; nothing is kept of one past the last."""
    b, h, row, column = jnp.unravel_index(jnp.minimum(place, math.prod(shape) - 1), shape)
    q, k = (at[:, None] * size + jnp.arange(size) for at, size in zip((row, column), blocks, strict=True))
    keep = (place < math.prod(shape))[:, None, None] & (q < lengths[0])[:, :, None] & (k < lengths[1])[:, None]
    q, k = (jnp.minimum(x, length - 1).astype(jnp.int32) for x, length in zip((q, k), lengths, strict=True))
    b, h = (x.astype(jnp.int32) for x in (b, h))
    wide = lambda x: x[:, None, None]
    of_entry = wide(offset[jnp.minimum(b, offset.shape[0] - 1)])
    keep &= mask.elements(wide(b), wide(h), q[:, :, None], k[:, None], q_offset=of_entry)
    return _Blocks(b if shape[0] > 1 else None, h if shape[1] > 1 else None, q, k, keep)


def _of_chunk(found: _Blocks, inputs: AttentionInputs, options: AttentionOptions, lse, delta, dout) -> tuple[Any, ...]:
    """The gradients of the arrays, or None, from these blocks. Scores are [chunk, batch, heads, block_q, block_kv]."""
    heads = inputs.query.shape[2]
    of_query, of_key = (functools.partial(_rows, found, heads=heads, index=index) for index in (found.q, found.k))
    pairs = ((inputs.query, inputs.key), (dout, inputs.value))
    products, dp = (_products(of_query(x), of_key(y), options) for x, y in pairs)
    lse, delta = (of_query(x.swapaxes(1, 2)[..., None]).swapaxes(2, 3) for x in (lse, delta))

    def scores_of(given):
        mod = ScoreMod(with_moving(inputs.score_mod.arrays, given), inputs.score_mod.program)
        program = jaxpr_as_fun(ClosedJaxpr(mod.program, []))
        modify = lambda score, *at: program(*mod.arrays, score, *at)[0]
        modified = lambda scores: _mapped(modify, found, inputs, scores.astype(jnp.float32)).astype(scores.dtype)
        bias = None if inputs.bias is None else _mapped(functools.partial(_at, inputs.bias), found, inputs, products)
        return reference.scores_of(products, bias, options, modified)

    scores, pull = jax.vjp(scores_of, moving(inputs.score_mod.arrays))
    p = jnp.exp(jnp.where(found.keep[:, None, None], scores, -jnp.inf) - lse)
    return pull(p * (dp - delta))[0]


def _rows(found: _Blocks, x: jax.Array, *, heads: int, index: jax.Array) -> jax.Array:
    """[chunk, batch, block, heads, D] of x [B, T, heads or key's, D], at the blocks' indices of queries or of keys."""
    every = slice(None)
    entry = every if found.b is None else found.b[:, None]
    head = every if found.h is None else (found.h // (heads // x.shape[2]))[:, None]
    rows = x[entry, index, head]
    rows = rows[:, None] if found.b is not None else jnp.moveaxis(rows, 1, 0)
    return rows if found.h is None else rows[..., None, :]


def _products(x: jax.Array, y: jax.Array, options: AttentionOptions) -> jax.Array:
    """x @ y^T, float32 [chunk, batch, heads, block_q, block_kv], from what _rows gives."""
    # Blocks are to it as batch entries.
    query, key = (rows.reshape(-1, *rows.shape[2:]) for rows in (x, y))
    products = reference.query_key_products(AttentionInputs(query, key, value=None), options)
    return products.reshape(*x.shape[:2], *products.shape[1:])


def _mapped(function: Any, found: _Blocks, inputs: AttentionInputs, scores: jax.Array) -> jax.Array:
    """function(score, b, h, q, k), of scalars, over scores [chunk, batch, heads, block_q, block_kv].

    Mapped one axis at a time, so that what it looks up by some indices is of their axes alone, and its gradient is
    summed over the others before it goes into an array.
    """
    of_all = [jnp.arange(size, dtype=jnp.int32) for size in inputs.query.shape[::2]]
    b, h = (every if own is None else own[:, None] for own, every in zip((found.b, found.h), of_all, strict=False))
    for axis in (3, 2, 1, 0):
        function = jax.vmap(function, (0, *(0 if axis == other else None for other in range(4))))
    of_chunk = (0, None if found.b is None else 0, None if found.h is None else 0, 0, 0)
    return jax.vmap(function, of_chunk)(scores, b, h, found.q, found.k)


def _at(array: jax.Array, score: jax.Array, *index: jax.Array) -> jax.Array:
    """A number of an array with axes that may be of length 1."""
    return array[tuple(0 if size == 1 else at for size, at in zip(array.shape, index, strict=True))]
