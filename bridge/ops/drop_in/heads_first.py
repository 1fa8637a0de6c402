"""flash_attention on PyTorch's layout [B, H, T, D], without copies where the tensors' memory allows.

| memory | read as |
|---|---|
| [B, T, H, D], seen as [B, H, T, D] by a transpose | [B, T, H, D], in place |
| [B, H, T, D] with Hkv = H, or with T = 1 | [B * Hkv, T, H / Hkv, D], in place: heads join the batch |
| else | a copy in flash_attention's layout |
"""

from typing import Unpack

import torch

from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.ops.attention.attention_types import AttentionOptions
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention

__all__ = ["attend"]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """Returns the attention [B, H, T, Dv] of query [B, H, T, D], key [B, Hkv, S, D] and value [B, Hkv, S, Dv].

    The result may be a transposed view of [B, T, H, Dv]. It has gradients.

    mask, bias: broadcastable to [B, H, T, S]. options: other options of flash_attention that are the same for all batch
    entries and heads, without return_lse.
    """
    scores = [x for x in (mask, bias) if x is not None]
    if not _folds(query, key, value) or not all(_score_folds(x, query) for x in scores):
        transposed = (x.transpose(1, 2) for x in (query, key, value))
        return flash_attention(*transposed, mask=mask, bias=bias, **options).transpose(1, 2)
    batch, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    mask, bias = (None if x is None else _score_folded(x, query, kv_heads) for x in (mask, bias))
    query = query.reshape(batch * kv_heads, length, heads // kv_heads, query.shape[-1])  # T or H / Hkv is 1
    key, value = (x.flatten(0, 1).unsqueeze(2) for x in (key, value))
    out = flash_attention(query, key, value, mask=mask, bias=bias, **options)
    return out.reshape(batch, heads, length, out.shape[-1])


def _folds(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether heads can become batch entries without a copy, where a transpose to [B, T, H, D] would need a copy."""
    if query.shape[1] != key.shape[1] and query.shape[2] != 1:
        return False
    given = (query, key, value)
    if all(x.transpose(1, 2).is_contiguous() for x in given):
        return False
    return all(x.is_contiguous() for x in given) and not dtensors.is_dtensor(query)


def _score_folds(x: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether a mask or bias can get a batch axis of B * Hkv entries at little cost in memory.

    It can if its first two axes are (1, 1) or query's (B, H), or if it has size 1 along the queries. x: broadcastable
    to [B, H, T, S]. query: [B, H, T, D].
    """
    shape = (1,) * (4 - x.ndim) + tuple(x.shape)
    return shape[:2] in ((1, 1), tuple(query.shape[:2])) or shape[2] == 1


def _score_folded(x: torch.Tensor, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Returns a mask or bias for a call in which each key head of each sequence is a batch entry.

    The result is [B * Hkv, query heads of an entry, T or 1, S or 1]. With a first shape of (1, 1) it is x itself, with
    4 axes. x: broadcastable to [B, H, T, S]. query: [B, H, T, D].
    """
    batch, heads = query.shape[:2]
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if x.shape[:2] == (1, 1):
        return x
    of_heads = heads if x.shape[1] > 1 else kv_heads
    x = x.expand(batch, of_heads, -1, -1)
    return x.reshape(batch * kv_heads, of_heads // kv_heads, *x.shape[2:])
