"""The gradients of queries with a large log-sum-exp under a bias: a kernel in base 2 leaves these gradients out.

A bias of -1e9 or of finfo.min for all keys of a query gives an lse close to the bias. Times log2(e), lse is rounded by
more than the scores differ, or it overflows. Here scores stay in natural units, and lse is subtracted exactly.

Such queries ("large rows": softmax.is_large of their lse is True) are rare. One launch looks for them, and ends at once
in a call without large rows. It has few programs. Each program owns several tiles of keys, then several tiles of
queries. Every tile is visited with the predicate: optimisations for this launch alone would not pay.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.softmax import is_large
from jax_kernels.pallas.attention.triton.arrays import (
    aligned,
    all_rows,
    bias_spec,
    head_mask,
    load,
    load_rows,
    load_tile,
    whole,
    whole_array,
)
from jax_kernels.pallas.attention.triton.bias_gradient import Pairs, Tile, gradient_of_tiles, is_kept
from jax_kernels.pallas.attention.triton.common import Queries, Refs, TracedCall, limiting_arrays, run
from jax_kernels.pallas.attention.triton.score_mod import tile_scores
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton
from jax_kernels.pallas.kernel_types import Index, Ref, Slice, needed
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, padded, row_mask

PROGRAMS = 1  # per SM


def large_rows(
    inputs: AttentionInputs,
    options: AttentionOptions,
    gradients: AttentionGradients,
    lse: Float32[Array, "B H T"],
    delta: Float32[Array, "B H T"],
    dout: Float[Array, "B T H Dv"],
    lse_lo: Float32[Array, "B H T"],
    *,
    config: AttentionBackwardTriton,
    core_count: int,
    interpret: bool,
) -> AttentionGradients:
    """The gradients with the contributions of large rows added: of query, key, value and, if present, bias.

    Large rows are queries whose lse is so large, above 2**13, that its rounding matters (softmax.is_large). inputs may
    have a mask. gradients: without large rows, from the Hopper backward. lse, delta, dout, lse_lo: of all queries; lse
    and lse_lo are the forward's. config: the block spec row.
    """
    bias = inputs.bias
    large = is_large(lse)
    lse = jnp.where(large, lse, jnp.inf)
    of_heads = large.reshape(len(lse), inputs.key.shape[2], -1).any(axis=-1).astype(jnp.int32)
    inputs = inputs._replace(bias=aligned(bias), sinks=None)
    call = TracedCall.of(inputs, options, config.block_q_dq, config.block_kv_dq, interpret)
    pairs = Pairs.of(inputs, options, call, with_blocks=gradients.bias is not None)
    limiting, rows = limiting_arrays(inputs, options), (dout.astype(inputs.query.dtype), lse, delta, lse_lo)
    gradients = _added(inputs, limiting, rows, pairs, of_heads, gradients, call, config, PROGRAMS * core_count)
    if gradients.bias is None:
        return gradients
    more = gradient_of_tiles(inputs, *limiting, *rows, pairs, call, config, large=of_heads)
    return gradients._replace(bias=(gradients.bias + more[..., : needed(bias).shape[3]]).astype(gradients.bias.dtype))


def _added(
    inputs, limiting, rows, pairs, large, gradients, call: TracedCall, config, programs: int
) -> AttentionGradients:
    """The gradients, with large rows' gradients of query, key and value added in one launch.

    limiting: (bounds, segment ids of queries, segment ids of keys), as limiting_arrays returns them. rows: (dout, lse,
    delta, lse_lo), where lse is inf for queries that are not large rows. pairs: a mask's Pairs, or None. large: int32
    [B, Hkv], 1 for key heads with large rows. gradients: without large rows; also the memory of the result. programs:
    the most programs to launch, but at least one for each key head of each batch entry.
    """
    (query, key, value), (bounds, q_ids, kv_ids), (dout, lse, delta, lse_lo) = inputs[:3], limiting, rows
    # All queries of the query heads of a key head; without an axis of heads if the group has one head.
    heads, q_rows = None if call.group == 1 else call.group, all_rows(call.q_length, call.block_q)
    kv_rows = all_rows(call.kv_length, call.block_kv)
    of_head = lambda i, h, b: (b, h)
    q_spec = lambda d: whole(call.q_length, call.block_q, heads, d, of_head)
    kv_spec = lambda d: whole(call.kv_length, call.block_kv, None, d, of_head)
    row_spec = pl.BlockSpec((None, heads, q_rows), lambda i, h, b: (b, h, 0))
    sums = [
        (gradients.query, q_spec(call.head_dim)),
        (gradients.key, kv_spec(call.head_dim)),
        (gradients.value, kv_spec(call.v_head_dim)),
    ]
    bias_tile = bias_spec(inputs.bias, (None, heads, q_rows, kv_rows), lambda i, h, b: (b, h, 0, 0))
    ins = {
        "bounds": whole_array(bounds),
        "query": (query, q_spec(call.head_dim)),
        "key": (key, kv_spec(call.head_dim)),
        "value": (value, kv_spec(call.v_head_dim)),
        "dout": (dout, q_spec(call.v_head_dim)),
        "lse": (lse, row_spec),
        "delta": (delta, row_spec),
        "lse_lo": (lse_lo, row_spec),
        "bias": (inputs.bias, bias_tile),
        "large": whole_array(large),
        "sums": sums,
        **({} if pairs is None else pairs.ins(call)),
    }
    if q_ids is not None:
        ins["q_ids"] = q_ids, pl.BlockSpec((None, q_rows), lambda i, h, b: (b, 0))
        ins["kv_ids"] = kv_ids, pl.BlockSpec((None, kv_rows), lambda i, h, b: (b, 0))
    batch, kv_heads = large.shape
    splits = max(1, min(programs // (batch * kv_heads), call.q_blocks, call.kv_blocks))
    # With more stages Triton uses too much shared memory if there is one block of keys.
    config = dataclasses.replace(config, num_stages=1)
    dquery, dkey, dvalue = run(
        _kernel,
        call,
        config,
        name="attention_far_rows_triton",
        grid=(splits, kv_heads, batch),
        ins=ins,
        outs=[(jax.ShapeDtypeStruct(x.shape, x.dtype), spec) for x, spec in sums],
        splits=splits,
    )
    return gradients._replace(query=dquery, key=dkey, value=dvalue)


def _kernel(refs: Refs, *, call: TracedCall, splits: int):
    """Runs one program: its tiles of keys, then its tiles of queries; nothing if the key head has no large rows."""
    split, kv_head, batch_index = (pl.program_id(axis) for axis in range(3))

    def of_split(blocks: int, program: Any) -> None:
        """Calls program(index of a block) for every block that this program has, of `blocks` blocks."""
        count = lax.div(blocks - 1 - split, jnp.int32(splits)) + 1
        lax.fori_loop(0, count, lambda n, _: program(split + n * splits), None)

    @pl.when(needed(refs.large)[batch_index, kv_head] != 0)
    def _():
        tile = functools.partial(_tile, refs, call, batch_index, kv_head)
        of_split(call.kv_blocks, lambda kv_index: _key_program(refs, call, kv_index, tile))
        # For a group: the query blocks of its heads, one head after another.
        of_split(call.q_blocks * call.group, lambda index: _query_program(refs, call, index, tile))


def _of_head(ref: Ref, head: Index, group: int, rows: Slice) -> Ref:
    """The rows of an array [rows, D], or of head `head` of an array [rows, group, D], in memory."""
    return ref.at[rows, :] if group == 1 else ref.at[rows, head, :]


def _row_of_head(ref: Ref, head: Index, group: int, rows: Slice) -> Ref:
    """The values of an array [rows], or of head `head` of an array [group, rows], in memory."""
    return ref.at[rows] if group == 1 else ref.at[head, rows]


def _tile(
    refs: Refs, call: TracedCall, batch_index: Index, kv_head: Index, head: Index, q_index: Index, kv_index: Index
):
    """(query, key, dout, P, dS) of a block of queries by a block of keys, of one query head.

    P and dS are [block_q, block_kv], zero for queries that are not large rows. head: the index of the query head within
    the group of query heads that share kv_head. q_index, kv_index: the indices of the blocks.
    """
    group, q_start, kv_start = call.group, q_index * call.block_q, kv_index * call.block_kv
    queries, keys = pl.ds(q_start, call.block_q), pl.ds(kv_start, call.block_kv)
    limits, own_head = call.limits(refs, batch_index), kv_head * group + head
    of_queries = lambda ref, d: load(_of_head(ref, head, group, queries), q_start, call.q_length, d)
    of_keys = lambda ref, d: load(ref.at[keys, :], kv_start, limits.kv_length, d)
    of_rows = lambda ref, other: load_rows(_row_of_head(ref, head, group, queries), q_start, call.q_length, other)
    query, dout = of_queries(refs.query, call.head_dim), of_queries(refs.dout, call.v_head_dim)
    key, value = of_keys(refs.key, call.head_dim), of_keys(refs.value, call.v_head_dim)
    masks = row_mask(q_start, call.block_q, call.q_length), row_mask(kv_start, call.block_kv, call.columns)
    load_this = lambda x: load_tile(x, queries, keys, masks, head)
    scores, pullback = tile_scores(call, refs, load_this, query, key, (batch_index, own_head, q_start, kv_start))
    p = call.exp2(scores, of_rows(refs.lse, jnp.inf)[:, None], of_rows(refs.lse_lo, 0.0)[:, None])
    q_ids = kv_ids = None
    if refs.q_ids is not None:
        q_ids = load_rows(refs.q_ids.at[queries], q_start, call.q_length, block_ranges.NO_QUERY)
        kv_ids = load_rows(needed(refs.kv_ids).at[keys], kv_start, call.kv_length, block_ranges.NO_KEY)
    keep = Queries.of(limits, q_start, call.block_q, q_ids).keep(kv_start + iota(call.block_kv), kv_ids)
    if refs.entries is not None or refs.mask is not None:
        keep = keep & is_kept(refs, call, Tile(b=batch_index, h=own_head, q_index=q_index, kv_index=kv_index))
    p = jnp.where(keep, p, 0.0)
    ds, _ = pullback(p, p * (call.dot(dout, value, (1, 1)) - of_rows(refs.delta, 0.0)[:, None]))
    return query, key, dout, p, ds.astype(query.dtype)


def _key_program(refs: Refs, call: TracedCall, kv_index: Index, tile: Any) -> None:
    """Adds the contributions of all large rows to the gradients of a block of keys and of its values.

    kv_index: the index of the block of keys. tile(head, q_index, kv_index) returns (query, key, dout, P, dS) of a block
    of queries by a block of keys; head is an index within the group.
    """

    def step(index, state):
        dkey, dvalue = state
        head = lax.div(index, jnp.int32(call.q_blocks))
        query, _, dout, p, ds = tile(head, lax.rem(index, jnp.int32(call.q_blocks)), kv_index)
        return dkey + call.dot(ds, query, (0, 0)), dvalue + call.dot(p.astype(dout.dtype), dout, (0, 0))

    zeros = tuple(jnp.zeros((call.block_kv, padded(d)), jnp.float32) for d in (call.head_dim, call.v_head_dim))
    dkey, dvalue = lax.fori_loop(0, call.q_blocks * call.group, step, zeros)
    start = kv_index * call.block_kv
    place = lambda ref: ref.at[pl.ds(start, call.block_kv), :]
    (_, *outs), (_, *sums) = refs.outs, refs.sums
    _add(place(outs[0]), place(sums[0]), dkey * call.options.scale, start, call.kv_length, call.head_dim)
    _add(place(outs[1]), place(sums[1]), dvalue, start, call.kv_length, call.v_head_dim)


def _query_program(refs: Refs, call: TracedCall, index: Index, tile: Any) -> None:
    """Adds dquery of the large rows of a block of queries, from all keys.

    index: of the block of queries among the blocks of all heads of the group, one head after another. tile(head,
    q_index, kv_index) returns (query, key, dout, P, dS) of a block of queries by a block of keys; head is an index
    within the group.
    """
    head, q_index = lax.div(index, jnp.int32(call.q_blocks)), lax.rem(index, jnp.int32(call.q_blocks))

    def step(kv_index, dquery):
        _, key, _, _, ds = tile(head, q_index, kv_index)
        return dquery + call.dot(ds, key, (1, 0))

    dquery = jnp.zeros((call.block_q, padded(call.head_dim)), jnp.float32)
    dquery = lax.fori_loop(0, call.kv_blocks, step, dquery)
    start = q_index * call.block_q
    place = lambda ref: _of_head(ref, head, call.group, pl.ds(start, call.block_q))
    out, so_far = place(refs.outs[0]), place(refs.sums[0])
    _add(out, so_far, dquery * call.options.scale, start, call.q_length, call.head_dim)


def _add(out: Ref, so_far: Ref, x: jax.Array, start: Index, length: int, head_dim: int) -> None:
    """Adds x to the rows of out that begin at row `start`: out[start : start + len(x), :head_dim] += x.

    so_far: a second ref to the memory of out. length: the number of rows of the array; rows past it are not stored.
    """
    mask = head_mask(row_mask(start, len(x), length), len(x), head_dim)
    x = x + load(so_far, start, length, head_dim).astype(jnp.float32)
    plgpu.store(out, x.astype(out.dtype), mask=mask)
