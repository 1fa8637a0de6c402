"""Attention backward through Triton, in two passes: one owns blocks of keys and loops over queries, one the reverse.

Both passes recompute the probabilities from the log-sum-exp, P = exp2(S * scale * log2(e) - lse), and use
dS = P * (dO V^T - delta), with a delta per query. They take seven matmuls where one pass needs five, but no program
adds to another program's result: every run gives the same bits. With wide heads a pass of its own may compute dvalue,
in eight matmuls: two accumulators in one program leave few registers.

The gradient of a bias is a pass of its own (triton/bias_gradient.py).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.triton.arrays import (
    aligned,
    all_rows,
    bias_spec,
    load,
    load_rows,
    load_tile,
    store,
    whole,
    whole_array,
    whole_lists,
)
from jax_kernels.pallas.attention.triton.bias_gradient import Pairs, gradient_of_tiles
from jax_kernels.pallas.attention.triton.block_lists import ListedBlocks
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
from jax_kernels.pallas.attention.triton.score_mod import array_gradients, operands_of, summed, tile_scores
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton
from jax_kernels.pallas.kernel_types import Index, needed
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, padded, row_mask


class RowTerms(NamedTuple):
    """The values of each query that the kernels read.

    dout: [B, T, H, Dv], in query's dtype. lse, delta, lse_lo: float32 [B, H, T]. lse is in base 2, or in natural units
    if TracedCall.may_mask, and +inf for queries without keys. lse_lo is None without a bias or a score_mod. delta is
    None if the dq kernel computes lse and delta, and has not run yet.
    """

    dout: jax.Array
    lse: jax.Array
    delta: jax.Array | None
    lse_lo: jax.Array | None


class Results(NamedTuple):
    """The forward's results, from which the dq kernel computes lse and delta of the row terms.

    lse, dlse: float32 [B, H, T]: natural log, -inf for queries without keys, and its cotangent, None for zeros. out:
    [B, T, H, Dv].
    """

    lse: jax.Array
    out: jax.Array
    dlse: jax.Array | None


class Accumulators(NamedTuple):
    """The float32 sums of a block of keys in the dkv kernel's loop.

    key, value: [block_kv, padded D]; None for a gradient that another kernel computes. operands: [block_kv] for each
    operand of the score_mod whose gradient is summed over queries.
    """

    key: jax.Array | None
    value: jax.Array | None
    operands: tuple[jax.Array, ...] = ()


def attention_backward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    lse: Float32[Array, "B H T"],
    delta: Float32[Array, "B H T"] | None,
    dout: Float[Array, "B T H Dv"],
    lse_lo: Float32[Array, "B H T"] | None = None,
    out: Float[Array, "B T H Dv"] | None = None,
    dlse: Float32[Array, "B H T"] | None = None,
    *,
    config: AttentionBackwardTriton,
    core_count: int,
    interpret: bool,
) -> AttentionGradients:
    """The gradients of query, key, value, bias and score_mod, each with its input's shape and dtype.

    lse: [B, H, T] float32, the forward's in natural log, but +inf for queries without keys. delta: [B, H, T] float32,
    the sum of out * dout over Dv, minus the cotangent of lse. dout: [B, T, H, Dv]. lse_lo: the forward's, with a bias
    or a score_mod. out, dlse: instead of delta, the forward's out and the cotangent of lse (None for zeros); lse is
    then the forward's, unchanged. bias and score_mod have a gradient only if the options ask for it; sinks have none
    here. config: the block spec row.
    """
    del core_count  # one program per tile: nothing is persistent
    bias = inputs.bias
    whole = inputs._replace(bias=aligned(inputs.bias))
    listed = functools.partial(TracedCall.listed, whole, options, interpret=interpret)
    call, inputs, lists = listed(blocks=(config.block_q_dq, config.block_kv_dq), by="query")
    limiting, operands = limiting_arrays(inputs, call.options), operands_of(call, inputs)
    results = None if out is None else Results(lse, out, dlse)
    rows = RowTerms(dout.astype(inputs.query.dtype), call.in_units(lse), delta, lse_lo)
    dquery, terms, by_query = _dq(inputs, *limiting, rows, results, operands, call, config, lists)
    found: dict[str, jax.Array] = {}
    by_key: list[jax.Array] = []
    for names, block_q in _key_passes(config).items():
        of_keys, _, key_lists = listed(blocks=(block_q, config.block_kv_dkv), by="key")
        gradients, sums = _dkv(inputs, *limiting, terms, operands, of_keys, config, key_lists, names)
        found |= gradients
        by_key += sums
    dbias = None
    if bias is not None and options.bias_gradient:
        pairs = None if lists is None else Pairs.of_lists(lists, call)
        of_rows = terms.dout, terms.lse, terms.delta, terms.lse_lo
        dbias = gradient_of_tiles(inputs, *limiting, *of_rows, pairs, call, config)
        dbias = dbias[..., : bias.shape[3]]
    dmod = None
    if inputs.score_mod is not None and options.score_mod_gradient:
        dmod = array_gradients(call, inputs, operands, by_query, by_key)
    return AttentionGradients(dquery, found["key"], found["value"], dbias, score_mod=dmod)


def _key_passes(config: AttentionBackwardTriton) -> dict[tuple[str, ...], int]:
    """The queries in a step of each kernel whose programs own blocks of keys, by the gradients that it computes."""
    if config.block_q_dv is None:
        return {("key", "value"): config.block_q_dkv}
    return {("value",): config.block_q_dv, ("key",): config.block_q_dkv}


def _dkv(inputs, bounds, q_ids, kv_ids, rows, operands, call, config, lists, names):
    """(the gradients by name, [sums by key]) from a pass whose programs own blocks of keys.

    bounds: int32 [B, 2 or 3]: the position of query 0, the number of keys, and the first query with keys; or None.
    q_ids, kv_ids: segment ids, or None. rows: the RowTerms. operands: of the score_mod, empty without one. lists: the
    block lists by key, or None. names: of the gradients that the pass computes, "key" and "value" or one of them. sums
    by key, from the pass for key: for each operand with an axis of keys that has a gradient, its gradient summed over
    queries, [B, H, S] float32.
    """
    block_kv, q_rows, group = call.block_kv, all_rows(call.q_length, call.block_q), call.group
    # All queries of the query heads of this key head; without an axis of heads if the group has one head.
    heads = None if group == 1 else group
    q_spec = lambda d: whole(call.q_length, call.block_q, heads, d, lambda i, h, b: (b, h))
    row_spec = pl.BlockSpec((None, heads, q_rows), lambda i, h, b: (b, h, 0))
    kv_spec = lambda d: pl.BlockSpec((None, block_kv, None, padded(d)), lambda i, h, b: (b, i, h, 0))
    tile = lambda x: bias_spec(x, (None, heads, q_rows, block_kv), lambda i, h, b: (b, h, 0, i))
    key, value, bias = inputs.key, inputs.value, inputs.bias
    of_key = "key" in names
    ins = {
        "bounds": whole_array(bounds),
        "query": (inputs.query, q_spec(call.head_dim)),
        "key": (key, kv_spec(call.head_dim)),
        "value": (value, kv_spec(call.v_head_dim)),
        "dout": (rows.dout, q_spec(call.v_head_dim)),
        "lse": (rows.lse, row_spec),
        "delta": (rows.delta, row_spec),
        "lse_lo": None if rows.lse_lo is None else (rows.lse_lo, row_spec),
        "bias": None if bias is None else (bias, tile(bias)),
        "operands": [(x, tile(x)) for x in operands],
        "lists": whole_lists(lists),
    }
    by_key = jax.ShapeDtypeStruct((len(key), call.heads, call.kv_length), jnp.float32)
    by_key_spec = pl.BlockSpec((None, heads, block_kv), lambda i, h, b: (b, h, i))
    if q_ids is not None:
        ins["q_ids"] = q_ids, pl.BlockSpec((None, q_rows), lambda i, h, b: (b, 0))
        ins["kv_ids"] = kv_ids, pl.BlockSpec((None, block_kv), lambda i, h, b: (b, i))
        ins["ranges"] = whole_array(block_ranges.segment_ranges(kv_ids, block_kv, q_ids, call.block_q))
    every = {"key": (key, call.head_dim), "value": (value, call.v_head_dim)}
    outs = run(
        functools.partial(_dkv_kernel, names=names),
        call,
        config,
        name="attention_backward_dkv_triton" if len(names) == 2 else f"attention_backward_d{names[0][0]}_triton",
        grid=(call.kv_blocks, key.shape[2], key.shape[0]),
        ins=ins,
        outs=[(_gradient_of(x, call), kv_spec(d)) for name, (x, d) in every.items() if name in names]
        + [(by_key, by_key_spec)] * len(summed(call, operands, by_key=True) if of_key else []),
    )
    return dict(zip(names, outs, strict=False)), outs[len(names) :]


def _gradient_of(x: jax.Array, call: TracedCall) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an input's gradient."""
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if call.options.float32_gradients else x.dtype)


def _dkv_kernel(refs: Refs, *, call: TracedCall, names: tuple[str, ...]):
    """Computes the gradients of a block of keys, in a loop over the query heads of its group and their queries.

    names: "key" and "value", or one of them.
    """
    kv_index, kv_head, batch_index = (pl.program_id(axis) for axis in range(3))
    block_q, block_kv, group = call.block_q, call.block_kv, call.group
    first_head = kv_head * group
    kv_start = kv_index * block_kv
    limits = call.limits(refs, batch_index)
    keys = kv_start + iota(block_kv)
    among = None if refs.ranges is None else block_ranges.among(refs.ranges, batch_index, kv_index)
    # Keys past the length need no predicate: their sums are dropped at the end. But if there are partial blocks anyway,
    # they get it: ptxas serialises a causal kernel's wgmma (C7515) if the number of partial blocks is constant.
    has_partial = limits.left >= 0 or limits.right >= 0
    in_range = limits.query_blocks(kv_start, block_kv, block_q, call.q_length, among, predicate_at_end=has_partial)
    k = load(refs.key, kv_start, limits.kv_length, call.head_dim)
    of_key, of_value = "key" in names, "value" in names
    v = load(refs.value, kv_start, limits.kv_length, call.v_head_dim) if of_key else None
    columns = row_mask(kv_start, block_kv, call.columns)
    kv_ids = None if refs.kv_ids is None else load_rows(refs.kv_ids, kv_start, call.kv_length, block_ranges.NO_KEY)

    by_key = summed(call, refs.operands, by_key=True) if of_key else []

    # Everything is transposed, [keys, queries], so that P^T and dS^T are first operands as they are.
    def step(visit, state, *, head, blocks, partial):
        start = visit.block * block_q
        rows = pl.ds(start, block_q)
        of_head = lambda ref: ref.at[rows, :] if head is None else ref.at[rows, head, :]
        row_of_head = lambda ref: ref.at[rows] if head is None else ref.at[head, rows]
        q = load(of_head(refs.query), start, call.q_length, call.head_dim)
        lse = load_rows(row_of_head(refs.lse), start, call.q_length, jnp.inf)
        masks = row_mask(start, block_q, call.q_length), columns
        load_this = lambda x: load_tile(x, rows, slice(None), masks, head)
        own_head = first_head if head is None else first_head + head
        at = batch_index, own_head, start, kv_start
        s, pullback = tile_scores(call, refs, load_this, q, k, at, transposed=True)
        lse_lo = None
        if refs.lse_lo is not None:
            lse_lo = load_rows(row_of_head(refs.lse_lo), start, call.q_length, 0.0)[None, :]
        p = call.exp2(s, lse[None, :], lse_lo)
        if call.mod is not None and masks[0] is not None:  # past the queries mod reads zeros, and may divide by zero
            p = jnp.where(masks[0][None, :], p, 0.0)
        if partial and isinstance(blocks, ListedBlocks):
            p = jnp.where(blocks.keep(visit), p, 0.0)
        elif partial:
            ids = None
            if kv_ids is not None:
                ids = load_rows(needed(refs.q_ids).at[rows], start, call.q_length, block_ranges.NO_QUERY)
            p = jnp.where(Queries.of(limits, start, block_q, ids).keep(keys, kv_ids, transposed=True), p, 0.0)
        dout = load(of_head(refs.dout), start, call.q_length, call.v_head_dim)
        if of_value:
            state = state._replace(value=state.value + call.dot(p.astype(dout.dtype), dout, (1, 0)))
        if not of_key:
            return state
        delta = load_rows(row_of_head(refs.delta), start, call.q_length, 0.0)
        ds, doperands = pullback(p, p * (call.dot(needed(v), dout, (1, 1)) - delta[None, :]))
        sums = tuple(x + doperands[i].sum(axis=1) for i, x in zip(by_key, state.operands, strict=True))
        return state._replace(key=state.key + call.dot(ds.astype(q.dtype), q, (1, 0)), operands=sums)

    def one_head(head, state):
        state = state._replace(operands=tuple(jnp.zeros((block_kv,), jnp.float32) for _ in by_key))
        own_head = first_head if head is None else first_head + head
        blocks = in_range if refs.lists is None else refs.lists.of(batch_index, own_head, kv_index)
        state = block_loop(blocks, functools.partial(step, head=head, blocks=blocks), state)
        for ref, x in zip(refs.outs[len(names) :], state.operands, strict=True):
            x = jnp.where(keys < limits.kv_length, x, 0.0)
            plgpu.store(ref if head is None else ref.at[head], x, mask=row_mask(kv_start, block_kv, call.kv_length))
        return state._replace(operands=())

    zeros = lambda wanted, d: jnp.zeros((block_kv, padded(d)), jnp.float32) if wanted else None
    state = Accumulators(zeros(of_key, call.head_dim), zeros(of_value, call.v_head_dim))
    state = one_head(None, state) if group == 1 else lax.fori_loop(0, group, one_head, state)
    for name, ref in zip(names, refs.outs, strict=False):
        x, factor, d = (
            (state.key, call.options.scale, call.head_dim) if name == "key" else (state.value, 1.0, call.v_head_dim)
        )
        if refs.bounds is not None:
            x = jnp.where((keys < limits.kv_length)[:, None], x, 0.0)
        store(ref, (x if factor == 1.0 else x * factor).astype(ref.dtype), kv_start, call.kv_length, d)


def _dq(inputs, bounds, q_ids, kv_ids, rows, results, operands, call, config, lists):
    """(dquery, the RowTerms, [sums by query]) from the pass whose programs own blocks of queries.

    bounds: int32 [B, 2 or 3]: the position of query 0, the number of keys, and the first query with keys; or None.
    q_ids, kv_ids: segment ids, or None. rows: the RowTerms. results: None, or the Results from which the pass computes
    lse and delta of rows. operands: of the score_mod, empty without one. lists: the block lists by
    query, or None. sums by query: for each operand without an axis of keys that has a gradient, its gradient summed
    over keys, [B, H, T] float32.
    """
    programs = QueryPrograms(call, inputs, (bounds, q_ids, kv_ids), operands, lists)
    query, spec = inputs.query, programs.q_spec(call.head_dim)
    given: dict[str, Any] = {"lse": rows.lse, "delta": rows.delta, "lse_lo": rows.lse_lo}
    ins = programs.ins | {"dout": (rows.dout, programs.q_spec(call.v_head_dim))}
    if results is not None:
        given |= {"lse": results.lse, "delta": results.dlse}
        ins["out"] = results.out, programs.q_spec(call.v_head_dim)
    per_query = jax.ShapeDtypeStruct((len(query), call.heads, call.q_length), jnp.float32), programs.row_spec
    made = 0 if results is None else 2
    dquery, *outs = run(
        _dq_kernel,
        call,
        config,
        name="attention_backward_dq_triton",
        grid=programs.grid,
        ins=ins | {name: None if x is None else (x, programs.row_spec) for name, x in given.items()},
        outs=[(_gradient_of(query, call), spec)] + [per_query] * (made + len(summed(call, operands, by_key=False))),
        q_block=programs.q_block,
    )
    if made:
        rows = rows._replace(lse=outs[0], delta=outs[1])
    return dquery, rows, outs[made:]


def _dq_kernel(refs: Refs, *, call: TracedCall, q_block):
    """Computes dquery of a block of queries of one head, in a loop over the keys. q_block: maps a program to its
    block.
    """
    q_index, head, batch_index = q_block(pl.program_id(0)), pl.program_id(1), pl.program_id(2)
    block_q, block_kv = call.block_q, call.block_kv
    q_start = q_index * block_q
    by_query = summed(call, refs.operands, by_key=False)
    limits = call.limits(refs, batch_index)
    blocks = call.key_blocks(refs, limits, batch_index, head, q_index)
    rows = row_mask(q_start, block_q, call.q_length)
    q = load(refs.query, q_start, call.q_length, call.head_dim)
    dout = load(needed(refs.dout), q_start, call.q_length, call.v_head_dim)
    lse, delta = _row_terms(refs, call, dout, q_start)
    lse_lo = None if refs.lse_lo is None else load_rows(refs.lse_lo, q_start, call.q_length, 0.0)[:, None]
    q_ids = None if refs.q_ids is None else load_rows(refs.q_ids, q_start, call.q_length, block_ranges.NO_QUERY)
    queries = Queries.of(limits, q_start, block_q, q_ids)

    def step(visit, state, *, partial):
        dq, *sums = state
        start = visit.block * block_kv
        these = pl.ds(start, block_kv)
        length = limits.kv_length if partial else None
        k = load(refs.key.at[these, :], start, length, call.head_dim)
        v = load(refs.value.at[these, :], start, length, call.v_head_dim)
        columns = row_mask(start, block_kv, call.columns if partial else None)
        load_this = lambda x: load_tile(x, slice(None), these, (rows, columns))
        s, pullback = tile_scores(call, refs, load_this, q, k, (batch_index, head, q_start, start))
        p = call.exp2(s, lse[:, None], lse_lo)
        if partial:
            p = jnp.where(kept_keys(refs, call, blocks, visit, queries), p, 0.0)
        ds, doperands = pullback(p, p * (call.dot(dout, v, (1, 1)) - delta[:, None]))
        sums = [x + doperands[i].sum(axis=1) for i, x in zip(by_query, sums, strict=True)]
        return (dq + call.dot(ds.astype(k.dtype), k, (1, 0)), *sums)

    zeros = [jnp.zeros((block_q, padded(call.head_dim)), jnp.float32)]
    dq, *sums = block_loop(blocks, step, (*zeros, *(jnp.zeros((block_q,), jnp.float32) for _ in by_query)))
    dq_ref, *row_refs = refs.outs
    made, sum_refs = ([], row_refs) if refs.out is None else (row_refs[:2], row_refs[2:])
    for ref, x in zip(made, (lse, delta), strict=False):
        plgpu.store(ref, x, mask=rows)
    for ref, x in zip(sum_refs, sums, strict=True):
        plgpu.store(ref, x, mask=rows)
    store(dq_ref, (dq * call.options.scale).astype(dq_ref.dtype), q_start, call.q_length, call.head_dim)


def _row_terms(refs: Refs, call: TracedCall, dout: jax.Array, q_start: Index) -> tuple[jax.Array, jax.Array]:
    """(lse, delta) of a block of queries, float32 [block_q], as RowTerms has them; computed if the Refs have out."""
    lse = load_rows(needed(refs.lse), q_start, call.q_length, jnp.inf)
    delta = None if refs.delta is None else load_rows(refs.delta, q_start, call.q_length, 0.0)
    if refs.out is None:
        return lse, needed(delta)
    out = load(refs.out, q_start, call.q_length, call.v_head_dim)
    dead, total = lse == -jnp.inf, (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=1)
    if delta is not None:
        total = total - jnp.where(dead, 0.0, delta)
    return jnp.where(dead, jnp.inf, call.in_units(lse)), total
