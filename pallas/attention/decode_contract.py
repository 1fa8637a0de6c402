"""Parts that the decoding kernels have in common: queries packed as rows, keys cut into splits, and splits merged.

A kernel is a function

    attention_decode(query, key, value, kv_lengths, block_tables, sinks, mask, bias, *, scale, softcap, left, config,
                     core_count, interpret) -> (out, lse)

query: [B, T, H, D]. key, value: [B, S, Hkv, D] and [B, S, Hkv, Dv]; or, with block_tables [B, pages of a sequence]
int32, [pages, page_size, Hkv, D] and [pages, page_size, Hkv, Dv]. kv_lengths: [B] int32, clipped to 0 ... capacity.
sinks: [B, H] float32 or None. mask, bias: bool and float [n, H or 1, T or 1, S], or None; each of the n entries serves
B / n consecutive sequences. scale: positive. left: the number of keys before its own that a query attends to, -1 for
all. out: [B, T, H, Dv] in query's dtype. lse: [B, H, T] float32.

The T queries of the H / Hkv query heads with the same key head are the rows of one matrix, so that a key is read once
for all of them: row t * H / Hkv + g is query t of head g.

Under a mask, a kernel reads a block of keys only if some row of the key head keeps one of its keys (`live_blocks`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_kernels.masks.block_lists import compress

# The cost of a split in addition to its keys, and the cost of merging, in blocks of keys: a few microseconds each.
SPLIT_OVERHEAD = 4
MERGE_OVERHEAD = 4


def pack(query: Float[Array, "B T H D"], kv_heads: int, rows: int) -> Float[Array, "B Hkv rows D"]:
    """The queries as rows of one matrix per key head: row t * H / Hkv + g is query t of query head g of the key head.

    rows: the number of rows of the result; rows without a query are zeros at the end.
    """
    batch, q_length, heads, head_dim = query.shape
    query = query.reshape(batch, q_length, kv_heads, heads // kv_heads, head_dim).swapaxes(1, 2)
    query = query.reshape(batch, kv_heads, -1, head_dim)
    return jnp.pad(query, [(0, 0), (0, 0), (0, rows - query.shape[2]), (0, 0)])


def unpack(
    out: Float[Array, "B Hkv rows Dv"], lse: Float32[Array, "B Hkv rows"], q_length: int, heads: int
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """The inverse of `pack` for a kernel's results: out [B, T, H, Dv] and lse [B, H, T]; rows without a query are
    dropped.
    """
    batch, kv_heads = out.shape[:2]
    group = heads // kv_heads
    out, lse = (x[:, :, : group * q_length].reshape(batch, kv_heads, q_length, group, *x.shape[3:]) for x in (out, lse))
    return out.swapaxes(1, 2).reshape(batch, q_length, heads, -1), lse.swapaxes(2, 3).reshape(batch, heads, q_length)


def merged(
    out: Float32[Array, "B Hkv parts rows Dv"],
    lse: Float32[Array, "B Hkv parts more_rows"],
    q_length: int,
    heads: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """(out [B, T, H, Dv] in `dtype`, lse [B, H, T]) over all keys, from results over parts of the keys, by XLA.

    The weight of a part is its fraction of the sum of exponentials. lse: natural log. A row whose parts all have
    lse = -inf gets out = 0.
    """
    lse = lse[..., : out.shape[3]]
    highest = lse.max(axis=2)
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights = jnp.exp(lse - shift[:, :, None])
    total = weights.sum(axis=2)
    safe = jnp.where(total == 0.0, 1.0, total)
    out = (out * weights[..., None]).sum(axis=2) / safe[..., None]
    lse = jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(safe))
    return unpack(out.astype(dtype), lse, q_length, heads)


def row_sinks(
    sinks: Float32[Array, "B H"] | None, kv_heads: int, q_length: int, rows: int
) -> Float32[Array, "B Hkv rows"] | None:
    """The sink of each packed row's head, zeros for rows without a query; None without sinks."""
    if sinks is None:
        return None
    of_rows = jnp.tile(sinks.reshape(len(sinks), kv_heads, -1), (1, 1, q_length))
    return jnp.pad(of_rows, [(0, 0), (0, 0), (0, rows - of_rows.shape[2])])


class LiveBlocks(NamedTuple):
    """The blocks of keys that each sequence and key head visits under a mask.

    indices: int32 [B, Hkv or 1, blocks], the indices of the live blocks in ascending order, then zeros. counts: int32
    [B, Hkv or 1], the number of live blocks.
    """

    indices: jax.Array
    counts: jax.Array


def live_blocks(
    mask: Bool[Array, "#B #H #T S"],
    kv_lengths: Int32[Array, " B"],
    *,
    kv_heads: int,
    q_length: int,
    left: int,
    block_kv: int,
) -> LiveBlocks:
    """The blocks of keys, within the lengths and the window, in which a query of a key head's group keeps a key.

    mask: [n, H or 1, T or 1, S], each of whose n entries serves B / n consecutive sequences. q_length: T. left: the
    number of keys before its own that a query attends to, -1 for all.
    """
    entries, heads, _, capacity = mask.shape
    kept = mask.any(axis=2)
    if heads > 1:
        kept = kept.reshape(entries, kv_heads, heads // kv_heads, capacity).any(axis=2)
    kept = jnp.repeat(kept, len(kv_lengths) // entries, axis=0)
    key, lengths = jnp.arange(capacity, dtype=jnp.int32), jnp.clip(kv_lengths, 0, capacity)[:, None, None]
    kept = kept & (key < lengths)
    if left >= 0:
        kept = kept & (key >= lengths - q_length - left)
    kept = jnp.pad(kept, ((0, 0), (0, 0), (0, -capacity % block_kv)))
    alive = kept.reshape(*kept.shape[:2], -1, block_kv).any(axis=3)
    lists = compress(alive, jnp.zeros_like(alive), alive.shape[2])
    return LiveBlocks(indices=lists.indices, counts=lists.partial_count)


def most_blocks(capacity: int, q_length: int, left: int, block_kv: int) -> int:
    """The largest number of blocks of keys that a sequence may visit.

    left: the number of keys before its own that a query attends to; -1: all.
    """
    blocks = pl.cdiv(capacity, block_kv)
    return blocks if left < 0 else min(blocks, pl.cdiv(left + q_length, block_kv) + 1)


def split_count(programs: int, blocks: int, slots: int) -> int:
    """The number of splits into which the keys of each sequence are cut, so that all SMs have work.

    programs: pairs of a sequence and a key head (and a tile of rows). blocks: blocks of keys of a sequence. slots: the
    number of programs that run at a time. Returns the fewest splits that reach the shortest estimated time.
    """

    def time(splits):
        waves = pl.cdiv(programs * splits, slots)
        return waves * (pl.cdiv(blocks, splits) + SPLIT_OVERHEAD) + (MERGE_OVERHEAD if splits > 1 else 0)

    return min(range(1, min(blocks, slots) + 1), key=time)
