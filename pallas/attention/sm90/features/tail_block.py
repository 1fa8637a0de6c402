"""The block of keys and values in which kv_lengths ends, with zeros past the length.

A key past kv_lengths has a weight of 0, but 0 times a NaN or an infinity, which a cache or padding may hold, is a NaN.
The Hopper kernels load this block instead of the caller's block.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.masks.limits import key_lengths
from jax_kernels.pallas.kernel_types import Index, Ref

__all__ = ["CleanEnd", "clean_end"]


class CleanEnd[A: jax.Array | Ref](NamedTuple):
    """Copies of each batch entry's last block of keys and values, with zeros past the entry's length.

    lengths: [B] int32, the number of keys that count. key, value: [B, block, Hkv, D], the rows from lengths // block *
    block on.
    """

    lengths: A
    key: A
    value: A

    def load(self, b: Index, start: Index, rows: int, whole: Callable[[], None], end: Callable[[], None]) -> None:
        """Calls end() if rows start ... start + rows - 1 of batch entry b reach past its length, else whole().

        end loads the block from these arrays, whole from the caller's arrays. Rows past the length have no effect, so
        that any zeros serve for them.
        """
        reaches_past = start + rows > self.lengths[b]
        pl.when(reaches_past)(end)
        pl.when(jnp.logical_not(reaches_past))(whole)


def clean_end(inputs: AttentionInputs, key: jax.Array, value: jax.Array, block: int) -> CleanEnd | None:
    """Copies of each batch entry's last block of keys and values, with zeros past its length; None without kv_lengths.

    key, value: of the inputs, padded to the kernel's head_dim. block: the number of keys that the kernel loads at once.
    """
    lengths = key_lengths(inputs)
    if lengths is None:
        return None
    rows = lengths[:, None] // block * block + jnp.arange(block, dtype=jnp.int32)
    counts = (rows < lengths[:, None])[:, :, None, None]

    def of(x: jax.Array) -> jax.Array:
        taken = jnp.take_along_axis(x, rows[:, :, None, None], axis=1, mode="clip")
        return jnp.where(counts, taken, jnp.zeros((), x.dtype))

    return CleanEnd(lengths, of(key), of(value))
