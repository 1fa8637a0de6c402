"""The order in which a Hilbert curve visits a sequence that is laid out on a square grid."""

import functools

import numpy as np
from jaxtyping import Array, Int32, Integer

from jax_kernels.plain_numbers import plain_arguments

__all__ = ["hilbert_order", "invert_order"]


@plain_arguments
def hilbert_order(n: int) -> Int32[np.ndarray, " n"]:
    """The first n tokens, in the order of a Hilbert curve.

    Token t is in row t // side and column t % side of a square grid: the smallest grid that holds n tokens and whose
    side is a power of two. The curve steps from each cell to a neighbouring cell, and skips cells past the last token.
    So tokens that are near on the grid are near each other in `x[hilbert_order(n)]`. Cached.

    Args:
      n: the number of tokens.

    Returns:
      int32 [n], read-only: entry j is the j-th token on the curve.

    Raises:
      TypeError, ValueError: n is not an int, or below 0.

    Source: Hilbert, "Über die stetige Abbildung einer Linie auf ein Flächenstück" (1891).
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n: got {type(n).__name__}, want an int")
    if n < 0:
        raise ValueError(f"n: got {n}, want at least 0")
    return _hilbert_order(n)


@functools.lru_cache(maxsize=32)
def _hilbert_order(n: int) -> np.ndarray:
    """hilbert_order(n) for a checked n."""
    bits = (int(max(n - 1, 0)).bit_length() + 1) // 2
    side = 1 << bits
    rest = np.arange(side * side, dtype=np.int64)
    row, column = np.zeros_like(rest), np.zeros_like(rest)
    for bit in range(bits):
        # The quadrant at this scale, and the turn that joins its curve to the curves of the other quadrants.
        right = (rest >> 1) & 1
        lower = (rest ^ right) & 1
        turned, flipped = lower == 0, (lower == 0) & (right == 1)
        last = (1 << bit) - 1
        row, column = np.where(flipped, last - row, row), np.where(flipped, last - column, column)
        row, column = np.where(turned, column, row), np.where(turned, row, column)
        row, column = row + (lower << bit), column + (right << bit)
        rest >>= 2
    order = row * side + column
    order = order[order < n].astype(np.int32)
    order.flags.writeable = False
    return order


def invert_order(order: Integer[Array, " n"] | Integer[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
    """The order that undoes `order`: x[order][invert_order(order)] is x.

    Args:
      order: integers [n], a permutation of 0 to n - 1.

    Returns:
      int32 [n].

    Raises:
      ValueError: order is not a permutation.
    """
    order = np.asarray(order)
    if order.ndim != 1 or not np.issubdtype(order.dtype, np.integer):
        raise ValueError(f"order: got {order.dtype} of shape {order.shape}, want integers [n]")
    inverse = np.full(order.size, -1, np.int32)
    if order.size and (order.min() < 0 or order.max() >= order.size):
        raise ValueError(f"order: got values from {order.min()} to {order.max()}, want a permutation of {order.size}")
    inverse[order] = np.arange(order.size, dtype=np.int32)
    if (inverse < 0).any():
        raise ValueError(f"order: got a value twice, want a permutation of {order.size}")
    return inverse
