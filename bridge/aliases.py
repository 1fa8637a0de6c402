"""Functions of flash-attn and flash-dmattn by their own names, arguments and meanings, over this library's attention.

They differ from bridge.flash_attention in their alignment: causal masks and windows are bottom-right, so that the last
query stands at the last key.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge import library
from jax_kernels.bridge.attention import flash_attention
from jax_kernels.bridge.attention_checks import as_torch_is_set, check_inputs, check_tensor
from jax_kernels.bridge.function import from_jax
from jax_kernels.bridge.other_names import check_mask_shape
from jax_kernels.bridge.sparse_attention import dynamic_mask_attention
from jax_kernels.ops.attention import flash_attention as ops

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_dmattn_func",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func by bridge.flash_attention.

    Args:
      q: [B, T, H, D]; k: [B, S, Hkv, D]; v: [B, S, Hkv, D].
      softmax_scale: multiplies the scores; default 1 / sqrt(D).
      causal, window_size: bottom-right: query i stands at position i + S - T.
      softcap: 0 for none.
      alibi_slopes: float32 [H] or [B, H]: slope * |position of the query - position of the key| is subtracted from the
        scores. They get no gradient. softcap is not taken beside them.
      deterministic: False follows torch.use_deterministic_algorithms.
      return_attn_probs: return (out, lse float32 [B, H, T], None). The probabilities are never stored.

    Raises NotImplementedError for dropout_p above 0, and what bridge.flash_attention raises.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    return _finished(_attend(q, k, v, alibi_slopes, _offset(q, k), options, return_attn_probs), return_attn_probs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func with the keys and values in one tensor kv: [B, S, 2, Hkv, D]."""
    _check_packed("kv", kv, 2)
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func with queries, keys and values in one tensor qkv: [B, T, 3, H, D]."""
    _check_packed("qkv", qkv, 3)
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func by bridge.flash_attention: sequences of several lengths, one after another.

    Where one tensor is both cu_seqlens, or neither causal nor a window nor alibi_slopes is asked for, the sequences run
    as they stand, by segment_ids. Else queries and keys may be aligned in another way in each sequence, and they are
    copied to a batch of max_seqlen_q queries and max_seqlen_k keys.

    Args:
      q: [total_q, H, D]; k: [total_k, Hkv, D]; v: [total_k, Hkv, D].
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1]: where each sequence begins, and the last one ends.
      max_seqlen_q, max_seqlen_k: the longest sequence. Where cu_seqlens are on a GPU this is the caller's word, as in
        flash-attn: with a smaller number the results are wrong.
      alibi_slopes: [H] or, with sequences copied to a batch, [B, H].
      return_attn_probs: return (out, lse float32 [H, total_q], None).
      The others are those of flash_attn_func. Tokens after the last sequence, and of a sequence
      without keys, get 0 and an lse of -inf. There may be no token, and no sequence.

    Raises NotImplementedError for dropout_p above 0 and for block_table (see bridge.decode_attention), ValueError for a
    max_seqlen below the longest sequence on a CPU, and what bridge.flash_attention raises.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if block_table is not None:
        raise NotImplementedError("block_table: got one, want None; bridge.decode_attention takes block_tables")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, q)
        if x.ndim != 3:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want [tokens, heads, head_dim]")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, x, q)
        if x.dtype != torch.int32 or x.ndim != 1 or x.shape != cu_seqlens_q.shape or not len(x):
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, want torch.int32 [sequences + 1]")
    _check_longest("q", cu_seqlens_q, max_seqlen_q)
    _check_longest("k", cu_seqlens_k, max_seqlen_k)
    if len(cu_seqlens_q) == 1:  # no sequence, whose slopes might matter
        cu_seqlens_k, alibi_slopes = cu_seqlens_q, None
    is_aligned = cu_seqlens_q is cu_seqlens_k or not (causal or alibi_slopes is not None or options["window"])
    if is_aligned and (alibi_slopes is None or alibi_slopes.ndim == 1):
        ids = _numbers(cu_seqlens_q, q.shape[0]), _numbers(cu_seqlens_k, k.shape[0])
        options["segment_ids"] = ids
        results = _attend(q[None], k[None], v[None], alibi_slopes, 0, options, return_attn_probs)
        out, lse = _pair(results, return_attn_probs)
        return (out[0], lse[0], None) if return_attn_probs else out[0]
    rows, columns = _Places.of(cu_seqlens_q, max_seqlen_q), _Places.of(cu_seqlens_k, max_seqlen_k)
    options["kv_lengths"] = columns.lengths
    offset = columns.lengths - rows.lengths
    tensors = rows.apart(q), columns.apart(k), columns.apart(v)
    results = _attend(*tensors, alibi_slopes, offset, options, return_attn_probs)
    out, lse = _pair(results, return_attn_probs)
    joined = rows.joined(out, q.shape[0])
    return (joined, rows.joined(lse.mT, q.shape[0]).mT, None) if return_attn_probs else joined


def flash_dmattn_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
) -> torch.Tensor:
    """flash_dmattn.flash_dmattn_func by bridge.dynamic_mask_attention.

    Args:
      query: [B, T, H, D]; key: [B, S, Hkv, D]; value: [B, S, Hkv, D].
      attn_mask: bool, broadcastable to [B, H, T, S] or [B, Hkv, T, S], True where a query may attend.
      attn_bias: likewise, in query's dtype or float32, added to the scores; it has a gradient.
      is_causal: bottom-right: query i stands at position i + S - T. None is False.

    Raises NotImplementedError for return_attn_probs, and what bridge.dynamic_mask_attention raises.
    """
    if return_attn_probs:
        raise NotImplementedError("return_attn_probs: got True, want False: attention weights are never stored")
    options: dict[str, Any] = {"scale": scale, "is_causal": bool(is_causal), "softcap": softcap or None}
    options |= {"deterministic": deterministic or None, "q_offset": _offset(query, key)}
    if attn_mask is not None:
        check_mask_shape("attn_mask", attn_mask, query, key)
        return dynamic_mask_attention(query, key, value, attn_mask, attn_bias, **options)
    if attn_bias is not None and attn_bias.ndim == 4 and attn_bias.shape[1] not in (1, query.shape[2]):
        attn_bias = attn_bias.repeat_interleave(query.shape[2] // attn_bias.shape[1], dim=1)
    return flash_attention(query, key, value, bias=attn_bias, **options)


def _options(
    dropout_p: float, softmax_scale: Any, causal: bool, window_size: Any, softcap: float, deterministic: bool
) -> dict[str, Any]:
    """The arguments of flash-attn's functions by the names that bridge.flash_attention has for them."""
    if dropout_p:
        raise NotImplementedError(f"dropout_p: got {dropout_p}, want 0: attention weights are never stored")
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}, want (left, right), -1 for no limit")
    left, right = window_size
    return {
        "scale": softmax_scale,
        "is_causal": causal,
        "window": None if left < 0 and right < 0 else (max(left, -1), max(right, -1)),
        "softcap": softcap or None,
        "deterministic": deterministic or None,
    }


def _offset(query: Any, key: Any) -> int:
    """The position of query 0 where the last query stands at the last key."""
    for name, x in (("query", query), ("key", key)):
        check_tensor(name, x, query)
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 4 axes [batch, length, heads, head_dim]")
    return key.shape[1] - query.shape[1]


def _check_packed(name: str, x: Any, parts: int) -> None:
    check_tensor(name, x, x)
    if x.ndim != 5 or x.shape[2] != parts:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want [batch, length, {parts}, heads, head_dim]")


def _check_longest(name: str, starts: torch.Tensor, given: Any) -> None:
    """Raises where a sequence is known to be longer than was said. The host does not wait for a GPU."""
    if len(starts) == 1 or starts.device.type != "cpu" or torch.compiler.is_compiling() or not library.is_plain_call():
        return
    longest = int(starts.diff().max())
    if given < longest:
        raise ValueError(f"max_seqlen_{name}: got {given}, want at least {longest}, the longest of cu_seqlens_{name}")


def _finished(results: Any, with_lse: bool) -> Any:
    return (*results, None) if with_lse else results


def _pair(results: Any, with_lse: bool) -> tuple[Any, Any]:
    """(out, lse or None)."""
    return results if with_lse else (results, None)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: Any, offset: Any, options: dict[str, Any], with_lse: bool
) -> Any:
    """flash_attention with the slopes of ALiBi, where there are any."""
    if slopes is None:
        return flash_attention(q, k, v, q_offset=offset, return_lse=with_lse, **options)
    check_tensor("alibi_slopes", slopes, q)
    batch, heads = q.shape[0], q.shape[2]
    if slopes.dtype != torch.float32 or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        want = f"torch.float32 [{heads}] or [{batch}, {heads}]"
        raise ValueError(f"alibi_slopes: got {slopes.dtype} {tuple(slopes.shape)}, want {want}")
    ids = options.pop("segment_ids", (None, None))
    check_inputs(q, k, v, segment_ids=ids, kv_lengths=options.get("kv_lengths"), q_offset=offset)
    q, k, v, _, options["deterministic"] = as_torch_is_set(q, k, v, deterministic=options["deterministic"])
    options |= {"return_lse": with_lse, "segment_ids": None if ids[0] is None else ids}
    offsets = offset.expand(batch) if isinstance(offset, torch.Tensor) else slopes.new_full((batch,), offset).int()
    return _with_alibi(q, k, v, slopes.detach().expand(batch, heads), offsets, **options)


@from_jax
def _with_alibi(q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array, offsets: jax.Array, **options: Any) -> Any:
    """Attention whose scores lose slopes[b, h] for each position between query and key."""

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = jnp.abs(q_idx + offsets[b] - kv_idx).astype(jnp.float32)
        return score - slopes[b, h] * distance

    return ops.flash_attention(q, k, v, score_mod=score_mod, q_offset=offsets, **options)


def _numbers(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """The number [1, tokens] of each token's sequence, -1 after the last."""
    positions = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    found = torch.searchsorted(starts[1:].contiguous(), positions, right=True).to(torch.int32)
    return torch.where(found < len(starts) - 1, found, -1)[None]


class _Places(NamedTuple):
    """The places of packed tokens in a batch. lengths: int32 [B]. index: the token at [B, longest], clamped."""

    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int

    @classmethod
    def of(cls, starts: torch.Tensor, longest: int) -> "_Places":
        return cls(lengths=starts.diff(), starts=starts, longest=max(int(longest), 1))

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """[B, longest, ...] of [tokens, ...]. What stands behind a sequence is any token."""
        if len(x) == 0:  # an index needs a token
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        index = self.starts[:-1, None] + torch.arange(self.longest, device=x.device, dtype=torch.int32)
        return x[index.clamp(max=x.shape[0] - 1)]

    def joined(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """[tokens, ...] of [B, longest, ...], 0 for tokens after the last sequence."""
        numbers = _numbers(self.starts, tokens)[0]
        positions = torch.arange(tokens, device=x.device, dtype=torch.int32) - self.starts[:-1][numbers.clamp(min=0)]
        found = x[numbers.clamp(min=0), positions.clamp(max=self.longest - 1)]
        is_there = (numbers >= 0).reshape(-1, *(1,) * (found.ndim - 1))
        return torch.where(is_there, found, torch.zeros_like(found))
