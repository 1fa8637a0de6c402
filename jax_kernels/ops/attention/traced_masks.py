"""Masks of traced floats: a call gives NaN if they hold other values than 0 and 1."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import Mask, checks

__all__ = ["mask_or_nan", "with_validity"]


def with_validity(name: str, mask: Any) -> tuple[Any, Any]:
    """(mask, is_valid). is_valid: a traced bool if the mask is or holds traced floats: whether all are 0 or 1.

    It is None if this is known, or left to other checks. Traced floats are returned as bool, True for 1.
    """
    if isinstance(mask, Mask):
        return mask, mask.is_valid
    is_unknown = isinstance(mask, jax.core.Tracer) and mask.dtype in checks.MASK_FLOATS
    return checks.boolean(name, mask) if is_unknown else (mask, None)


def mask_or_nan(results: Any, is_valid: Any) -> Any:
    """The results and their gradients; NaN if is_valid is False. is_valid: from with_validity."""
    if is_valid is None:
        return results
    factor = jnp.where(jnp.all(is_valid), 1, jnp.nan)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), results)
