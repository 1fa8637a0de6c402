"""dilated_attention. Its checks are in checks.py, its plan in plan.py, its forward and backward in vjp.py."""

import functools
from collections.abc import Sequence
from typing import Literal, overload

import jax
from jaxtyping import Array, Float, Float32, Integer

from jax_kernels.ops.dilated import vjp as dilated_vjp
from jax_kernels.ops.dilated.plan import plan_of_call, prepare
from jax_kernels.ops.planned_op import explained_as
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.plain_numbers import DILATED, with_plain_numbers
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["dilated_attention"]


@overload
def dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = ...,
    heads: str = ...,
    combine: str = ...,
    layout: str = ...,
    order: str | None = ...,
    stop_gradient_weights: bool = ...,
    return_lse: Literal[False] = ...,
    segment_ids: Integer[Array, "B T"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"]: ...
@overload
def dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = ...,
    heads: str = ...,
    combine: str = ...,
    layout: str = ...,
    order: str | None = ...,
    stop_gradient_weights: bool = ...,
    return_lse: Literal[True],
    segment_ids: Integer[Array, "B T"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@overload
def dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = ...,
    heads: str = ...,
    combine: str = ...,
    layout: str = ...,
    order: str | None = ...,
    stop_gradient_weights: bool = ...,
    return_lse: bool = ...,
    segment_ids: Integer[Array, "B T"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers(*DILATED)
@with_explicit_axes(as_attention)
@under_defaults
@jax.named_scope("dilated_attention")
def dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
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
    segment_ids: Integer[Array, "B T"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """Self-attention of every rate-th token within segments, by several branches of (segment length, rate).

    Equivalent to the following JAX code, where branch i gives head h the tokens whose position in their segment is
    offset(i, h) modulo the branch's rate::

        def branch(i):
            tokens, length, rate = arange(T), segment_lengths[i], dilation_rates[i]
            # heads="all"; with heads="groups", i % rate for the heads of group i, and no token for the others
            offset = arange(H) // ceil(H / rate)
            takes = tokens % length % rate == offset[:, None]
            keep = (tokens[:, None] // length == tokens // length) & takes[:, :, None] & takes[:, None, :]
            return flash_attention(query, key, value, mask=keep, is_causal=is_causal, return_lse=True)

        outs, lses = map(stack, zip(*(branch(i) for i in range(branches))))
        weights = softmax(lses, axis=0) if combine == "lse" else full_like(lses, 1 / branches)
        out = (weights.swapaxes(2, 3)[..., None] * outs).sum(0)
        lse = logsumexp(lses, axis=0)

    B, T and H may be 0: the results and the gradients are then empty, or 0.

    Under jit on a mesh with Auto axes, the kernels are sharded over batch and heads. If the shards of the heads take
    different tokens, the program has kernels for each of these shards, and a device runs the kernels of its shard.
    "xla" gathers heads.

    The op needs memory for one attention over the tokens of the branches, without a mask or a T x T array. The forward
    keeps query, key, value, out and lse for the backward.

    "mosaic_gpu" (Hopper) can read a branch in place if

    - D and Dv are equal and 64, 128 or 256, there are no segment_ids, and deterministic is not set;
    - its segment length divides T or is at least T, and its rate divides the segments into classes of a multiple of 8
      tokens;
    - order is None, or its rate is 1;
    - with heads="groups", its first query head is the first of a key head;
    - with layout="partition", segments of one length and one rate cover the sequence.

    Without gradients it reads these branches in place, short branches in one launch. With gradients it gathers some
    branches, namely if they are so short that one launch of their backward saves more time than their copies cost. All
    other branches, and all branches of other implementations, are gathered first, which copies their tokens. Gathered
    branches whose segments hold equally many tokens, as in LongNet, run as one attention, if they serve equally many
    heads and their classes divide the query heads of a key head in the same way. Their classes must also have equally
    many heads if there are segment_ids, or if is_causal is False and the rate does not divide the segments.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32; D up to 256, any T.
      key: [B, T, Hkv, D] in query's dtype; Hkv divides H. A query head's branch takes the same tokens of its key head.
      value: [B, T, Hkv, Dv] in query's dtype; Dv up to 256.
      segment_lengths: of each branch, at least 1. A length may exceed T, and need not divide T.
      dilation_rates: of each branch, from 1 to its segment length.
      is_causal: a token attends only to itself and to earlier tokens, for any order.
      heads: "all": every head runs every branch, with the offset h // ceil(H / rate) for head h. "groups": branch i
        serves only the i-th group of heads, with the offset i % rate; if the branches do not divide the heads, the
        first groups have one more head.
      combine: "lse": a token's outputs are weighted by the softmax of the branches' log-sum-exps; a branch without the
        token has weight 0. "mean": the outputs are added and divided by the number of branches. A token of a head that
        is in no branch gets out = 0 and lse = -inf.
      layout: "overlap": each branch cuts the whole sequence into segments of its length. "partition":
        segment_lengths cut the sequence one after another, and in segment i every residue class modulo
        dilation_rates[i] attends within itself, for all heads, so that each token is in one class; tokens past the
        sum of the lengths form a last segment at rate 1. heads, combine and stop_gradient_weights then have no effect
        and must keep their defaults.
      order: None, or "hilbert": a token's position in its segment is its index in hilbert_order. Has no effect at
        rate 1.
      stop_gradient_weights: pass no gradient through the weights of "lse".
      return_lse: also return the log-sum-exp over all branches. Gradients through it are exact.
      segment_ids: int32 [B, T]: packed sequences. A token attends to tokens with its id. A token with an id below 0
        attends to no token, but its values must be finite. Other integers are taken as in flash_attention.
      scale, deterministic, precision, implementation: as in flash_attention; "cudnn" supports no branch.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call; the message has the reason.

    Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens" (2023), arXiv:2307.02486.
    """
    call, arrays = prepare(
        query=query,
        key=key,
        value=value,
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
    results = dilated_vjp.run(call, arrays)
    return results if return_lse else results[0]


explained_as(functools.partial(plan_of_call, "dilated_attention"))(dilated_attention)
