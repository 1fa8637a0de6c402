"""Masks of traced floats: a call gives NaN if they hold other values than 0 and 1."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import Mask, checks

__all__ = ["mask_or_nan", "with_validity"]


def with_validity(name: str, mask: Any) -> tuple[Any, Any]:
    """(mask, is_valid). A mask of floats must hold only 0 and 1; for traced floats, is_valid says whether it does.

    is_valid: a traced bool if the mask is an array of traced floats or a Mask that holds some; else None, since other
    checks raise for known floats. Traced floats are returned as bool, True for 1. name: of the argument, in messages.
    """
    if isinstance(mask, Mask):
        return mask, mask.is_valid
    is_unknown = isinstance(mask, jax.core.Tracer) and mask.dtype in checks.MASK_FLOATS
    return checks.boolean(name, mask) if is_unknown else (mask, None)


def mask_or_nan(results: Any, is_valid: Any) -> Any:
    """The tree `results`, unchanged if is_valid is None or True. If it is False, arrays and their gradients are NaN.

    is_valid: a traced bool, or an array of bools that must all be True: whether the floats of a mask are all 0 or 1.
    """
    if is_valid is None:
        return results
    factor = jnp.where(jnp.all(is_valid), 1, jnp.nan)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), results)
