"""flash-attn's and flash-dmattn's functions, with their names, arguments and meanings, run by this library's attention.

Their alignment differs from bridge.flash_attention: causal masks and windows are bottom-right, so the last query has
the position of the last key.
"""

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import checked_flag, checked_number, plain_of
from jax_kernels.bridge.jax_functions.api import from_jax
from jax_kernels.bridge.jax_functions.argument_names import rename
from jax_kernels.bridge.ops.attention.argument_aliases import check_mask_shape
from jax_kernels.bridge.ops.attention.attention_checks import as_torch_is_set, check_inputs, check_tensor
from jax_kernels.bridge.ops.attention.attention_types import Outputs, Window
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.attention.masked_attention import dynamic_mask_attention
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import flash_attention as ops
from jax_kernels.ops.checks import check_softcap
from jax_kernels.plain_numbers import ATTENTION, with_plain_numbers

type Probabilities = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]  # out, or (out, lse, None)

__all__ = [
    "Probabilities",
    "attend",
    "check_packed",
    "check_slopes",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_dmattn_func",
    "options_of",
]

# flash-attn's argument names by this library's, for errors.
_OWN_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "scale": "softmax_scale",
    "is_causal": "causal",
    "window": "window_size",
    "return_lse": "return_attn_probs",
}


@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
) -> Probabilities: ...
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
) -> Probabilities:
    """flash_attn.flash_attn_func by bridge.flash_attention: returns out [B, T, H, D].

    Args:
      q: [B, T, H, D]; k: [B, S, Hkv, D]; v: [B, S, Hkv, D].
      dropout_p: only 0.
      softmax_scale: multiplies the scores; default 1 / sqrt(D).
      causal, window_size: bottom-right: query i has position i + S - T. window_size: (left, right), the numbers of keys
        before and after the query's position that it attends to; -1 is no limit.
      softcap: 0 for none; else the scores become softcap * tanh(scores / softcap).
      alibi_slopes: float32 [H] or [B, H]: slope * |position of the query - position of the key| is subtracted from the
        scores, after softcap. The slopes have a gradient; on a Hopper GPU it takes the Triton backward.
      deterministic: False follows torch.use_deterministic_algorithms.
      return_attn_probs: return (out, lse float32 [B, H, T], None). The probabilities are never stored.

    Numbers may be Python's, NumPy's or tensors without axes; window_size may be a tensor of two integers.

    Raises NotImplementedError for dropout_p above 0, and the errors of bridge.flash_attention.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    options |= {"q_offset": _offset(q, k, ("q", "k")), "return_lse": return_attn_probs}
    return _finished(attend(q, k, v, alibi_slopes, options), return_attn_probs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func with the keys and values in one tensor kv: [B, S, 2, Hkv, D]; kv[:, :, 0] has the keys.

    args, options: the arguments of flash_attn_func after v.
    """
    check_packed("kv", kv, 2)
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func with queries, keys and values in one tensor qkv: [B, T, 3, H, D], in this order along axis 2.

    args, options: the arguments of flash_attn_func after v.
    """
    check_packed("qkv", qkv, 3)
    return flash_attn_func(*qkv.unbind(2), *args, **options)


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
    *,
    mask: torch.Tensor | Mask | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash_dmattn.flash_dmattn_func by bridge.dynamic_mask_attention: returns out [B, T, H, D].

    Args:
      query: [B, T, H, D]; key: [B, S, Hkv, D]; value: [B, S, Hkv, D].
      attn_mask: bool, broadcastable to [B, H, T, S] or [B, Hkv, T, S], True where a query may attend.
      attn_bias: likewise, in query's dtype or float32, added to the scores; it has a gradient.
      scale: multiplies the scores; default 1 / sqrt(D). softcap: the scores become softcap * tanh(scores / softcap).
      is_causal: bottom-right: query i has position i + S - T. None is False.
      deterministic: None or False follows torch.use_deterministic_algorithms.
      mask, bias: this library's names for attn_mask and attn_bias. A mask may also be a masks.Mask.

    Raises NotImplementedError for return_attn_probs, TypeError if an argument is given by two names, and the errors of
    bridge.dynamic_mask_attention.
    """
    softcap, flags = checked_number("softcap", softcap), {"deterministic": deterministic, "is_causal": is_causal}
    deterministic, is_causal = (None if x is None else checked_flag(name, x) for name, x in flags.items())
    if return_attn_probs is not None and checked_flag("return_attn_probs", return_attn_probs):
        raise NotImplementedError("return_attn_probs: got True, want False: attention weights are never stored")
    for name, x, own, other in (("attn_mask", attn_mask, "mask", mask), ("attn_bias", attn_bias, "bias", bias)):
        if x is not None and other is not None:
            raise TypeError(f"{name}: got it together with {own}, which is the same argument; want one of them")
    options: dict[str, Any] = {"scale": scale, "is_causal": False if is_causal is None else is_causal}
    options |= {"softcap": softcap or None, "deterministic": deterministic or None, "q_offset": _offset(query, key)}
    names = {name: f"attn_{name}" for name, x in (("mask", attn_mask), ("bias", attn_bias)) if x is not None}
    mask, bias = attn_mask if mask is None else mask, attn_bias if bias is None else bias
    try:
        if mask is not None:
            check_mask_shape("mask", mask, query, key)
            return dynamic_mask_attention(query, key, value, mask, bias, **options)
        return flash_attention(query, key, value, bias=_of_heads(bias, query, key), **options)
    except (TypeError, ValueError) as error:
        rename(error, **names)
        raise


def _of_heads(bias: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Returns a bias [B, Hkv, T, S] as [B, H, T, S], repeated for its query heads; other biases unchanged."""
    heads, kv_heads = query.shape[2], key.shape[2]
    is_dense = isinstance(bias, torch.Tensor) and bias.layout == torch.strided
    if not is_dense or bias.ndim != 4 or bias.shape[1] != kv_heads or kv_heads in (0, 1, heads) or heads % kv_heads:
        return bias
    return bias.repeat_interleave(heads // kv_heads, dim=1)


def options_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool,
) -> dict[str, Any]:
    """Returns flash-attn's arguments as keyword arguments of bridge.flash_attention.

    They are scale, is_causal, window (None for no limit on either side), softcap (None for 0) and deterministic (None
    for False). Raises NotImplementedError for dropout, TypeError for a window_size that is no pair.
    """
    window_size = plain_of("window_size", window_size)
    softcap = checked_number("softcap", softcap)
    deterministic = deterministic is not None and checked_flag("deterministic", deterministic)
    if checked_number("dropout_p", dropout_p):
        raise NotImplementedError(f"dropout_p: got {dropout_p}, want 0: attention weights are never stored")
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}, want (left, right), -1 for no limit")
    if not all(isinstance(side, int) for side in window_size):
        raise TypeError(f"window_size: got {window_size!r}, want an int for each side, -1 for no limit")
    left, right = window_size
    return {
        "scale": softmax_scale,
        "is_causal": causal,
        "window": None if left < 0 and right < 0 else (max(left, -1), max(right, -1)),
        "softcap": softcap or None,
        "deterministic": deterministic or None,
    }


def _offset(query: torch.Tensor, key: torch.Tensor, names: tuple[str, str] = ("query", "key")) -> int:
    """Returns the position of query 0 if the last query has the position of the last key: S - T.

    names: the caller's names of query and key, for errors. Raises TypeError or ValueError if one has not 4 axes.
    """
    for name, x in zip(names, (query, key), strict=True):
        check_tensor(name, x, query)
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 4 axes [batch, length, heads, head_dim]")
    return key.shape[1] - query.shape[1]


def check_packed(name: str, x: torch.Tensor, parts: int, want: str | None = None) -> None:
    """Raises unless x is a tensor with `parts` entries in the axis before heads and head_dim.

    want: the axes in words for a tensor of packed sequences, which has 4; None for a batch, which has 5 axes.
    """
    check_tensor(name, x, x)
    axes = 5 if want is None else 4
    if x.ndim != axes or x.shape[axes - 3] != parts:
        want = want or f"[batch, length, {parts}, heads, head_dim]"
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want {want}")


def _finished(results: Any, with_lse: bool) -> Probabilities:
    """Returns flash-attn's results, out or (out, lse, None), from flash_attention's, out or (out, lse)."""
    return (*results, None) if with_lse else results


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, options: dict[str, Any]
) -> Outputs:
    """Returns flash_attention's out, or with return_lse (out, lse). Errors have flash-attn's argument names.

    q: [B, T, H, D]; k, v: [B, S, Hkv, D]. slopes: ALiBi slopes [H] or [B, H], float32, or None. options:
    flash_attention's keyword arguments: options_of's, q_offset (an int or int32 [B]), return_lse, and others.
    """
    try:
        if slopes is None:
            return flash_attention(q, k, v, **options)
        return attend_with_slopes(q, k, v, slopes, options)
    except (TypeError, ValueError, NotImplementedError) as error:
        rename(error, **_OWN_NAMES)
        raise


def attend_with_slopes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, options: dict[str, Any]
) -> Outputs:
    """Returns flash_attention's out, or with return_lse (out, lse), with ALiBi.

    slope * |query position - key position| is subtracted from the scores.

    The arguments are as in attend. The function changes the dict `options`.
    """
    check_slopes(slopes, q)
    batch, heads = q.shape[0], q.shape[2]
    if dtensors.are_in(q, k, v):
        run = lambda query, key, value, alibi_slopes, **others: attend_with_slopes(
            query, key, value, alibi_slopes, others
        )
        return dtensors.attention(run, {"query": q, "key": k, "value": v, "alibi_slopes": slopes} | options)
    ids, offset = options.pop("segment_ids", (None, None)), options.pop("q_offset")
    check_inputs(q, k, v, segment_ids=ids, kv_lengths=options.get("kv_lengths"), q_offset=offset)
    q, k, v, _, options["deterministic"] = as_torch_is_set(q, k, v, deterministic=options["deterministic"])
    options["segment_ids"] = None if ids[0] is None else ids
    offsets = offset.expand(batch) if isinstance(offset, torch.Tensor) else slopes.new_full((batch,), offset).int()
    return _flash_attn(q, k, v, slopes.expand(batch, heads), offsets, **options)


@from_jax
@with_plain_numbers(*ATTENTION)
def _flash_attn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array,
    offsets: jax.Array,
    softcap: float | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array] | jax.Array:
    """Returns attention on scores that are softcapped, then reduced by slopes[b, h] * |query position - key position|.

    slopes: float32 [B, H]. offsets: int32 [B], the position of query 0. options: jax_kernels.flash_attention's.
    """
    check_softcap(softcap)

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = jnp.abs(q_idx + offsets[b] - kv_idx).astype(jnp.float32)
        capped = score if softcap is None else softcap * jnp.tanh(score / softcap)
        return capped - slopes[b, h] * distance

    return ops.flash_attention(q, k, v, score_mod=score_mod, q_offset=offsets, **options)


def check_slopes(slopes: torch.Tensor, q: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless alibi_slopes are float32 [H] or [B, H], for q [B, T, H, D]."""
    check_tensor("alibi_slopes", slopes, q)
    batch, heads = q.shape[0], q.shape[2]
    shape = tuple(slopes.shape)
    if slopes.dtype != torch.float32 or (shape != (heads,) and shape != (batch, heads)):
        want = f"torch.float32 [{heads}] or [{batch}, {heads}]"
        raise ValueError(f"alibi_slopes: got {slopes.dtype} {tuple(slopes.shape)}, want {want}")
