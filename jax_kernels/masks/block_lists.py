"""The live blocks of a mask, as lists for kernels, and the bitmaps of its partial blocks."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.masks.block_arithmetic import Grid, live, most_partial, running_sums, width

# Pairs that are evaluated at a time, if block arithmetic cannot judge a mask.
_CHUNK = 1 << 24
# Pairs whose bits are packed at a time. Most masks need no memory for a pair except its bit.
_BITS_CHUNK = 1 << 26


class BlockLists(NamedTuple):
    """For every block of one side (queries or keys), the indices of the live blocks of the other side.

    indices: int32 [B or 1, H or 1, blocks, width]. A list has its full blocks, in which every pair is kept, then its
    partial blocks, in which a kernel evaluates the mask, then zeros. Full and partial blocks are in ascending
    order. A softmax that starts with a full block has a finite maximum in each row.
    full_count, partial_count: int32 [B or 1, H or 1, blocks], the number of full and of partial blocks of each list.
    """

    indices: Any
    full_count: Any
    partial_count: Any


class PackedBlocks(NamedTuple):
    """The partial blocks of a mask, one bit for each pair.

    words: uint32 [entries, ceil(block_kv / 32), block_q] for lists by query, [entries, ceil(block_q / 32), block_kv]
    for lists by key: an entry is the bits of one partial block. By query, bit j % 32 of word [j // 32, i] tells whether
    query i of the block keeps key j of the block; by key, i is the key and j the query. Bits beyond the last key and
    query are 0. The last entry belongs to no block and is 0. Entries are in the order of (batch, head, query block, key
    block).

    entries: int32, shaped as BlockLists.indices: the index into `words` of a partial block, -1 for every other block.
    """

    words: Any
    entries: Any


def counts(mask: Any, grid: Grid) -> jax.Array:
    """The number of pairs that each block keeps, by evaluating all pairs: int32 [B or 1, H or 1, rows, columns]."""
    size = mask.batch * mask.heads * grid.block_q * grid.kv_length
    rows = max(1, min(grid.rows, _CHUNK // size))
    chunks = -(-grid.rows // rows)

    def one(chunk):
        queries = chunk * (rows * grid.block_q) + jnp.arange(rows * grid.block_q, dtype=jnp.int32)
        keep = mask.rows(jnp.minimum(queries, grid.q_length - 1), grid.kv_length, q_offset=grid.offset)
        keep = keep & (queries < grid.q_length)[:, None]
        return block_sums(keep, grid.block_q, grid.block_kv)

    if chunks == 1:
        return one(jnp.int32(0))
    sums = jnp.moveaxis(lax.map(one, jnp.arange(chunks, dtype=jnp.int32)), 0, 2)
    return sums.reshape(*sums.shape[:2], -1, grid.columns)[:, :, : grid.rows]


def block_sums(keep: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """The number of True in each block of bool [B, H, T, S]: int32 [B, H, ceil(T / block_q), ceil(S / block_kv)]."""
    *leading, q_length, kv_length = keep.shape
    pads = ((0, 0), (0, 0), (0, -q_length % block_q), (0, -kv_length % block_kv))
    keep = jnp.pad(keep, pads) if any(map(any, pads)) else keep
    blocks = keep.reshape(*leading, keep.shape[2] // block_q, block_q, keep.shape[3] // block_kv, block_kv)
    return blocks.sum(axis=(3, 5), dtype=jnp.int32)


_array_sums: list[Callable[[jax.Array, int, int], jax.Array]] = [block_sums]


def count_arrays_by(sums: Callable[[jax.Array, int, int], jax.Array]) -> None:
    """Makes array_sums call this function, which has the signature of block_sums.

    Masks import no kernels, so the op that has a counting kernel sets it here.
    """
    _array_sums[:] = [sums]


def array_sums(array: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """The number of True in each block of bool [B, H, T, S], as block_sums returns it, by a kernel if one was set."""
    return _array_sums[0](array, block_q, block_kv)


def status(mask: Any, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """(live, full): whether each block keeps some pair, and all its pairs: bool [B or 1, H or 1, rows, columns] each.

    A block that reaches past the last key is not full. Where block arithmetic is not exact, a dead block may be called
    live, and a full one not full.
    """
    if 0 in (shape := _shape_of(mask, grid)):  # an array of the mask may have no entry to look up
        return jnp.zeros(shape, bool), jnp.zeros(shape, bool)
    if mask.is_evaluated:
        count = mask.block_counts(grid)
        alive, full = count > 0, count == grid.area()
    else:
        alive, full = live(mask.terms(False), grid), ~live(mask.terms(True), grid)
    inside = (jnp.arange(grid.columns) + 1) * grid.block_kv <= grid.kv_length
    full = alive & full & inside
    return jnp.broadcast_to(alive, full.shape), full


def _shape_of(mask: Any, grid: Grid) -> tuple[int, int, int, int]:
    """The shape of an array with an entry for each block of the mask: (B or 1, H or 1, rows, columns)."""
    offsets = grid.offset.shape[0]
    return (mask.batch if offsets == 1 else offsets), mask.heads, grid.rows, grid.columns


def compress(alive: jax.Array, full: jax.Array, most: int) -> BlockLists:
    """The block lists of bool arrays [..., lists, blocks], cut to `most` entries along the last axis.

    alive, full: whether each block is live, and full. If a list has more than `most` live blocks, the rest is lost.
    """
    count = alive.shape[-1]
    kind = jnp.where(full, 0, jnp.where(alive, 1, 2)).astype(jnp.int32)
    order = lax.sort(kind * count + jnp.arange(count, dtype=jnp.int32), dimension=alive.ndim - 1)[..., :most]
    total, full_count = (x.sum(axis=-1, dtype=jnp.int32) for x in (alive, full))
    indices = jnp.where(order < 2 * count, lax.rem(order, jnp.int32(max(count, 1))), 0)
    return BlockLists(indices, full_count, total - full_count)


def sided(x: jax.Array, by: str, joined: int = 1) -> jax.Array:
    """The array [B, H, rows, columns] with the axis of the lists before the axis of their entries.

    by="query": x itself. by="key": [B, H / joined, joined * rows, columns] with the last two axes swapped, so that
    a list of a block of keys has the query blocks of `joined` heads, head after head. x with one head is repeated.
    """
    if by == "query":
        return x
    batch, heads, rows, columns = x.shape
    together = min(joined, max(heads, 1))
    x = x.reshape(batch, heads // together, together, rows, columns)
    x = jnp.broadcast_to(x, (*x.shape[:2], joined, rows, columns))
    return x.reshape(*x.shape[:2], joined * rows, columns).swapaxes(2, 3)


@functools.partial(jax.jit, static_argnames=("lengths", "blocks", "static_offset", "by"))
def block_lists(mask: Any, offset: Any, *, lengths, blocks, static_offset, by) -> BlockLists:
    """The block lists of a mask, with one list for each block of queries (by="query") or of keys (by="key").

    offset: int32 [B or 1], the position of query 0. static_offset: its value if known when tracing, else None. lengths:
    (queries, keys) of the call. blocks: (queries, keys) of a block.
    """
    grid = Grid.of(lengths, blocks, offset, static_offset)
    alive, full = status(mask, grid)
    return compress(sided(alive, by), sided(full, by), width(mask.terms(False), grid, by))


@functools.partial(jax.jit, static_argnames=("lengths", "blocks", "static_offset"))
def block_status(mask: Any, offset: Any, *, lengths, blocks, static_offset) -> tuple[jax.Array, jax.Array]:
    """(live, full): whether each block keeps some pair, and all its pairs: bool [B or 1, H or 1, rows, columns] each.

    offset: int32 [B or 1], the position of query 0. static_offset: its value if known when tracing, else None. lengths:
    (queries, keys) of the call. blocks: (queries, keys) of a block.
    """
    return status(mask, Grid.of(lengths, blocks, offset, static_offset))


def packed_partial(mask: Any, offset: Any, *, by, **statics) -> PackedBlocks:
    """The bits of a mask's partial blocks, in as many entries as there are partial blocks, and one more.

    Under a trace, the entries are instead one more than the partial blocks that the mask's structure allows. offset:
    int32 [B or 1], the position of query 0. by: "query" or "key", the side of the lists. statics: lengths (queries,
    keys) of the call, blocks (queries, keys) of a block, and static_offset, the offset if known when tracing, else
    None.
    """
    alive, full = block_status(mask, offset, **statics)
    most = None if isinstance(alive, jax.core.Tracer) else int((alive & ~full).sum())
    return packed_lists(mask, offset, **statics, by=by, most=most)[1]


@functools.partial(jax.jit, static_argnames=("lengths", "blocks", "static_offset", "by", "joined", "most"))
def packed_lists(
    mask: Any, offset: Any, *, lengths, blocks, static_offset, by, joined: int = 1, most: int | None = None
) -> tuple[BlockLists, PackedBlocks]:
    """The block lists, and the bits of their partial blocks.

    offset: int32 [B or 1], the position of query 0. static_offset: its value if known when tracing, else None. lengths:
    (queries, keys) of the call. blocks: (queries, keys) of a block. by: "query" or "key", the side of the lists. most:
    an upper bound on the partial blocks of all batch entries and heads, for the size of the bits; None takes the bound
    from the mask's structure. joined: with by="key", the number of heads whose query blocks one list has, head after
    head.
    """
    grid = Grid.of(lengths, blocks, offset, static_offset)
    terms = mask.terms(False)
    alive, full = status(mask, grid)
    partial = alive & ~full
    if most is None:
        most = math.prod(partial.shape[:2]) * most_partial(terms, grid)
    lists = compress(sided(alive, by, joined), sided(full, by, joined), joined * width(terms, grid, by))
    numbers, words = _packed(mask, grid, partial, by, most)
    if most == 0 or partial.size == 0:
        return lists, PackedBlocks(words, jnp.full_like(lists.indices, -1))
    entries = jnp.take_along_axis(sided(numbers, by, joined), lists.indices, axis=-1)
    slots = jnp.arange(lists.indices.shape[-1], dtype=jnp.int32)
    past_full = slots - lists.full_count[..., None]
    entries = jnp.where((past_full >= 0) & (past_full < lists.partial_count[..., None]), entries, -1)
    return lists, PackedBlocks(words, entries)


@functools.partial(jax.jit, static_argnames=("lengths", "blocks", "static_offset"))
def packed_status(
    mask: Any, offset: Any, *, lengths, blocks, static_offset
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(live, full, entry, words) of all blocks, without lists.

    live, full: whether each block keeps some pair, and all its pairs: bool [B or 1, H or 1, rows, columns]. entry:
    int32 of the same shape, the index into words of each partial block; arbitrary for other blocks. words: uint32
    [entries, ceil(block_kv / 32), block_q]. In a block's entry, bit j % 32 of word [j // 32, i] tells whether query i
    of the block keeps key j of the block.

    offset: int32 [B or 1], the position of query 0. static_offset: its value if known when tracing, else None. lengths:
    (queries, keys) of the call. blocks: (queries, keys) of a block.
    """
    grid = Grid.of(lengths, blocks, offset, static_offset)
    alive, full = status(mask, grid)
    most = math.prod(alive.shape[:2]) * most_partial(mask.terms(False), grid)
    return alive, full, *_packed(mask, grid, alive & ~full, "query", most)


def _packed(mask: Any, grid: Grid, partial: jax.Array, by: str, most: int) -> tuple[jax.Array, jax.Array]:
    """(numbers, words): each partial block's index among the partial blocks, and the bits of these blocks.

    numbers: int32, shaped as `partial`, which is bool [B, H, rows, columns]; arbitrary for blocks that are not partial.
    words: uint32 [most + 1, words, rows], the bits of one block per entry; the last entry is 0. With by="query" a row
    is a query of the block and its bits are keys; with by="key" the reverse. most: an upper bound on the number of
    partial blocks of all batch entries and heads.
    """
    numbers = running_sums(partial.reshape(-1)).reshape(partial.shape) - 1
    words = functools.partial(_words, mask, grid, partial.shape, by)
    if most == 0 or partial.size == 0:
        rows, others = (grid.block_q, grid.block_kv) if by == "query" else (grid.block_kv, grid.block_q)
        return numbers, jnp.zeros((1, -(-others // 32), rows), jnp.uint32)
    # The index of each entry's block among all blocks; the last entry has no block.
    places = jnp.full((most + 1,), partial.size, jnp.int32)
    every = jnp.arange(partial.size, dtype=jnp.int32).reshape(partial.shape)
    places = places.at[jnp.where(partial, numbers, most + 1)].set(every, mode="drop")
    chunk = max(1, _BITS_CHUNK // (grid.block_q * grid.block_kv))
    return numbers, jax.vmap(words)(places) if most < chunk else lax.map(words, places, batch_size=chunk)


def _words(mask: Any, grid: Grid, shape: tuple[int, ...], by: str, place: jax.Array) -> jax.Array:
    """The bits of the block at the flat index `place` among all blocks: uint32 [words, rows]; 0 past the last block.

    shape: [B, H, rows, columns] of all blocks. by="query": a row is a query and its bits are keys; by="key": the
    reverse.
    """
    b, h, row, column = jnp.unravel_index(jnp.minimum(place, math.prod(shape) - 1), shape)
    rows, others = (grid.block_q, grid.block_kv) if by == "query" else (grid.block_kv, grid.block_q)
    mine, bit = jnp.arange(rows, dtype=jnp.int32), jnp.arange(32, dtype=jnp.int32)[:, None]
    other = jnp.arange(-(-others // 32), dtype=jnp.int32)[:, None, None] * 32 + bit
    q_index, k_index = (mine, other) if by == "query" else (other, mine)
    inside = (other < others) & (place < math.prod(shape))
    q, k = row * grid.block_q + q_index, column * grid.block_kv + k_index
    keep = mask.elements(
        b,
        h,
        jnp.minimum(q, grid.q_length - 1),
        jnp.minimum(k, grid.kv_length - 1),
        q_offset=grid.offset[jnp.minimum(b, grid.offset.shape[0] - 1)],
    )
    keep = keep & inside & (q < grid.q_length) & (k < grid.kv_length)
    return (keep.astype(jnp.uint32) << bit.astype(jnp.uint32)).sum(axis=1, dtype=jnp.uint32)
