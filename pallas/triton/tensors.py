"""Sizes of Triton's tensors and of its grids, and masks of what exists of a tensor."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

SMALLEST = 16  # the least size of a tensor core operand
MOST_PROGRAMS = 65535  # along the second and the third axis of CUDA's grid


def reaches(elements: int, itemsize: int) -> bool:
    """Whether a kernel reaches all elements of an array: not where it has 2 to 4 GiB of elements of one byte.

    Up to 2^32 bytes Pallas gives Triton the offset of an element in 32 bits, which Triton reads as a signed number.
    Elements of 2 or more bytes are then at most 2^31.
    """
    return elements <= 1 << 31 or elements * itemsize > 1 << 32


def padded(columns: int) -> int:
    """The columns of a tensor that holds so many."""
    return max(SMALLEST, pl.next_power_of_2(columns))


def fit(block: int, length: int) -> int:
    """A block's rows, not many more than there are."""
    return min(block, max(SMALLEST, pl.next_power_of_2(length)))


def iota(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)


def row_mask(start: Any, rows: int, length: Any, block: int | None = None) -> jax.Array | None:
    """Which rows from `start` exist; None where all do: length is None, or whole blocks of rows.

    block: the rows of a block, of which these are a part; None: `rows`.
    """
    if length is None or (isinstance(length, int) and length % (block or rows) == 0):
        return None
    return start + iota(rows) < length


def both(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """The mask of a matrix whose rows and columns have masks."""
    mask = None if rows is None else jnp.broadcast_to(rows[:, None], shape)
    if columns is not None:
        columns = jnp.broadcast_to(columns[None, :], shape)
        mask = columns if mask is None else mask & columns
    return mask
