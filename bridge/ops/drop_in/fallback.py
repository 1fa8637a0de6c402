"""The calls that PyTorch computes instead of this library, in functions and modules with PyTorch's names.

These are scaled_dot_product_attention, nn.MultiheadAttention and the attention of Hugging Face models. They warn once
for each reason. Functions with this library's own names raise.
"""

import torch
from torch.nn import functional

from jax_kernels.bridge.interop.arguments.autocast import without_autocast
from jax_kernels.bridge.interop.warn_once import warn_once
from jax_kernels.bridge.ops.attention.attention_checks import as_torch_is_set

__all__ = ["attention", "attention_with_weights", "reason_of", "warn"]

attention = functional.scaled_dot_product_attention  # PyTorch's own, even if the name is reassigned later
_MOST_HEAD_DIM = 256


def reason_of(query: torch.Tensor, head_dim: int, dropout_p: float = 0.0, name: str = "dropout_p") -> str | None:
    """Returns the reason why flash_attention cannot serve a call, for a warning; None if it can.

    The reasons: dropout, float64, a device other than a CPU or a CUDA device, or a head_dim above 256.

    head_dim: the larger of query's and value's head_dim. name: the caller's name for dropout_p.
    """
    if dropout_p:
        return f"{name}={dropout_p} drops attention weights, which flash_attention never stores"
    if query.dtype == torch.float64:
        return "query is float64, and flash_attention computes in float32"
    if query.device.type not in ("cpu", "cuda", "meta"):
        return f"query is on {query.device}, and flash_attention runs on CPUs and CUDA devices"
    if head_dim > _MOST_HEAD_DIM:
        return f"head_dim is {head_dim}, and flash_attention's limit is {_MOST_HEAD_DIM}"
    return None


def warn(name: str, reason: str) -> None:
    """Warns once that PyTorch computes the calls of a function or module of this name, for this reason."""
    warn_once(f"{name}: {reason}; PyTorch's own computation runs instead")


def attention_with_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    head_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (attention [B, H, T, Dv], weights [B, H, T, S]) in plain PyTorch, both with gradients.

    A query that may attend to no key has weights of 0, an output of 0 and gradients of 0. Scores and their softmax are
    computed in float32, or float64 for float64.

    Args:
      query: [B, H, T, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv].
      mask: bool, True where a query may attend, and bias: added to the scores; broadcastable to [B, H, T, S].
      sinks: [H], logits that only join the softmax's denominator. scale: multiplies the scores; default 1 / sqrt(D).
      softcap: the scores become softcap * tanh(scores / softcap), before the bias is added.
      dropout_p: the probability of dropping a weight. The returned weights are the weights after dropout.
      head_mask: multiplies the weights, last; broadcastable to [B, H, T, S], or [H].
    """
    query, key, value, bias, _ = as_torch_is_set(query, key, value, bias=bias)
    # Without autocast, matmuls of float32 stay float32.
    with without_autocast(query.device):
        group = query.shape[1] // key.shape[1] if key.shape[1] else 1
        if group > 1:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        wide = torch.promote_types(query.dtype, torch.float32)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (query.to(wide) * scale) @ key.to(wide).transpose(-2, -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        is_dead = (scores == -torch.inf).all(-1, keepdim=True)  # the softmax of such a row would be NaN
        scores = scores.masked_fill(is_dead, 0.0)
        if sinks is not None:
            sinks = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        weights = weights.masked_fill(is_dead, 0.0).to(value.dtype)
        weights = functional.dropout(weights, dropout_p)
        if head_mask is not None:
            head_mask = head_mask[:, None, None] if head_mask.ndim == 1 else head_mask
            weights = weights * head_mask.to(weights.dtype)
        return weights @ value, weights
