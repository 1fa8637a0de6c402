"""Sizes of Triton's tensors and grids, and masks of the valid values of a tensor."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.pallas.kernel_types import Index

SMALLEST = 16  # the least size of a tensor core operand
MOST_PROGRAMS = 65535  # along the second and the third axis of CUDA's grid


def reaches(elements: int, itemsize: int) -> bool:
    """Whether a Triton kernel can address all elements of an array. It cannot address 2 to 4 GiB of one-byte elements.

    elements: the number of elements. itemsize: the bytes of an element.

    For arrays of up to 2^32 bytes Pallas gives Triton an element's offset in 32 bits, which Triton reads as a signed
    integer. An array of larger elements then has at most 2^31 of them.
    """
    return elements <= 1 << 31 or elements * itemsize > 1 << 32


def padded(columns: int) -> int:
    """The number of columns of a Triton tensor that can hold `columns`: a power of two, at least SMALLEST."""
    return max(SMALLEST, pl.next_power_of_2(columns))


def fit(block: int, length: int) -> int:
    """The number of rows of a block: `block`, or less for a short axis.

    The result is at most `length` rounded up to a power of two, or SMALLEST if that is more.
    """
    return min(block, max(SMALLEST, pl.next_power_of_2(length)))


def iota(size: int) -> jax.Array:
    """int32 [size]: 0, 1, 2, ..."""
    return lax.broadcasted_iota(jnp.int32, (size,), 0)


def masked_slice(start: Index, size: int) -> Any:
    """pl.ds(start, size) for an access with a mask, which may pass the end of the array.

    The start is traced, because JAX raises an error for a constant slice that passes the end.
    """
    return pl.ds(lax.add(jnp.int32(start), jnp.int32(0)) if isinstance(start, int) else start, size)


def row_mask(start: Index, rows: int, length: Index | None, block: int | None = None) -> jax.Array | None:
    """Whether each of the `rows` rows from `start` on is below `length`, bool [rows]; None if all blocks are whole.

    They are if length is None, or a Python int that is a multiple of the block. block: the rows of a block, if these
    rows are a part of a block; None if they are a block.
    """
    if length is None or (isinstance(length, int) and length % (block or rows) == 0):
        return None
    return start + iota(rows) < length


def both(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """The mask of a matrix of this shape: a value is valid if its row and its column are. None if both masks are None.

    rows: bool [shape[0]], None if all rows are valid. columns: bool [shape[1]], likewise.
    """
    mask = None if rows is None else jnp.broadcast_to(rows[:, None], shape)
    if columns is not None:
        columns = jnp.broadcast_to(columns[None, :], shape)
        mask = columns if mask is None else mask & columns
    return mask
