"""Masks that have a value for each pair of a query and a key."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.masks import checks
from jax_kernels.masks.arrays.array_mask import ArrayMask, with_batch, within
from jax_kernels.masks.block_lists import array_sums
from jax_kernels.masks.mask import Mask, node
from jax_kernels.masks.restriction import of_heads


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


class DenseMask(ArrayMask):
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
        return self.array[tuple(map(within, (b, h, q_index, k_index), sizes))]

    def rows(self, q_index, kv_length, *, q_offset=0):
        _, offset = checks.offset(q_offset)
        queries = self.array.shape[2]
        in_place = isinstance(q_index, np.ndarray) and np.array_equal(q_index, np.arange(queries))
        part = self.array if queries == 1 or in_place else self.array[:, :, q_index]
        part = jnp.broadcast_to(part, (*part.shape[:2], q_index.shape[0], kv_length))
        return with_batch(part, offset)

    def __repr__(self) -> str:
        return f"dense({checks.array_text(self.array)})"
