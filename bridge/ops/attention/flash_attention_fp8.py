"""8-bit attention on PyTorch tensors: quantize_fp8 and flash_attention_fp8."""

from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, overload

import torch

from jax_kernels import quantization
from jax_kernels.bridge.interop.arguments.plain_numbers import in_float32, plain_of
from jax_kernels.bridge.jax_functions.api import JaxOp, from_jax
from jax_kernels.bridge.jax_functions.argument_checks import check_optional_tensors, check_scales, check_tensors
from jax_kernels.bridge.ops.attention.attention_types import OutAndLse, Outputs
from jax_kernels.ops.attention import flash_attention_fp8 as ops
from jax_kernels.spelling import with_name_hints

__all__ = ["flash_attention_fp8", "quantize_fp8"]

_attend = JaxOp(ops.flash_attention_fp8, is_opaque=True)
_quantize_fp8 = from_jax(quantization.quantize_fp8)


def quantize_fp8(x: torch.Tensor, axis: int | Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a tensor to float8_e4m3fn, by jax_kernels.quantize_fp8: (values, scales), with x ≈ values * scales.

    Args:
      x: a float tensor, of any shape.
      axis: the axes along which values have the same scale; None is all axes. (1, 3) gives each batch entry and head of
        x [B, T, H, D] a scale.

    Returns:
      values: torch.float8_e4m3fn, of x's shape. scales: positive float32, of x's shape without `axis`.

    Raises the errors of jax_kernels.quantize_fp8, or from_jax's errors if the two differ.
    """
    check_tensors(x=x)
    axis = plain_of("axis", axis)
    return tuple(_quantize_fp8(x, axis=tuple(axis) if isinstance(axis, list) else axis))


class _Options(TypedDict, total=False):
    """The keyword arguments of flash_attention_fp8 except return_lse, for type checkers."""

    q_scale: torch.Tensor | float | None
    k_scale: torch.Tensor | float | None
    v_scale: torch.Tensor | float | None
    is_causal: bool
    scale: float | None
    q_offset: int | torch.Tensor
    kv_lengths: torch.Tensor | None
    implementation: str | None


@overload
def flash_attention_fp8(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> torch.Tensor: ...
@overload
def flash_attention_fp8(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> OutAndLse: ...
@overload
def flash_attention_fp8(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Outputs: ...
@with_name_hints
def flash_attention_fp8(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Outputs:
    """jax_kernels.flash_attention_fp8 on 8-bit PyTorch tensors, the results of quantize_fp8(x, axis=(1, 3)).

    Forward only. bridge.from_jax describes how calls run, compile and are captured.

    Args:
      query: [B, T, H, D], torch.float8_e4m3fn; key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv].
      q_scale: [B, H] float32, or a number: the factor of query's values. k_scale, v_scale: [B, Hkv] float32, or a
        number; None is 1. JAX compiles a program for each number.
      is_causal: keep key j for query i where q_offset + i >= j.
      scale: multiplies the scores; default 1 / sqrt(D).
      q_offset: position of query 0, an int, or an int32 tensor, a scalar or [B].
      kv_lengths: [B] int32, the number of valid keys of each batch entry.
      implementation: a name, or None for the device's first that supports the call.

    Returns:
      out [B, T, H, Dv] bfloat16; with return_lse, (out, lse), lse float32 [B, H, T].

    Raises the errors of jax_kernels.flash_attention_fp8, or from_jax's errors if the two differ.
    """
    call = _attend.lookup(
        (query, key, value, q_scale, k_scale, v_scale, q_offset, kv_lengths),
        (is_causal, scale, return_lse, implementation),
    )
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(query=query, key=key, value=value)
    check_optional_tensors(kv_lengths=kv_lengths)
    check_scales(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    return _attend.run(
        call,
        query,
        key,
        value,
        q_scale=in_float32(q_scale),
        k_scale=in_float32(k_scale),
        v_scale=in_float32(v_scale),
        is_causal=is_causal,
        scale=scale,
        q_offset=plain_of("q_offset", q_offset),
        kv_lengths=kv_lengths,
        return_lse=return_lse,
        implementation=implementation,
    )
