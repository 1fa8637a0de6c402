"""Attention of a shared sequence by heads: each device gets all tokens of some heads (Ulysses)."""

from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels.ops.attention import vjp
from jax_kernels.ops.attention.flash_attention import flash_attention, prepare
from jax_kernels.ops.ring.vjp import RingArrays, RingCall

__all__ = ["OF_HEADS", "all_to_all_attention"]

# Names for policies of jax.checkpoint: all tokens of a device's heads.
OF_HEADS = "ring_attention_query", "ring_attention_key", "ring_attention_value"


def all_to_all_attention(
    call: RingCall, arrays: RingArrays, results: tuple[jax.Array, jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a device's queries; JAX differentiates it.

    results: (out, lse) where they are known already, for their gradients with respect to the arrays.

    Raises:
      ValueError: the devices do not divide the heads.
    """
    layout, name = call.layout, call.axis_name
    for of, x in (("query", arrays.query), ("key", arrays.key)):
        if x.shape[2] % layout.devices:
            raise ValueError(
                f"{of}: got {x.shape[2]} heads on {layout.devices} devices with strategy='all_to_all', want a multiple"
            )

    def of_heads(x: jax.Array, heads: int = 2, tokens: int = 1) -> jax.Array:
        return layout.in_order(lax.all_to_all(x, name, split_axis=heads, concat_axis=tokens, tiled=True), tokens)

    def of_tokens(x: jax.Array, heads: int = 2, tokens: int = 1) -> jax.Array:
        x = layout.in_order(x, tokens, back=True)
        return lax.all_to_all(x, name, split_axis=tokens, concat_axis=heads, tiled=True)

    tensors = zip((arrays.query, arrays.key, arrays.value), OF_HEADS, strict=True)
    query, key, value = (checkpoint_name(of_heads(x), kept) for x, kept in tensors)
    arguments: dict[str, Any] = layout.limits | dict(call.options)
    arguments |= {"query": query, "key": key, "value": value, "return_lse": True}
    arguments |= {"segment_ids": _all_ids(call, arrays), "sinks": _own_sinks(call, arrays)}
    if results is None:
        out, lse = flash_attention(**arguments)
    else:
        out, lse = of_heads(results[0]), of_heads(results[1], 1, 2)
        out, lse = vjp.with_results(*prepare(**arguments), out, lse)
    return of_tokens(out), of_tokens(lse, 1, 2)


def _all_ids(call: RingCall, arrays: RingArrays) -> jax.Array | None:
    if arrays.segment_ids is None:
        return None
    return call.layout.in_order(lax.all_gather(arrays.segment_ids, call.axis_name, axis=1, tiled=True))


def _own_sinks(call: RingCall, arrays: RingArrays) -> jax.Array | None:
    """Those of the device's heads."""
    if arrays.sinks is None:
        return None
    own = arrays.sinks.shape[1] // call.layout.devices
    return lax.dynamic_slice_in_dim(arrays.sinks[0], call.index * own, own)
