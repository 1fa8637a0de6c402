"""A whole sequence's mask in a call with only some of its queries and keys."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.masks.block_arithmetic import Grid, Literal, live, most_partial, width
from jax_kernels.masks.mask import Composite, Mask, node, static
from jax_kernels.masks.restriction import Piece, position_of


@node
class Placed(Composite):
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
    def is_arithmetic(self) -> bool:
        return False  # a position is a look-up of its piece

    @property
    def is_evaluated(self) -> bool:
        return self.mask.is_evaluated or not self.mask.is_restrictable

    def check_lengths(self, q_length, kv_length):
        if self.lengths != (q_length, kv_length):
            raise ValueError(f"mask: got a mask for {self.lengths} queries and keys, want {(q_length, kv_length)}")

    def terms(self, negated):
        cells = lambda grid: self._live(grid, negated)
        cell_width = lambda grid, by: self._width(grid, by, negated)
        return ((Literal(cells=cells, cell_width=cell_width, varies=self._partial),),)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        of = lambda side, index: position_of(index, self._firsts(side), self._size(side), self.stride)
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
            position = firsts[piece] - self.stride * (piece * size - start)
            found.append((first, end, position, min(end * block, length) - start))
        return found

    def _tiles(self, grid: Grid) -> "Iterator[_Tile]":
        """A _Tile for each pair of a piece of queries and a piece of keys. Tiles overlap in blocks that hold two
        pieces.
        """
        for q, k in itertools.product(self._blocks(grid, 0), self._blocks(grid, 1)):
            (row, last_row, q_first, q_length), (column, last_column, k_first, k_length) = q, k
            at = lax.div(q_first - k_first - self.shift, jnp.int32(self.stride))
            piece = Piece(
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
                mask=self.mask.restricted(piece),
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
