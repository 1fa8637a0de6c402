"""The live blocks of a mask, as lists that a kernel walks along, and the bitmaps of its partial blocks."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.masks.literals import Grid, live, width

# Pairs that are evaluated at a time, where a mask is no matter of block arithmetic.
_CHUNK = 1 << 24


class BlockLists(NamedTuple):
    """The live blocks of the other side, for every block of one side.

    indices: int32 [B or 1, H or 1, blocks, width]: in ascending order first the partial blocks, in which a kernel
    evaluates the predicate, then the full ones, in which every pair is kept; 0 past the last.
    partial_count, full_count: int32 [B or 1, H or 1, blocks], how many there are of each.
    """

    indices: Any
    partial_count: Any
    full_count: Any


class PackedBlocks(NamedTuple):
    """The partial blocks of a mask, bit by bit.

    words: uint32 [entries, block_q, ceil(block_kv / 32)]: bit j % 32 of word j // 32 is key j of the block, a row is
    a query; 0 beyond the last key and query. Entries are in the order of (batch, head, query block, key block),
    whichever side the lists are by, so that one array serves both directions.
    entries: int32, shaped as BlockLists.indices: the entry of a partial block, -1 for every other.
    """

    words: Any
    entries: Any


def counts(mask: Any, grid: Grid) -> jax.Array:
    """How many pairs each block keeps, by evaluating them all: int32 [B or 1, H or 1, rows, columns]."""
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
    """int32 [B, H, ceil(T / block_q), ceil(S / block_kv)] from bool [B, H, T, S]; in one pass where it stands alone."""
    *leading, q_length, kv_length = keep.shape
    pads = ((0, 0), (0, 0), (0, -q_length % block_q), (0, -kv_length % block_kv))
    keep = jnp.pad(keep, pads) if any(map(any, pads)) else keep
    blocks = keep.reshape(*leading, keep.shape[2] // block_q, block_q, keep.shape[3] // block_kv, block_kv)
    return blocks.sum(axis=(3, 5), dtype=jnp.int32)


def status(mask: Any, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """(live, full), bool [B or 1, H or 1, rows, columns]. A block that reaches past the last key is not full."""
    if mask.is_evaluated:
        count = mask.block_counts(grid)
        alive, full = count > 0, count == grid.area()
    else:
        alive, full = live(mask.terms(False), grid), ~live(mask.terms(True), grid)
    inside = (jnp.arange(grid.columns) + 1) * grid.block_kv <= grid.kv_length
    full = alive & full & inside
    return jnp.broadcast_to(alive, full.shape), full


def compress(alive: jax.Array, full: jax.Array, most: int) -> BlockLists:
    """Lists along the last axis, of at most `most` entries."""
    count = alive.shape[-1]
    kind = jnp.where(full, 1, jnp.where(alive, 0, 2)).astype(jnp.int32)
    order = lax.sort(kind * count + jnp.arange(count, dtype=jnp.int32), dimension=alive.ndim - 1)[..., :most]
    total, full_count = (x.sum(axis=-1, dtype=jnp.int32) for x in (alive, full))
    return BlockLists(jnp.where(order < 2 * count, lax.rem(order, jnp.int32(count)), 0), total - full_count, full_count)


def _sided(x: jax.Array, by: str) -> jax.Array:
    return x if by == "query" else x.swapaxes(2, 3)


@functools.partial(jax.jit, static_argnames=("lengths", "blocks", "static_offset", "by"))
def block_lists(mask: Any, offset: Any, *, lengths, blocks, static_offset, by) -> BlockLists:
    grid = Grid.of(lengths, blocks, offset, static_offset)
    alive, full = status(mask, grid)
    return compress(_sided(alive, by), _sided(full, by), width(mask.terms(False), grid, by))


@functools.partial(jax.jit, static_argnames=("lengths", "blocks", "static_offset"))
def block_status(mask: Any, offset: Any, *, lengths, blocks, static_offset) -> tuple[jax.Array, jax.Array]:
    return status(mask, Grid.of(lengths, blocks, offset, static_offset))


def packed_partial(mask: Any, offset: Any, *, lengths, blocks, static_offset, by) -> PackedBlocks:
    statics = {"lengths": lengths, "blocks": blocks, "static_offset": static_offset}
    alive, full = block_status(mask, offset, **statics)
    partial = alive & ~full
    if isinstance(partial, jax.core.Tracer):
        most = width(mask.terms(False), Grid.of(lengths, blocks, offset, static_offset), "query")
        capacity = math.prod(partial.shape[:3]) * most
    else:
        capacity = max(1, int(partial.sum()))
    return _packed(mask, offset, alive, full, **statics, by=by, capacity=capacity)


@functools.partial(jax.jit, static_argnames=("lengths", "blocks", "static_offset", "by", "capacity"))
def _packed(mask, offset, alive, full, *, lengths, blocks, static_offset, by, capacity) -> PackedBlocks:
    grid = Grid.of(lengths, blocks, offset, static_offset)
    partial = alive & ~full
    numbers = jnp.where(partial, jnp.cumsum(partial, dtype=jnp.int32).reshape(partial.shape) - 1, -1)
    lists = compress(_sided(alive, by), _sided(full, by), width(mask.terms(False), grid, by))
    entries = jnp.take_along_axis(_sided(numbers, by), lists.indices, axis=-1)
    slots = jnp.arange(lists.indices.shape[-1], dtype=jnp.int32)
    entries = jnp.where(slots < lists.partial_count[..., None], entries, -1)

    def words(place):
        b, h, row, column = place
        q = row * grid.block_q + jnp.arange(grid.block_q, dtype=jnp.int32)[:, None]
        k = column * grid.block_kv + jnp.arange(grid.block_kv, dtype=jnp.int32)
        keep = mask.elements(
            b,
            h,
            jnp.minimum(q, grid.q_length - 1),
            jnp.minimum(k, grid.kv_length - 1),
            q_offset=offset[jnp.minimum(b, offset.shape[0] - 1)],
        )
        return pack_bits(keep & (q < grid.q_length) & (k < grid.kv_length))

    places = jnp.nonzero(partial, size=capacity, fill_value=0)
    places = tuple(x.astype(jnp.int32) for x in places)
    batch_size = max(1, min(capacity, _CHUNK // (grid.block_q * grid.block_kv)))
    packed = lax.map(words, places, batch_size=batch_size)
    used = jnp.arange(capacity, dtype=jnp.int32) < partial.sum(dtype=jnp.int32)
    return PackedBlocks(jnp.where(used[:, None, None], packed, 0), entries)


def pack_bits(keep: jax.Array) -> jax.Array:
    """uint32 [..., ceil(n / 32)] from bool [..., n], the first in the lowest bit."""
    keep = jnp.pad(keep, [(0, 0)] * (keep.ndim - 1) + [(0, -keep.shape[-1] % 32)])
    bits = keep.reshape(*keep.shape[:-1], -1, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return bits.sum(axis=-1, dtype=jnp.uint32)
