"""Attention for decoding in plain jnp, the "xla" implementation. Pages are gathered into one array."""

import jax.numpy as jnp
from jax import lax


def attention_decode(query, key, value, kv_lengths, block_tables, sinks, *, scale, softcap, left):
    """(out [B, T, H, Dv] in query's dtype, lse [B, H, T] float32).

    Arguments are those of the kernels: see jax_kernels.pallas.attention.decode. scale may be any number here.
    """
    batch, q_length, heads, _ = query.shape
    if block_tables is not None:
        page_size = key.shape[1]
        counts = jnp.arange(block_tables.shape[1]) * page_size < kv_lengths[:, None]
        pages = jnp.where(counts, block_tables, 0)
        key, value = (x[pages].reshape(batch, -1, *x.shape[2:]) for x in (key, value))
    kv_heads = key.shape[2]
    kv_lengths = jnp.clip(kv_lengths, 0, key.shape[1])
    keys = jnp.arange(key.shape[1], dtype=jnp.int32)
    # What stands past a length may be anything, a NaN too.
    value = jnp.where((keys < kv_lengths[:, None])[..., None, None], value, 0)

    grouped = query.reshape(batch, q_length, kv_heads, heads // kv_heads, -1)
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, **exact) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    position = (kv_lengths[:, None] - q_length + jnp.arange(q_length, dtype=jnp.int32))[:, None, None, :, None]
    keep = keys <= position
    if left >= 0:
        keep = keep & (keys >= position - left)
    scores = jnp.where(keep, scores, -jnp.inf)

    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(batch, kv_heads, -1, 1, 1)
        highest = jnp.maximum(highest, sinks)
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = jnp.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, value.astype(jnp.float32), **exact)
    lse = (jnp.log(total) + highest).reshape(batch, heads, q_length)
    return out.reshape(batch, q_length, heads, -1).astype(query.dtype), lse
