"""Targets of a loss: known values outside the vocabulary raise, traced values outside it give NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["check_targets", "clipped", "is_known", "usable_targets"]


def check_targets(targets: Any, vocabulary: int) -> None:
    """Raises ValueError if a known target is `vocabulary` or more. Targets below 0 do not count."""
    if is_known(targets) and 0 not in np.shape(targets):
        most = np.asarray(targets).max()
        if most >= vocabulary:
            raise ValueError(
                f"targets: got ids up to {most}, want 0 to {vocabulary - 1}, or below 0 for tokens that do not count"
            )


def usable_targets(targets: Any, vocabulary: int) -> jax.Array:
    """The targets as int32: -1 for targets below 0, `vocabulary` for targets of `vocabulary` or more."""
    return jnp.asarray(clipped(targets, vocabulary))


def is_known(x: Any) -> bool:
    """Whether this process can read the values of an array: it is no tracer, and has no shard on another process."""
    return not isinstance(x, jax.core.Tracer) and (not isinstance(x, jax.Array) or x.is_fully_addressable)


def clipped(ids: Any, vocabulary: int) -> Any:
    """Integers of any width as int32: -1 for values below 0, `vocabulary` for values of `vocabulary` or more."""
    numeric: Any = jnp if isinstance(ids, jax.Array) else np
    if ids.dtype.itemsize < 4:
        ids = ids.astype(np.int32)
    bounded = numeric.where(ids < 0, -1, vocabulary)
    return numeric.where((ids >= 0) & (ids < vocabulary), ids, bounded).astype(np.int32)
