"""The gradient of a bias through Triton: two matmuls per tile, for P and for dS.

A program owns a tile of the bias and loops over the bias's broadcast axes, so that it needs no memory except the
gradient. If the bias is small, few programs run. Under a mask, dead blocks are skipped.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.arrays import dense
from jax_kernels.masks.block_lists import block_status, packed_status
from jax_kernels.masks.checks import offset as offset_of
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.triton.arrays import (
    aligned,
    all_rows,
    bias_spec,
    load,
    load_rows,
    load_tile,
    whole_array,
    whole_lists,
)
from jax_kernels.pallas.attention.triton.block_lists import ListedBlocks, Lists, Visit, first_indices, kept_bits
from jax_kernels.pallas.attention.triton.common import Queries, Refs, TracedCall, block_loop, limiting_arrays, run
from jax_kernels.pallas.attention.triton.score_mod import tile_scores
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton
from jax_kernels.pallas.kernel_types import needed
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import both, iota, padded, reaches, row_mask

DEAD, WHOLE = -2, -1  # of Pairs.entries


class Pairs(NamedTuple):
    """The pairs that a mask keeps, as the kernels read them.

    entries: int32 [B or 1, H or 1, blocks of queries, blocks of keys]: DEAD, WHOLE, or the block's index in `words`.
    None if only `mask` says which pairs are kept. words: int32 [entries, ceil(block_kv / 32), block_q]: bit j % 32 of
    word j // 32 is key j of the block. mask: bool [B or 1, H or 1, T or 1, S or 1], instead of words, if the mask is an
    array that a kernel can address. lists: block lists by query, instead of words, if they have no entries.
    """

    entries: jax.Array | None
    words: jax.Array | None = None
    mask: jax.Array | None = None
    lists: Lists[jax.Array] | None = None

    @classmethod
    def of(
        cls, inputs: AttentionInputs, options: AttentionOptions, call: TracedCall, *, with_blocks: bool = True
    ) -> "Pairs | None":
        """The pairs that inputs.mask keeps, for the blocks of `call`; None without a mask.

        with_blocks: whether to find the dead blocks of a mask array, too. Dead blocks of a Mask are always found.
        """
        if inputs.mask is None:
            return None
        static_offset, offset = offset_of(first_position(inputs, options))
        sizes = {"lengths": (call.q_length, call.kv_length), "blocks": (call.block_q, call.block_kv)}
        mask = inputs.mask if isinstance(inputs.mask, Mask) else dense(inputs.mask)
        array = None if isinstance(inputs.mask, Mask) else aligned(inputs.mask)
        if array is not None and reaches(array.size, itemsize=1):
            if not with_blocks:
                return cls(None, mask=array)
            alive, _ = block_status(mask, offset, **sizes, static_offset=static_offset)
            return cls(jnp.where(alive, WHOLE, DEAD), mask=array)
        alive, full, entries, words = packed_status(mask, offset, **sizes, static_offset=static_offset)
        entries = jnp.where(full, WHOLE, jnp.where(alive, entries, DEAD))
        return cls(entries, lax.bitcast_convert_type(words, jnp.int32))

    @classmethod
    def of_lists(cls, lists: Lists[jax.Array], call: TracedCall) -> "Pairs":
        """The pairs that a call's block lists by query keep, without another evaluation of the mask."""
        steps = jnp.arange(lists.indices.shape[3], dtype=jnp.int32)
        full, count = lists.counts[..., :1], lists.counts[..., 1:]
        partial = jnp.int32(0) if lists.entries is None else lists.entries
        found = jnp.where(steps < full, WHOLE, partial)
        shape = jnp.broadcast_shapes(lists.indices.shape[:3], lists.counts.shape[:3])
        wide = lambda x: jnp.broadcast_to(x, (*shape, len(steps)))
        # Steps past a list's end write to a column of their own, which is dropped.
        at = wide(jnp.where(steps < count, lists.indices, call.kv_blocks))
        entries = jnp.full((*shape, call.kv_blocks + 1), DEAD, jnp.int32)
        entries = jnp.put_along_axis(entries, at, wide(found), axis=3, inplace=False)[..., :-1]
        # A list of all blocks of queries, as a mask of keys has it.
        entries = jnp.broadcast_to(entries, (*shape[:2], call.q_blocks, call.kv_blocks))
        return cls(entries, lists.words) if lists.entries is not None else cls(entries, lists=lists)

    def ins(self, call: TracedCall) -> dict[str, Any]:
        """The operands of common.run by the names of Refs: (array, BlockSpec) pairs. Every program has the whole
        arrays.
        """
        found: dict[str, Any] = {"entries": whole_array(self.entries), "words": whole_array(self.words)}
        found["lists"] = whole_lists(self.lists)
        if self.mask is not None:
            rows = all_rows(call.q_length, call.block_q), all_rows(call.kv_length, call.block_kv)
            sides = (1 if n == 1 else of_all for n, of_all in zip(self.mask.shape[2:], rows, strict=True))
            shape = *self.mask.shape[:2], *sides
            found["mask"] = self.mask, pl.BlockSpec(shape, lambda *grid: (0,) * len(shape))
        return found


class Tile(NamedTuple):
    """The indices of a batch entry, a query head, a block of queries and a block of keys."""

    b: Any
    h: Any
    q_index: Any
    kv_index: Any


def is_kept(refs: Refs, call: TracedCall, tile: Tile) -> jax.Array:
    """Which pairs of a tile the mask keeps, inside a kernel whose Refs have Pairs: bool, broadcastable to [block_q,
    block_kv].
    """
    q_start, kv_start = tile.q_index * call.block_q, tile.kv_index * call.block_kv
    if refs.mask is not None:
        masks = row_mask(q_start, call.block_q, call.q_length), row_mask(kv_start, call.block_kv, call.columns)
        places = pl.ds(q_start, call.block_q), pl.ds(kv_start, call.block_kv)
        return load_tile(refs.mask, *places, masks, *first_indices(refs.mask, tile.b, tile.h))
    entry = needed(refs.entries)[(*first_indices(needed(refs.entries), tile.b, tile.h), tile.q_index, tile.kv_index)]
    if refs.lists is None:
        is_kept = kept_bits(needed(refs.words), jnp.maximum(entry, 0), call.block_kv)
    else:
        of_queries = ListedBlocks(refs.lists, tile.b, tile.h, tile.q_index, full=0, count=0)
        is_kept = of_queries.keep(Visit(0, tile.kv_index))
    return (entry == WHOLE) | ((entry != DEAD) & is_kept)


def bias_gradient(
    inputs: AttentionInputs,
    options: AttentionOptions,
    lse: Float32[Array, "B H T"],
    delta: Float32[Array, "B H T"],
    dout: Float[Array, "B T H Dv"],
    lse_lo: Float32[Array, "B H T"] | None = None,
    *,
    config: AttentionBackwardTriton,
    core_count: int,
    interpret: bool,
) -> Float32[Array, "#B #H #T #S"]:
    """The gradient of inputs.bias, with its shape and dtype. inputs may have a mask.

    lse: [B, H, T] float32, natural log, +inf for queries without keys. delta: [B, H, T] float32, the sum of out * dout
    over Dv, minus the cotangent of lse. dout: [B, T, H, Dv]. lse_lo: the forward's. config: the block spec row.
    """
    del core_count
    keys, inputs = needed(inputs.bias).shape[3], inputs._replace(bias=aligned(inputs.bias))
    call = TracedCall.of(inputs, options, config.block_q_dq, config.block_kv_dq, interpret)
    limiting = limiting_arrays(inputs, options)
    pairs = Pairs.of(inputs, options, call)
    return gradient_of_tiles(inputs, *limiting, dout, lse, delta, lse_lo, pairs, call, config)[..., :keys]


def gradient_of_tiles(inputs, bounds, q_ids, kv_ids, dout, lse, delta, lse_lo, pairs, call, config, *, large=None):
    """The gradient of inputs.bias, with its shape and dtype.

    The caller has padded the last axis of inputs.bias to a multiple of 8, and drops the same columns of the gradient.
    bounds: int32 [B, 2 or 3]: the position of query 0, the number of keys, and the first query with keys; or None.
    q_ids, kv_ids: segment ids, or None. lse: in natural units. pairs: a mask's Pairs, or None. large: [B, Hkv] int32,
    nonzero for key heads that have queries with a gradient; other heads are skipped. None: all have.
    """
    bias, batch = inputs.bias, inputs.query.shape[0]
    q_rows, kv_rows = all_rows(call.q_length, call.block_q), all_rows(call.kv_length, call.block_kv)
    whole_spec = lambda *shape: pl.BlockSpec(shape, lambda i, j, n: (0,) * len(shape))
    heads_of = lambda x, rows: (x, whole_spec(batch, rows, x.shape[2], padded(x.shape[3])))
    rows_of = lambda x: (x, whole_spec(batch, call.heads, q_rows))
    tile = (None, None, call.block_q, call.block_kv)
    tile_spec = bias_spec(bias, tile, lambda i, j, n: (n // bias.shape[1], lax.rem(n, bias.shape[1]), i, j))
    ins = {
        "bounds": whole_array(bounds),
        "query": heads_of(inputs.query, q_rows),
        "key": heads_of(inputs.key, kv_rows),
        "value": heads_of(inputs.value, kv_rows),
        "bias": (bias, tile_spec),
        "dout": heads_of(dout, q_rows),
        "lse": rows_of(lse),
        "delta": rows_of(delta),
        "lse_lo": None if lse_lo is None else rows_of(lse_lo),
        "large": whole_array(large),
    }
    if pairs is not None:
        ins |= pairs.ins(call)
    if q_ids is not None:
        ins["q_ids"] = q_ids, whole_spec(batch, q_rows)
        ins["kv_ids"] = kv_ids, whole_spec(batch, kv_rows)
        ins["ranges"] = whole_array(block_ranges.segment_ranges(q_ids, call.block_q, kv_ids, call.block_kv))
    grid = (
        call.q_blocks if bias.shape[2] > 1 else 1,
        call.kv_blocks if bias.shape[3] > 1 else 1,
        bias.shape[0] * bias.shape[1],
    )
    (dbias,) = run(
        _dbias_kernel,
        call,
        config,
        name="attention_backward_dbias_triton" if large is None else "attention_far_dbias_triton",
        grid=grid,
        ins=ins,
        outs=[(jax.ShapeDtypeStruct(bias.shape, bias.dtype), tile_spec)],
        batch=batch,
        bias_shape=bias.shape,
    )
    return dbias


def _dbias_kernel(refs: Refs, *, call: TracedCall, batch: int, bias_shape):
    """Computes the gradient of one tile of the bias, summed over the batch entries, heads, queries and keys that use
    it.

    batch: the number of batch entries of the call. bias_shape: of the bias, where 1 means a broadcast axis.
    """
    block_q, block_kv = call.block_q, call.block_kv
    # The numbers of batch entries and of heads that use this tile.
    batches, heads = (count if size == 1 else 1 for count, size in zip((batch, call.heads), bias_shape, strict=False))
    own_q, own_kv, own = (pl.program_id(axis) for axis in range(3))
    own_batch, own_head = lax.div(own, jnp.int32(bias_shape[1])), lax.rem(own, jnp.int32(bias_shape[1]))

    def one_query_block(q_index, acc, *, b, h):
        if refs.entries is None or bias_shape[3] == 1:
            return live_query_block(q_index, acc, b=b, h=h)
        entry = refs.entries[(*first_indices(refs.entries, b, h), q_index, own_kv)]
        live = functools.partial(live_query_block, q_index, b=b, h=h)
        return lax.cond(entry == DEAD, lambda acc: acc, live, acc)

    def live_query_block(q_index, acc, *, b, h):
        q_start = q_index * block_q
        limits = call.limits(refs, b)
        first, end = (0, call.kv_blocks) if bias_shape[3] == 1 else (own_kv, own_kv + 1)
        among = block_ranges.Among(first, end)
        q_ids = None
        if refs.q_ids is not None:
            meets = block_ranges.among(needed(refs.ranges), b, q_index)
            among = block_ranges.Among(
                block_ranges.maximum(among.first, meets.first), block_ranges.minimum(among.end, meets.end)
            )
            q_ids = load_rows(refs.q_ids.at[b, pl.ds(q_start, block_q)], q_start, call.q_length, block_ranges.NO_QUERY)
        blocks = limits.key_blocks(q_start, block_q, block_kv, among)
        these = pl.ds(q_start, block_q)
        q = load(refs.query.at[b, these, h, :], q_start, call.q_length, call.head_dim)
        dout = load(needed(refs.dout).at[b, these, h, :], q_start, call.q_length, call.v_head_dim)
        lse = load_rows(needed(refs.lse).at[b, h, these], q_start, call.q_length, jnp.inf)
        delta = load_rows(needed(refs.delta).at[b, h, these], q_start, call.q_length, 0.0)
        lse_lo = None
        if refs.lse_lo is not None:
            lse_lo = load_rows(refs.lse_lo.at[b, h, these], q_start, call.q_length, 0.0)[:, None]
        rows, queries = row_mask(q_start, block_q, call.q_length), Queries.of(limits, q_start, block_q, q_ids)

        def step(visit, acc, *, partial):
            start = visit.block * block_kv
            keys, of_keys = pl.ds(start, block_kv), lax.div(h, jnp.int32(call.group))
            k = load(refs.key.at[b, keys, of_keys, :], start, limits.kv_length, call.head_dim)
            v = load(refs.value.at[b, keys, of_keys, :], start, limits.kv_length, call.v_head_dim)
            masks = (rows, row_mask(start, block_kv, call.columns))
            load_this = lambda x: load_tile(x, slice(None), slice(None), masks)
            s, _ = tile_scores(call, refs, load_this, q, k, (b, h, q_start, start))
            p = call.exp2(s, lse[:, None], lse_lo)
            if not (q_ids is None and limits.keep_all(block_kv)):
                kv_ids = None
                if q_ids is not None:
                    kv_ids = load_rows(needed(refs.kv_ids).at[b, keys], start, call.kv_length, block_ranges.NO_KEY)
                p = jnp.where(queries.keep(start + iota(block_kv), kv_ids), p, 0.0)
            if refs.entries is not None:
                tile = Tile(b=b, h=h, q_index=q_index, kv_index=visit.block)
                p = jnp.where(is_kept(refs, call, tile), p, 0.0)
            return acc + p * (call.dot(dout, v, (1, 1)) - delta[:, None])

        return block_loop(blocks, step, acc)

    def one_head(n, acc):
        b = own_batch if batches == 1 else lax.div(n, jnp.int32(heads))
        h = own_head if heads == 1 else lax.rem(n, jnp.int32(heads))
        of_head = lambda q_index, acc: one_query_block(q_index, acc, b=b, h=h)
        if bias_shape[2] > 1:
            return of_head(own_q, acc)
        count: Any = call.q_blocks
        if refs.large is not None:
            is_large = refs.large[b, lax.div(h, jnp.int32(call.group))] != 0
            count = jnp.where(is_large, jnp.int32(count), jnp.int32(0))
        return lax.fori_loop(0, count, of_head, acc)

    acc = lax.fori_loop(0, batches * heads, one_head, jnp.zeros((block_q, block_kv), jnp.float32))
    rows = columns = None
    if bias_shape[2] > 1:
        rows = row_mask(own_q * block_q, block_q, call.q_length)
    else:
        acc = acc.sum(axis=0)[None, :]
    if bias_shape[3] > 1:
        columns = row_mask(own_kv * block_kv, block_kv, call.columns)
    else:
        acc = acc.sum(axis=1)[:, None]
    (dbias_ref,) = refs.outs
    plgpu.store(dbias_ref, acc.astype(dbias_ref.dtype), mask=both(rows, columns, acc.shape))
