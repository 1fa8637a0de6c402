"""Masks of cells: each cell of several queries by several keys is kept or dropped as a whole."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.masks import checks
from jax_kernels.masks.arrays.array_mask import ArrayMask, with_batch, within
from jax_kernels.masks.block_arithmetic import Grid, Literal, running_sums, touched
from jax_kernels.masks.mask import Mask, node, static
from jax_kernels.masks.restriction import of_heads


def block_sparse(blocks: jax.Array, block_size: int | tuple[int, int]) -> Mask:
    """Keeps or drops each cell of block_size queries by block_size keys.

    blocks: bool [rows, columns], [H or 1, rows, columns] or [B or 1, H or 1, rows, columns], True to keep the cell;
    zeros and ones in float32, bfloat16 or float16 too. rows = ceil(T / block_size) and columns = ceil(S / block_size)
    of the call. block_size: an int, or (queries, keys). Row 0 starts at query 0, whatever its position.
    """
    return named_block_sparse("blocks", blocks, block_size)


def named_block_sparse(name: str, blocks: Any, block_size: Any) -> "BlockSparse":
    """The block_sparse mask of `blocks`; errors call this array `name`."""
    blocks, is_mask = checks.boolean(name, blocks)
    blocks = checks.four_axes(name, blocks, "[batch, heads, rows, columns]")
    return BlockSparse(blocks, *checks.block_pair("block_size", block_size), is_mask=is_mask)


class _CellArray(ArrayMask):
    """A base class of masks of cells, `blocks`: bool [B or 1, H or 1, rows, columns]. Subclasses define the methods."""

    blocks: Any
    _in_cells: Any
    _counts: Any
    _width: Any

    @property
    def _array(self):
        return self.blocks

    def terms(self, negated):
        if negated:
            return ((Literal(cells=lambda grid: jnp.less(*grid.once(self._counts)), varies=self._varies),),)
        alive = lambda grid: grid.once(self._counts)[0] > 0
        return ((Literal(cells=alive, cell_width=self._width, varies=self._varies),),)

    def _varies(self, grid: Grid) -> int:
        """The most blocks of a batch entry and head that may be partial: none if each block lies in one cell."""
        return 0 if self._in_cells(grid) else grid.rows * grid.columns


@node
class BlockSparse(_CellArray):
    """A mask that keeps or drops whole cells of block_q queries by block_kv keys.

    blocks: bool [B or 1, H or 1, rows, columns], True for the cells to keep. most_blocks: an upper bound on the kept
    cells in a row of cells, if known. is_mask: if `blocks` was made from traced floats, a traced bool, whether all
    floats are 0 or 1; otherwise None.
    """

    blocks: Any
    block_q: int = static()
    block_kv: int = static()
    most_blocks: int | None = static(default=None)
    is_mask: Any = None

    @property
    def is_valid(self) -> Any:
        return self.is_mask

    def check_lengths(self, q_length, kv_length):
        want = (-(-q_length // self.block_q), -(-kv_length // self.block_kv))
        if self.blocks.ndim != 4 or self.blocks.shape[2:] != want:
            raise ValueError(
                f"block_sparse: got blocks of shape {self.blocks.shape} for {q_length} queries and {kv_length} keys, "
                f"want [batch, heads, {want[0]}, {want[1]}] at block_size {(self.block_q, self.block_kv)}"
            )

    def restricted(self, piece):
        firsts, sizes = (piece.q_first, piece.k_first), (self.block_q, self.block_kv)
        return _Cells(self.blocks, *firsts, sizes, self.most_blocks, piece.stride, piece.units)

    def of_heads(self, first, count):
        return dataclasses.replace(self, blocks=of_heads(self.blocks, first, count))

    def keeps_none(self, queries, keys):
        if isinstance(self.blocks, jax.core.Tracer):
            return super().keeps_none(queries, keys)
        rows, columns = np.unique(np.array(queries) // self.block_q), np.unique(np.array(keys) // self.block_kv)
        return not np.asarray(self.blocks)[..., rows[:, None], columns].any()

    def _in_cells(self, grid: Grid) -> bool:
        """Whether the grid's blocks are so small and aligned that each one lies in a single cell."""
        return self.block_q % grid.block_q == 0 and self.block_kv % grid.block_kv == 0

    def _counts(self, grid: Grid):
        """(live cells, all cells) that each block of the grid touches.

        The live cells are int32 [B or 1, H or 1, rows, columns]; all cells are an int or int32 [rows, columns]. If
        blocks span several cells, the counts are differences of two-dimensional running sums.
        """
        if self._in_cells(grid):
            cells = jnp.repeat(self.blocks, self.block_q // grid.block_q, axis=2)[:, :, : grid.rows]
            cells = jnp.repeat(cells, self.block_kv // grid.block_kv, axis=3)[..., : grid.columns]
            return cells.astype(jnp.int32), 1

        def spans() -> Iterator[tuple[jax.Array, jax.Array]]:
            for (first, last), size in ((grid.edges(0), self.block_q), (grid.edges(1), self.block_kv)):
                yield first // size, last // size + 1

        return _counts_within(self.blocks, spans())

    def _width(self, grid: Grid, by: str) -> int:
        """The most live blocks that a list can have. by: "query" or "key", the side of the lists."""
        if self.most_blocks is None or by == "key":
            return grid.columns if by == "query" else grid.rows
        # The cells that a block of queries touches, and the blocks of keys that a cell touches.
        cells = touched(grid.block_q, self.block_q, math.gcd(grid.block_q, self.block_q), 0)
        blocks = touched(self.block_kv, grid.block_kv, math.gcd(grid.block_kv, self.block_kv), 0)
        return self.most_blocks * cells * blocks

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        b, h = within(b, self.batch), within(h, self.heads)
        return self.blocks[b, h, q_index // self.block_q, k_index // self.block_kv]

    def rows(self, q_index, kv_length, *, q_offset=0):
        _, offset = checks.offset(q_offset)
        cells = jnp.repeat(self.blocks[:, :, q_index // self.block_q], self.block_kv, axis=3)[..., :kv_length]
        return with_batch(cells, offset)

    def __repr__(self) -> str:
        size = self.block_q if self.block_q == self.block_kv else (self.block_q, self.block_kv)
        return f"block_sparse({checks.array_text(self.blocks)}, {size})"


@node
class _Cells(_CellArray):
    """A whole sequence's BlockSparse, restricted to a piece's tokens.

    blocks: bool [B or 1, H or 1, rows, columns], the cells of the whole sequence. q_first, k_first: the position of the
    piece's first query and key. sizes: (queries, keys) of a cell. most_blocks: the most live cells of a row of cells,
    if known. stride, units: of the piece.
    """

    blocks: Any
    q_first: Any
    k_first: Any
    sizes: tuple[int, int] = static()
    most_blocks: int | None = static()
    stride: int = static()
    units: tuple[int, int] = static()

    def _in_cells(self, grid: Grid) -> bool:
        """Whether the grid's blocks are so small and aligned that each one lies in a single cell."""
        blocks = grid.block_q, grid.block_kv
        if self.stride == 1:
            return not any(
                size % block or unit % block for size, block, unit in zip(self.sizes, blocks, self.units, strict=True)
            )
        spans = [self.stride * block for block in blocks]
        return not any(size % span for size, span in zip(self.sizes, spans, strict=True))

    def _width(self, grid: Grid, by: str) -> int:
        """The most live blocks that a list can have. by: "query" or "key", the side of the lists."""
        most = grid.columns if by == "query" else grid.rows
        if self.most_blocks is None or by == "key" or not self._in_cells(grid):
            return most
        return min(most, self.most_blocks * (self.sizes[1] // self.stride // grid.block_kv))

    def _counts(self, grid: Grid) -> tuple[jax.Array, jax.Array]:
        """(live cells, all cells) between the first and the last token of each block. Cells past the end do not count.

        The live cells are int32 [B or 1, H or 1, rows, columns], all cells int32 [rows, columns].
        """

        def spans() -> Iterator[tuple[jax.Array, jax.Array]]:
            for axis, (first, size) in enumerate(zip((self.q_first, self.k_first), self.sizes, strict=True)):
                start, last = (jnp.maximum(first + self.stride * edge, 0) // size for edge in grid.edges(axis))
                count = self.blocks.shape[2 + axis]
                yield jnp.minimum(start, count), jnp.minimum(last + 1, count)

        return _counts_within(self.blocks, spans())


def _counts_within(blocks: jax.Array, spans: Iterable[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """(live cells, all cells) in each block: int32 [B or 1, H or 1, rows, columns], int32 [rows, columns].

    The counts are differences of two-dimensional running sums of `blocks`, bool [B or 1, H or 1, rows, columns]. spans:
    for queries, then for keys: (start, end) of the cells that each block touches, int32 each, end exclusive.
    """
    sums = running_sums(running_sums(blocks.swapaxes(2, 3)).swapaxes(2, 3))
    sums = jnp.pad(sums, ((0, 0), (0, 0), (1, 0), (1, 0)))
    (top, bottom), (left, right) = spans
    at = lambda rows, columns: sums[:, :, rows[:, None], columns]
    count = at(bottom, right) - at(top, right) - at(bottom, left) + at(top, left)
    return count, (bottom - top)[:, None] * (right - left)
