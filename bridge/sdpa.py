"""PyTorch's scaled_dot_product_attention over flash_attention."""

import torch

from jax_kernels.bridge.attention import flash_attention
from jax_kernels.bridge.attention_checks import check_tensor

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention by flash_attention.

    Args:
      query: [B, H, T, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv]; bfloat16, float16 or float32. They are copied
        once to flash_attention's layout, unless they are transposed views of it.
      attn_mask: broadcastable to [B, H, T, S]. A bool one is True where a query may attend. One in query's dtype or
        float32 is added to the scores, and has a gradient. A query that may attend to nothing has an output of 0.
      is_causal: keep key j for query i where i >= j, aligned top-left.
      scale: multiplies the scores; default 1 / sqrt(D).
      enable_gqa: allow fewer key and value heads than query heads.

    Returns:
      [B, H, T, Dv] in query's dtype: a transposed view of [B, T, H, Dv].

    Raises:
      NotImplementedError: dropout_p is not 0.
      TypeError: attn_mask is neither bool nor in query's dtype or float32.
      ValueError: both attn_mask and is_causal are given, or head counts differ without enable_gqa.
      Otherwise it raises what flash_attention raises.
    """
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p: got {dropout_p}, want 0: dropout is not served")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, query)
        if tensor.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want 4 axes [batch, heads, length, head_dim]")
    mask = bias = None
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask, query)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        elif attn_mask.dtype in (query.dtype, torch.float32):
            bias = attn_mask
        else:
            raise TypeError(
                f"attn_mask: got dtype {attn_mask.dtype}, want torch.bool (True = attend), or query's dtype "
                f"{query.dtype} or torch.float32 (added to the scores)"
            )
        if is_causal:
            raise ValueError("attn_mask, is_causal: got both, want one of them")
    if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
        raise ValueError(
            f"query, key, value: got {query.shape[1]}, {key.shape[1]} and {value.shape[1]} heads, want one number of "
            "heads, or enable_gqa=True"
        )
    out = flash_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        scale=scale,
    )
    return out.transpose(1, 2)
