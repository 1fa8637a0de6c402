"""Joins all limits on the keys of an attention call into one mask."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks.arrays import dense, segments
from jax_kernels.masks.mask import And, Mask
from jax_kernels.masks.positions import Prefix, causal, prefix, sliding_window

__all__ = ["key_lengths", "whole_mask"]


def whole_mask(inputs: Any, options: Any) -> Mask:
    """Joins the mask of a call with every other limit on its keys, except a bias of -inf.

    inputs: AttentionInputs. options: AttentionOptions.
    """
    mask = inputs.mask
    if not isinstance(mask, Mask):
        mask = sliding_window(None, None) if mask is None else dense(mask)
    mask = mask.unprepared
    if options.is_causal:
        mask &= causal()
    if options.window is not None:
        mask &= sliding_window(*options.window)
    if inputs.q_segment_ids is not None:
        mask &= segments(inputs.q_segment_ids, inputs.kv_segment_ids)
    if inputs.kv_lengths is not None:
        mask &= prefix(inputs.kv_lengths)
    return mask


def key_lengths(inputs: Any) -> jax.Array | None:
    """How many keys of each batch entry count, [B] int32; None where the call does not limit them.

    inputs: AttentionInputs, whose kv_lengths, and prefix masks joined by `&`, are the limits. Keys past that number may
    hold anything.
    """
    batch, kv_length = inputs.key.shape[:2]
    limits = [] if inputs.kv_lengths is None else [inputs.kv_lengths]
    if isinstance(inputs.mask, Mask):
        mask = inputs.mask.unprepared
        parts = mask.masks if isinstance(mask, And) else (mask,)
        limits += [part.per_batch[:, 0] for part in parts if isinstance(part, Prefix)]
    if not limits:
        return None
    lengths = jnp.full((batch,), kv_length, jnp.int32)
    for limit in limits:
        lengths = jnp.minimum(lengths, limit)
    return jnp.maximum(lengths, 0)
