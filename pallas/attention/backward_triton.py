"""Attention backward through Triton, in two passes: one owns blocks of keys and walks the queries, one the reverse.

Both recompute the probabilities from the log-sum-exp, P = exp2(S * scale * log2(e) - lse2), and have
dS = P * (dO V^T - delta), where delta = sum(out * dout) - dlse per query. Seven products where one pass needs five,
but no program adds to another's result: the same bits on every run.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_kernels.pallas.attention import tiles
from jax_kernels.pallas.attention.forward_triton import (
    LOG2E,
    bounds_spec,
    dot,
    dot_precision,
    exp2,
    fit,
    iota,
    load,
    load_rows,
    padded,
    row_limits,
    store,
    walk,
    whole,
    with_bounds,
)


def attention_backward(
    query, key, value, kv_lengths, q_offset, out, lse, dout, dlse, *, is_causal, scale, precision, config,
    core_count, interpret,
):  # fmt: skip
    """See the package's docstring. config: AttentionBackwardTriton."""
    del core_count  # one program per tile: nothing is persistent
    dead = jnp.isneginf(lse)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    if dlse is not None:
        delta = delta - jnp.where(dead, 0.0, dlse)
    # A query without keys: exp2(score - inf) is 0, and so is all that it would pass on.
    lse2 = jnp.where(dead, jnp.inf, lse * LOG2E)
    bounds = tiles.bounds_array(q_offset, kv_lengths, query.shape[0], key.shape[1])
    arrays = (bounds, query, key, value, dout.astype(query.dtype), lse2, delta)
    options = {
        "q_length": query.shape[1],
        "kv_length": key.shape[1],
        "head_dim": query.shape[3],
        "v_head_dim": value.shape[3],
        "q_offset": q_offset,
        "is_causal": is_causal,
        "scale": scale,
        "precision": dot_precision(precision),
        "interpret": interpret,
    }
    dkey, dvalue = _dkv(*arrays, config=config, **options)
    return _dq(*arrays, config=config, **options), dkey, dvalue


def _dkv(bounds, query, key, value, dout, lse2, delta, *, config, **options):
    q_length, kv_length, head_dim, v_head_dim = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    block_q, block_kv = fit(config.block_q_dkv, q_length), fit(config.block_kv_dkv, kv_length)
    group = query.shape[2] // key.shape[2]
    # All queries, of the heads that share this head of keys; without an axis of heads where it is one.
    heads = None if group == 1 else group
    q_spec = lambda d: whole(q_length, block_q, heads, d, lambda i, h, b: (b, h))
    row_spec = pl.BlockSpec((None, heads, pl.cdiv(q_length, block_q) * block_q), lambda i, h, b: (b, h, 0))
    kv_spec = lambda d: pl.BlockSpec((None, block_kv, None, padded(d)), lambda i, h, b: (b, i, h, 0))
    kernel = functools.partial(
        _dkv_kernel, bounds_ref=None, block_q=block_q, block_kv=block_kv, group=group, **options
    )  # fmt: skip
    return pl.pallas_call(
        kernel if bounds is None else with_bounds(kernel),
        grid=(pl.cdiv(kv_length, block_kv), key.shape[2], key.shape[0]),
        in_specs=[
            *bounds_spec(bounds),
            q_spec(head_dim),
            kv_spec(head_dim),
            kv_spec(v_head_dim),
            q_spec(v_head_dim),
            row_spec,
            row_spec,
        ],
        out_specs=[kv_spec(head_dim), kv_spec(v_head_dim)],
        out_shape=[jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)],
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=options["interpret"],
        name="attention_backward_dkv_triton",
    )(*([] if bounds is None else [bounds]), query, key, value, dout, lse2, delta)


def _dkv_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse2_ref, delta_ref, dk_ref, dv_ref, *, bounds_ref, group, q_length, kv_length,
    head_dim, v_head_dim, block_q, block_kv, q_offset, is_causal, scale, precision, interpret,
):  # fmt: skip
    kv_start = pl.program_id(0) * block_kv
    limits = tiles.limits(bounds_ref, pl.program_id(2), q_offset, kv_length, is_causal=is_causal)
    keys = kv_start + iota(block_kv)
    if is_causal:
        blocks = limits.query_blocks(kv_start, block_kv, block_q, q_length)
    else:  # no predicate: what keys past the length gather is dropped at the end
        total = pl.cdiv(q_length, block_q)
        count = total if bounds_ref is None else total * (kv_start < limits.kv_length).astype(jnp.int32)
        blocks = tiles.Blocks(count, 0, lambda step: step)
    k = load(k_ref, kv_start, limits.kv_length, head_dim)
    v = load(v_ref, kv_start, limits.kv_length, v_head_dim)

    # Everything is transposed, [keys, queries], so that P^T and dS^T are first operands as they stand.
    def step(index, state, *, head, partial):
        dk, dv = state
        start = blocks.at(index) * block_q
        rows = pl.ds(start, block_q)
        of_head = lambda ref: ref.at[rows, :] if head is None else ref.at[rows, head, :]
        row_of_head = lambda ref: ref.at[rows] if head is None else ref.at[head, rows]
        q = load(of_head(q_ref), start, q_length, head_dim)
        lse2 = load_rows(row_of_head(lse2_ref), start, q_length, jnp.inf)
        p = exp2(dot(k, q, (1, 1), precision), scale * LOG2E, lse2[None, :], interpret)
        if partial:
            p = jnp.where(keys[:, None] < row_limits(limits, start, block_q)[None, :], p, 0.0)
        dout = load(of_head(dout_ref), start, q_length, v_head_dim)
        dv = dv + dot(p.astype(dout.dtype), dout, (1, 0), precision)
        delta = load_rows(row_of_head(delta_ref), start, q_length, 0.0)
        ds = p * (dot(v, dout, (1, 1), precision) - delta[None, :])
        dk = dk + dot(ds.astype(q.dtype), q, (1, 0), precision)
        return dk, dv

    one_head = lambda head, state: walk(blocks, functools.partial(step, head=head), state)
    state = tuple(jnp.zeros((block_kv, padded(d)), jnp.float32) for d in (head_dim, v_head_dim))
    dk, dv = one_head(None, state) if group == 1 else lax.fori_loop(0, group, one_head, state)
    if bounds_ref is not None:
        dk, dv = (jnp.where((keys < limits.kv_length)[:, None], x, 0.0) for x in (dk, dv))
    store(dk_ref, (dk * scale).astype(dk_ref.dtype), kv_start, kv_length, head_dim)
    store(dv_ref, dv.astype(dv_ref.dtype), kv_start, kv_length, v_head_dim)


def _dq(bounds, query, key, value, dout, lse2, delta, *, config, **options):
    q_length, kv_length, head_dim, v_head_dim = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    block_q, block_kv = fit(config.block_q_dq, q_length), fit(config.block_kv_dq, kv_length)
    q_blocks, group = pl.cdiv(q_length, block_q), query.shape[2] // key.shape[2]
    q_block = (lambda i: q_blocks - 1 - i) if options["is_causal"] else lambda i: i
    q_spec = lambda d: pl.BlockSpec((None, block_q, None, padded(d)), lambda i, h, b: (b, q_block(i), h, 0))
    row_spec = pl.BlockSpec((None, None, block_q), lambda i, h, b: (b, h, q_block(i)))
    kv_spec = lambda d: whole(kv_length, block_kv, None, d, lambda i, h, b: (b, h // group))
    kernel = functools.partial(
        _dq_kernel, bounds_ref=None, q_block=q_block, block_q=block_q, block_kv=block_kv, **options
    )  # fmt: skip
    return pl.pallas_call(
        kernel if bounds is None else with_bounds(kernel),
        grid=(q_blocks, query.shape[2], query.shape[0]),
        in_specs=[
            *bounds_spec(bounds),
            q_spec(head_dim),
            kv_spec(head_dim),
            kv_spec(v_head_dim),
            q_spec(v_head_dim),
            row_spec,
            row_spec,
        ],
        out_specs=q_spec(head_dim),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=options["interpret"],
        name="attention_backward_dq_triton",
    )(*([] if bounds is None else [bounds]), query, key, value, dout, lse2, delta)


def _dq_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse2_ref, delta_ref, dq_ref, *, bounds_ref, q_block, q_length, kv_length,
    head_dim, v_head_dim, block_q, block_kv, q_offset, is_causal, scale, precision, interpret,
):  # fmt: skip
    q_start = q_block(pl.program_id(0)) * block_q
    limits = tiles.limits(bounds_ref, pl.program_id(2), q_offset, kv_length, is_causal=is_causal)
    blocks = limits.key_blocks(q_start, block_q, block_kv)
    key_limit = row_limits(limits, q_start, block_q)
    q = load(q_ref, q_start, q_length, head_dim)
    dout = load(dout_ref, q_start, q_length, v_head_dim)
    lse2 = load_rows(lse2_ref, q_start, q_length, jnp.inf)
    delta = load_rows(delta_ref, q_start, q_length, 0.0)

    def step(index, dq, *, partial):
        start = blocks.at(index) * block_kv
        length = limits.kv_length if partial else None
        k = load(k_ref.at[pl.ds(start, block_kv), :], start, length, head_dim)
        v = load(v_ref.at[pl.ds(start, block_kv), :], start, length, v_head_dim)
        p = exp2(dot(q, k, (1, 1), precision), scale * LOG2E, lse2[:, None], interpret)
        if partial:
            p = jnp.where(start + iota(block_kv)[None, :] < key_limit[:, None], p, 0.0)
        ds = p * (dot(dout, v, (1, 1), precision) - delta[:, None])
        return dq + dot(ds.astype(k.dtype), k, (1, 0), precision)

    dq = walk(blocks, step, jnp.zeros((block_q, padded(head_dim)), jnp.float32))
    store(dq_ref, (dq * scale).astype(dq_ref.dtype), q_start, q_length, head_dim)
