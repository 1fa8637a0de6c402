"""Masks as attention takes them: as arguments where they say no more than these do, and floats that may be no mask."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kernels.masks import Mask, PreparedMask, checks
from jax_kernels.masks.arrays import DenseMask, Segments
from jax_kernels.masks.mask import And
from jax_kernels.masks.positions import Band, Prefix

__all__ = ["MaskArguments", "as_arguments", "mask_or_nan", "with_validity"]


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


class MaskArguments(NamedTuple):
    """The checked arguments that limit the keys of a call.

    window: (left, right), -1 for no limit, its right 0 where is_causal. mask: a bool array with four axes, or a Mask.
    segment_ids: a pair of [B, length], or None. kv_lengths: [B] or None.
    """

    mask: Any
    is_causal: bool
    window: tuple[int, int] | None
    segment_ids: Any
    kv_lengths: Any


def as_arguments(call: MaskArguments, batch: int, *, reads_lists: bool = True) -> MaskArguments:
    """The same without a Mask, where it is causal, sliding_window, segments, prefix and dense masks joined by `&`.

    Of segments and of dense masks there may be one, and of segments none where the call has ids of its own. Other
    masks, and with them the whole call, stay as they are, and so does one with lists in a call that reads_lists.
    """
    if not isinstance(call.mask, Mask):
        return call
    has_lists = isinstance(call.mask, PreparedMask) and bool(call.mask.lists)
    if has_lists and reads_lists and call.segment_ids is None and call.kv_lengths is None:
        return call
    mask = call.mask.unprepared
    left, right = call.window or (-1, 0 if call.is_causal else -1)
    found: dict[str, Any] = {"mask": None, "segment_ids": call.segment_ids, "kv_lengths": call.kv_lengths}
    for part in mask.masks if isinstance(mask, And) else (mask,):
        if isinstance(part, Band) and (part.low or 0) <= 0 <= (part.high or 0):
            left = _tighter(left, -1 if part.low is None else -part.low)
            right = _tighter(right, -1 if part.high is None else part.high)
        elif isinstance(part, Prefix):
            found["kv_lengths"] = _shorter(found["kv_lengths"], part, batch)
        elif isinstance(part, Segments) and found["segment_ids"] is None:
            ids = part.q_ids, part.kv_ids
            found["segment_ids"] = tuple(jnp.broadcast_to(x, (batch, x.shape[1])) for x in ids)
        elif isinstance(part, DenseMask) and found["mask"] is None:
            found["mask"] = part.array
        else:
            return call
    is_causal = call.is_causal or right == 0
    window = (left, right) if left != -1 or right > 0 else None
    return MaskArguments(is_causal=is_causal, window=window, **found)


def _tighter(side: int, other: int) -> int:
    """The smaller of two limits, of which -1 is none."""
    return max(side, other) if -1 in (side, other) else min(side, other)


def _shorter(lengths: Any, prefix: Prefix, batch: int) -> Any:
    """[B] int32. Where only a plan is wanted, lengths may be a ShapeDtypeStruct."""
    limits = jnp.broadcast_to(prefix.per_batch[:, 0], (batch,))
    if lengths is None or isinstance(lengths, jax.ShapeDtypeStruct):
        return limits if lengths is None else lengths
    return jnp.minimum(lengths, limits)
