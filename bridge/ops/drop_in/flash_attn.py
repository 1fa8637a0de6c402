"""flash-attn's and flash-dmattn's functions, with their names, arguments and meanings, run by this library's attention.

Their alignment differs from bridge.flash_attention: causal masks and windows are bottom-right, so the last query has
the position of the last key.
"""

from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge.interop import dtensors, torch_internals
from jax_kernels.bridge.interop.plain_numbers import plain_of
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
    "attend",
    "check_slopes",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
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
        scores, after softcap. The slopes get no gradient.
      deterministic: False follows torch.use_deterministic_algorithms.
      return_attn_probs: return (out, lse float32 [B, H, T], None). The probabilities are never stored.

    Numbers may be Python's, NumPy's or tensors without axes; window_size may be a tensor of two integers.

    Raises NotImplementedError for dropout_p above 0, and the errors of bridge.flash_attention.
    """
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    offset = _offset(q, k, ("q", "k"))
    return _finished(attend(q, k, v, alibi_slopes, offset, options, return_attn_probs), return_attn_probs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func with the keys and values in one tensor kv: [B, S, 2, Hkv, D]; kv[:, :, 0] has the keys.

    args, options: the arguments of flash_attn_func after v.
    """
    _check_packed("kv", kv, 2)
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func with queries, keys and values in one tensor qkv: [B, T, 3, H, D], in this order along axis 2.

    args, options: the arguments of flash_attn_func after v.
    """
    _check_packed("qkv", qkv, 3)
    return flash_attn_func(*qkv.unbind(2), *args, **options)


@overload
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
    block_table: torch.Tensor | None = ...,
) -> torch.Tensor: ...
@overload
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
    block_table: torch.Tensor | None = ...,
) -> Probabilities: ...
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
) -> Probabilities:
    """flash_attn.flash_attn_varlen_func by bridge.flash_attention: packed sequences of several lengths. Returns out.

    If both cu_seqlens are one tensor, or if the call has no causal, window or alibi_slopes, the packed sequences run in
    place, with segment_ids. Otherwise the alignment of queries and keys may differ from sequence to sequence: queries
    and keys are copied to a batch of max_seqlen_q queries and max_seqlen_k keys.

    Args:
      q: [total_q, H, D]; k: [total_k, Hkv, D]; v: [total_k, Hkv, D].
      cu_seqlens_q, cu_seqlens_k: int32 [B + 1]: the start of each sequence, then the end of the last.
      max_seqlen_q, max_seqlen_k: length of the longest sequence. With cu_seqlens on a GPU it is not checked, as in
        flash-attn: a smaller number gives wrong results.
      alibi_slopes: [H] or, with sequences copied to a batch, [B, H].
      return_attn_probs: return (out, lse float32 [H, total_q], None).
      Other arguments: as in flash_attn_func.

    Returns out [total_q, H, D]. Tokens after the last sequence, and queries of a sequence without keys, get out 0 and
    lse -inf. There may be zero tokens and zero sequences.

    Raises NotImplementedError for dropout_p above 0 and for block_table (see bridge.decode_attention), ValueError for a
    max_seqlen below the longest sequence on a CPU, and the errors of bridge.flash_attention.
    """
    if dtensors.are_in(q, k, v):
        given = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes}
        named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
        named |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "dropout_p": dropout_p, "causal": causal}
        named |= {"softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap}
        return _varlen_on_shards(given, named | {"deterministic": deterministic}, return_attn_probs)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
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
    max_seqlen_q = _checked_longest("q", cu_seqlens_q, max_seqlen_q)
    max_seqlen_k = _checked_longest("k", cu_seqlens_k, max_seqlen_k)
    if len(cu_seqlens_q) == 1:  # without sequences the slopes have no effect
        cu_seqlens_k, alibi_slopes = cu_seqlens_q, None
    is_aligned = cu_seqlens_q is cu_seqlens_k or not (causal or alibi_slopes is not None or options["window"])
    if is_aligned and (alibi_slopes is None or alibi_slopes.ndim == 1):
        ids = _numbers(cu_seqlens_q, q.shape[0]), _numbers(cu_seqlens_k, k.shape[0])
        options["segment_ids"] = ids
        results = attend(q[None], k[None], v[None], alibi_slopes, 0, options, return_attn_probs)
        out, lse = _pair(results, return_attn_probs)
        return (out[0], lse[0], None) if return_attn_probs else out[0]
    rows, columns = _Places.of(cu_seqlens_q, max_seqlen_q), _Places.of(cu_seqlens_k, max_seqlen_k)
    options["kv_lengths"] = columns.lengths
    offset = columns.lengths - rows.lengths
    tensors = rows.apart(q), columns.apart(k), columns.apart(v)
    results = attend(*tensors, alibi_slopes, offset, options, return_attn_probs)
    out, lse = _pair(results, return_attn_probs)
    joined = rows.joined(out, q.shape[0])
    return (joined, rows.joined(lse.mT, q.shape[0], -torch.inf).mT, None) if return_attn_probs else joined


def _varlen_on_shards(tensors: dict[str, Any], options: dict[str, Any], with_lse: bool) -> Probabilities:
    """Runs flash_attn_varlen_func on DTensors, whose heads may be sharded. Returns DTensors: out, or (out, lse, None).

    tensors: q, k, v and alibi_slopes by name. options: the other arguments by name, without return_attn_probs.
    """
    heads = (None, "heads", None)
    slopes = tensors["alibi_slopes"]
    of_slopes = (None, "heads") if isinstance(slopes, torch.Tensor) and slopes.ndim == 2 else ("heads",)
    roles = {"q": heads, "k": heads, "v": heads, "alibi_slopes": of_slopes}

    def run(**given: Any) -> Any:
        out, lse, _ = flash_attn_varlen_func(**given, return_attn_probs=True)
        return (out, lse) if with_lse else out

    results = dtensors.on_shards(run, tensors, roles, (heads, ("heads", None)), options)
    return (*results, None) if with_lse else results


@overload
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
) -> Probabilities: ...
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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
) -> Probabilities:
    """flash_attn_varlen_func with the keys and values in one tensor kv: [total_k, 2, Hkv, D]; kv[:, 0] has the keys.

    The other arguments and the result are as in flash_attn_varlen_func.
    """
    _check_packed("kv", kv, 2, "[tokens, 2, heads, head_dim]")
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
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
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
) -> Probabilities: ...
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Probabilities:
    """flash_attn_varlen_func with queries, keys and values in one tensor qkv: [total, 3, H, D], in this order.

    cu_seqlens, max_seqlen: of queries and keys alike: int32 [B + 1], the start of each sequence, then the end of the
    last; and the length of the longest sequence. The other arguments and the result are as in flash_attn_varlen_func.
    """
    _check_packed("qkv", qkv, 3, "[tokens, 3, heads, head_dim]")
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(1)
    try:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)
    except (TypeError, ValueError) as error:
        rename(error, cu_seqlens_q="cu_seqlens", max_seqlen_q="max_seqlen")
        raise


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
    if return_attn_probs:
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
        return flash_attention(query, key, value, bias=_of_heads(bias, query), **options)
    except (TypeError, ValueError) as error:
        rename(error, **names)
        raise


def _of_heads(bias: Any, query: torch.Tensor) -> torch.Tensor | None:
    """Returns a bias [B, Hkv, T, S] as [B, H, T, S], repeated for its query heads; other biases unchanged."""
    is_of_keys = isinstance(bias, torch.Tensor) and bias.ndim == 4 and bias.shape[1] not in (0, 1, query.shape[2])
    return bias.repeat_interleave(query.shape[2] // bias.shape[1], dim=1) if is_of_keys else bias


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
    if not isinstance(window_size, tuple):
        window_size = plain_of("window_size", window_size)
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


def _offset(query: torch.Tensor, key: torch.Tensor, names: tuple[str, str] = ("query", "key")) -> int:
    """Returns the position of query 0 if the last query has the position of the last key: S - T.

    names: the caller's names of query and key, for errors. Raises TypeError or ValueError if one has not 4 axes.
    """
    for name, x in zip(names, (query, key), strict=True):
        check_tensor(name, x, query)
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 4 axes [batch, length, heads, head_dim]")
    return key.shape[1] - query.shape[1]


def _check_packed(name: str, x: torch.Tensor, parts: int, want: str | None = None) -> None:
    """Raises unless x is a tensor with `parts` entries in the axis before heads and head_dim.

    want: the axes in words for a tensor of packed sequences, which has 4; None for a batch, which has 5 axes.
    """
    check_tensor(name, x, x)
    axes = 5 if want is None else 4
    if x.ndim != axes or x.shape[axes - 3] != parts:
        want = want or f"[batch, length, {parts}, heads, head_dim]"
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want {want}")


def _checked_longest(name: str, starts: torch.Tensor, given: int) -> int:
    """Returns max_seqlen_q or max_seqlen_k as an int.

    Raises ValueError if a sequence on a CPU is longer, TypeError for a value that is no int. The host never waits for a
    GPU.

    name: "q" or "k". starts: the cu_seqlens, int32 [B + 1]. given: the argument.
    """
    if torch.compiler.is_compiling():
        return given
    given = plain_of(f"max_seqlen_{name}", given)
    if isinstance(given, bool) or not isinstance(given, int | torch.SymInt):
        raise TypeError(f"max_seqlen_{name}: got {type(given).__name__}, want an int")
    if len(starts) == 1 or starts.device.type != "cpu" or not torch_internals.is_plain_eager():
        return given
    longest = int(starts.diff().max())
    if given < longest:
        raise ValueError(f"max_seqlen_{name}: got {given}, want at least {longest}, the longest of cu_seqlens_{name}")
    return given


def _finished(results: Any, with_lse: bool) -> Probabilities:
    """Returns flash-attn's results, out or (out, lse, None), from flash_attention's, out or (out, lse)."""
    return (*results, None) if with_lse else results


def _pair(results: Any, with_lse: bool) -> tuple[Any, Any]:
    """Returns (out, lse) from flash_attention's results; lse is None without with_lse."""
    return results if with_lse else (results, None)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    offset: int | torch.Tensor,
    options: dict[str, Any],
    with_lse: bool,
) -> Outputs:
    """Returns flash_attention's out, or with with_lse (out, lse). Errors have flash-attn's argument names.

    q: [B, T, H, D]; k, v: [B, S, Hkv, D]. slopes: ALiBi slopes [H] or [B, H], float32, or None. offset: position of
    query 0, an int or int32 [B]. options: flash_attention's other keyword arguments, as options_of returns them.
    """
    try:
        if slopes is None:
            return flash_attention(q, k, v, q_offset=offset, return_lse=with_lse, **options)
        return attend_with_slopes(q, k, v, slopes, offset, options, with_lse)
    except (TypeError, ValueError, NotImplementedError) as error:
        rename(error, **_OWN_NAMES)
        raise


def attend_with_slopes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor,
    offset: int | torch.Tensor,
    options: dict[str, Any],
    with_lse: bool,
) -> Outputs:
    """Returns flash_attention's out, or with with_lse (out, lse), with ALiBi.

    slope * |query position - key position| is subtracted from the scores. The slopes get no gradient.

    q: [B, T, H, D]; k, v: [B, S, Hkv, D]. slopes: float32 [H] or [B, H]. offset: position of query 0, an int or int32
    [B]. options: flash_attention's other keyword arguments, with `deterministic`; the function changes this dict.
    """
    check_slopes(slopes, q)
    batch, heads = q.shape[0], q.shape[2]
    if dtensors.are_in(q, k, v):
        run = lambda query, key, value, alibi_slopes, q_offset, **others: attend_with_slopes(
            query, key, value, alibi_slopes, q_offset, others, with_lse
        )
        named = {"query": q, "key": k, "value": v, "alibi_slopes": slopes, "q_offset": offset}
        return dtensors.attention(run, named | options)
    ids = options.pop("segment_ids", (None, None))
    check_inputs(q, k, v, segment_ids=ids, kv_lengths=options.get("kv_lengths"), q_offset=offset)
    q, k, v, _, options["deterministic"] = as_torch_is_set(q, k, v, deterministic=options["deterministic"])
    options |= {"return_lse": with_lse, "segment_ids": None if ids[0] is None else ids}
    offsets = offset.expand(batch) if isinstance(offset, torch.Tensor) else slopes.new_full((batch,), offset).int()
    return _with_alibi(q, k, v, slopes.detach().expand(batch, heads), offsets, **options)


@from_jax
@with_plain_numbers(*ATTENTION)
def _with_alibi(
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
    if slopes.dtype != torch.float32 or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        want = f"torch.float32 [{heads}] or [{batch}, {heads}]"
        raise ValueError(f"alibi_slopes: got {slopes.dtype} {tuple(slopes.shape)}, want {want}")


def _numbers(starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the index of each packed token's sequence, int32 [1, tokens]; -1 after the last sequence.

    starts: int32 [sequences + 1], the start of each sequence, then the end of the last.
    """
    positions = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    found = torch.searchsorted(starts[1:].contiguous(), positions, right=True).to(torch.int32)
    return torch.where(found < len(starts) - 1, found, -1)[None]


class _Places(NamedTuple):
    """Converts packed tokens [tokens, ...] to a batch [B, longest, ...] and back.

    lengths: int32 [B], the length of each sequence. starts: int32 [B + 1], their starts, then the end of the last.
    longest: the batch's size along the tokens.
    """

    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int

    @classmethod
    def of(cls, starts: torch.Tensor, longest: int) -> "_Places":
        return cls(lengths=starts.diff(), starts=starts, longest=max(int(longest), 1))

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the batch [B, longest, ...] of packed tokens [tokens, ...].

        The padding after a sequence holds arbitrary tokens.
        """
        if len(x) == 0:  # an index needs a token
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        index = self.starts[:-1, None] + torch.arange(self.longest, device=x.device, dtype=torch.int32)
        return x[index.clamp(max=x.shape[0] - 1)]

    def joined(self, x: torch.Tensor, tokens: int, fill: float = 0.0) -> torch.Tensor:
        """Returns the packed tokens [tokens, ...] of a batch [B, longest, ...]; `fill` after the last sequence."""
        numbers = _numbers(self.starts, tokens)[0]
        positions = torch.arange(tokens, device=x.device, dtype=torch.int32) - self.starts[:-1][numbers.clamp(min=0)]
        found = x[numbers.clamp(min=0), positions.clamp(max=self.longest - 1)]
        is_there = (numbers >= 0).reshape(-1, *(1,) * (found.ndim - 1))
        return torch.where(is_there, found, torch.full_like(found, fill))
