"""Attention in plain jnp.

`attention` is the textbook form, in whatever precision its inputs have: the oracle, with float64 inputs.
`forward` and `backward` are the "xla" implementation: the same mathematics, over chunks of queries, so
that no array of query length times key length is ever made.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

# Bytes of float32 scores that one chunk of queries may take.
CHUNK_BYTES = 1 << 28


def live(query_positions, key_positions, *, mask, kv_lengths, is_causal):
    """Which keys each query may attend to: bool, broadcastable to [B, H, queries, keys].

    query_positions: [B or 1, queries] global positions (q_offset is already in them); key_positions: [keys].
    """
    keep = jnp.ones((1, 1, 1, 1), bool)
    if is_causal:
        keep = keep & (query_positions[:, None, :, None] >= key_positions)
    if kv_lengths is not None:
        keep = keep & (key_positions < kv_lengths[:, None, None, None])
    if mask is not None:
        keep = keep & mask
    return keep


def positions(length, q_offset, start=0):
    """Global positions of `length` queries from `start`: [B or 1, length] int32."""
    return jnp.atleast_1d(jnp.asarray(q_offset, jnp.int32))[:, None] + start + jnp.arange(length, dtype=jnp.int32)


def attention(query, key, value, mask=None, kv_lengths=None, q_offset=0, *, is_causal=False, scale=None):
    """The textbook form. Returns (out [B, T, H, Dv], lse [B, H, T]) in the inputs' precision, float32 at least."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") * scale
    keep = live(
        positions(query.shape[1], q_offset),
        jnp.arange(key.shape[1]),
        mask=mask,
        kv_lengths=kv_lengths,
        is_causal=is_causal,
    )
    scores = jnp.where(keep, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    highest = lax.stop_gradient(jnp.where(jnp.isneginf(highest), 0, highest))
    weights = jnp.where(keep, jnp.exp(scores - highest), 0)
    total = weights.sum(axis=-1, keepdims=True)
    dead = total == 0
    weights = weights / jnp.where(dead, 1, total)
    lse = jnp.where(dead, -jnp.inf, jnp.log(jnp.where(dead, 1, total)) + highest)[..., 0]
    return jnp.einsum("bhts,bshd->bthd", weights, value, precision="highest"), lse


def _chunk_length(query, key):
    """Queries to a chunk: as many as CHUNK_BYTES holds, a multiple of 16, the whole length if it fits."""
    row = query.shape[0] * query.shape[2] * max(key.shape[1], 1) * 4
    rows = max(16, CHUNK_BYTES // max(row, 1) // 16 * 16)
    return min(rows, max(query.shape[1], 1))


def _split(x, chunk, axis=1):
    """[..., T, ...] -> [chunks, ..., chunk, ...], zero-padded at the end."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % chunk)
    x = jnp.pad(x, pad)
    x = x.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x, length, axis=1):
    """The inverse of _split."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _grouped(x, kv_heads):
    """[B, T, H, D] -> [B, T, kv heads, queries per kv head, D]."""
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])


def _precision(precision):
    return lax.Precision.DEFAULT if precision == "tf32" else lax.Precision.HIGHEST


def _chunk_mask(mask, start, chunk):
    """The rows of a dense mask [B, H, T, S] that belong to a chunk; a broadcast query axis stays."""
    if mask is None or mask.shape[2] == 1:
        return mask
    return lax.dynamic_slice_in_dim(mask, start, chunk, axis=2)


def _scores(query, key, keep, scale, precision):
    """Masked scores of one chunk, float32 [B, H, chunk, S]; query is [B, chunk, H, D]."""
    q = _grouped(query, key.shape[2])
    s = jnp.einsum("bqkgd,bskd->bkgqs", q, key, precision=precision, preferred_element_type=jnp.float32)
    return jnp.where(keep, s.reshape(s.shape[0], -1, *s.shape[3:]) * scale, -jnp.inf)


def _keep(start, chunk, key, mask, kv_lengths, q_offset, is_causal):
    return live(
        positions(chunk, q_offset, start),
        jnp.arange(key.shape[1]),
        mask=_chunk_mask(mask, start, chunk),
        kv_lengths=kv_lengths,
        is_causal=is_causal,
    )


def _pad_mask(mask, length, chunk):
    if mask is None or mask.shape[2] == 1:
        return mask
    return jnp.pad(mask, [(0, 0), (0, 0), (0, -length % chunk), (0, 0)])


def forward(query, key, value, mask, kv_lengths, q_offset, *, is_causal, scale, precision, out_dtype):
    """Returns (out [B, T, H, Dv] in out_dtype, lse [B, H, T] float32)."""
    length, kv_heads = query.shape[1], key.shape[2]
    chunk = _chunk_length(query, key)
    mask = _pad_mask(mask, length, chunk)
    precision = _precision(precision)

    def one(args):
        index, q = args
        keep = _keep(index * chunk, chunk, key, mask, kv_lengths, q_offset, is_causal)
        s = _scores(q, key, keep, scale, precision)
        highest = jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf)
        highest = jnp.where(jnp.isneginf(highest), 0, highest)
        p = jnp.exp(s - highest)
        total = p.sum(axis=-1)
        p = p / jnp.where(total == 0, 1, total)[..., None]
        p = p.reshape(p.shape[0], kv_heads, -1, *p.shape[2:])
        out = jnp.einsum("bkgqs,bskd->bqkgd", p, value.astype(jnp.float32), precision=precision)
        return out.reshape(*q.shape[:3], -1).astype(out_dtype), jnp.log(total) + highest[..., 0]

    q = _split(query, chunk)
    out, lse = lax.map(one, (jnp.arange(q.shape[0], dtype=jnp.int32), q))
    return _join(out, length), _join(lse, length, axis=2)


def backward(
    query, key, value, mask, kv_lengths, q_offset, out, lse, dout, dlse, *, is_causal, scale, precision
):  # fmt: skip
    """Returns (dquery, dkey, dvalue) in the inputs' dtypes; dkey and dvalue are summed in float32."""
    length, kv_heads = query.shape[1], key.shape[2]
    chunk = _chunk_length(query, key)
    mask = _pad_mask(mask, length, chunk)
    precision = _precision(precision)
    delta = jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), dout.astype(jnp.float32), precision="highest")
    if dlse is not None:
        # A row without keys has lse = -inf whatever its inputs are: no gradient passes.
        delta = delta - jnp.where(jnp.isneginf(lse), 0, dlse)
    k32, v32 = key.astype(jnp.float32), value.astype(jnp.float32)

    def one(carry, args):
        index, q, do, l, d = args
        keep = _keep(index * chunk, chunk, key, mask, kv_lengths, q_offset, is_causal)
        s = _scores(q, key, keep, scale, precision)
        p = jnp.exp(s - jnp.where(jnp.isneginf(l), jnp.inf, l)[..., None])
        grouped = lambda x: x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])
        q, do = (_grouped(x.astype(jnp.float32), kv_heads) for x in (q, do))
        dv = jnp.einsum("bkgqs,bqkgd->bskd", grouped(p), do, precision=precision)
        dp = jnp.einsum("bqkgd,bskd->bkgqs", do, v32, precision=precision)
        ds = grouped(p) * (dp - grouped(d)[..., None]) * scale
        dq = jnp.einsum("bkgqs,bskd->bqkgd", ds, k32, precision=precision)
        dk = jnp.einsum("bkgqs,bqkgd->bskd", ds, q, precision=precision)
        return (carry[0] + dk, carry[1] + dv), dq.reshape(*dq.shape[:2], -1, dq.shape[-1]).astype(query.dtype)

    # zeros_like keeps what shard_map knows of the arrays: that they vary over the mesh.
    zeros = (jnp.zeros_like(key, jnp.float32), jnp.zeros_like(value, jnp.float32))
    q, do = _split(query, chunk), _split(dout, chunk)
    l, d = _split(lse, chunk, axis=2), _split(delta, chunk, axis=2)
    (dk, dv), dq = lax.scan(one, zeros, (jnp.arange(q.shape[0], dtype=jnp.int32), q, do, l, d))
    return _join(dq, length), dk.astype(key.dtype), dv.astype(value.dtype)


# The public form of the oracle, jitted: un-jitted einsums in float64 are slow on a CPU.
oracle = jax.jit(attention, static_argnames=("is_causal", "scale"))
