"""flash-attn's attention to a KV cache, after writing new keys and values to the cache."""

from typing import Any, Literal, overload

import torch

from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import checked_flag, plain_of
from jax_kernels.bridge.jax_functions.argument_names import rename
from jax_kernels.bridge.ops.attention.attention_types import Outputs
from jax_kernels.bridge.ops.decoding.decode_attention import decode_attention
from jax_kernels.bridge.ops.drop_in.flash_attn import attend, check_slopes, options_of
from jax_kernels.bridge.ops.drop_in.kvcache_arguments import (
    KeyValueCache,
    check_int32,
    check_no_gradient,
    checked_cache,
    checked_lengths,
    checked_new,
    checked_rotary,
)
from jax_kernels.ops.attention.decode_attention import MOST_QUERIES

__all__ = ["flash_attn_with_kvcache"]

_OWN_NAMES = {
    "query": "q",
    "key": "k_cache",
    "value": "v_cache",
    "kv_lengths": "cache_seqlens",
    "block_tables": "block_table",
    "scale": "softmax_scale",
    "window": "window_size",
}


@overload
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ...,
    cache_seqlens: int | torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ...,
    cache_leftpad: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    rotary_interleaved: bool = ...,
    alibi_slopes: torch.Tensor | None = ...,
    num_splits: int = ...,
    return_softmax_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    rotary_cos: torch.Tensor | None = ...,
    rotary_sin: torch.Tensor | None = ...,
    cache_seqlens: int | torch.Tensor | None = ...,
    cache_batch_idx: torch.Tensor | None = ...,
    cache_leftpad: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    rotary_interleaved: bool = ...,
    alibi_slopes: torch.Tensor | None = ...,
    num_splits: int = ...,
    return_softmax_lse: bool = ...,
) -> Outputs: ...
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Outputs:
    """flash_attn.flash_attn_with_kvcache by bridge.decode_attention and bridge.flash_attention. Forward only.

    It returns the attention of new queries to the keys of a cache. k and v are first written to k_cache and v_cache in
    place, after the cache_seqlens keys of each sequence; the queries attend to the old and the new keys. Calls with one
    query, or with up to 16 causal queries, run by decode_attention, which reads the cache in place. Other calls run by
    flash_attention, which reads a copy of pages, and of the rows of cache_batch_idx.

    Args:
      q: [B, T, H, D].
      k_cache: [cache rows, S, Hkv, D], or with block_table [pages, page_size, Hkv, D]; v_cache: likewise. Without
        cache_batch_idx, sequence b has row b.
      k, v: the new keys and values [B, N, Hkv, D], or None.
      rotary_cos, rotary_sin: [positions, R / 2], R at most D: rotary embedding of the first R features of k and q. k
        has the positions to which it is written. q starts at the same position; without causal and window_size, all
        queries have this first position. Only with k and v.
      cache_seqlens: the number of keys that each sequence has in the cache, without the new keys: an int, or integers,
        int32 [B]. None is S; only without k and v.
      cache_batch_idx: int32 [B], the cache row of each sequence. If two rows are equal, either k is kept. Not with
        block_table.
      cache_leftpad: int32 [B], the index of each sequence's first key in the cache; None is 0. The cache is copied.
      block_table: int32 [B, pages of a sequence], the page indices of each sequence, in order.
      softmax_scale, softcap, alibi_slopes: as in flash_attn_func.
      causal, window_size: bottom-right: the last query has the position of the last key.
      rotary_interleaved: rotate the feature pairs (0, 1), (2, 3), ...; False: (0, R / 2), (1, R / 2 + 1), ...
      num_splits: an int. It has no effect: decode_attention splits the keys if that is faster.
      return_softmax_lse: return (out, lse float32 [B, H, T]).

    Returns:
      out [B, T, H, D]. A query without a key has out = 0 and lse = -inf.

    Raises:
      TypeError, ValueError: an argument is wrong; the error names it. Lengths and indices are checked on a CPU only:
        the host does not wait for a GPU.
      NotImplementedError: a tensor requires a gradient, under torch.enable_grad.
    """
    dtensors.refuse("flash_attn_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    check_no_gradient(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        softmax_scale=softmax_scale,
        alibi_slopes=alibi_slopes,
    )
    cache = checked_cache(q, k_cache, v_cache, cache_batch_idx, block_table)
    causal, rotary_interleaved = checked_flag("causal", causal), checked_flag("rotary_interleaved", rotary_interleaved)
    num_splits = plain_of("num_splits", num_splits)
    if type(num_splits) is not int or num_splits < 0:
        raise ValueError(f"num_splits: got {num_splits!r}, want an int of 0 or more")
    lengths = checked_lengths(cache_seqlens, q, cache, has_new=k is not None)
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, False)
    with torch.no_grad():
        if k is None:
            for name, x in (("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
                if x is not None:
                    raise ValueError(f"{name}: got one without k, want k and v too, or None")
        else:
            k, v = checked_new(q, k, v, cache, lengths)
            if rotary_cos is not None or rotary_sin is not None:
                is_moving = causal or options["window"] is not None
                count = max(k.shape[1], q.shape[1] if is_moving else 1)
                rotary = checked_rotary(q, rotary_cos, rotary_sin, rotary_interleaved, lengths, count)
                q, k = rotary.rotated(q, lengths, is_moving=is_moving), rotary.rotated(k, lengths)
            cache.write(k, v, lengths)
            lengths = lengths + k.shape[1]
        if cache_leftpad is not None:
            check_int32("cache_leftpad", cache_leftpad, q, (q.shape[0],))
            cache, lengths = cache.without_padding(cache_leftpad), lengths - cache_leftpad
        try:
            return _attend(
                q, cache, lengths, alibi_slopes, options, checked_flag("return_softmax_lse", return_softmax_lse)
            )
        except (TypeError, ValueError, NotImplementedError) as error:
            rename(error, **_OWN_NAMES)
            raise


def _attend(
    q: torch.Tensor,
    cache: KeyValueCache,
    lengths: torch.Tensor,
    slopes: torch.Tensor | None,
    options: dict[str, Any],
    with_lse: bool,
) -> Outputs:
    """Returns the attention of the queries q [B, T, H, D] to the first lengths[b] keys of each sequence b.

    The last query has the position of the last key. The result is out [B, T, H, D], or with with_lse (out, lse
    [B, H, T]).

    slopes: ALiBi slopes [H] or [B, H], or None. options: flash_attention's keyword arguments scale, is_causal, window,
    softcap and deterministic.
    """
    length = q.shape[1]
    if 0 < length <= MOST_QUERIES and (length == 1 or options["is_causal"]):
        key, value, tables = cache.in_place()
        left = -1 if options["window"] is None else options["window"][0]
        bias = None
        if slopes is not None:
            check_slopes(slopes, q)
            offset = lengths.clamp(max=cache.capacity) - length
            rows = offset[:, None] + torch.arange(length, device=q.device)
            distance = (rows[..., None] - torch.arange(cache.capacity, device=q.device)).abs().float()
            bias = -slopes.reshape(-1, q.shape[2], 1, 1) * distance[:, None]
        own = {"bias": bias, "window": None if left < 0 else (left, 0), "scale": options["scale"]}
        own |= {"softcap": options["softcap"], "return_lse": with_lse}
        return decode_attention(q, key, value, kv_lengths=lengths, block_tables=tables, **own)
    key, value = cache.whole()
    own = {"kv_lengths": lengths, "q_offset": lengths - length, "return_lse": with_lse}
    return attend(q, key, value, slopes, options | own)
