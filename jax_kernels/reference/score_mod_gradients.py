"""The gradients of the arrays that a score_mod closes over, computed from the live blocks of a call.

The mathematics is the same as in reference.chunked_attention.backward. It runs over chunks of live blocks, which may be
far apart; dead blocks are not visited.

Values that a score_mod looks up by the difference q - k are read as kernels read them (see score_mod_reads.Operands).
"""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.block_lists import block_status
from jax_kernels.masks.checks import offset as offset_of
from jax_kernels.masks.limits import whole_mask
from jax_kernels.reference import attention as reference
from jax_kernels.reference import attention_chunks
from jax_kernels.reference.score_mod_reads import Arrays, Blocks, Operands, at, mapped
from jax_kernels.score_mod.tile_reads import split
from jax_kernels.score_mod.trace import ScoreMod

# The number of queries, and of keys, in a block.
BLOCK = 128


def array_gradients(inputs: AttentionInputs, options: AttentionOptions, lse, delta, dout, lse_lo=None) -> ScoreMod:
    """A ScoreMod whose arrays are the gradients of the score_mod's arrays, summed in float32 over the live blocks.

    lse, delta: float32 [B, H, T], the log-sum-exp of each query, and sum(out * dout) - dlse, as reference.row_terms
    returns them. dout: [B, T, H, Dv]. lse_lo: the exact log-sum-exp minus lse, [B, H, T], from the forward; None for 0.
    """
    lse_lo = jnp.zeros_like(lse) if lse_lo is None else lse_lo
    inputs = reference.without_ignored(inputs)
    mod, lengths = cast(ScoreMod, inputs.score_mod), (inputs.query.shape[1], inputs.key.shape[1])
    sums = mod.zeros(of_arrays=True)
    if 0 in lengths or not jax.tree.leaves(sums):
        return mod.with_gradients(sums)
    mask, blocks = whole_mask(inputs, options), tuple(min(BLOCK, length) for length in lengths)
    reader = _reader(mod, _batch_and_heads(inputs), lengths, max(blocks))
    blocks = blocks if isinstance(reader, Arrays) else (reader.block,) * 2
    static_offset, offset = offset_of(first_position(inputs, options))
    alive, _ = block_status(mask, offset, lengths=lengths, blocks=blocks, static_offset=static_offset)
    together = [1 if told > 1 else of_all for told, of_all in zip(alive.shape, inputs.query.shape[::2], strict=False)]
    chunk = max(1, min(alive.size, attention_chunks.CHUNK_BYTES // (4 * math.prod((*together, *blocks)))))
    # Only the device knows the number of live blocks: there is room for all blocks, and the loop ends at the last live.
    room = -(-alive.size // chunk) * chunk
    places = jnp.flatnonzero(alive, size=room, fill_value=alive.size).astype(jnp.int32)

    def one(index, sums):
        place = lax.dynamic_slice(places, (index * chunk,), (chunk,))
        found = _blocks_at(place, mask, offset, alive.shape, lengths, blocks)
        return reader.added(sums, _of_chunk(found, reader, inputs, options, (lse, delta, lse_lo), dout), found)

    count = jnp.sum(alive, dtype=jnp.int32)
    return reader.gradients(lax.fori_loop(0, (count + chunk - 1) // chunk, one, reader.zeros()))


def _batch_and_heads(inputs: AttentionInputs) -> tuple[int, int]:
    batch, _, heads, _ = inputs.query.shape
    return batch, heads


def _reader(mod: ScoreMod, shape: tuple[int, int], lengths: tuple[int, int], block: int) -> Arrays | Operands:
    """The object that reads the score_mod's arrays for some blocks, and sums their gradients.

    Operands if a value of the score_mod depends on q - k and it can be split into reads and a program, else Arrays.
    shape: (batch entries, heads). lengths: (queries, keys). block: the queries, and the keys, of a block.
    """
    try:
        parts = split(mod, mosaic=True)
    except NotImplementedError:
        return Arrays(mod, shape)
    if not any("d" in axes for _, axes in parts.reads):
        return Arrays(mod, shape)
    return Operands(mod, parts, parts.operands(mod.arrays, (*shape, *lengths)), shape, lengths, block)


def _blocks_at(place, mask: Mask, offset, shape: tuple[int, ...], lengths, blocks) -> Blocks:
    """The Blocks with the flat indices `place`, int32 [chunk], in an array of blocks of this shape.

    shape: (B or 1, H or 1, rows, columns). lengths: (queries, keys) of the call. blocks: (queries, keys) of a block.
    offset: int32 [B or 1], the position of query 0. Indices past the last block give blocks that keep no pair.
    """
    b, h, row, column = jnp.unravel_index(jnp.minimum(place, math.prod(shape) - 1), shape)
    q, k = (at[:, None] * size + jnp.arange(size) for at, size in zip((row, column), blocks, strict=True))
    keep = (place < math.prod(shape))[:, None, None] & (q < lengths[0])[:, :, None] & (k < lengths[1])[:, None]
    q, k = (jnp.minimum(x, length - 1).astype(jnp.int32) for x, length in zip((q, k), lengths, strict=True))
    b, h = (x.astype(jnp.int32) for x in (b, h))
    wide = lambda x: x[:, None, None]
    of_entry = wide(offset[jnp.minimum(b, offset.shape[0] - 1)])
    keep &= mask.elements(wide(b), wide(h), q[:, :, None], k[:, None], q_offset=of_entry)
    return Blocks(b if shape[0] > 1 else None, h if shape[1] > 1 else None, q, k, keep)


def _of_chunk(
    found: Blocks, reader: Arrays | Operands, inputs: AttentionInputs, options: AttentionOptions, rows, dout
) -> tuple[Any, ...]:
    """The gradients of the values that `reader` reads for these blocks, shaped as reader.given(found).

    rows: (lse, delta, lse_lo), float32 [B, H, T] each. dout: [B, T, H, Dv]. Inside, scores are [chunk, batch, heads,
    block_q, block_kv].
    """
    heads = inputs.query.shape[2]
    of_query, of_key = (functools.partial(_rows, found, heads=heads, index=index) for index in (found.q, found.k))
    pairs = ((inputs.query, inputs.key), (dout, inputs.value))
    products, dp = (_products(of_query(x), of_key(y), options) for x, y in pairs)
    lse, delta, lse_lo = (of_query(x.swapaxes(1, 2)[..., None]).swapaxes(2, 3) for x in rows)

    def scores_of(given):
        modified = lambda scores: reader.modified(given, found, scores.astype(jnp.float32)).astype(scores.dtype)
        bias = None
        if inputs.bias is not None:
            number = lambda score, _, *index: at(inputs.bias, score, *index)
            bias = mapped(number, found, _batch_and_heads(inputs), products)
        return reference.scores_of(products, bias, options, modified)

    scores, pull = jax.vjp(scores_of, reader.given(found))
    p = jnp.exp(jnp.where(found.keep[:, None, None], scores, -jnp.inf) - lse - lse_lo)
    return pull(p * (dp - delta))[0]


def _rows(found: Blocks, x: jax.Array, *, heads: int, index: jax.Array) -> jax.Array:
    """The rows of x that the blocks need: [chunk, batch, block, heads, D].

    x: [B, length, heads or key heads, D]. index: found.q if x has queries, found.k if it has keys: int32 [chunk,
    block]. batch and heads are 1 where a block has one batch entry or head. heads: the number of query heads.
    """
    every = slice(None)
    entry = every if found.b is None else found.b[:, None]
    head = every if found.h is None else (found.h // (heads // x.shape[2]))[:, None]
    rows = x[entry, index, head]
    rows = rows[:, None] if found.b is not None else jnp.moveaxis(rows, 1, 0)
    return rows if found.h is None else rows[..., None, :]


def _products(x: jax.Array, y: jax.Array, options: AttentionOptions) -> jax.Array:
    """x @ y^T for each block, float32 [chunk, batch, heads, block_q, block_kv].

    x, y: rows of queries and of keys, [chunk, batch, block, heads, D], as _rows returns them.
    """
    query = x.reshape(*x.shape[:-2], y.shape[-2], -1, x.shape[-1])
    precision = reference.matmul_precision(options)
    by = {"precision": precision, "preferred_element_type": jnp.float32}
    products = jnp.einsum("cbqkgd,cbskd->cbkgqs", query, y, **by)
    return products.reshape(*products.shape[:2], -1, *products.shape[4:])
