"""sequence_parallel_dilated_attention: dilated attention of a sequence whose tokens are sharded over devices."""

from collections.abc import Sequence
from typing import Any, Literal, overload

from jaxtyping import Array, Float, Float32, Integer

from jax_kernels.ops.dilated import vjp as dilated_vjp
from jax_kernels.ops.dilated.plan import DilatedPlan, plan_of_call, prepare
from jax_kernels.ops.dilated.sharded_segments import Shards
from jax_kernels.ops.planned_op import explained_as
from jax_kernels.ops.ring.layouts import axis_size
from jax_kernels.ops.sharding.axis_plans import on_axis
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.plain_numbers import DILATED, with_plain_numbers
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["sequence_parallel_dilated_attention"]


@overload
def sequence_parallel_dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
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
def sequence_parallel_dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
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
def sequence_parallel_dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
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
def sequence_parallel_dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
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
    """dilated_attention inside jax.shard_map, where device i of an axis has the tokens i * T ... (i + 1) * T - 1.

    Equivalent to the following JAX code, without the gathered arrays::

        gather = lambda x: all_gather(x, axis_name, axis=1, tiled=True)
        out = dilated_attention(*map(gather, (query, key, value)), segment_ids=gather(segment_ids), ...)
        out = out[:, i * T : (i + 1) * T]

    It takes any segments and rates that dilated_attention takes, on any number of devices. The fastest segments are

    - segments whose length divides T: they need no communication;
    - segments whose length is T times a divisor of the number of devices, at a rate that divides T. The keys and values
      that take part, one in `rate`, travel round the ring of the segment's devices.

    All other segments begin or end within a device, or their classes have different numbers of tokens on the devices.
    So do the segments of "partition", unless all have one such length and rate. A device then takes all its tokens of
    the branch as one run, and segment ids mark the tokens of each segment. Keys travel as far as the last device that
    shares a segment. A run of T tokens has up to T * T / rate**2 scores for each head and each device that sends keys
    ("partition": T * T, with tokens sorted by class), and kernels skip only the blocks without a pair of one segment.
    Rows come in multiples of 8, for each device and class as many as the largest class has. int32 tables cover all of
    the segment's tokens. With segment_ids, the ids of all devices are gathered in addition, int32 [B, all tokens].

    segment_ids travel with the keys. In the backward, keys travel again, with their float32 gradients. A device holds
    the keys and gradients of two devices at a time. So, except for ids and tables, memory is linear in its own tokens.
    The forward keeps a device's query, key, value, segment_ids, out and lse for the backward.

    With order="hilbert", the devices of a longer segment may have different numbers of tokens that take part. Each
    device then sends as many rows as the largest number, rounded up to a multiple of 8.

    Args:
      query: [B, T, H, D]. key: [B, T, Hkv, D]. value: [B, T, Hkv, Dv]: a device's tokens; else as in dilated_attention.
      axis_name: the mesh axis over which the sequence is sharded, in the order of its tokens.
      segment_lengths, dilation_rates: of each branch, as in dilated_attention of the whole sequence.
      segment_ids: int32 [B, T], of a device's tokens: packed sequences; the ids hold for the whole sequence.
        Traced integers that may not fit int32 cost an all-gather of the ids.
      is_causal: a token attends only to itself and to earlier tokens of the whole sequence.
      heads, combine, layout, order, stop_gradient_weights: the pattern and the merge of the branches, as in
        dilated_attention.
      return_lse: also return the log-sum-exp over all branches.
      scale: a number, multiplies the scores; default 1 / sqrt(D).
      deterministic: True for the same bits on every run; None follows XLA's --xla_gpu_deterministic_ops.
      precision: for float32 inputs, "fp32" (exact products, the default) or "tf32". None for other dtypes.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log.

    Raises:
      TypeError, ValueError, NotImplementedError: as dilated_attention. ValueError if axis_name is not an axis of a
        jax.shard_map around the call.

    Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens" (2023), arXiv:2307.02486, section 3.
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
        shards=Shards(axis_name, axis_size(axis_name)),
    )
    results = dilated_vjp.run(call, arrays)
    return results if return_lse else results[0]


def _plan(*, axis_name: str, **arguments: Any) -> DilatedPlan:
    def plan(**arguments: Any) -> DilatedPlan:
        shards = Shards(axis_name, axis_size(axis_name))
        return plan_of_call("sequence_parallel_dilated_attention", **arguments, shards=shards)

    return on_axis(axis_name, plan, arguments)


explained_as(_plan)(sequence_parallel_dilated_attention)
