"""Sizes of Triton's tensors and grids, and masks of the valid values of a tensor."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.pallas.kernel_types import Index

SMALLEST = 16  # the least size of a tensor core operand
MOST_PROGRAMS = 65535  # along the second and the third axis of CUDA's grid


def reaches(elements: int, itemsize: int) -> bool:
    """Whether a kernel can address all elements of an array. It cannot if they are 2 to 4 GiB of one-byte elements.

    For arrays of up to 2^32 bytes Pallas gives Triton an element's offset in 32 bits, which Triton reads as a signed
    integer. An array of larger elements then has at most 2^31 of them.
    """
    return elements <= 1 << 31 or elements * itemsize > 1 << 32


def padded(columns: int) -> int:
    """The columns of a tensor that can hold `columns`: a power of two, at least SMALLEST."""
    return max(SMALLEST, pl.next_power_of_2(columns))


def fit(block: int, length: int) -> int:
    """The rows of a block: at most `length` rounded up to a power of two."""
    return min(block, max(SMALLEST, pl.next_power_of_2(length)))


def iota(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)


def row_mask(start: Index, rows: int, length: Index | None, block: int | None = None) -> jax.Array | None:
    """Whether each row from `start` exists; None if all exist: length is None, or a multiple of the block.

    block: the rows of a block, if these rows are a part of a block; None for `rows`.
    """
    if length is None or (isinstance(length, int) and length % (block or rows) == 0):
        return None
    return start + iota(rows) < length


def both(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """The mask of a matrix from the masks of its rows and columns; None if both masks are None."""
    mask = None if rows is None else jnp.broadcast_to(rows[:, None], shape)
    if columns is not None:
        columns = jnp.broadcast_to(columns[None, :], shape)
        mask = columns if mask is None else mask & columns
    return mask
