"""Masks of traced floats: whether they hold 0 and 1 alone, and what a call gives if they do not."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import Mask, checks

__all__ = ["mask_or_nan", "with_validity"]


def with_validity(name: str, mask: Any) -> tuple[Any, Any]:
    """(the mask, whether it is one): the second is a traced bool where the mask is, or holds, floats that are traced.

    It is None where that is known, or left to other checks. Traced floats come back as bool, True where they are 1.
    """
    if isinstance(mask, Mask):
        return mask, mask.is_valid
    is_unknown = isinstance(mask, jax.core.Tracer) and mask.dtype in checks.MASK_FLOATS
    return checks.boolean(name, mask) if is_unknown else (mask, None)


def mask_or_nan(results: Any, is_valid: Any) -> Any:
    """The results and their gradients, which are NaN if is_valid is False. is_valid: that of with_validity."""
    if is_valid is None:
        return results
    factor = jnp.where(jnp.all(is_valid), 1, jnp.nan)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), results)
