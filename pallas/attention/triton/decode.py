"""Attention for decoding through Triton: a program owns the rows of one key head, and a split of the keys.

A row is a query of a head (see decode_contract.py). Bound by reading keys and values: at (64, 1, 32 / 8 heads, 128)
over 16,384 keys they are 4.3 GB, which take 2.1 ms on an A100 at 2.04 TB/s. The 69 GFLOP, with rows padded to 16, take
0.2 ms at 312 TFLOP/s.
"""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_kernels.pallas.attention import decode_contract
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.attention.triton.arrays import all_rows, load, store, whole, whole_array
from jax_kernels.pallas.attention.triton.block_lists import first_indices
from jax_kernels.pallas.block_specs.specs import AttentionDecodeTriton
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import SMALLEST, fit, iota, padded
from jax_kernels.pallas.varying import result_types

# Rows of a program: more rows are cut into tiles.
MOST_ROWS = 64
# The approximate number of programs that an SM holds at a time.
PROGRAMS_PER_CORE = 2
# A lower bias counts as this one, which is still finite in base 2.
LEAST_BIAS = -2.3e38
# Parts that are merged in one step.
MERGED_AT_ONCE = 16


class Refs(NamedTuple):
    """The arrays of the kernel; None if the call lacks one.

    A row is one query of one query head; a tile is the rows of one program, all of one key head.

    query: [rows of a tile, D], of the program. key, value: all keys of the program's sequence and key head, [keys, D];
    or all pages of the cache, [pages, page_size, D]. lengths: [B] int32. tables: [pages of a sequence] int32, of the
    program's sequence. sinks: [rows of a tile] float32. mask, bias: the whole arrays. indices, counts: the whole arrays
    of decode_contract.LiveBlocks, with a mask. outs: out and lse of the program's tile and split.
    """

    query: Ref
    key: Ref
    value: Ref
    lengths: Ref
    tables: Ref | None = None
    sinks: Ref | None = None
    mask: Ref | None = None
    bias: Ref | None = None
    indices: Ref | None = None
    counts: Ref | None = None
    outs: tuple[Ref, ...] = ()


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """The static facts of a call, with which the kernel is traced.

    left: the number of keys before its own that a query attends to, -1 for all. group: query heads per key head.
    capacity: the number of keys that a sequence has room for. tile: the number of rows of a program, where a row is one
    query of one query head of the program's key head. splits: the number of splits of a sequence's keys. page_size:
    None if the keys of a sequence are contiguous.
    """

    batch: int
    scale: float
    softcap: float | None
    left: int
    q_length: int
    group: int
    kv_heads: int
    capacity: int
    head_dim: int
    v_head_dim: int
    tile: int
    block_kv: int
    splits: int
    page_size: int | None


def attention_decode(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"] | Float[Array, "pages page_size Hkv D"],
    value: Float[Array, "B S Hkv Dv"] | Float[Array, "pages page_size Hkv Dv"],
    kv_lengths: Int32[Array, " B"],
    block_tables: Int32[Array, "B max_pages"] | None,
    sinks: Float32[Array, "B H"] | None,
    mask: Bool[Array, "B H T S"] | None,
    bias: Float[Array, "B H T S"] | None,
    *,
    scale: float,
    softcap: float | None,
    left: int,
    config: AttentionDecodeTriton,
    core_count: int,
    interpret: bool,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """(out [B, T, H, Dv] in query's dtype, lse [B, H, T] float32) of T new queries per sequence over its cached keys.

    The queries are the last T of kv_lengths keys. key, value: a contiguous cache, or pages if block_tables, int32, has
    the pages of each sequence; 16-bit. sinks: logits that join the softmax's denominator. mask, bias: [n, H or 1, T or
    1, S] or None; each of the n entries serves B / n consecutive sequences. mask: True keeps a pair. A block of keys is
    not read if a key head's rows keep none of its keys. bias: added to the scores in natural units. A query without
    keys has out = 0, and lse = -inf unless it has a sink. left: the number of keys before its own that a query attends
    to, -1 for all. scale: positive. config: the block spec row.
    """
    batch, q_length, heads, head_dim = query.shape
    kv_heads, v_head_dim = key.shape[2], value.shape[3]
    group = heads // kv_heads
    page_size = None if block_tables is None else key.shape[1]
    capacity = key.shape[1] * (1 if block_tables is None else block_tables.shape[1])
    tile = min(MOST_ROWS, max(SMALLEST, pl.next_power_of_2(group * q_length)))
    tiles = pl.cdiv(group * q_length, tile)
    rows = tile * tiles
    block_kv = fit(config.block_kv, capacity)
    blocks = decode_contract.most_blocks(capacity, q_length, left, block_kv)
    splits = decode_contract.split_count(batch * kv_heads * tiles, blocks, core_count * PROGRAMS_PER_CORE)
    call = TracedCall(
        batch=batch,
        scale=scale,
        softcap=softcap,
        left=left,
        q_length=q_length,
        group=group,
        kv_heads=kv_heads,
        capacity=capacity,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        tile=tile,
        block_kv=block_kv,
        splits=splits,
        page_size=page_size,
    )

    # Neighbouring programs have neighbouring heads: the keys of such heads are neighbours in memory.
    head_of = lambda i: lax.rem(i, kv_heads)
    tile_of = lambda i: lax.div(i, kv_heads)
    if page_size is None:
        kv_spec = lambda d: whole(capacity, block_kv, None, d, lambda i, split, b: (b, head_of(i)))
    else:
        pages = (*key.shape[:2], None)
        kv_spec = lambda d: pl.BlockSpec((*pages, padded(d)), lambda i, split, b: (0, 0, head_of(i), 0))
    ins: dict[str, Any] = {
        "query": (
            decode_contract.pack(query, kv_heads, rows),
            pl.BlockSpec((None, None, tile, padded(head_dim)), lambda i, split, b: (b, head_of(i), tile_of(i), 0)),
        ),
        "key": (key, kv_spec(head_dim)),
        "value": (value, kv_spec(v_head_dim)),
        "lengths": whole_array(kv_lengths),
    }
    if block_tables is not None:
        ins["tables"] = block_tables, pl.BlockSpec((None, block_tables.shape[1]), lambda i, split, b: (b, 0))
    if sinks is not None:
        spec = pl.BlockSpec((None, None, tile), lambda i, split, b: (b, head_of(i), tile_of(i)))
        ins["sinks"] = decode_contract.row_sinks(sinks, kv_heads, q_length, rows), spec

    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None:
            ins[name] = x, pl.BlockSpec(x.shape, lambda i, split, b: (0, 0, 0, 0))
    if mask is not None:
        live = decode_contract.live_blocks(
            mask, kv_lengths, kv_heads=kv_heads, q_length=q_length, left=left, block_kv=block_kv
        )
        ins |= {name: whole_array(x) for name, x in live._asdict().items()}

    out_dtype = query.dtype if splits == 1 else jnp.float32
    parts = (batch, kv_heads, splits, rows)

    def body(*refs):
        _kernel(Refs(**dict(zip(ins, refs, strict=False)), outs=refs[len(ins) :]), call)

    arrays = [array for array, _ in ins.values()]
    shapes = [jax.ShapeDtypeStruct((*parts, v_head_dim), out_dtype), jax.ShapeDtypeStruct(parts, jnp.float32)]
    out, lse = pl.pallas_call(
        body,
        grid=(kv_heads * tiles, splits, batch),
        in_specs=[spec for _, spec in ins.values()],
        out_specs=[
            pl.BlockSpec(
                (None, None, None, tile, padded(v_head_dim)), lambda i, split, b: (b, head_of(i), split, tile_of(i), 0)
            ),
            pl.BlockSpec((None, None, None, tile), lambda i, split, b: (b, head_of(i), split, tile_of(i))),
        ],
        out_shape=result_types(shapes, *arrays),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="attention_decode_triton",
    )(*arrays)
    if splits == 1:
        return decode_contract.unpack(out[:, :, 0], lse[:, :, 0], q_length, heads)
    return merge(out, lse, query, interpret=interpret)


def merge(out, lse, query, *, interpret) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, Dv] in query's dtype, lse [B, H, T] float32) over all keys, from results over parts of the keys.

    A row is one query of one of the H / Hkv query heads of a key head: row t * H / Hkv + g is query t of head g.

    out: [B, Hkv, parts, rows, Dv] float32. lse: [B, Hkv, parts, rows or more] float32, natural log. query: [B, T, H,
    D], only for its shape and dtype. Without Pallas-Triton, XLA merges.
    """
    batch, q_length, heads, _ = query.shape
    if not backend.AVAILABLE:
        return decode_contract.merged(out, lse, q_length, heads, query.dtype)
    kv_heads, parts, _, v_head_dim = out.shape[1:]
    group = heads // kv_heads
    whole_parts = all_rows(parts, MERGED_AT_ONCE)
    head_of = lambda row, head: head * group + lax.rem(row, group)
    shapes = [
        jax.ShapeDtypeStruct((batch, q_length, heads, v_head_dim), query.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32),
    ]
    return pl.pallas_call(
        lambda *refs: _merge_kernel(*refs, parts=parts, v_head_dim=v_head_dim),
        grid=(group * q_length, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((None, None, whole_parts, None, padded(v_head_dim)), lambda row, h, b: (b, h, 0, row, 0)),
            pl.BlockSpec((None, None, whole_parts, None), lambda row, h, b: (b, h, 0, row)),
        ],
        out_specs=[
            pl.BlockSpec(
                (None, 1, None, padded(v_head_dim)), lambda row, h, b: (b, lax.div(row, group), head_of(row, h), 0)
            ),
            pl.BlockSpec((None, None, 1), lambda row, h, b: (b, head_of(row, h), lax.div(row, group))),
        ],
        out_shape=result_types(shapes, out, lse),
        compiler_params=plgpu.CompilerParams(num_warps=1 if v_head_dim <= 64 else 2, num_stages=2),
        interpret=interpret,
        name="attention_decode_merge_triton",
    )(out, lse)


def _merge_kernel(out_ref, lse_ref, merged_ref, merged_lse_ref, *, parts, v_head_dim):
    """Merges the parts of one row. The weight of a part is its fraction of the sum of exponentials.

    parts: the number of parts. The views of out and merged have padded(v_head_dim) columns: past v_head_dim they hold
    the next row.
    """

    def step(index, state):
        acc, row_max, row_sum = state
        start = index * MERGED_AT_ONCE
        exists = start + iota(MERGED_AT_ONCE) < parts
        these = pl.ds(start, MERGED_AT_ONCE)
        lse = plgpu.load(lse_ref.at[these], mask=exists, other=-jnp.inf)
        new = jnp.maximum(row_max, lse.max())
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        weights = jnp.exp2((lse - shift) * LOG2E)
        alpha = jnp.exp2((row_max - shift) * LOG2E)
        out = load(out_ref.at[these, :], start, parts, v_head_dim)
        return acc * alpha + (out * weights[:, None]).sum(axis=0), new, row_sum * alpha + weights.sum()

    state = jnp.zeros((padded(v_head_dim),), jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0)
    acc, row_max, row_sum = lax.fori_loop(0, pl.cdiv(parts, MERGED_AT_ONCE), step, state)
    safe = jnp.where(row_sum == 0.0, 1.0, row_sum)
    store(merged_ref, (acc / safe)[None].astype(merged_ref.dtype), 0, 1, v_head_dim)
    lse = jnp.where(row_sum == 0.0, -jnp.inf, row_max + jnp.log2(safe) / LOG2E)
    plgpu.store(merged_lse_ref, jnp.full((1,), lse))


def _load_pages(call: TracedCall, tables: Ref | None, start: Index, length: Index) -> Any:
    """The pages of the block of keys from key `start` on: a scalar if one page has all keys, else int32 [block_kv].

    0 for keys at or past `length`, where a table may hold invalid page numbers. () for contiguous keys.
    """
    if call.page_size is None:
        return ()
    if call.page_size >= call.block_kv:
        return plgpu.load(
            needed(tables).at[lax.div(start, call.page_size)], mask=cast(jax.Array, start < length), other=0
        )
    keys = start + iota(call.block_kv)
    return plgpu.load(needed(tables).at[lax.div(keys, call.page_size)], mask=keys < length, other=0)


def _load_block(call: TracedCall, ref: Ref, page: Any, start: Index, length: Index, head_dim: int) -> jax.Array:
    """Keys (or values) start ... start + block_kv - 1 of a sequence, zeros from `length` on: [block_kv, padded
    head_dim].

    ref: the keys of one key head, [keys, D], or [pages, page_size, D]. page: the page of all these keys, a scalar; or
    the page of each key, [block_kv]. It is not used for contiguous keys.
    """
    block_kv, page_size = call.block_kv, call.page_size
    if page_size is None:
        return load(ref.at[pl.ds(start, block_kv), :], start, length, head_dim)
    if page_size >= block_kv:
        return load(ref.at[page, pl.ds(lax.rem(start, page_size), block_kv), :], start, length, head_dim)
    keys = start + iota(block_kv)
    shape = (block_kv, padded(head_dim))
    wide = lambda x: jnp.broadcast_to(x[:, None], shape)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    view = ref.at[wide(page), wide(lax.rem(keys, page_size)), column]
    return plgpu.load(view, mask=wide(keys < length) & (column < head_dim), other=0.0)


class _Blocks(NamedTuple):
    """The blocks of keys that the splits of a sequence and key head visit: the listed blocks, or all within the limits.

    Without a mask, step i visits block i.
    """

    refs: Refs
    b: Index
    kv_head: Index

    def steps(self, call: TracedCall, length: jax.Array) -> tuple[Any, jax.Array]:
        """(first, end) of the steps of all splits together. length: the number of keys of the sequence."""
        if self.refs.counts is not None:
            return 0, self.refs.counts[first_indices(self.refs.counts, self.b, self.kv_head)]
        first: Any = 0
        if call.left >= 0:
            first = lax.div(jnp.maximum(length - call.q_length - call.left, 0), call.block_kv)
        return first, lax.div(length + (call.block_kv - 1), call.block_kv)

    def listed(self, step: Index) -> jax.Array | None:
        """The block that a step visits, arbitrary past the last step; None without a mask."""
        indices = self.refs.indices
        if indices is None:
            return None
        step = jnp.minimum(step, indices.shape[2] - 1)
        return indices[(*first_indices(indices, self.b, self.kv_head), step)]


class _Rows(NamedTuple):
    """The rows of a program, as it looks them up in a mask or bias. A row is one query of one query head.

    entry: the index of the program's sequence. entries: the number of sequences of the call. head, query: [tile] int32,
    the query head and the query of each row.
    """

    entry: Any
    entries: int
    head: jax.Array
    query: jax.Array


def _load_scores(call: TracedCall, ref: Ref, rows: _Rows, start: Index, length: Index) -> jax.Array:
    """The part of a mask or bias for the keys from key `start` on: [1 or tile, block_kv], zeros from `length` on.

    ref: [n, H or 1, T or 1, S]. Each of the n entries serves consecutive sequences.
    """
    entries, heads, queries, _ = ref.shape
    entry = lax.div(rows.entry, jnp.int32(rows.entries // entries))
    keys = start + iota(call.block_kv)
    if heads == queries == 1:
        row = ref.at[entry, jnp.int32(0), jnp.int32(0), pl.ds(start, call.block_kv)]
        return plgpu.load(row, mask=keys < length, other=0)[None]
    shape = (call.tile, call.block_kv)
    wide = lambda x: jnp.broadcast_to(x, shape)
    of_rows = lambda x, count: wide((x if count > 1 else jnp.zeros_like(x))[:, None])
    view = ref.at[wide(entry), of_rows(rows.head, heads), of_rows(rows.query, queries), wide(keys[None, :])]
    return plgpu.load(view, mask=wide((keys < length)[None, :]), other=0)


def _kernel(refs: Refs, call: TracedCall) -> None:
    """Computes out and lse of a tile of rows over one split of the keys."""
    head_tile, split, batch_index = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    block_kv, tile = call.block_kv, call.tile
    row_start = lax.div(head_tile, call.kv_heads) * tile
    length = jnp.clip(refs.lengths[batch_index], 0, call.capacity)
    # A row may attend to the keys below its limit. Rows past the last query have the last query's limit.
    query = jnp.minimum(lax.div(row_start + iota(tile), call.group), call.q_length - 1)
    limits = length - call.q_length + 1 + query
    rows: Any = None
    if refs.mask is not None or refs.bias is not None:
        head = lax.rem(head_tile, call.kv_heads) * call.group + lax.rem(row_start + iota(tile), call.group)
        rows = _Rows(entry=batch_index, entries=call.batch, head=head, query=query)
    factor = LOG2E * (call.scale if call.softcap is None else call.softcap)
    q = load(refs.query, 0, None, call.head_dim)

    blocks = _Blocks(refs, batch_index, lax.rem(head_tile, call.kv_heads))
    first, end = blocks.steps(call, length)
    per_split = lax.div(end - first + (call.splits - 1), call.splits)
    begin = jnp.minimum(first + split * per_split, end)
    stop = jnp.minimum(begin + per_split, end)

    def step(index, state):
        acc, row_max, row_sum, listed, page = state
        start = (index if listed is None else listed) * block_kv
        k = _load_block(call, refs.key, page, start, length, call.head_dim)
        s = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if call.softcap is not None:
            s = 1.0 - 2.0 / (1.0 + jnp.exp2(s * (2 * LOG2E * call.scale / call.softcap)))
        keys = (start + iota(block_kv))[None, :]
        keep = keys < limits[:, None]
        if call.left >= 0:
            keep = keep & (keys >= limits[:, None] - (call.left + 1))
        if refs.bias is not None:
            added = _load_scores(call, refs.bias, rows, start, length).astype(jnp.float32)
            s = s * factor + jnp.where(added == -jnp.inf, added, jnp.maximum(added, LEAST_BIAS) * LOG2E)
        if refs.mask is not None:
            keep = keep & (_load_scores(call, refs.mask, rows, start, length) != 0)
        s = jnp.where(keep, s, -jnp.inf)
        to_base_2 = factor if refs.bias is None else 1.0
        new = jnp.maximum(row_max, s.max(axis=1) * to_base_2)
        # A row may have met no key so far: -inf - -inf would be NaN.
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        alpha = jnp.exp2(row_max - shift)
        p = jnp.exp2(s * to_base_2 - shift[:, None])
        v = _load_block(call, refs.value, page, start, length, call.v_head_dim)
        product = lax.dot_general(
            p.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )  # fmt: skip
        # One block ahead, so that the loads of keys and values do not wait for them.
        listed = blocks.listed(index + 1)
        page = _load_pages(call, refs.tables, start + block_kv if listed is None else listed * block_kv, length)
        return acc * alpha[:, None] + product, new, row_sum * alpha + p.sum(axis=1), listed, page

    row_max, row_sum = jnp.full((tile,), -jnp.inf, jnp.float32), jnp.zeros((tile,), jnp.float32)
    if refs.sinks is not None:  # a key before all others, without a value, in the first split
        is_first = split == 0
        row_max = jnp.where(is_first, refs.sinks[...] * LOG2E, -jnp.inf)
        row_sum = jnp.where(is_first & (row_max > -jnp.inf), 1.0, row_sum)
    acc = jnp.zeros((tile, padded(call.v_head_dim)), jnp.float32)
    listed = blocks.listed(begin)
    page = _load_pages(call, refs.tables, (begin if listed is None else listed) * block_kv, length)
    acc, row_max, row_sum, *_ = lax.fori_loop(begin, stop, step, (acc, row_max, row_sum, listed, page))
    dead = row_sum == 0.0
    row_sum = jnp.where(dead, 1.0, row_sum)
    lse = jnp.where(dead, -jnp.inf, (row_max + jnp.log2(row_sum)) / LOG2E)
    out_ref, lse_ref = refs.outs
    plgpu.store(lse_ref, lse)
    store(
        out_ref, (acc / row_sum[:, None]).astype(out_ref.dtype), row_start, call.group * call.q_length, call.v_head_dim
    )
