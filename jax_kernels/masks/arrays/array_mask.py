"""The common part of masks of one array."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import checks
from jax_kernels.masks.mask import Mask


class ArrayMask(Mask):
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


def within(index: Any, size: int) -> Any:
    """The index into an axis of this size: 0 if the size is 1, i.e. if the axis is broadcast, else `index`."""
    return 0 if size == 1 else index


def with_batch(keep: jax.Array, offset: jax.Array) -> jax.Array:
    """The array keep [B or 1, ...], broadcast along its first axis to the larger of its batch and offset's.

    offset: [B or 1], the position of query 0. Raises ValueError if both batches exceed 1 and differ.
    """
    batch = checks.joint("q_offset", [keep.shape[0], offset.shape[0]], "batch entries")
    return jnp.broadcast_to(keep, (batch, *keep.shape[1:]))
