"""Checks of token ids and targets: known values outside the vocabulary raise, traced values outside it give NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["check_targets", "checked_tokens", "usable_ids", "usable_targets"]

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


def check_targets(targets: Any, vocabulary: int) -> None:
    """Raises ValueError if a known target is `vocabulary` or more. Targets below 0 do not count."""
    if is_known(targets) and 0 not in np.shape(targets):
        most = np.asarray(targets).max()
        if most >= vocabulary:
            raise ValueError(
                f"targets: got ids up to {most}, want 0 to {vocabulary - 1}, or below 0 where no target counts"
            )


def usable_ids(ids: Any, vocabulary: int, *, segment_ids: Any = None, targets: Any = None) -> jax.Array:
    """The ids as int32, for an embedding lookup. Ids outside the vocabulary become `vocabulary`, whose embedding is
    NaN.

    Padding becomes 0: ids whose segment_ids are below 0, and ids below 0 whose targets are below 0.
    """
    ids = _clipped(ids, vocabulary)
    if targets is not None:
        ids = jnp.where((ids < 0) & (_clipped(targets, vocabulary) < 0), 0, ids)
    if segment_ids is not None:
        ids = jnp.where(segment_ids < 0, 0, ids)
    return jnp.where(ids < 0, vocabulary, ids)


def usable_targets(targets: Any, vocabulary: int) -> jax.Array:
    """The targets as int32: -1 for targets below 0, `vocabulary` for targets of `vocabulary` or more."""
    return jnp.asarray(_clipped(targets, vocabulary))


def is_known(x: Any) -> bool:
    """Whether this process can read the values of an array: it is no tracer, and has no shard on another process."""
    return not isinstance(x, jax.core.Tracer) and (not isinstance(x, jax.Array) or x.is_fully_addressable)


def _clipped(ids: Any, vocabulary: int) -> Any:
    """Integers of any width as int32: -1 for values below 0, `vocabulary` for values of `vocabulary` or more."""
    numeric: Any = jnp if isinstance(ids, jax.Array) else np
    if ids.dtype.itemsize < 4:
        ids = ids.astype(np.int32)
    bounded = numeric.where(ids < 0, -1, vocabulary)
    return numeric.where((ids >= 0) & (ids < vocabulary), ids, bounded).astype(np.int32)
