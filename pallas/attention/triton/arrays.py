"""Arrays in the Triton attention kernels: their BlockSpecs, and masked loads and stores of their tiles."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_kernels.pallas.attention.triton.block_lists import Lists
from jax_kernels.pallas.kernel_types import Index, Ref, Slice
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import both, iota, padded, row_mask

ALIGNED = 8  # 16-bit values in 16 bytes


def all_rows(length: int, block: int) -> int:
    """`length` rounded up to whole blocks."""
    return pl.cdiv(length, block) * block


def whole(
    length: int, block: int, heads: int | None, head_dim: int, index_map: Callable[..., tuple[Index, ...]]
) -> pl.BlockSpec:
    """The BlockSpec of all rows of one head of an array [B, T, H, D], or of `heads` neighbouring heads.

    length, block: of T, which the spec rounds up to whole blocks. heads: None for one head, without an axis of heads.
    index_map: maps grid indices to (batch entry, block of heads). The spec is only a view: a program loads the blocks
    of rows that it visits.
    """

    def full_index_map(*grid):
        b, h = index_map(*grid)
        return b, 0, h, 0

    return pl.BlockSpec((None, all_rows(length, block), heads, padded(head_dim)), full_index_map)


def whole_lists(lists: Lists[jax.Array] | None) -> Lists[tuple[jax.Array, pl.BlockSpec]] | None:
    """The block lists as inputs for `run`: every program has the whole arrays."""
    return None if lists is None else jax.tree.map(whole_array, lists)


def whole_array(x: jax.Array | None) -> tuple[jax.Array, pl.BlockSpec] | None:
    """(x, the BlockSpec that gives every program the whole array), for look-ups; None without an array."""
    return None if x is None else (x, pl.BlockSpec(x.shape, lambda *grid: (0,) * x.ndim))


def aligned(x: jax.Array | None) -> jax.Array | None:
    """x [.., .., .., S] with its last axis padded to a multiple of 8 values (16 bytes at 16 bits); None stays None.

    x: a bias, a mask or an operand of a score_mod. An axis of length 1 stays. Loads of single values would take
    thousands of registers.
    """
    if x is None or x.shape[3] == 1:
        return x
    return jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % ALIGNED)])


def bias_spec(
    bias: jax.Array, block: tuple[int | None, ...], index_map: Callable[..., tuple[Index, ...]]
) -> pl.BlockSpec:
    """The BlockSpec of a bias [B or 1, H or 1, T or 1, S or 1], whose axes of length 1 are broadcast.

    block, index_map: as for a bias without broadcast axes. A batch or head axis of length 1 is dropped from the view,
    like None in block.
    """
    one = bias.shape
    block = tuple((None if axis < 2 else 1) if one[axis] == 1 else size for axis, size in enumerate(block))

    def full_index_map(*grid):
        return tuple(0 if n == 1 else i for n, i in zip(one, index_map(*grid), strict=True))

    return pl.BlockSpec(block, full_index_map)


def head_mask(rows: jax.Array | None, count: int, head_dim: int) -> jax.Array | None:
    """Which elements of a matrix [count, padded head_dim] exist: bool, None if all do. rows: which rows exist, None for
    all.
    """
    width = padded(head_dim)
    columns = None if head_dim == width else iota(width) < head_dim
    return both(rows, columns, (count, width))


def load(view: Ref, start: Index, length: Index | None, head_dim: int) -> jax.Array:
    """Rows `start` and following of a head: [rows of view, padded head_dim], zeros for absent rows and columns.

    view: a Ref whose first row is row `start`. length: the number of rows that exist; rows past it are never read. None
    if all rows of the view exist.
    """
    rows = view.shape[0]
    mask = head_mask(row_mask(start, rows, length), rows, head_dim)
    return plgpu.load(view, mask=mask, other=None if mask is None else 0.0)


def load_rows(view: Ref, start: Index, length: Index, other: float) -> jax.Array:
    """A value per row, from row `start` on, with `other` for rows at or past `length`. view: a Ref that begins at
    `start`.
    """
    mask = row_mask(start, view.shape[0], length)
    return plgpu.load(view, mask=mask, other=None if mask is None else other)


def load_tile(
    ref: Ref, rows: Slice, columns: Slice, masks: tuple[jax.Array | None, jax.Array | None], *leading: Index
) -> jax.Array:
    """A tile of an array whose last two axes may be 1: [rows or 1, columns or 1], zeros where absent.

    rows, columns: indices along the last two axes of ref, used if the axis is not 1. masks: which of the rows and
    columns exist, None for all. leading: indices along the other axes of ref, as many as it has.
    """
    axes = [slice(None) if n == 1 else part for n, part in zip(ref.shape[-2:], (rows, columns), strict=True)]
    view = ref.at[(*leading[: len(ref.shape) - 2], *axes)]
    row_mask, column_mask = (None if n == 1 else mask for n, mask in zip(view.shape[-2:], masks, strict=True))
    mask = both(row_mask, column_mask, view.shape[-2:])
    return plgpu.load(view, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def store(ref: Ref, x: jax.Array, start: Index, length: int, head_dim: int) -> None:
    """Stores a block's rows below `length` and its first head_dim columns. start: the index of the first row of x."""
    plgpu.store(ref, x, mask=head_mask(row_mask(start, len(x), length), len(x), head_dim))
