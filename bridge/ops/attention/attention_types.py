"""Types of the arguments and results of attention on PyTorch tensors."""

from typing import TypedDict

import torch

from jax_kernels.bridge.translate.score_mods import ScoreMod
from jax_kernels.masks import Mask

__all__ = ["AttentionOptions", "FlashOptions", "OutAndLse", "Outputs", "PrepareOptions", "SegmentIds", "Window"]

type Window = int | tuple[int, int] | torch.Tensor
type SegmentIds = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
type OutAndLse = tuple[torch.Tensor, torch.Tensor]
type Outputs = torch.Tensor | OutAndLse  # a tensor, or with return_lse a pair


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of every attention function except mask, bias and return_lse, for type checkers.

    softmax_scale, causal and window_size are other names for scale, is_causal and window.
    """

    is_causal: bool
    window: Window | None
    segment_ids: SegmentIds | None
    kv_lengths: torch.Tensor | None
    q_offset: int | torch.Tensor
    score_mod: ScoreMod | None
    sinks: torch.Tensor | None
    scale: float | torch.Tensor | None
    softcap: float | torch.Tensor | None
    deterministic: bool | None
    precision: str | None
    implementation: str | None
    softmax_scale: float | torch.Tensor | None
    causal: bool
    window_size: Window | None


class PrepareOptions(AttentionOptions, total=False):
    """The keyword arguments of prepare_mask, all of them also arguments of flash_attention, for type checkers."""

    bias: torch.Tensor | None
    return_lse: bool


class FlashOptions(AttentionOptions, total=False):
    """The keyword arguments of flash_attention except return_lse. attn_mask is another name for mask."""

    bias: torch.Tensor | None
    mask: torch.Tensor | Mask | None
    attn_mask: torch.Tensor | None
