"""dilated_attention on PyTorch tensors."""

from collections.abc import Sequence
from typing import Literal, Required, TypedDict, Unpack, overload

import torch

from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.learned_scale import in_query
from jax_kernels.bridge.jax_functions.api import JaxOp, with_types
from jax_kernels.bridge.ops.attention.attention_checks import as_torch_is_set, check_inputs
from jax_kernels.bridge.ops.attention.attention_types import OutAndLse, Outputs
from jax_kernels.ops.dilated import dilated_attention as ops
from jax_kernels.spelling import with_name_hints

__all__ = ["DilatedOptions", "dilated_attention"]

_attend = JaxOp(ops.dilated_attention, is_opaque=True, settings=torch.are_deterministic_algorithms_enabled)


class DilatedOptions(TypedDict, total=False):
    """The keyword arguments of dilated attention except return_lse, for type checkers."""

    segment_lengths: Required[Sequence[int]]
    dilation_rates: Required[Sequence[int]]
    is_causal: bool
    heads: str
    combine: str
    layout: str
    order: str | None
    stop_gradient_weights: bool
    segment_ids: torch.Tensor | None
    scale: float | torch.Tensor | None
    deterministic: bool | None
    precision: str | None
    implementation: str | None


@overload
def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DilatedOptions],
) -> torch.Tensor: ...
@overload
def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DilatedOptions],
) -> OutAndLse: ...
@overload
def dilated_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool, **options: Unpack[DilatedOptions]
) -> Outputs: ...
@with_name_hints
def dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = False,
    heads: str = "all",
    combine: str = "lse",
    layout: str = "overlap",
    order: str | None = None,
    stop_gradient_weights: bool = False,
    return_lse: bool = False,
    segment_ids: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Outputs:
    """jax_kernels.dilated_attention on PyTorch tensors, with gradients of query, key and value, also through lse.

    bridge.from_jax describes how calls run, compile, are differentiated and are captured. Under autocast query, key and
    value are cast to the autocast dtype.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32, on a CPU or a CUDA device.
      key: [B, T, Hkv, D]; value: [B, T, Hkv, Dv]; in query's dtype and on its device.
      segment_lengths, dilation_rates: one int per branch. A branch cuts the sequence into segments of its length. In a
        segment, every rate-th token takes part; these tokens attend to each other. The first one depends on the head.
      is_causal: a token attends only to itself and to earlier tokens.
      heads: "all": every head runs every branch; "groups": branch i serves only the i-th group of heads.
      combine: "lse" weights the branches' outputs by the softmax of their log-sum-exps; "mean" averages them.
      layout: "overlap": as above. "partition": segments of these lengths follow one another; in segment i, all tokens
        with equal positions modulo rate i attend to each other, for all heads.
      order: None, or "hilbert": positions in a segment follow a Hilbert curve.
      stop_gradient_weights: pass no gradient through the weights of "lse".
      segment_ids: int32 [B, T], packed sequences: a token attends only to tokens with its id.
      deterministic: None follows torch.use_deterministic_algorithms; if that is off, XLA's flag decides.
      Other arguments: as in jax_kernels.dilated_attention, which has the equivalent code.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T].

    Raises:
      TypeError: an argument is not a tensor, or has an unsupported type or dtype.
      ValueError: shapes do not fit together, a value is out of range, or tensors are on several devices.
      NotImplementedError: a named implementation cannot serve this call; the error says why.
    """
    query, scale = in_query(query, scale)
    branches = with_types(segment_lengths), with_types(dilation_rates), heads, combine, layout, order
    settings = is_causal, stop_gradient_weights, return_lse, scale, deterministic, precision, implementation
    call = _attend.lookup((query, key, value, segment_ids), (*branches, *settings))
    if call and call.cached:
        return call.cached(call.tensors)
    if dtensors.are_in(query, key, value):  # a head's tokens depend on the head's index: no sharded heads
        batch = ("batch", None, None, None)
        tensors = {"query": query, "key": key, "value": value, "segment_ids": segment_ids}
        roles = {"query": batch, "key": batch, "value": batch, "segment_ids": batch[:2]}
        options = {
            "segment_lengths": segment_lengths,
            "dilation_rates": dilation_rates,
            "is_causal": is_causal,
            "heads": heads,
            "combine": combine,
            "layout": layout,
            "order": order,
            "stop_gradient_weights": stop_gradient_weights,
            "return_lse": return_lse,
            "scale": scale,
            "deterministic": deterministic,
            "precision": precision,
            "implementation": implementation,
        }
        return dtensors.on_shards(dilated_attention, tensors, roles, (batch, batch[:3]), options)
    if isinstance(segment_ids, tuple | list):
        raise TypeError("segment_ids: got a pair, want one int32 tensor [B, T]: queries and keys are the same tokens")
    check_inputs(query, key, value, segment_ids=(segment_ids,))
    query, key, value, _, deterministic = as_torch_is_set(query, key, value, deterministic=deterministic)
    return _attend.run(
        call,
        query,
        key,
        value,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        is_causal=is_causal,
        heads=heads,
        combine=combine,
        layout=layout,
        order=order,
        stop_gradient_weights=stop_gradient_weights,
        return_lse=return_lse,
        segment_ids=segment_ids,
        scale=scale,
        deterministic=deterministic,
        precision=precision,
        implementation=implementation,
    )
