"""Checks of token ids and targets: known values outside the vocabulary raise, traced values outside it give NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.cross_entropy.targets import check_targets, clipped, is_known

__all__ = ["check_targets", "checked_tokens", "usable_ids"]

PADDING = "; padding has segment_ids below 0, or in a loss targets below 0"


def checked_tokens(
    tokens: Any, vocabulary: int, *, segment_ids: Any = None, targets: Any = None, hint: str = PADDING
) -> Any:
    """The tokens as an array. Raises ValueError unless they are integers [batch, length] from 0 to vocabulary - 1.

    The range is checked if the values are known: not for tracers, and not for arrays with shards on other processes.
    Padding may have any id: positions whose segment_ids are below 0, and ids below 0 whose targets are below 0. hint:
    the end of the error about ids below 0, which explains how to mark padding.
    """
    tokens = tokens if hasattr(tokens, "dtype") else np.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: got {tokens.dtype} {tokens.shape}, want integers [batch, length]")
    if not all(x is None or is_known(x) for x in (tokens, segment_ids, targets)) or 0 in tokens.shape:
        return tokens
    values = np.asarray(tokens)
    counts = np.ones(values.shape, bool)
    of_padding: tuple[tuple[Any, Any], ...] = ((segment_ids, True), (targets, values < 0))
    for beside, is_padding in of_padding:
        if beside is not None and np.shape(beside) == values.shape:  # another check raises for other shapes
            counts &= ~((np.asarray(beside) < 0) & is_padding)
    if (bad := counts & ((values < 0) | (values >= vocabulary))).any():
        counted = values[counts]
        want = f"want 0 to {vocabulary - 1}{hint if (values[bad] < 0).all() else ''}"
        raise ValueError(f"tokens: got ids from {counted.min()} to {counted.max()}, {want}")
    return tokens


def usable_ids(ids: Any, vocabulary: int, *, segment_ids: Any = None, targets: Any = None) -> jax.Array:
    """The ids as int32, for an embedding lookup. Ids outside the vocabulary become `vocabulary`, whose embedding is
    NaN.

    Padding becomes 0: ids whose segment_ids are below 0, and ids below 0 whose targets are below 0.
    """
    ids = clipped(ids, vocabulary)
    if targets is not None:
        ids = jnp.where((ids < 0) & (clipped(targets, vocabulary) < 0), 0, ids)
    if segment_ids is not None:
        ids = jnp.where(segment_ids < 0, 0, ids)
    return jnp.where(ids < 0, vocabulary, ids)
