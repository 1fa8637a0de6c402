"""Masks that hold arrays of a call, and masks of a function."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.masks import checks
from jax_kernels.masks.block_arithmetic import Grid, Literal, running_sums, touched
from jax_kernels.masks.block_lists import array_sums
from jax_kernels.masks.mask import Mask, node, static
from jax_kernels.masks.restriction import of_heads


def segments(q_ids: jax.Array, kv_ids: jax.Array | None = None) -> Mask:
    """Packed sequences: a query attends to the keys that have its id; an id below 0 attends to nothing.

    q_ids: int32 [T] or [B or 1, T]. kv_ids: int32 [S] or [B or 1, S]; None is q_ids. Other integer dtypes are accepted:
    known values must fit int32; traced values may be any, and are compared exactly. Row i of q_ids belongs to query i,
    whatever its position. Ids may come in any order. If each id has one run of keys, the dead, partial and full blocks
    are exact.
    """
    q_ids, kv_ids = _ids(q_ids, kv_ids)
    return Segments(q_ids, kv_ids)


def _ids(q_ids: Any, kv_ids: Any) -> tuple[jax.Array, jax.Array]:
    """(q_ids, kv_ids) as int32 [B or 1, T] and [B or 1, S]. kv_ids of None gives q_ids twice."""
    want = "an int32 array [length] or [batch, length]"
    given = {"q_ids": q_ids} | ({} if kv_ids is None else {"kv_ids": kv_ids})
    for name, x in given.items():
        checks.is_array(name, x, want)
        if x.ndim not in (1, 2):
            raise ValueError(f"{name}: got shape {x.shape}, want {want}")
    checks.joint("q_ids, kv_ids", [1 if x.ndim == 1 else x.shape[0] for x in given.values()], "batch entries")
    found = [jnp.atleast_2d(x) for x in checks.ids(tuple(given), tuple(given.values()), want)]
    return found[0], found[-1]


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


def dense(array: jax.Array) -> Mask:
    """A mask given by an array with a bool for each pair of a query and a key.

    array: bool, [T or 1, S or 1], [H or 1, ...] or [B or 1, H or 1, T or 1, S or 1]. Row i belongs to query i, whatever
    its position. Zeros and ones in float32, bfloat16 or float16, as Flax makes them, are accepted. Other floats raise
    ValueError; in a traced array, they make the attention output NaN.
    """
    return named_dense("array", array)


def named_dense(name: str, array: Any) -> "Dense":
    """The dense mask of `array`; errors call it `name`."""
    array, is_mask = checks.boolean(name, array)
    array = checks.four_axes(name, array, "[batch, heads, queries, keys]")
    return Dense(array, is_mask)


def from_function(
    function: Callable[..., Any], *arrays: jax.Array, batch: int | None = None, heads: int | None = None
) -> Mask:
    """A mask of any elementwise predicate function(b, h, q, k, *arrays) -> bool, in traceable jnp code.

    b, h, k: int32 indices of the batch entry, the query head and the key; q: int32, the query's position, q_offset + i.
    They broadcast with each other, and the result has their joint shape, or a shape that broadcasts to it. So the
    function may compare, select and look up (`ids[b, q] == ids[b, k]`), but not reduce, sort or reshape.
    arrays: the arrays that the function looks up; they are leaves of the mask. Arrays that the function captures must
    not be traced. batch, heads: the number of batch entries and heads that the function distinguishes; None if it does
    not use b, or h. If an array for a look-up is empty, the function is not called: the mask keeps no pair.

    jit compiles again for a mask of another function object: define the function once, not for each call.

    Under a trace, a kernel's lists hold bits for every block: gigabytes at 131,072 queries and keys. To avoid this,
    intersect the mask with a mask that bounds it, such as a sliding_window; or call prepare_mask outside of jit, which
    holds bits only for the blocks that exist.
    """
    if not callable(function):
        raise TypeError(f"function: got {type(function).__name__}, want a function (b, h, q, k) -> bool")
    sizes = [None if x is None else checks.integer(name, x, 0) for name, x in (("batch", batch), ("heads", heads))]
    leaves = tuple(checks.array("arrays", x, "arrays") for x in arrays)
    checks.elementwise(function, leaves, *sizes)
    return Function(leaves, function, *(1 if size is None else size for size in sizes))


def _within(index: Any, size: int) -> Any:
    """The index into an axis of this size: 0 if the size is 1, i.e. if the axis is broadcast, else `index`."""
    return 0 if size == 1 else index


@node
class Segments(Mask):
    """A mask in which a query attends to the keys that have its id, unless the id is below 0.

    q_ids, kv_ids: int32 [B or 1, T] and [B or 1, S].
    """

    q_ids: Any
    kv_ids: Any
    is_shardable = True
    is_arithmetic = True

    @property
    def batch(self) -> int:
        return self.kv_ids.shape[0] if self.q_ids.shape[0] == 1 else self.q_ids.shape[0]

    def check_lengths(self, q_length, kv_length):
        for name, x, length in (("q_ids", self.q_ids, q_length), ("kv_ids", self.kv_ids, kv_length)):
            if x.ndim != 2 or x.shape[1] != length:
                raise ValueError(f"segments: got {name} of shape {x.shape}, want [batch, {length}] for this call")

    def terms(self, negated):
        if not negated:
            return ((Literal(interval=lambda grid: grid.once(self._runs)[:2]),),)

        def before(grid):
            start, _, is_run = grid.once(self._runs)
            return 0, jnp.where(is_run, start, grid.kv_length)

        def after(grid):
            _, end, is_run = grid.once(self._runs)
            return jnp.where(is_run, end, 0), grid.kv_length

        return ((Literal(interval=before),), (Literal(interval=after),))

    def restricted(self, piece):
        return Segments(piece.ids(self.q_ids, 0), piece.ids(self.kv_ids, 1))

    def _runs(self, grid: Grid):
        """(start, end, is_run) for each query, each [B or 1, T]: the first and last + 1 of the keys with the query's
        id.

        is_run: bool, whether all keys from start to end - 1 have the id. A query without such keys has start = end = 0.
        """
        q_ids, kv_ids = (jnp.broadcast_to(x, (self.batch, x.shape[1])) for x in (self.q_ids, self.kv_ids))

        def runs(q_ids, kv_ids):
            order = jnp.argsort(kv_ids, stable=True).astype(jnp.int32)
            ids = kv_ids[order]
            first, after = (jnp.searchsorted(ids, q_ids, side=side).astype(jnp.int32) for side in ("left", "right"))
            some = (first < after) & (q_ids >= 0)
            start = jnp.where(some, order[jnp.minimum(first, grid.kv_length - 1)], 0)
            end = jnp.where(some, order[jnp.maximum(after - 1, 0)] + 1, 0)
            return start, end, ~some | (end - start == after - first)

        return jax.vmap(runs)(q_ids, kv_ids)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        q_ids = self.q_ids[_within(b, self.q_ids.shape[0]), q_index]
        kv_ids = self.kv_ids[_within(b, self.kv_ids.shape[0]), k_index]
        return (q_ids == kv_ids) & (q_ids >= 0)

    def __repr__(self) -> str:
        return f"segments({checks.array_text(self.q_ids)}, {checks.array_text(self.kv_ids)})"


class _Array(Mask):
    """A base class of masks with one array, whose first two axes are [B or 1, H or 1].

    Subclasses return the array from `_array`.
    """

    is_shardable = True

    @property
    def _array(self) -> Any:
        raise NotImplementedError

    @property
    def batch(self) -> int:
        return self._array.shape[0]

    @property
    def heads(self) -> int:
        return self._array.shape[1]


class _CellArray(_Array):
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
        b, h = _within(b, self.batch), _within(h, self.heads)
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


def with_batch(keep: jax.Array, offset: jax.Array) -> jax.Array:
    """The array keep [B or 1, ...], broadcast along its first axis to the larger of its batch and offset's.

    offset: [B or 1], the position of query 0. Raises ValueError if both batches exceed 1 and differ.
    """
    batch = checks.joint("q_offset", [keep.shape[0], offset.shape[0]], "batch entries")
    return jnp.broadcast_to(keep, (batch, *keep.shape[1:]))


class DenseMask(_Array):
    """A base class of masks whose `array` gives a value for each pair: bool [B or 1, H or 1, T or 1, S or 1]."""

    array: Any

    @property
    def _array(self):
        return self.array


@node
class Dense(DenseMask):
    """A mask of one bool array [B or 1, H or 1, T or 1, S or 1], True where a query may attend.

    is_mask: if the array was made from traced floats, a traced bool, whether all floats are 0 or 1; otherwise None.
    """

    array: Any
    is_mask: Any = None

    @property
    def is_valid(self) -> Any:
        return self.is_mask

    def check_lengths(self, q_length, kv_length):
        shape = self.array.shape
        if len(shape) != 4 or shape[2] not in (1, q_length) or shape[3] not in (1, kv_length):
            raise ValueError(
                f"dense: got an array of shape {shape}, want a shape broadcastable to "
                f"[batch, heads, {q_length}, {kv_length}]"
            )

    def of_heads(self, first, count):
        return dataclasses.replace(self, array=of_heads(self.array, first, count))

    def block_counts(self, grid):
        """The number of pairs that each block keeps, int32 [B or 1, H or 1, rows or 1, columns or 1], in one pass over
        the array.
        """
        sums = array_sums(self.array, grid.block_q, grid.block_kv)
        (q_first, q_last), (k_first, k_last) = grid.edges(0), grid.edges(1)
        # An axis of length 1 holds for every query, or key.
        sums = sums if self.array.shape[2] > 1 else sums * (q_last - q_first + 1)[:, None]
        sums = sums if self.array.shape[3] > 1 else sums * (k_last - k_first + 1)
        return sums

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        sizes = self.array.shape
        return self.array[tuple(map(_within, (b, h, q_index, k_index), sizes))]

    def rows(self, q_index, kv_length, *, q_offset=0):
        _, offset = checks.offset(q_offset)
        queries = self.array.shape[2]
        in_place = isinstance(q_index, np.ndarray) and np.array_equal(q_index, np.arange(queries))
        part = self.array if queries == 1 or in_place else self.array[:, :, q_index]
        part = jnp.broadcast_to(part, (*part.shape[:2], q_index.shape[0], kv_length))
        return with_batch(part, offset)

    def __repr__(self) -> str:
        return f"dense({checks.array_text(self.array)})"


@node
class Function(Mask):
    """A mask of an elementwise predicate function(b, h, q, k, *arrays) -> bool.

    arrays: the arrays that the function looks up. batch_entries, head_count: the number of batch entries and of query
    heads that it distinguishes, 1 for none.
    """

    arrays: tuple[Any, ...]
    function: Callable[..., Any] = static()
    batch_entries: int = static()
    head_count: int = static()

    @property
    def batch(self) -> int:
        return self.batch_entries

    @property
    def heads(self) -> int:
        return self.head_count

    def of_heads(self, first, count):
        if self.heads == 1:
            return self
        arrays = jnp.asarray(first, jnp.int32), *self.arrays
        return Function(arrays, _OfHeads(self.function), self.batch_entries, count)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        int32 = functools.partial(jnp.asarray, dtype=jnp.int32)
        q = int32(q_offset) + int32(q_index)
        return self.function(int32(b), int32(h), q, int32(k_index), *self.arrays)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"from_function({', '.join([name, *map(checks.array_text, self.arrays)])})"


@dataclasses.dataclass(frozen=True)
class _OfHeads:
    """A predicate for from_function that adds an offset to the head's index before it calls `function`.

    The offset, the index of the first head, is the first of the mask's arrays.
    """

    function: Any

    def __call__(self, b: Any, h: Any, q: Any, k: Any, first: Any, *arrays: Any) -> Any:
        return self.function(b, h + first, q, k, *arrays)
