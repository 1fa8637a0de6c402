"""Sizes of Triton's tensors and of its grids."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

SMALLEST = 16  # the least size of a tensor core operand
MOST_PROGRAMS = 65535  # along the second and the third axis of CUDA's grid


def reaches(size: int) -> bool:
    """Whether a kernel reaches all of an array of so many bytes.

    Pallas gives Triton offsets of 32 bits up to 2^32 bytes, which it takes for signed ones.
    """
    return not (1 << 31) <= size <= (1 << 32)


def padded(columns: int) -> int:
    """The columns of a tensor that holds so many."""
    return max(SMALLEST, pl.next_power_of_2(columns))


def iota(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)
