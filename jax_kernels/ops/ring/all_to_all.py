"""Attention of a sharded sequence by heads: each device gets all tokens of some heads (Ulysses)."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention import vjp
from jax_kernels.ops.attention.flash_attention import flash_attention, prepare
from jax_kernels.ops.ring.head_exchange import Exchange
from jax_kernels.ops.ring.ring_call import RingArrays, RingCall
from jax_kernels.ops.ring.vjp import RESIDUALS
from jax_kernels.score_mod.restriction import placed

__all__ = ["OF_HEADS", "all_to_all_attention", "attention_arguments"]

# Names for policies of jax.checkpoint. The arrays have all tokens of a device's heads.
OF_HEADS = "ring_attention_query", "ring_attention_key", "ring_attention_value"


def all_to_all_attention(
    call: RingCall, arrays: RingArrays, results: tuple[jax.Array, jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, Dv], lse float32 [B, H, T]) of a device's queries, differentiable.

    results: (out, lse) if they are known already. They are then returned without computing the attention again, with
    their gradients with respect to the arrays.

    Raises:
      ValueError: the number of devices does not divide the heads.
    """
    arguments, exchange, of_rows = attention_arguments(call, arrays)
    if results is None:
        out, lse = flash_attention(**arguments)
    else:
        out, lse = *exchange.to_heads(results[0]), *of_rows.to_heads(results[1])
        out, lse = vjp.with_results(*prepare(FlashArguments(**arguments)), out, lse)
    # A policy that keeps this result spares the layers after the attention a second exchange in their backward.
    return checkpoint_name(exchange.to_tokens(out), RESIDUALS[0]), of_rows.to_tokens(lse)


def attention_arguments(call: RingCall, arrays: RingArrays) -> tuple[dict[str, Any], Exchange, Exchange]:
    """(the arguments of flash_attention by name, the Exchange of query, key, value and out, the Exchange of lse).

    The arguments have all tokens of this device's heads, which other devices have sent.

    Raises:
      ValueError: the number of devices does not divide the heads.
    """
    layout, name = call.layout, call.axis_name
    for of, x in (("query", arrays.query), ("key", arrays.key)):
        if x.shape[2] % layout.devices:
            raise ValueError(
                f"{of}: got {x.shape[2]} heads on {layout.devices} devices with strategy='all_to_all', want a multiple"
            )

    exchange = Exchange(layout=layout, axis_name=name, by_permutes=layout.devices <= call.permutes_up_to)
    of_rows = dataclasses.replace(exchange, heads=1, tokens=2)  # for lse and bias
    # Queries and keys are exchanged together, so that a model's projection of the values can run at the same time.
    tensors = *exchange.to_heads(arrays.query, arrays.key), *exchange.to_heads(arrays.value)
    query, key, value = (checkpoint_name(x, kept) for x, kept in zip(tensors, OF_HEADS, strict=True))
    arguments: dict[str, Any] = layout.limits | dict(call.options)
    arguments |= {"query": query, "key": key, "value": value, "return_lse": True}
    arguments |= {"segment_ids": _all_ids(call, arrays), "sinks": _own_sinks(call, arrays)}
    if arrays.mask is not None:
        own = query.shape[2]
        arguments["mask"] = arrays.mask.of_heads(call.index * own, own)
    if arrays.score_mod is not None:
        first = call.index * query.shape[2]
        of_whole = lambda h, q, k, first: (h + first, q, k)
        arguments["score_mod"] = placed(arrays.score_mod, of_whole, (first,))
    if arrays.bias is not None:
        arguments["bias"] = _own_bias(call, arrays.bias, of_rows)
    return arguments, exchange, of_rows


def _all_ids(call: RingCall, arrays: RingArrays) -> jax.Array | None:
    if arrays.segment_ids is None:
        return None
    return call.layout.in_order(lax.all_gather(arrays.segment_ids, call.axis_name, axis=1, tiled=True))


def _own_bias(call: RingCall, bias: jax.Array, exchange: Exchange) -> jax.Array:
    """The bias for this device's heads and the queries of all devices.

    bias: for all heads and this device's queries, [B or 1, H or 1, T or 1, S or 1]. exchange: with heads at axis 1 and
    tokens at axis 2.
    """
    has_heads, has_rows = (size > 1 for size in bias.shape[1:3])
    if has_rows and has_heads:
        return exchange.to_heads(bias)[0]
    if has_rows:
        return call.layout.in_order(lax.all_gather(bias, call.axis_name, axis=2, tiled=True), 2)
    own = bias.shape[1] // call.layout.devices
    return lax.dynamic_slice_in_dim(bias, call.index * own, own, 1) if has_heads else bias


def _own_sinks(call: RingCall, arrays: RingArrays) -> jax.Array | None:
    if arrays.sinks is None:
        return None
    own = arrays.sinks.shape[1] // call.layout.devices
    return lax.dynamic_slice_in_dim(arrays.sinks[0], call.index * own, own)
