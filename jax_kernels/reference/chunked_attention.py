"""The "xla" implementation of attention: the mathematics of attention.py over chunks of a call.

A chunk has some batch entries, key heads, queries and keys, so that no array has the size of query length times key
length. attention_chunks.py cuts the calls.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionOptions
from jax_kernels.masks import Mask
from jax_kernels.reference import attention_chunks as chunks
from jax_kernels.reference.attention import below_highest, kept_by_limits, matmul_precision, softmax_terms
from jax_kernels.reference.attention_chunks import Chunk, Sizes, each, grouped_scores

__all__ = ["backward", "forward"]


def forward(inputs: AttentionInputs, options: AttentionOptions, *, out_dtype: Any, chunk_bytes: int | None = None):
    """Returns (out [B, T, H, Dv] in out_dtype, lse [B, H, T] float32), with a bias or score_mod also lse_lo.

    lse_lo, shaped like lse, is the exact log-sum-exp minus lse: next to scores of -1e9, float32 loses the log. A query
    without keys has an out of 0 and an lse of -inf. chunk_bytes: the limit of chunk_sizes; None is CHUNK_BYTES.
    """
    sizes = chunks.chunk_sizes(inputs, options, chunk_bytes or chunks.CHUNK_BYTES)
    batch, length, heads, _ = inputs.query.shape
    of_rows = functools.partial(_forward_of_rows, options=options, sizes=sizes, out_dtype=out_dtype)

    def of_heads(part: Chunk):
        (out, *rows), _ = each(part, "queries", sizes.counts[2], of_rows)
        return (chunks.join(out, 3, length), *(chunks.join(x, 2, length) for x in rows)), ()

    def of_batch(part: Chunk):
        part = chunks.heads_in_front(part, for_backward=False)
        (out, *rows), _ = each(part, "heads", sizes.counts[1], of_heads)
        out = chunks.lengths_in_front(chunks.join(out, 1, inputs.key.shape[2]))
        return (out, *(chunks.join(x, 1, heads) for x in rows)), ()

    results, _ = each(chunks.chunk_of(inputs), "batch", sizes.counts[0], of_batch)
    return tuple(chunks.join(x, 0, batch) for x in results)


def _forward_of_rows(part: Chunk, *, options: AttentionOptions, sizes: Sizes, out_dtype: Any):
    """((out [b, k, g, T, Dv], lse [b, H, T], and lse_lo with a bias or score_mod), ()) of a chunk."""
    part, first = chunks.in_window(part, sizes, _position(part, options))
    s, highest, _ = _masked_scores(part, options, sizes, first)
    p, highest, sink = softmax_terms(s, highest, part.sinks)
    total, highest = (p.sum(axis=-1, keepdims=True) + sink)[..., 0], highest[..., 0]
    dead = total == 0
    total = jnp.where(dead, 1, total)  # log has an infinite derivative at 0
    kv_heads = part.key.shape[1]
    # The sum of S weights of at most 1, not divided yet, could exceed float32 where the mean of the values does not.
    size = part.value.shape[2] if isinstance(part.value.shape[2], int) else 1 << 20
    small = 0.5 ** max(size - 1, 0).bit_length()
    p, value = grouped_scores(p, kv_heads), part.value * small
    if chunks.has_few_rows(part.query):
        out = jnp.sum(p[..., None] * value[:, :, None, None], axis=-2)
    else:
        out = jnp.einsum("bkgqs,bksd->bkgqd", p, value, precision=matmul_precision(options))
    # Dividing `out`, not the weights, is S / Dv times cheaper.
    out = (out / grouped_scores(total[..., None] * small, kv_heads)).astype(out_dtype)
    log = jnp.log(total)
    lse = jnp.where(dead, -jnp.inf, log + highest)
    if part.bias is None and part.score_mod is None:
        return (out, lse), ()
    return (out, lse, jnp.where(dead, 0, log + (highest - lse))), ()


def _position(part: Chunk, options: AttentionOptions) -> Any:
    """The position of query 0 of the call: an int, or int32 [b]."""
    return options.q_offset if part.q_offset is None else part.q_offset


def _masked_scores(part: Chunk, options: AttentionOptions, sizes: Sizes, first: Any):
    """(scores minus the row's highest, the highest, query @ key^T) of a chunk.

    Shapes: [b, H, T, S], [b, H, T, 1], [b, H, T, S]. The first is -inf for pairs that are masked out. first: the index
    of the chunk's first key.
    """
    if chunks.has_few_rows(part.query):
        query, key = part.query.astype(jnp.float32), part.key.astype(jnp.float32)
        products = jnp.sum(query[..., None, :] * key[:, :, None, None], axis=-1)
    else:
        with_precision = {"precision": matmul_precision(options), "preferred_element_type": jnp.float32}
        products = jnp.einsum("bkgqd,bksd->bkgqs", part.query, part.key, **with_precision)
    products = products.reshape(products.shape[0], products.shape[1] * products.shape[2], *products.shape[3:])
    keep = kept_by_limits(part, options, part.rows, part.keys)
    if isinstance(part.mask, Mask):
        of_mask = part.mask.rows(part.rows, sizes.kv_length, q_offset=_position(part, options))
        keep = keep & (of_mask if sizes.start is None else lax.dynamic_slice_in_dim(of_mask, first, sizes.keys, 3))
    elif part.mask is not None:
        keep = keep & part.mask
    mod = part.score_mod
    modify = None if mod is None else lambda scores: mod(scores, part.rows, **_indices(part))
    return *below_highest(products, keep, part.bias, options, modify), products


def _indices(part: Chunk) -> dict[str, Any]:
    """The indices of a chunk's batch entries, heads and keys, as a ScoreMod takes them."""
    return {"b": part.entries, "h": part.heads, "kv_idx": part.keys}


def backward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    lse: Any,
    delta: Any,
    dout: Any,
    lse_lo: Any = None,
    *,
    chunk_bytes: int | None = None,
) -> AttentionGradients:
    """All gradients except dsinks, in the inputs' dtypes, or float32 with options.float32_gradients; sums are in
    float32.

    lse, delta: float32 [B, H, T], as row_terms returns them. dout: [B, T, H, Dv]. lse_lo: the exact log-sum-exp minus
    lse, [B, H, T], which the forward returns with a bias or a score_mod; None for 0. chunk_bytes: as in forward.
    """
    sizes = chunks.chunk_sizes(inputs, options, chunk_bytes or chunks.CHUNK_BYTES)
    (batch, length, heads, _), kv_heads = inputs.query.shape, inputs.key.shape[2]
    dtype_of = lambda x: jnp.float32 if options.float32_gradients else x.dtype
    slots = _BiasSlots(inputs.bias.shape if inputs.bias is not None and options.bias_gradient else None)
    mod, of_arrays = inputs.score_mod, options.score_mod_gradient
    # zeros_like keeps the mesh axes along which the arrays vary in a shard_map.
    zeros_at = lambda part, level: (slots.zeros(part, level), () if mod is None else mod.zeros(of_arrays=of_arrays))
    of_rows = functools.partial(_backward_of_rows, options=options, sizes=sizes, slots=slots)

    def of_heads(part: Chunk):
        zeros = lambda: (jnp.zeros_like(part.key32), jnp.zeros_like(part.value), zeros_at(part, "queries"))
        add = None if sizes.start is None else _added_in_window
        of_chunks = each(part, "queries", sizes.counts[2], of_rows, zeros, add)
        (dq, stacked), (dk, dv, (summed, arrays), *_) = of_chunks
        stacked, summed = slots.of_level("heads", slots.joined("queries", stacked, summed, length))
        dq = chunks.join(dq, 3, length).astype(dtype_of(inputs.query))
        gradients = dq, dk.astype(dtype_of(inputs.key)), dv.astype(dtype_of(inputs.value))
        return (gradients, stacked), (summed, arrays)

    def of_batch(part: Chunk):
        part = chunks.heads_in_front(part, for_backward=True)
        zeros = lambda: zeros_at(part, "heads")
        (gradients, stacked), (summed, arrays) = each(part, "heads", sizes.counts[1], of_heads, zeros)
        stacked, summed = slots.of_level("batch", slots.joined("heads", stacked, summed, heads))
        return ([chunks.lengths_in_front(chunks.join(x, 1, kv_heads)) for x in gradients], stacked), (summed, arrays)

    whole = chunks.chunk_of(inputs, lse=lse, delta=delta, dout=dout, lse_lo=lse_lo)
    zeros = lambda: zeros_at(whole, "batch")
    (gradients, stacked), (summed, arrays) = each(whole, "batch", sizes.counts[0], of_batch, zeros)
    dbias = slots.joined("batch", stacked, summed, batch)
    dquery, dkey, dvalue = (chunks.join(x, 0, batch) for x in gradients)
    return AttentionGradients(
        query=dquery,
        key=dkey,
        value=dvalue,
        bias=None if dbias is None or inputs.bias is None else dbias.astype(inputs.bias.dtype),
        score_mod=None if mod is None else mod.with_gradients(arrays),
    )


@dataclasses.dataclass(frozen=True)
class _BiasSlots:
    """The gradient of a bias at each level of chunks: stacked if the bias has the level's axis, else summed.

    shape: [B or 1, H or 1, T or 1, S or 1]; None if no gradient of a bias is wanted: all slots are None then.
    """

    shape: tuple[Any, ...] | None

    def _is_summed(self, level: str) -> bool:
        return self.shape is not None and self.shape[chunks.LEVELS.index(level)] == 1

    def zeros(self, part: Chunk, level: str) -> Any:
        return jnp.zeros_like(part.bias, jnp.float32) if self._is_summed(level) else None

    def of_level(self, level: str, dbias: Any) -> tuple[Any, Any]:
        """(stacked, summed): the gradient of one chunk of this level in its slot, None in the other."""
        return (None, dbias) if self._is_summed(level) else (dbias, None)

    def joined(self, level: str, stacked: Any, summed: Any, length: Any) -> Any:
        """The gradient from the slots of all chunks of a level. length: the length of the level's axis."""
        if self.shape is None or self._is_summed(level):
            return summed
        return chunks.join(stacked, chunks.LEVELS.index(level), length)


def _backward_of_rows(part: Chunk, *, options: AttentionOptions, sizes: Sizes, slots: _BiasSlots):
    """((dq [b, k, g, T, D], dbias if stacked), (dk [b, k, S, D], dv, (dbias if summed, gradients of arrays))).

    Under a window, dk and dv have only the visited keys, and the last tuple also has the index of the first of them.
    """
    bias = part.bias
    part, first = chunks.in_window(part, sizes, _position(part, options))
    einsum = functools.partial(jnp.einsum, precision=matmul_precision(options))
    kv_heads, dout = part.key.shape[1], part.dout
    s, highest, products = _masked_scores(part, options, sizes, first)
    excess = highest - part.lse[..., None]
    p = jnp.exp(s + (excess if part.lse_lo is None else excess - part.lse_lo[..., None]))
    dv = einsum("bkgqs,bkgqd->bksd", grouped_scores(p, kv_heads), dout)
    dp = einsum("bkgqd,bksd->bkgqs", dout, part.value)
    ds = p * (dp.reshape(p.shape) - part.delta[..., None])
    dbias = _bias_gradient(ds, bias, slots, first)
    if options.softcap is not None:
        ds = ds * (1 - jnp.tanh(products * (options.scale / options.softcap)) ** 2)
    arrays: tuple[Any, ...] = ()
    if part.score_mod is not None:
        given = products * options.scale, part.rows, ds
        of_arrays = options.score_mod_gradient
        ds, arrays = part.score_mod.gradients(*given, of_arrays=of_arrays, **_indices(part))
        ds = jnp.where(jnp.isneginf(s), 0, ds)  # the derivative may be anything there
    ds = grouped_scores(ds * options.scale, kv_heads)
    dq = einsum("bkgqs,bksd->bkgqd", ds, part.key32)
    dk = einsum("bkgqs,bkgqd->bksd", ds, part.query.astype(jnp.float32))
    stacked, summed = slots.of_level("queries", dbias)
    return (dq, stacked), (dk, dv, (summed, arrays), *(() if sizes.start is None else (first,)))


def _added_in_window(sums: Any, more: Any) -> Any:
    """The sums of _backward_of_rows over chunks, plus these of one more chunk, under a window."""
    (dk, dv, others), (own_dk, own_dv, own_others, first) = sums, more
    add = chunks.added_keys
    return add(dk, own_dk, first, 2), add(dv, own_dv, first, 2), jax.tree.map(jnp.add, others, own_others)


def _bias_gradient(ds: Any, bias: Any, slots: _BiasSlots, first: Any) -> Any:
    """The gradient of a chunk's bias, [b or 1, H or 1, T or 1, S or 1], from the gradient of its scores; or None.

    first: the index of the first visited key: under a window, ds has only the visited keys.
    """
    if slots.shape is None:
        return None
    dbias = ds.sum(tuple(axis for axis in range(4) if slots.shape[axis] == 1), keepdims=True)
    if dbias.shape[3] == bias.shape[3]:
        return dbias
    return lax.dynamic_update_slice_in_dim(jnp.zeros_like(bias, jnp.float32), dbias, first, 3)
