"""decode_attention on PyTorch tensors."""

from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_options
from jax_kernels.bridge.jax_functions.api import JaxOp, with_types
from jax_kernels.bridge.jax_functions.argument_checks import check_optional_tensors
from jax_kernels.bridge.ops.attention import float_masks, length_buckets
from jax_kernels.bridge.ops.attention.attention_checks import as_torch_is_set, check_inputs
from jax_kernels.bridge.ops.attention.attention_types import OutAndLse, Outputs, Window
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import decode_attention as ops
from jax_kernels.spelling import with_name_hints

__all__ = ["decode_attention"]

_attend = JaxOp(ops.decode_attention, is_opaque=True)
_attend_by_object = JaxOp(ops.decode_attention)


class _Options(TypedDict, total=False):
    """The keyword arguments of decode_attention except return_lse, for type checkers."""

    kv_lengths: torch.Tensor | None
    block_tables: torch.Tensor | None
    mask: torch.Tensor | Mask | None
    bias: torch.Tensor | None
    window: Window | None
    softcap: float | None
    sinks: torch.Tensor | None
    scale: float | None
    implementation: str | None


@overload
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> torch.Tensor: ...
@overload
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> OutAndLse: ...
@overload
def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Outputs: ...
@with_name_hints
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    kv_lengths: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    mask: torch.Tensor | Mask | None = None,
    bias: torch.Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Outputs:
    """jax_kernels.decode_attention on PyTorch tensors: the newest 1 to 16 tokens against a cache. Forward only.

    bridge.from_jax describes how calls run, compile and are captured. Under autocast query, key and value are cast to
    the autocast dtype.

    Args:
      query: [B, T, H, D], T from 1 to 16, bfloat16, float16 or float32, on a CPU or a CUDA device.
      key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; with block_tables [pages, page_size, Hkv, D or Dv]. They already
        contain the T new tokens.
      kv_lengths: [B] int32, the number of keys of each sequence, including the T new ones; None is S. A dynamic value:
        a longer sequence in the same cache needs no compilation. Query i of a sequence of L keys attends to the keys up
        to position L - T + i, its own position.
      block_tables: [B, max_pages] int32, the page indices of each sequence, in order; it needs kv_lengths.
      mask: bool, broadcastable to [B, H, T, S], True where a query may attend, or floats of 0 and 1, as
        bridge.flash_attention takes them. Or a masks.Mask.
      bias: broadcastable to [B, H, T, S], in query's dtype or float32, added to the scores.
      window: an int or (left, right): a query at position p attends to keys from p - left on; None or -1: to all.
      softcap: the scores become softcap * tanh(scores / softcap).
      sinks: [H], bfloat16, float16 or float32, logits that only join the softmax's denominator.
      scale: multiplies the scores; default 1 / sqrt(D).
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.

    An axis of mask or bias that torch.Tensor.expand made is read with size 1.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T].

    Raises the errors of jax_kernels.decode_attention, or from_jax's errors if the two differ.
    """
    is_valid = None
    if mask is not None and float_masks.is_float(mask):
        mask, is_valid = float_masks.as_bool("mask", mask)
    call = _attend.lookup(
        (query, key, value, kv_lengths, block_tables, mask, bias, sinks),
        (with_types(window), softcap, scale, return_lse, implementation),
    )
    if call and call.cached:
        results = call.cached(call.tensors)
        return results if is_valid is None else float_masks.or_nan(results, is_valid)
    if block_tables is None and is_valid is None and dtensors.are_in(query, key, value):
        named = {"query": query, "key": key, "value": value, "kv_lengths": kv_lengths, "mask": mask, "bias": bias}
        numbers: dict[str, Any] = {"softcap": softcap, "scale": scale, "return_lse": return_lse, "window": window}
        numbers |= plain_options(tuple(numbers), numbers)
        named |= {"sinks": sinks, "implementation": implementation}
        return dtensors.attention(decode_attention, named | numbers)
    is_object = isinstance(mask, Mask)
    check_optional_tensors(block_tables=block_tables)
    check_inputs(
        query, key, value, bias=bias, sinks=sinks, mask=None if is_object else mask, kv_lengths=kv_lengths
    )  # fmt: skip
    query, key, value, bias, _ = as_torch_is_set(query, key, value, bias=bias)
    attend = _attend_by_object if is_object else _attend
    results = attend.run(
        None if is_object else call,
        query,
        key,
        value,
        kv_lengths=kv_lengths,
        block_tables=block_tables,
        mask=mask if is_object else length_buckets.without_expanded_axes(mask),
        bias=length_buckets.without_expanded_axes(bias),
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        return_lse=return_lse,
        implementation=implementation,
    )
    return float_masks.or_nan(results, is_valid)
