"""The schedule of a grouped matmul: tiles of rows that each belong to one group, computed on the device.

Each array is one reduction over comparisons of all pairs, which XLA runs as one kernel of about a microsecond. Scans
and chains of look-ups take longer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

__all__ = [
    "FoundTiles",
    "GroupTiles",
    "found_tiles",
    "group_of_rows",
    "group_offsets",
    "group_tiles",
    "largest_first",
    "tile_count",
]

# The largest number of runs or groups for which all pairs are compared.
MOST_PAIRED = 1024


class GroupTiles(NamedTuple):
    """The tiles of a grouped matmul's rows: each row is in one tile.

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
    sizes, groups = jnp.clip(group_sizes, 0, rows), group_sizes.shape[0]
    if _is_paired(groups) and isinstance(rows, int) and rows * groups < 2**31:
        return jnp.minimum(_sums_before([sizes], groups + 1)[0], rows)
    # A plain sum of many sizes may leave int32's range.
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes)
    return jnp.concatenate([jnp.zeros_like(ends, shape=1), ends])


def group_of_rows(offsets: jax.Array, rows: int) -> jax.Array:
    """int32 [rows]: the group of each row; G for rows past the last group. offsets: from group_offsets."""
    return (lax.iota(jnp.int32, rows)[:, None] >= offsets[None, 1:]).sum(axis=1, dtype=jnp.int32)


def group_tiles(offsets: jax.Array, rows: int, block: int) -> GroupTiles:
    """The GroupTiles of at most `block` rows each, in the order of the rows. offsets: from group_offsets."""
    found = found_tiles(offsets, rows, block)
    exists = lax.iota(jnp.int32, found.group.shape[0]) < found.used[-1]
    or_else = lambda x, other: jnp.where(exists, x, other)
    group = or_else(found.group, offsets.shape[0] - 1)
    return GroupTiles(group=group, first=or_else(found.first, rows), end=or_else(found.end, rows))


class FoundTiles(NamedTuple):
    """Tiles as in GroupTiles, but unused tiles have first = end = 0 and group 0: this takes fewer kernels.

    start: the first row of the tile's group. used: its last entry is the number of tiles that are used.
    """

    group: Int32[Array, " T"]
    first: Int32[Array, " T"]
    end: Int32[Array, " T"]
    start: Int32[Array, " T"]
    used: Int32[Array, " G+2"]


def found_tiles(offsets: jax.Array, rows: int, block: int, *, short_last: bool = False) -> FoundTiles:
    """The FoundTiles of at most `block` rows each, in the order of the rows.

    short_last: tiles of at most half of `block` rows come after all longer tiles, and then the rows of no group. So a
    launch that begins with the first tiles ends evenly on all SMs.
    """
    parts = offsets.shape[0]
    is_last = lax.iota(jnp.int32, parts) == parts - 1
    starts, ends = offsets, jnp.where(is_last, rows, jnp.roll(offsets, -1))
    counts = lax.div(ends - starts + (block - 1), jnp.int32(block))
    longs = counts
    if short_last:
        longs = jnp.where(is_last, 0, lax.div(ends - starts + (block - 1) // 2, jnp.int32(block)))
    if _is_paired(parts):
        longs_before, used = _sums_before([longs, counts], parts + 1)
    else:
        longs_before, used = (jnp.append(0, jnp.cumsum(x, dtype=jnp.int32)) for x in (longs, counts))
    tile, long_tiles = lax.iota(jnp.int32, tile_count(rows, parts - 1, block))[:, None], longs_before[-1]
    is_long = tile < long_tiles
    shorts_before = used - longs_before
    nth_long, nth_short = tile - longs_before[None, :-1], tile - long_tiles - shorts_before[None, :-1] + longs[None]
    nth = jnp.where(is_long, nth_long, nth_short)  # the tile's index in its part
    least, most = jnp.where(is_long, 0, longs[None]), jnp.where(is_long, longs[None], counts[None])
    first = starts[None] + nth * block
    values = [lax.iota(jnp.int32, parts)[None], first, jnp.minimum(first + block, ends[None]), starts[None]]
    group, first, end, start = _picked((nth >= least) & (nth < most), values)
    return FoundTiles(group=group, first=first, end=end, start=start, used=used)


def largest_first(offsets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(group, its first row, its end), int32 [G] each, of the groups from the largest to the smallest.

    offsets: from group_offsets.
    """
    groups, starts, ends = offsets.shape[0] - 1, offsets[:-1], offsets[1:]
    sizes, index = ends - starts, lax.iota(jnp.int32, offsets.shape[0] - 1)
    if not _is_paired(groups):
        order = jnp.argsort(-sizes).astype(jnp.int32)
        return order, starts[order], ends[order]
    is_equal = sizes[:, None] == sizes[None]
    is_after = (sizes[:, None] < sizes[None]) | (is_equal & (index[:, None] > index[None]))
    rank = is_after.sum(axis=1, dtype=jnp.int32)
    order, first, end = _picked(rank[None] == index[:, None], [index[None], starts[None], ends[None]])
    return order, first, end


def _is_paired(count: Any) -> bool:
    return isinstance(count, int) and count <= MOST_PAIRED


def _sums_before(values: list[jax.Array], count: int) -> list[jax.Array]:
    """int32 [count] for each of the values: entry i is the sum of its first i entries."""
    is_before = lax.iota(jnp.int32, count)[:, None] > lax.iota(jnp.int32, values[0].shape[0])[None]
    return _picked(is_before, [x[None] for x in values])


def _picked(is_picked: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
    """For each row of is_picked [A, B], the sum of the entries of each of `values` where it is True.

    The values broadcast to [A, B]. One reduction of all values is one kernel.
    """
    operands = [jnp.where(is_picked, x, jnp.int32(0)) for x in values]
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
    return list(lax.reduce(operands, [jnp.int32(0)] * len(values), add, (1,)))
