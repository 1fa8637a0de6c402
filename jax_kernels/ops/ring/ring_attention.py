"""ring_attention: exact attention inside jax.shard_map, of a sequence whose tokens are sharded over devices."""

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Integer

from jax_kernels.masks import Mask
from jax_kernels.ops.attention.traced_masks import mask_or_nan
from jax_kernels.ops.planned_op import (
    composed,
    explained_as,
    inside_composed,
    jitted_in_eager_shard_map,
    recorded_plans,
)
from jax_kernels.ops.ring import vjp
from jax_kernels.ops.ring.all_gather import all_gather_attention
from jax_kernels.ops.ring.all_to_all import OF_HEADS, all_to_all_attention
from jax_kernels.ops.ring.plan import RingPlan, plan_of
from jax_kernels.ops.ring.planning.documents import DocumentLayout, DocumentSteps
from jax_kernels.ops.ring.prepare import STRATEGIES, prepare
from jax_kernels.ops.ring.recorded import recorded
from jax_kernels.ops.ring.ring_call import RingArrays, RingCall
from jax_kernels.ops.ring.traffic import sent_bytes, work_shares
from jax_kernels.ops.ring.vjp import run
from jax_kernels.ops.sharding.axis_plans import on_axis
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.plain_numbers import ATTENTION, with_plain_numbers
from jax_kernels.score_mod.trace import ScoreMod, ScoreModFunction
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["OF_HEADS", "STRATEGIES", "attention_of", "prepare", "ring_attention", "with_results"]


@overload
def ring_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
    layout: str | DocumentLayout | DocumentSteps | None = ...,
    strategy: str = ...,
    sends_ahead: int | None = ...,
    mask: Mask | None = ...,
    is_causal: bool = ...,
    window: int | tuple[int, int] | None = ...,
    segment_ids: Integer[Array, "B _"] | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    score_mod: ScoreModFunction | ScoreMod | None = ...,
    bias: Float[Array, "*#BHTS"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"]: ...
@overload
def ring_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
    layout: str | DocumentLayout | DocumentSteps | None = ...,
    strategy: str = ...,
    sends_ahead: int | None = ...,
    mask: Mask | None = ...,
    is_causal: bool = ...,
    window: int | tuple[int, int] | None = ...,
    segment_ids: Integer[Array, "B _"] | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    score_mod: ScoreModFunction | ScoreMod | None = ...,
    bias: Float[Array, "*#BHTS"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@overload
def ring_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
    layout: str | DocumentLayout | DocumentSteps | None = ...,
    strategy: str = ...,
    sends_ahead: int | None = ...,
    mask: Mask | None = ...,
    is_causal: bool = ...,
    window: int | tuple[int, int] | None = ...,
    segment_ids: Integer[Array, "B _"] | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    score_mod: ScoreModFunction | ScoreMod | None = ...,
    bias: Float[Array, "*#BHTS"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    softcap: float | None = ...,
    return_lse: bool = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers(*ATTENTION, "sends_ahead")
@with_explicit_axes(as_attention)
@under_defaults
@jax.named_scope("ring_attention")
def ring_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
    layout: str | DocumentLayout | DocumentSteps | None = None,
    strategy: str = "auto",
    sends_ahead: int | None = None,
    mask: Mask | None = None,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: Integer[Array, "B _"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    score_mod: ScoreModFunction | ScoreMod | None = None,
    bias: Float[Array, "*#BHTS"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """flash_attention inside jax.shard_map, where each device of a mesh axis holds some tokens of the sequence.

    Equivalent to the following JAX code, without the gathered arrays::

        tokens = shard_sequence's order of all tokens, of which a device has [T]
        gather = lambda x: all_gather(x, axis_name, axis=1, tiled=True)[:, argsort(tokens)]
        ids = gather(segment_ids)  # likewise a bias, along its rows
        out = flash_attention(*map(gather, (query, key, value)), segment_ids=ids, mask=mask, ...)[:, mine]

    Keys and values travel round the ring of devices. Each step merges its (out, lse) in float32 with the (out, lse) of
    the earlier steps. In the backward, keys, values and their float32 gradients travel. The sends overlap the kernels.
    A step that a window or a mask leaves without a pair on all devices is skipped, and no keys are sent for it.
    shard_sequence puts an array into a layout.

    All partial results are float32, with one exception: with deterministic=True on "mosaic_gpu", each step rounds its
    gradient of query.

    The forward keeps query, key, value, out and lse. out and lse have the names "ring_attention_out" and
    "ring_attention_lse" for the policies of jax.checkpoint. With "all_to_all" and "all_gather" they have the names of
    flash_attention. With "all_to_all", the query, key and value of a device's heads have "ring_attention_query",
    "ring_attention_key" and "ring_attention_value".

    Args:
      query: [B, T, H, D]. key: [B, T, Hkv, D]. value: [B, T, Hkv, Dv]: a device's tokens; else as in flash_attention.
      axis_name: the name of the mesh axis over which the tokens are sharded.
      layout: "zigzag" (the sequence has 2 n chunks and device i of n has chunks i and 2 n - 1 - i; T is even),
        "striped" (every n-th token from i on) or "contiguous". Under a causal mask the first two give all devices equal
        work. None is "zigzag", as in shard_sequence; but "contiguous" if the order of the tokens has no effect, i.e.
        without is_causal, window, mask, bias and score_mod. A DocumentLayout gives the devices equal work on packed
        documents: steps in which no document is shared are skipped. Only keys of cut documents are sent, or all keys
        if the kernels take much longer than this send. Its `steps` is the same in a hashable form. "documents" is any
        DocumentLayout: nothing is skipped. These three need the DocumentLayout's segment_ids and strategy "ring" or
        "auto", without mask, window, score_mod and bias.
      strategy: "ring": as above. "halo": under a window, each device gets only the keys and values of its neighbours
        that the window reaches. On both sides, the window may reach at most one run of tokens. A run is all of a
        device's tokens with "contiguous", half of them with "zigzag"; "striped" has none. "halo" takes no mask,
        score_mod or bias. "all_to_all": each device gets all tokens of some heads (Ulysses); the number of devices
        divides H and Hkv. "all_gather": each device gets all keys and values, and needs memory for them; only with
        "zigzag" and "contiguous". "auto": the strategy with the least predicted time that supports the
        call, by the costs in the block specs of the GPU; a differentiated call may have another strategy. With
        sends_ahead it is "ring". `explain` has the predicted times.
      sends_ahead: the number of steps, 1 or more, by which a ring sends keys and values ahead of their step. Each
        further step takes memory for the keys and values of one more device, and gives a send the time of one more
        step. None follows the block specs: 1. Other strategies take only None.
      mask: a masks.Mask of the whole sequence: of its S queries and keys in sequence order, the same on all devices.
        Each step visits the live blocks of its part. A step is skipped if it is known to be empty from the mask's
        structure, or from the cells of a block_sparse that are known while tracing. "auto" uses the ring for a mask
        with a dense array or a function. An array of the mask, such as the array of masks.dense, is whole on each
        device.
      is_causal, window, softcap, sinks, scale: as in flash_attention, by the tokens' positions in the whole sequence.
      score_mod: as in flash_attention; q_idx and kv_idx are positions in the whole sequence. The gradients of its
        closed-over arrays cover only the device's queries: without check_vma, sum them over the devices (psum).
      bias: as in flash_attention, [B or 1, H or 1, T or 1, S or 1]: rows for the device's queries in the layout's
        order, columns for all S keys in sequence order; shard_sequence(bias, ..., axis=2) returns this form. "auto"
        uses the ring.
      segment_ids: int32 [B, T], of a device's tokens: packed sequences. An id below 0 marks padding. Other
        integers are taken as in flash_attention; traced ids that may not fit int32 cost an all-gather of the ids. With
        documents also [B, S], DocumentLayout.ring_ids, the same on all devices: then no ids are sent.
      return_lse, deterministic, precision, implementation: as in flash_attention.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log. Both are
      differentiable. B, T and H may be 0: then both are empty, and nothing is sent.

    Raises:
      TypeError, ValueError, NotImplementedError: as flash_attention. ValueError if axis_name is not an axis of a
        jax.shard_map around the call, or the number of devices does not divide the heads.

    Sources: Liu et al., "Ring Attention with Blockwise Transformers" (2023), arXiv:2310.01889; Brandon et al., "Striped
    Attention" (2023), arXiv:2311.09431; Jacobs et al., "DeepSpeed Ulysses" (2023), arXiv:2309.14509.
    """
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "layout": layout,
        "strategy": strategy,
        "sends_ahead": sends_ahead,
        "mask": mask,
        "is_causal": is_causal,
        "window": window,
        "segment_ids": segment_ids,
        "sinks": sinks,
        "score_mod": score_mod,
        "bias": bias,
        "scale": scale,
        "softcap": softcap,
        "return_lse": return_lse,
        "deterministic": deterministic,
        "precision": precision,
        "implementation": implementation,
    }
    call, arrays = prepare(**arguments, axis_name=axis_name)
    if not _is_empty(arrays) and all(isinstance(size, int) for size in query.shape):
        arrays = composed(lambda: recorded(call, arrays, attention_of, _plan_with_traffic, arguments), arrays)
    out, lse = attention_of(call, arrays)
    return (out, lse) if return_lse else out


def _plan(*, axis_name: str, with_traffic: bool = False, **arguments: Any) -> RingPlan:
    def plan(**arguments: Any) -> RingPlan:
        with recorded_plans() as plans:
            call, arrays = prepare(**arguments, axis_name=axis_name)
        found = plan_of(call, arrays, plans[-1] if plans else None)
        return dataclasses.replace(found, **_traffic(call, arrays)) if with_traffic else found

    return on_axis(axis_name, plan, arguments)


_plan_with_traffic = functools.partial(_plan, with_traffic=True)


def _traffic(call: RingCall, arrays: RingArrays) -> dict[str, Any]:
    """The fields of RingPlan for jax_kernels.analyze."""
    differentiated = dataclasses.replace(call, strategy=call.differentiated)

    def gradients() -> Any:
        run = lambda q, k, v: _of_strategy(differentiated, arrays._replace(query=q, key=k, value=v))
        results, backward = jax.vjp(run, *arrays[:3])
        return backward(results)  # any cotangents

    sent = functools.partial(sent_bytes, axis_name=call.axis_name, devices=call.layout.devices)
    forward, of_forward = (sent(functools.partial(_of_strategy, x, arrays)) for x in (call, differentiated))
    return {
        "work": work_shares(call.layout, call.strategy),
        "sent_bytes": forward,
        "differentiated_work": work_shares(call.layout, call.differentiated),
        "differentiated_sent_bytes": (of_forward, sent(gradients) - of_forward),
    }


explained_as(_plan)(ring_attention)


def attention_of(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, Dv], lse float32 [B, H, T]) of a prepared call, differentiable.

    call, arrays: from `prepare`. Both results are NaN if a traced mask holds invalid values.
    """
    if _is_empty(arrays):
        return _empty_results(arrays)
    return mask_or_nan(_attention(call, arrays), None if arrays.mask is None else arrays.mask.is_valid)


def _is_empty(arrays: RingArrays) -> bool:
    return 0 in arrays.query.shape[:3]


def _empty_results(arrays: RingArrays) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, Dv], lse [B, H, T]) of a call in which B, T or H is 0. Both are empty and have no gradient."""
    batch, length, heads, _ = arrays.query.shape
    out = jnp.zeros((batch, length, heads, arrays.value.shape[-1]), arrays.query.dtype)
    return as_varying((out, jnp.zeros((batch, heads, length), jnp.float32)), varying_axes(arrays))


@jitted_in_eager_shard_map
def _attention(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, jax.Array]:
    if not call.by_xla:
        arrays = in_reverse_mode(arrays, vjp.REVERSE_MODE)
    by_strategy = _of_strategy if call.strategy == call.differentiated else _of_either
    return by_strategy(call, arrays)


def with_results(call: RingCall, arrays: RingArrays, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse), which an earlier attention_of gave, with the gradients of attention_of.

    They are not computed again, except with strategy "all_gather", a bias or a score_mod.
    """
    if _is_empty(arrays):
        return _empty_results(arrays)
    if call.differentiated == "all_gather" or arrays.bias is not None or arrays.score_mod is not None:
        return attention_of(call, arrays)
    if call.differentiated == "all_to_all":
        return all_to_all_attention(call, arrays, (out, lse))
    return vjp.with_results(call, arrays, out, lse)


def _of_strategy(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, jax.Array]:
    """(out, lse) by call.strategy."""
    strategies: dict[str, Any] = {
        "ring": run,
        "halo": run,
        "all_to_all": all_to_all_attention,
        "all_gather": all_gather_attention,
    }
    with inside_composed():
        return strategies[call.strategy](call, arrays)


def _of_either(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, jax.Array]:
    """(out, lse) by call.strategy; under differentiation, by call.differentiated."""
    return _plain_of_either(call, arrays) if call.by_xla else _by_kernels_of_either(call, arrays)


@under_defaults
def _of_either_forward(call: RingCall, arrays: RingArrays) -> Any:
    differentiated = dataclasses.replace(call, strategy=call.differentiated)
    return jax.vjp(functools.partial(_of_strategy, differentiated), arrays)


@under_defaults
def _of_either_backward(call: RingCall, backward: Any, cotangents: Any) -> Any:
    return backward(cotangents)


_by_kernels_of_either = jax.custom_vjp(_of_strategy, nondiff_argnums=(0,))
_by_kernels_of_either.defvjp(_of_either_forward, _of_either_backward)
_plain_of_either = in_both_modes(
    _of_strategy,
    _of_either_forward,
    _of_either_backward,
    plain=lambda call, arrays: _of_strategy(dataclasses.replace(call, strategy=call.differentiated), arrays),
)
