"""Attention forward through Triton: a program owns a block of queries and loops over their keys.

Arrays keep their layout: a program reads its head of [B, T, H, D] in place. Tensors in a program have power-of-two
sizes, so that loads past a length or a head_dim are masked, and give zeros. The kv loop is two loops: over the partial
blocks and over the full blocks (see block_ranges.py).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.attention.triton.arrays import aligned, load, load_rows, load_tile, store, whole_array
from jax_kernels.pallas.attention.triton.common import (
    Queries,
    QueryPrograms,
    Refs,
    TracedCall,
    block_loop,
    kept_keys,
    limiting_arrays,
    run,
)
from jax_kernels.pallas.attention.triton.score_mod import operands_of, tile_scores
from jax_kernels.pallas.block_specs.specs import AttentionForwardTriton
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import padded, row_mask


def attention_forward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    out_dtype: DTypeLike,
    config: AttentionForwardTriton,
    core_count: int,
    interpret: bool,
) -> tuple[Float[Array, "B T H Dv"], *tuple[Float32[Array, "B H T"], ...]]:
    """(out [B, T, H, Dv] in out_dtype, lse [B, H, T] float32); with a bias or a score_mod (out, lse, lse_lo).

    lse: natural log, over the scores and the sink. lse_lo: like lse, the exact log-sum-exp minus lse. A query without
    keys has out = 0 and lse = -inf. config: the block spec row.
    """
    del core_count  # one program per tile: nothing is persistent
    inputs = inputs._replace(bias=aligned(inputs.bias))
    call, inputs, lists = TracedCall.listed(inputs, options, (config.block_q, config.block_kv), interpret, by="query")
    programs = QueryPrograms(call, inputs, limiting_arrays(inputs, call.options), operands_of(call, inputs), lists)
    out = jax.ShapeDtypeStruct((*inputs.query.shape[:3], call.v_head_dim), out_dtype)
    lse = jax.ShapeDtypeStruct((len(inputs.query), call.heads, call.q_length), jnp.float32)
    found, *rows = run(
        _kernel,
        call,
        config,
        name="attention_forward_triton",
        grid=programs.grid,
        ins=programs.ins | {"sinks": whole_array(inputs.sinks)},
        outs=[(out, programs.q_spec(call.v_head_dim)), *[(lse, programs.row_spec)] * (1 + call.may_mask)],
        q_block=programs.q_block,
    )
    return found, *rows


def _kernel(refs: Refs, *, call: TracedCall, q_block):
    """Computes out, lse and lse_lo of a block of queries of one head. q_block: maps a program to its block."""
    block_q, block_kv = call.block_q, call.block_kv
    q_index, head, batch_index = q_block(pl.program_id(0)), pl.program_id(1), pl.program_id(2)
    q_start = q_index * block_q
    limits = call.limits(refs, batch_index)
    blocks = call.key_blocks(refs, limits, batch_index, head, q_index)
    rows = row_mask(q_start, block_q, call.q_length)
    q = load(refs.query, q_start, call.q_length, call.head_dim)
    q_ids = None if refs.q_ids is None else load_rows(refs.q_ids, q_start, call.q_length, block_ranges.NO_QUERY)
    queries = Queries.of(limits, q_start, block_q, q_ids)

    def step(visit, state, *, partial):
        acc, row_max, row_sum = state
        start = visit.block * block_kv
        these = pl.ds(start, block_kv)
        length = limits.kv_length if partial else None
        k = load(refs.key.at[these, :], start, length, call.head_dim)
        columns = row_mask(start, block_kv, call.columns if partial else None)
        load_this = lambda x: load_tile(x, slice(None), these, (rows, columns))
        s, _ = tile_scores(call, refs, load_this, q, k, (batch_index, head, q_start, start))
        if partial:
            s = jnp.where(kept_keys(refs, call, blocks, visit, queries), s, -jnp.inf)
        new = jnp.maximum(row_max, s.max(axis=1) * call.factor)
        # A row may have met no key so far: -inf - -inf would be NaN.
        shift = jnp.where(new == -jnp.inf, 0.0, new) if partial or call.may_mask else new
        alpha = call.shrinking(row_max, shift)
        p = call.exp2(s, shift[:, None])
        row_sum = row_sum * alpha + p.sum(axis=1)
        v = load(refs.value.at[these, :], start, length, call.v_head_dim)
        acc = acc * alpha[:, None] + call.dot(p.astype(v.dtype), v, (1, 0))
        return acc, new, row_sum

    row_max, row_sum = jnp.full((block_q,), -jnp.inf, jnp.float32), jnp.zeros((block_q,), jnp.float32)
    if refs.sinks is not None:  # a key before all others, without a value
        of_batch = batch_index if refs.sinks.shape[0] > 1 else 0
        row_max = jnp.broadcast_to(call.in_units(refs.sinks[of_batch, head]), (block_q,))
        row_sum = row_sum + 1.0
    state = (jnp.zeros((block_q, padded(call.v_head_dim)), jnp.float32), row_max, row_sum)
    acc, row_max, row_sum = block_loop(blocks, step, state)
    dead = row_sum == 0.0
    if call.may_mask:  # lse_lo would be a NaN if a sink of -inf had counted itself
        dead = dead | (row_max == -jnp.inf)
    row_sum = jnp.where(dead, 1.0, row_sum)
    out_ref, lse_ref, *lse_lo_ref = refs.outs
    if call.may_mask:
        log = jnp.log2(row_sum) / LOG2E
        lse = jnp.where(dead, -jnp.inf, row_max + log)
        lse_lo = jnp.where(dead, 0.0, log + (row_max - lse))
        plgpu.store(lse_lo_ref[0], lse_lo, mask=rows)
    else:
        lse = jnp.where(dead, -jnp.inf, (row_max + jnp.log2(row_sum)) / LOG2E)
    store(out_ref, (acc / row_sum[:, None]).astype(out_ref.dtype), q_start, call.q_length, call.v_head_dim)
    plgpu.store(lse_ref, lse, mask=rows)
