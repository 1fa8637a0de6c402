"""PyTorch's scaled_dot_product_attention, computed by flash_attention."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jax_kernels.bridge.interop.arguments.autocast import autocast_dtype
from jax_kernels.bridge.interop.arguments.plain_numbers import checked_flag, checked_number
from jax_kernels.bridge.interop.import_hooks import when_imported
from jax_kernels.bridge.jax_functions.argument_checks import FLOATS, check_tensors
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.drop_in import fallback, heads_first

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

__all__ = ["scaled_dot_product_attention", "shared_axes"]

_CAUSAL_BIAS: Any = ()  # CausalBias, once its module is loaded: that imports torch._dynamo


def _find_causal_bias() -> None:
    """Sets _CAUSAL_BIAS, the classes for isinstance, to (CausalBias,). It runs when CausalBias's module is imported.

    Until then _CAUSAL_BIAS is (), since no mask can be a CausalBias. This module does not import that module, because
    it imports torch._dynamo.
    """
    global _CAUSAL_BIAS
    from torch.nn.attention.bias import CausalBias

    _CAUSAL_BIAS = (CausalBias,)


when_imported("torch.nn.attention.bias", _find_causal_bias)


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
    """PyTorch's scaled_dot_product_attention by flash_attention; you may assign it to PyTorch's name.

    PyTorch's function runs instead, with one warning per reason, for dropout_p above 0, a head_dim above 256, float64,
    nested tensors, and devices other than CPU and CUDA. It also runs, without a warning, for empty tensors and on the
    meta device. torch.fx.symbolic_trace keeps a call as one node; torch.jit.script compiles PyTorch's function.

    Args:
      query: [..., H, T, D]; key: [..., Hkv, S, D]; value: [..., Hkv, S, Dv]; bfloat16, float16 or float32. At least two
        axes; all axes except the last two are broadcast. Kernels read transposed views of [B, T, H, D] without a copy,
        and also contiguous tensors if H = Hkv or T = 1. Other tensors are copied once.
      attn_mask: two axes or more, broadcastable to [..., H, T, S]. A bool mask is True where a query may attend. A mask
        in query's dtype or float32 is added to the scores, and has a gradient. A query that may attend to nothing has
        an output of 0, as in PyTorch. A torch.nn.attention.bias.CausalBias works too.
      dropout_p: the probability with which attention weights are dropped.
      is_causal: keep key j for query i where i >= j, aligned top-left.
      scale: multiplies the scores, any finite number; default 1 / sqrt(D).
      enable_gqa: allow fewer key and value heads than query heads. They must divide the query heads.

    Returns:
      [..., H, T, Dv] in query's dtype.

    Raises:
      TypeError: attn_mask is neither bool nor in query's dtype or float32, dtypes differ, or scale is a tensor that
        requires a gradient.
      ValueError: both attn_mask and is_causal are given, shapes do not fit together, or a tensor is nested while query,
        key or value is dense or there is an attn_mask.

    It also raises the errors of flash_attention. A second derivative raises.
    """
    if not _check_tensors(query, key, value, attn_mask):
        return _without_shapes(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask, is_causal: got both, want one of them")
    q_offset = 0
    if isinstance(attn_mask, _CAUSAL_BIAS):
        if attn_mask.variant.name == "LOWER_RIGHT":
            q_offset = attn_mask.seq_len_kv - attn_mask.seq_len_q
        _check_lengths(attn_mask, query, key)
        attn_mask, is_causal = None, True
    if type(enable_gqa) is not bool:
        enable_gqa = checked_flag("enable_gqa", enable_gqa)
    if type(dropout_p) is not float:
        dropout_p = checked_number("dropout_p", dropout_p)
    reason = fallback.reason_of(query, max(query.shape[-1], value.shape[-1]), dropout_p)
    if reason is not None or query.device.type == "meta" or 0 in (*query.shape, *key.shape, *value.shape):
        if reason is not None:
            fallback.warn("scaled_dot_product_attention", reason)
        if attn_mask is not None and not torch.compiler.is_compiling():
            _check_mask(attn_mask, (query.shape[-2], key.shape[-2]))
        if q_offset:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril(q_offset)
            is_causal = False
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return fallback.attention(query, key, value, attn_mask, dropout_p, **options)
    inputs = _inputs(query, key, value, attn_mask, enable_gqa)
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    out = heads_first.attend(
        inputs.query,
        inputs.key,
        inputs.value,
        bias=None if is_bool else inputs.mask,
        mask=inputs.mask if is_bool else None,
        is_causal=is_causal,
        q_offset=q_offset,
        scale=scale if scale is None or type(scale) is float else _number(scale),
    )
    return out if query.ndim == 4 == len(inputs.batch) + 2 else out.reshape(*inputs.batch, *out.shape[-2:])


class _Inputs(NamedTuple):
    """The query, key and value of a call with exactly 4 axes, [batch, heads, length, head_dim], and its mask.

    mask: broadcastable to [batch, heads, queries, keys], with 2 to 4 axes, or None. batch: the axes of the final result
    before its last two, with the heads if it has any.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    batch: tuple[int, ...]


scaled_dot_product_attention.__prepare_scriptable__ = symbolic_trace.sdpa_of_script  # type: ignore[attr-defined]


def _without_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, *options: Any
) -> Any:
    """Runs a call that has tensors without a shape.

    Nested tensors run by PyTorch's function. A call of torch.fx's Proxies becomes a node of the graph: returns a Proxy.

    options: dropout_p, is_causal, scale and enable_gqa. Raises ValueError if only some tensors are nested, or with an
    attn_mask for nested tensors.
    """
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    names = ("dropout_p", "is_causal", "scale", "enable_gqa")
    if any(isinstance(x, symbolic_trace.Proxy) for x in given.values()):
        return symbolic_trace.call(
            scaled_dot_product_attention, *given.values(), **dict(zip(names, options, strict=True))
        )
    nested = [name for name, x in given.items() if x is not None and x.is_nested]
    want = f"{nested[0]}: got a nested tensor, want a dense one: pad it, with attn_mask for the padding"
    if nested != ["query", "key", "value"]:
        raise ValueError(f"{want}; PyTorch's own function takes query, key and value nested together")
    if attn_mask is not None:
        raise ValueError(f"{want}; PyTorch's own function takes nested tensors without an attn_mask")
    fallback.warn("scaled_dot_product_attention", "nested tensors have no shape, and flash_attention takes dense ones")
    dropout_p, is_causal, scale, enable_gqa = options
    return fallback.attention(
        query, key, value, None, dropout_p, is_causal, scale=_number(scale), enable_gqa=enable_gqa
    )


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any) -> bool:
    """Returns True after checks of the tensors' types, axes and dtypes. Raises TypeError or ValueError.

    Returns False, without further checks, if a tensor is nested or a torch.fx.Proxy.
    """
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if name == "attn_mask" and x is None:
            continue
        if not isinstance(x, torch.Tensor):
            if isinstance(x, symbolic_trace.Proxy):
                return False
            check_tensors(**{name: x})
        if x.is_nested:
            return False
        if x.ndim < 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 2 axes or more")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype and autocast_dtype(query.device) is None:
            raise TypeError(f"{name}: got dtype {x.dtype}, want query's dtype {query.dtype}")
    if attn_mask is None or attn_mask.dtype == torch.bool or isinstance(attn_mask, _CAUSAL_BIAS):
        return True
    casts = autocast_dtype(query.device) is not None and attn_mask.dtype in FLOATS
    if attn_mask.dtype not in (query.dtype, torch.float32) and not casts:
        or_float32 = "" if query.dtype == torch.float32 else " or torch.float32"
        raise TypeError(
            f"attn_mask: got dtype {attn_mask.dtype}, want torch.bool (True = attend), or query's dtype {query.dtype}"
            f"{or_float32} (added to the scores)"
        )
    return True


def _number(scale: torch.Tensor | float | None) -> float | None:
    """Returns `scale` as a number or None. A bool and a tensor with one element are accepted, as by PyTorch's function.

    Raises TypeError for a tensor that requires a gradient, or has several elements.
    """
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        raise TypeError(f"scale: got a tensor of shape {tuple(scale.shape)}, want a number")
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise TypeError("scale: got a tensor that requires a gradient, want a number; multiply query by it")
    return float(scale) if isinstance(scale, torch.Tensor | bool) else scale


def _check_lengths(bias: "CausalBias", query: torch.Tensor, key: torch.Tensor) -> None:
    """Raises ValueError unless the CausalBias was made for the numbers of queries and keys of this call."""
    if (bias.seq_len_q, bias.seq_len_kv) != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"attn_mask: got a CausalBias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys, want "
            f"{query.shape[-2]} and {key.shape[-2]}"
        )


def _inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, enable_gqa: bool
) -> _Inputs:
    """Returns the call with 4 axes, [batch, heads, length, head_dim].

    The batch axes are broadcast, and flattened to one. query has the result's number of heads. key and value have one
    number of heads, which may be a divisor; if their numbers differ, both get the result's number, by copies of heads.
    Raises ValueError for shapes that do not fit together, and for a mask on another device.
    """
    if attn_mask is not None and attn_mask.device != query.device:
        raise ValueError(f"attn_mask: got a tensor on {attn_mask.device}, want query's device {query.device}")
    mask = None if attn_mask is None else shared_axes(attn_mask)
    axes = max(query.ndim, key.ndim, value.ndim)
    if enable_gqa and axes < 3:
        raise ValueError(f"query: got shape {tuple(query.shape)} with enable_gqa, want 3 axes or more")
    if mask is not None and mask.ndim > max(axes, 4):
        raise ValueError(f"attn_mask: got shape {tuple(mask.shape)}, want at most {axes} axes")
    filled = lambda x: x.reshape((1,) * (max(axes, 4) - x.ndim) + x.shape)
    query, key, value = (x if x.ndim == axes >= 4 else filled(x) for x in (query, key, value))
    heads = _heads(query, key, value, enable_gqa)
    query = query if query.shape[-3] == heads else query.expand(*query.shape[:-3], heads, -1, -1)
    if key.shape[-3] != value.shape[-3]:  # flash_attention takes one head count for key and value
        repeats = heads // key.shape[-3], heads // value.shape[-3]
        key, value = (x.repeat_interleave(n, dim=-3) for x, n in zip((key, value), repeats, strict=True))
    batch = query.shape[:-3]
    if not batch == key.shape[:-3] == value.shape[:-3]:
        batch = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in (query, key, value))
    if mask is not None and not torch.compiler.is_compiling():
        _check_mask(mask, (*batch, heads, query.shape[-2], key.shape[-2]))
    if len(batch) > 1:
        mask = None if mask is None else _of_one_batch(mask, batch)
        query, key, value = (x.flatten(0, -4) for x in (query, key, value))
    result = (*batch, heads)
    return _Inputs(query=query, key=key, value=value, mask=mask, batch=result[len(result) - max(axes - 2, 0) :])


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> int:
    """Returns the number of heads of the result. Raises ValueError if the head counts do not fit together.

    With enable_gqa the heads of key and value must divide query's. Otherwise each count must be 1 or the largest count.
    """
    counts = query.shape[-3], key.shape[-3], value.shape[-3]
    of_query, *of_keys = counts
    if enable_gqa:
        if any(of_query % n for n in of_keys):
            raise ValueError(f"key, value: got {of_keys} heads, want divisors of query's {of_query}")
        return of_query
    most = max(counts)
    if any(n not in (1, most) for n in counts):
        got = ", ".join(map(str, of_keys))
        raise ValueError(
            f"query, key, value: got {of_query}, {got} heads, want one number of heads, 1, or enable_gqa=True"
        )
    return most


def _check_mask(mask: torch.Tensor, want: tuple[int, ...]) -> None:
    """Raises ValueError unless the mask is broadcastable to the shape `want`."""
    pairs = zip(reversed(mask.shape), reversed(want), strict=False)
    if any(got not in (1, size) for got, size in pairs):
        raise ValueError(f"attn_mask: got shape {tuple(mask.shape)}, want one broadcastable to {want}")


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape to which the batch axes of query, key and value broadcast. Raises ValueError if they do not."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(str(tuple(x)) for x in shapes)
        raise ValueError(f"query, key, value: got batch axes {listed}, want axes that broadcast") from None


def _of_one_batch(mask: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """Returns a mask [..., H, T, S] with its batch axes broadcast to `batch`, then flattened to one axis.

    Batch axes of size 1 only are removed instead, and a mask of up to 3 axes stays unchanged: both broadcast anyway.
    batch: the sizes of the call's batch axes. Raises ValueError if the mask does not broadcast to them.
    """
    if mask.ndim <= 3:
        return mask
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(mask.shape[-3:])
    try:
        return mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
    except RuntimeError:
        raise ValueError(
            f"attn_mask: got shape {tuple(mask.shape)}, want one broadcastable to batch axes {batch}"
        ) from None


def shared_axes(mask: torch.Tensor) -> torch.Tensor:
    """Returns the mask with size 1 in each axis that torch.Tensor.expand made (stride 0).

    A mask that requires a gradient stays unchanged.
    """
    if mask.requires_grad or 0 not in mask.stride():
        return mask
    for axis, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask
