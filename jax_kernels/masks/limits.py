"""All that limits the keys of an attention's queries, as one mask."""

from typing import Any

from jax_kernels.masks.arrays import dense, segments
from jax_kernels.masks.mask import Mask
from jax_kernels.masks.positions import causal, prefix, sliding_window

__all__ = ["whole_mask"]


def whole_mask(inputs: Any, options: Any) -> Mask:
    """Of AttentionInputs and AttentionOptions: their mask and all beside it but a bias of -inf."""
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
