"""Segment ids of packed documents, from the cumulative lengths that FlashAttention's varlen functions take."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.masks import checks
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["check_cu_seqlens", "segment_ids_from_cu_seqlens"]

_WANT = "int32 [documents + 1]: 0, then the end of each document"


@under_defaults
def segment_ids_from_cu_seqlens(cu_seqlens: Any, length: int) -> jax.Array:
    """The segment ids of documents that lie one after the other: int32 [1, length], for the argument segment_ids.

    Equivalent to the following JAX code::

        token = jnp.arange(length)
        ids = jnp.searchsorted(cu_seqlens[1:], token, side="right")
        jnp.where(token < cu_seqlens[-1], ids, -1)[None]

    For queries and keys of different lengths, make a pair: segment_ids=(ids of cu_seqlens_q, ids of cu_seqlens_kv).
    With is_causal both must be equal: positions count from the start of the packed sequence.

    Args:
      cu_seqlens: integers [documents + 1], the cumulative lengths of the documents, from 0 in ascending order; document
        i has the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1. A document may be empty. Under jit the values may be
        traced; they are not checked then, and out of order they give wrong ids.
      length: the number of tokens of the packed sequence, T or S. Tokens past the last document have the id -1: they
        attend to nothing.

    Raises:
      TypeError: cu_seqlens has no integers, or length is no int.
      ValueError: cu_seqlens has no entry or several axes, or its known values do not start with 0, descend, or exceed
        length.
    """
    if not checks.is_int(length) or length < 0:
        raise TypeError(f"length: got {length!r}, want the number of tokens, an int of 0 or more")
    checks.is_array("cu_seqlens", cu_seqlens, _WANT)
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise TypeError(f"cu_seqlens: got dtype {cu_seqlens.dtype}, want {_WANT}")
    is_known = not isinstance(cu_seqlens, jax.core.Tracer)
    check_cu_seqlens(tuple(cu_seqlens.shape), np.asarray(cu_seqlens) if is_known else None, length)
    ends = jnp.asarray(cu_seqlens, jnp.int32)
    tokens = jnp.arange(length, dtype=jnp.int32)
    ids = jnp.searchsorted(ends[1:], tokens, side="right").astype(jnp.int32)
    return jnp.where(tokens < ends[-1], ids, -1)[None]


def check_cu_seqlens(shape: tuple[int, ...], values: Any, length: int) -> None:
    """Raises ValueError for a wrong shape, or for wrong values of cu_seqlens; None for values that are not known."""
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"cu_seqlens: got shape {list(shape)}, want {_WANT}")
    if values is None:
        return
    if values[0] != 0:
        raise ValueError(f"cu_seqlens: got {values[0]} as its first entry, want 0")
    steps = np.diff(values.astype(np.int64))
    if (steps < 0).any():
        first = int(np.argmax(steps < 0))
        raise ValueError(
            f"cu_seqlens: got {values[first]} before {values[first + 1]}, want ascending ends of documents"
        )
    if values[-1] > length:
        raise ValueError(
            f"cu_seqlens: got {values[-1]} as its last entry, want at most the {length} tokens of `length`"
        )
