"""The schedule of a grouped matmul: tiles of rows that each belong to one group, computed on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

__all__ = ["GroupTiles", "group_of_rows", "group_offsets", "group_tiles", "tile_count"]


class GroupTiles(NamedTuple):
    """The tiles of a grouped matmul's rows, in the order of the rows: each row is in one tile.

    group: of the tile's rows; G for rows past the last group. first, end: the tile's rows, first <= row < end. Unused
    tiles come last, with first = end = M and group G.
    """

    group: Int32[Array, " T"]
    first: Int32[Array, " T"]
    end: Int32[Array, " T"]


def tile_count(rows: int, groups: int, block: int) -> int:
    """The number of tiles of at most `block` rows, which is enough for any sizes of the groups.

    The groups and the rows past them are G + 1 parts of the M rows. A part of n rows has at most (n + block - 1) /
    block tiles, and all parts together at most ceil(M / block) + G.
    """
    return -(-rows // block) + groups


def group_offsets(group_sizes: jax.Array, rows: int) -> jax.Array:
    """int32 [G + 1]: the first row of each group, and the end of the last group.

    group_sizes: int32 [G]. Sizes below 0 count as 0, and groups end at row `rows`.
    """
    sizes = jnp.clip(group_sizes, 0, rows)
    # A plain sum of many sizes may leave int32's range.
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes)
    return jnp.concatenate([jnp.zeros_like(ends, shape=1), ends])


def group_of_rows(offsets: jax.Array, rows: int) -> jax.Array:
    """int32 [rows]: the group of each row; G for rows past the last group. offsets: from group_offsets."""
    return (lax.iota(jnp.int32, rows)[:, None] >= offsets[None, 1:]).sum(axis=1, dtype=jnp.int32)


def group_tiles(offsets: jax.Array, rows: int, block: int) -> GroupTiles:
    """The GroupTiles of at most `block` rows each. offsets: from group_offsets."""
    groups = offsets.shape[0] - 1
    starts = offsets
    ends = jnp.concatenate([offsets[1:], jnp.full_like(offsets, rows, shape=1)])
    last_tiles = jnp.cumsum(-(-(ends - starts) // block), dtype=jnp.int32)
    tile = lax.iota(jnp.int32, tile_count(rows, groups, block))
    part = (tile[:, None] >= last_tiles[None]).sum(axis=1, dtype=jnp.int32)
    group = jnp.minimum(part, groups)
    tiles_before = jnp.concatenate([jnp.zeros_like(last_tiles, shape=1), last_tiles[:-1]])
    first = jnp.minimum(starts[group] + (tile - tiles_before[group]) * block, rows)
    return GroupTiles(group=group, first=first, end=jnp.minimum(first + block, ends[group]))
