"""Attention for decoding in plain jnp, the "xla" implementation. Pages are gathered into one array."""

import jax.numpy as jnp

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.reference import chunked_attention


def attention_decode(
    query, key, value, kv_lengths, block_tables, sinks, mask, bias, *, scale, softcap, left, chunk_bytes
):
    """(out [B, T, H, Dv] in query's dtype, lse [B, H, T] float32) of the last T tokens of each sequence.

    query: [B, T, H, D]. key: [B, S, Hkv, D], value: [B, S, Hkv, Dv]; or, with block_tables, int32 [B, pages of a
    sequence], [pages, page_size, Hkv, D or Dv]. kv_lengths: int32 [B], the keys of each sequence, including its T new
    ones. sinks: [B, H] float32, or None. mask, bias: bool and float [n, H or 1, T or 1, S], or None; each of the n
    entries serves B / n consecutive sequences. The scores are query @ key^T * scale, then softcap * tanh(scores /
    softcap) unless softcap is None, then + bias; scale may be any number. left: the keys before the query that it may
    attend to; -1 for all. chunk_bytes: as in chunked_attention.forward.
    """
    batch = query.shape[0]
    if block_tables is not None:
        page_size = key.shape[1]
        if key.shape[0] == 0:  # no sequence has a page then, but a lookup needs a page
            key, value = (jnp.zeros((1, *x.shape[1:]), x.dtype) for x in (key, value))
        counts = jnp.arange(block_tables.shape[1]) * page_size < kv_lengths[:, None]
        pages = jnp.where(counts, block_tables, 0)
        capacity = pages.shape[1] * page_size
        key, value = (x[pages].reshape(batch, capacity, *x.shape[2:]) for x in (key, value))
    kv_lengths = jnp.clip(kv_lengths, 0, key.shape[1])
    first = kv_lengths - query.shape[1]
    of_sequences = lambda x: x if x is None or x.shape[0] in (1, batch) else jnp.repeat(x, batch // x.shape[0], axis=0)
    inputs = AttentionInputs(
        query,
        key,
        value,
        bias=of_sequences(bias),
        mask=of_sequences(mask),
        sinks=sinks,
        kv_lengths=kv_lengths,
        q_offset=first,
    )
    options = AttentionOptions(scale, is_causal=True, window=(left, 0) if left >= 0 else None, softcap=softcap)
    out, lse, *_ = chunked_attention.forward(inputs, options, out_dtype=query.dtype, chunk_bytes=chunk_bytes)
    return out, lse
