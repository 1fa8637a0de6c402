"""Masks of a whole sequence, for a call with only some of its queries and keys, or only some of its heads."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kernels.masks.arrays import BlockSparse, Dense, Function, Segments
from jax_kernels.masks.block_arithmetic import Grid, Literal, live, most_partial, width
from jax_kernels.masks.mask import And, Mask, Not, Or, _Composite, node, static
from jax_kernels.masks.positions import Band, Dilated, GlobalTokens, Prefix, _Numbered, _one_row
from jax_kernels.masks.ranked_mask import Ranked
from jax_kernels.masks.running_sums import running_sums

__all__ = ["Placed", "keeps_none", "of_heads", "place_of"]

# Token counts are clamped to this, so that their sums with positions fit an int32.
_MOST_TOKENS = 1 << 30


@node
class Placed(_Composite):
    """A whole sequence's mask for a call with some of its queries and keys: indices are mapped to positions first.

    Pair (i, j) of the call is kept if `mask` keeps (position of query i, position of key j). The call's queries form
    pieces of equal length, one after the other, and so do its keys. Neighbours in a piece are `stride` positions apart.

    mask: of the whole sequence. q_firsts, k_firsts: int32 [pieces], the position of each piece's first query, or key.
    They may be traced; with a stride of 1 they are multiples of the piece's length. lengths: (queries, keys) of the
    call. shift: every difference q_firsts[i] - k_firsts[j] is shift plus a multiple of stride.

    Blocks are judged by arithmetic if the blocks of `mask` are. A block that spans two pieces may be called partial
    although it is dead or full.
    """

    mask: Mask
    q_firsts: Any
    k_firsts: Any
    lengths: tuple[int, int] = static()
    stride: int = static(default=1)
    shift: int = static(default=0)

    @property
    def parts(self):
        return (self.mask,)

    @property
    def is_evaluated(self) -> bool:
        return self.mask.is_evaluated or not _is_known(self.mask)

    def check_lengths(self, q_length, kv_length):
        if self.lengths != (q_length, kv_length):
            raise ValueError(f"mask: got a mask for {self.lengths} queries and keys, want {(q_length, kv_length)}")

    def terms(self, negated):
        cells = lambda grid: self._live(grid, negated)
        cell_width = lambda grid, by: self._width(grid, by, negated)
        return ((Literal(cells=cells, cell_width=cell_width, varies=self._partial),),)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        of = lambda side, index: place_of(index, self._firsts(side), self._size(side), self.stride)
        q, k = of(0, q_index), of(1, k_index)
        return self.mask.elements(b, h, q, k)

    def __repr__(self) -> str:
        return f"placed({self.mask!r})"

    def _firsts(self, side: int) -> Any:
        """The position of each piece's first token: int32 [pieces]. side: 0 for queries, 1 for keys."""
        return self.k_firsts if side else self.q_firsts

    def _size(self, side: int) -> int:
        """The number of tokens of a piece. side: 0 for queries, 1 for keys."""
        return self.lengths[side] // self._firsts(side).shape[0]

    def _blocks(self, grid: Grid, side: int) -> list[tuple[int, int, Any, int]]:
        """The blocks that hold tokens of each piece, as a tuple for each piece. side: 0 for queries, 1 for keys.

        A tuple has: the first block, the block after the last, the position of the first block's first token
        (extrapolated if this token belongs to the piece before), and the number of tokens in these blocks.
        """
        firsts, size = self._firsts(side), self._size(side)
        block, length = (grid.block_kv, grid.kv_length) if side else (grid.block_q, grid.q_length)
        found = []
        for piece in range(firsts.shape[0]):
            first, end = piece * size // block, -(-(piece + 1) * size // block)
            start = first * block
            place = firsts[piece] - self.stride * (piece * size - start)
            found.append((first, end, place, min(end * block, length) - start))
        return found

    def _tiles(self, grid: Grid) -> "Iterator[_Tile]":
        """A _Tile for each pair of a piece of queries and a piece of keys. Tiles overlap in blocks that hold two
        pieces.
        """
        for q, k in itertools.product(self._blocks(grid, 0), self._blocks(grid, 1)):
            (row, last_row, q_first, q_length), (column, last_column, k_first, k_length) = q, k
            at = lax.div(q_first - k_first - self.shift, jnp.int32(self.stride))
            place = _Place(
                stride=self.stride,
                shift=self.shift,
                q_first=q_first,
                k_first=k_first,
                at=at,
                lengths=(q_length, k_length),
                units=(self._size(0), self._size(1)),
            )
            yield _Tile(
                rows=(row, last_row),
                columns=(column, last_column),
                mask=_local(self.mask, place),
                grid=Grid(q_length, k_length, grid.block_q, grid.block_kv, jnp.atleast_1d(at), None),
            )

    def _live(self, grid: Grid, negated: bool) -> jax.Array:
        """Whether each block of the call may hold a kept pair: bool [B or 1, H or 1, rows, columns].

        negated: judge the mask's complement.
        """
        whole = jnp.zeros((self.batch, self.heads, grid.rows, grid.columns), bool)
        for tile in self._tiles(grid):
            found = live(tile.mask.terms(negated), tile.grid)
            whole = whole.at[:, :, slice(*tile.rows), slice(*tile.columns)].max(found)
        return whole

    def _width(self, grid: Grid, by: str, negated: bool) -> int:
        """The most live blocks that one block list can have: summed over the pieces of the other side.

        by: "query" for a list of each block of queries, "key" for one of each block of keys. negated: of the
        complement.
        """
        widths: dict[tuple[int, int], int] = {}
        for tile in self._tiles(grid):
            along = tile.rows if by == "query" else tile.columns
            widths[along] = widths.get(along, 0) + width(tile.mask.terms(negated), tile.grid, by)
        # The list of a block that spans two pieces joins the lists of the two pieces.
        each = sorted(widths.items())
        joint = [a[1] + b[1] for a, b in itertools.pairwise(each) if a[0][1] > b[0][0]]
        return max(*widths.values(), *joint, 1)

    def _partial(self, grid: Grid) -> int:
        """The most partial blocks of a batch entry and head, including each block that spans two pieces."""
        most = sum(most_partial(tile.mask.terms(False), tile.grid) for tile in self._tiles(grid))
        if self._size(0) % grid.block_q:
            most += (self._firsts(0).shape[0] - 1) * grid.columns
        if self._size(1) % grid.block_kv:
            most += (self._firsts(1).shape[0] - 1) * grid.rows
        return most


def place_of(index: Any, firsts: Any, size: int, stride: int) -> Any:
    """The position in the whole sequence of the token with index `index` in the call; int32, shaped like index.

    firsts: int32 [pieces], the position of each piece's first token. size: the tokens of a piece. stride: the distance
    of neighbours in a piece.
    """
    place = firsts[0] + stride * index
    for piece in range(1, len(firsts)):
        place = jnp.where(index < piece * size, place, firsts[piece] + stride * (index - piece * size))
    return place


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
    """The blocks where a piece of queries meets a piece of keys, with the mask and the grid restricted to these blocks.

    rows, columns: (first, end) of the blocks of queries and of keys in the call's grid; end is exclusive. mask: takes
    indices that count from the tile's first query and first key. grid: of the tile's blocks alone.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    mask: Mask
    grid: Grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """The map from indices in a _Tile to positions: query i is at q_first + stride * i, key j at k_first + stride * j.

    at: the offset of query 0 among the keys, in steps of stride: q_first - k_first is stride * at + shift. lengths:
    (queries, keys) of the tile. units: (tokens of a piece of queries, of a piece of keys). If stride is 1 and the
    blocks' sizes divide the units, q_first and k_first are multiples of the units.
    """

    stride: int
    shift: int
    q_first: Any
    k_first: Any
    at: Any
    lengths: tuple[int, int]
    units: tuple[int, int]

    def count(self, limits: Any, first: Any) -> Any:
        """The number of the tile's tokens before each position in `limits`: the position's index, rounded up.

        limits: positions in the whole sequence. first: the position of the tile's first token, q_first or k_first. The
        tile's length is not considered, so the number may be negative or exceed it.
        """
        return -((first - jnp.clip(limits, 0, _MOST_TOKENS)) // self.stride)

    def ids(self, ids: Any, side: int) -> Any:
        """The segment ids of the tile's tokens: int32 [B or 1, length]. side: 0 for queries, 1 for keys.

        ids: of the whole sequence. Tokens whose position is outside of the sequence get arbitrary ids.
        """
        first, length = (self.q_first, self.k_first)[side], self.lengths[side]
        places = first + self.stride * jnp.arange(length, dtype=jnp.int32)
        return ids[:, jnp.clip(places, 0, ids.shape[1] - 1)]


_LEAVES = Band | Prefix | GlobalTokens | Dilated | Segments | BlockSparse | Dense | Ranked | Function


def _is_known(mask: Mask) -> bool:
    """Whether _local can restrict the mask: it consists of classes in _LEAVES, joined by `&`, `|` and `~`."""
    mask = mask.unprepared
    return all(map(_is_known, mask.parts)) if isinstance(mask, And | Or | Not) else isinstance(mask, _LEAVES)


def _local(mask: Mask, place: _Place) -> Mask:
    """The mask restricted to a _Tile's indices, for block arithmetic only.

    Dense, ranked and function masks, which keep or drop single pairs, become _Any: every block may be live.
    """
    mask = mask.unprepared
    if isinstance(mask, And | Or):
        return type(mask)(tuple(_local(part, place) for part in mask.masks))
    if isinstance(mask, Not):
        return Not(_local(mask.mask, place))
    if isinstance(mask, Band):
        low, high = (None if x is None else x + place.shift for x in (mask.low, mask.high))
        low = None if low is None else -(-low // place.stride)
        return Band(low, None if high is None else high // place.stride)
    if isinstance(mask, Prefix):
        return Prefix(None, place.count(mask.per_batch[:, 0], place.k_first))
    if isinstance(mask, GlobalTokens):
        limits = mask.per_batch[:, 0]
        queries = _FirstQueries(None, place.count(limits, place.q_first) + place.at)
        return Or((queries, Prefix(None, place.count(limits, place.k_first))))
    if isinstance(mask, Dilated):
        return _Apart(mask.rate, place.stride, place.shift)
    if isinstance(mask, Segments):
        return Segments(place.ids(mask.q_ids, 0), place.ids(mask.kv_ids, 1))
    if isinstance(mask, BlockSparse):
        firsts = place.q_first, place.k_first
        return _Cells(mask.blocks, *firsts, (mask.block_q, mask.block_kv), mask.most_blocks, place.stride, place.units)
    return _Any()


@node
class _Any(Mask):
    """A mask that block arithmetic cannot judge: every block may be live, in the mask and in its complement."""

    def terms(self, negated):
        return ((Literal(cells=lambda grid: jnp.ones((1, 1, grid.rows, grid.columns), bool)),),)


@node
class _FirstQueries(_Numbered):
    """Keeps all keys for the queries before a position: `limit` if known when tracing, else `limits` int32 [B or 1]."""

    limit: int | None = static()
    limits: Any

    def terms(self, negated):
        def keys(grid):
            is_first = grid.positions < self.per_batch
            return 0, jnp.where(is_first != negated, grid.kv_length, 0)

        return ((Literal(interval=keys, varies=_one_row),),)


@node
class _Apart(Mask):
    """Keeps the pairs for which stride * d + shift is a multiple of rate, where d is the query's index minus the key's.

    It is Dilated(rate) for tokens that are `stride` positions apart. The query's index includes the grid's offset.
    """

    rate: int = static()
    stride: int = static()
    shift: int = static()

    def terms(self, negated):
        def distance(d):
            return (lax.rem(d * self.stride + self.shift, jnp.int32(self.rate)) == 0) != negated

        return ((Literal(distance=distance, rate=1 if negated else self.rate // math.gcd(self.rate, self.stride)),),)


@node
class _Cells(Mask):
    """A whole sequence's BlockSparse, restricted to a _Tile's tokens.

    blocks: bool [B or 1, H or 1, rows, columns], the cells of the whole sequence. q_first, k_first: the position of the
    tile's first query and key. sizes: (queries, keys) of a cell. most_blocks: the most live cells of a row of cells, if
    known. stride: the distance of neighbouring tokens. units: (queries, keys) of a piece; with a stride of 1, q_first
    and k_first are multiples of them.
    """

    blocks: Any
    q_first: Any
    k_first: Any
    sizes: tuple[int, int] = static()
    most_blocks: int | None = static()
    stride: int = static()
    units: tuple[int, int] = static()

    @property
    def batch(self) -> int:
        return self.blocks.shape[0]

    @property
    def heads(self) -> int:
        return self.blocks.shape[1]

    def terms(self, negated):
        if negated:
            return ((Literal(cells=lambda grid: jnp.less(*grid.once(self._counts)), varies=self._varies),),)
        alive = lambda grid: grid.once(self._counts)[0] > 0
        return ((Literal(cells=alive, cell_width=self._width, varies=self._varies),),)

    def _in_cells(self, grid: Grid) -> bool:
        """Whether the grid's blocks are so small and aligned that each one lies in a single cell."""
        blocks = grid.block_q, grid.block_kv
        if self.stride == 1:
            return not any(
                size % block or unit % block for size, block, unit in zip(self.sizes, blocks, self.units, strict=True)
            )
        spans = [self.stride * block for block in blocks]
        return not any(size % span for size, span in zip(self.sizes, spans, strict=True))

    def _varies(self, grid: Grid) -> int:
        """The most blocks of a batch entry and head that may be partial: none if each block lies in one cell."""
        return 0 if self._in_cells(grid) else grid.rows * grid.columns

    def _width(self, grid: Grid, by: str) -> int:
        """The most live blocks that a list can have. by: "query" or "key", the side of the lists."""
        most = grid.columns if by == "query" else grid.rows
        if self.most_blocks is None or by == "key" or not self._in_cells(grid):
            return most
        return min(most, self.most_blocks * (self.sizes[1] // self.stride // grid.block_kv))

    def _counts(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        """(live cells, all cells) between the first and the last token of each block.

        The live cells are int32 [B or 1, H or 1, rows, columns], all cells int32 [rows, columns]. Cells past the end of
        `blocks` do not count.
        """
        sums = running_sums(running_sums(self.blocks.swapaxes(2, 3)).swapaxes(2, 3))
        sums = jnp.pad(sums, ((0, 0), (0, 0), (1, 0), (1, 0)))
        sides = []
        for axis, (first, size) in enumerate(zip((self.q_first, self.k_first), self.sizes, strict=True)):
            start, last = (jnp.maximum(first + self.stride * edge, 0) // size for edge in grid.edges(axis))
            count = self.blocks.shape[2 + axis]
            sides.append((jnp.minimum(start, count), jnp.minimum(last + 1, count)))
        (top, bottom), (left, right) = sides
        at = lambda rows, columns: sums[:, :, rows[:, None], columns]
        count = at(bottom, right) - at(top, right) - at(bottom, left) + at(top, left)
        return count, (bottom - top)[:, None] * (right - left)


def of_heads(mask: Mask, first: Any, count: int) -> Mask:
    """The mask of the `count` query heads from head `first` on, with its per-head arrays sliced; `first` may be traced.

    A mask that is the same for all heads is returned as it is. Raises NotImplementedError for a mask of an unknown
    class that differs between heads.
    """
    mask = mask.unprepared
    if mask.heads == 1:
        return mask
    if isinstance(mask, And | Or):
        return type(mask)(tuple(of_heads(part, first, count) for part in mask.masks))
    if isinstance(mask, Not):
        return Not(of_heads(mask.mask, first, count))
    own = lambda x: x if x.shape[1] == 1 else lax.dynamic_slice_in_dim(x, first, count, 1)
    if isinstance(mask, Dense):
        return dataclasses.replace(mask, array=own(mask.array))
    if isinstance(mask, BlockSparse):
        return dataclasses.replace(mask, blocks=own(mask.blocks))
    if isinstance(mask, Ranked):
        return dataclasses.replace(mask, rank=own(mask.rank), last=own(mask.last))
    if isinstance(mask, Function):
        arrays = jnp.asarray(first, jnp.int32), *mask.arrays
        return Function(arrays, _OfHeads(mask.function), mask.batch_entries, count)
    raise NotImplementedError(f"mask: got {type(mask).__name__}, whose heads cannot be sharded")


@dataclasses.dataclass(frozen=True)
class _OfHeads:
    """A predicate for from_function that adds an offset to the head's index before it calls `function`.

    The offset, the index of the first head, is the first of the mask's arrays.
    """

    function: Any

    def __call__(self, b: Any, h: Any, q: Any, k: Any, first: Any, *arrays: Any) -> Any:
        return self.function(b, h + first, q, k, *arrays)


def keeps_none(mask: Mask, queries: range, keys: range) -> bool:
    """Whether it is certain without evaluating pairs that no query at `queries` keeps a key at `keys`.

    queries, keys: positions in the whole sequence. False may also mean that it is not known. The limits of windows,
    prefixes, global tokens and dilation count, and cells that are known when tracing.
    """
    mask = mask.unprepared
    if isinstance(mask, Or):
        return all(keeps_none(part, queries, keys) for part in mask.masks)
    if isinstance(mask, And) and any(keeps_none(part, queries, keys) for part in mask.masks):
        return True
    if isinstance(mask, BlockSparse) and not isinstance(mask.blocks, jax.core.Tracer):
        rows, columns = np.unique(np.array(queries) // mask.block_q), np.unique(np.array(keys) // mask.block_kv)
        return not np.asarray(mask.blocks)[..., rows[:, None], columns].any()
    return all(_keeps_none(literals, queries, keys) for literals in mask.terms(False))


def _keeps_none(literals: Any, queries: range, keys: range) -> bool:
    """Whether the limits of a conjunction (low, high, keys, queries and rate of its literals) leave no pair of
    positions.
    """
    queries = _within(queries, [x.queries for x in literals])
    keys = _within(keys, [x.keys for x in literals])
    if not queries or not keys:
        return True
    apart = keys[0] - queries[-1], keys[-1] - queries[0]
    least = max([apart[0], *(x.low for x in literals if x.low is not None)])
    most = min([apart[1], *(x.high for x in literals if x.high is not None)])
    least += (apart[0] - least) % queries.step
    rates = [x.rate for x in literals if x.rate > 1]
    period = queries.step * math.lcm(*rates)
    distances = range(least, min(most + 1, least + period), queries.step)
    return all(any(distance % rate for rate in rates) for distance in distances)


def _within(places: range, limits: list[tuple[int | None, int | None]]) -> range:
    """The positions in `places` that all limits keep. limits: [start, end) each; None is no limit."""
    low = max([places.start, *(start for start, _ in limits if start is not None)])
    end = min([places.stop, *(stop for _, stop in limits if stop is not None)])
    return range(low + (places.start - low) % places.step, end, places.step)
