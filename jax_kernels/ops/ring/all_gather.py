"""Attention of a sharded sequence by one all-gather of its keys and values: no step waits for another step.

It takes memory for all keys and values on each device. It is for sequences so short that a ring's step takes less time
than its launch.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.ops.ring.ring_call import RingArrays, RingCall
from jax_kernels.score_mod.restriction import placed
from jax_kernels.tracing.derivatives import in_both_modes

__all__ = ["all_gather_attention", "attention_arguments"]


def all_gather_attention(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, Dv], lse float32 [B, H, T]) of a device's queries, differentiable.

    Each device rounds its gradients of all keys and values to their dtype. The sums over devices are float32.
    """
    found = [flash_attention(**arguments) for arguments in attention_arguments(call, arrays)]
    return jnp.concatenate([out for out, _ in found], 1), jnp.concatenate([lse for _, lse in found], 2)


def attention_arguments(call: RingCall, arrays: RingArrays) -> Iterator[dict[str, Any]]:
    """The arguments of flash_attention by name, for each chunk of a device's queries with the keys of all devices.

    Raises ValueError for the layout "striped".
    """
    layout, axis_name = call.layout, call.axis_name
    if layout.name == "striped":
        raise ValueError("layout: got 'striped' with strategy='all_gather', want 'zigzag' or 'contiguous'")
    keys, values = (_gathered((axis_name, layout), x) for x in (arrays.key, arrays.value))
    of_chunks: Any = lambda x: [None] * layout.chunks if x is None else jnp.split(x, layout.chunks, 1)
    ids = arrays.segment_ids
    all_ids = None if ids is None else layout.in_order(lax.all_gather(ids, axis_name, axis=1, tiled=True))
    index = lax.axis_index(axis_name)
    for chunk, (query, q_ids) in enumerate(zip(of_chunks(arrays.query), of_chunks(ids), strict=True)):
        first = layout.first(chunk, index)
        limits: dict[str, Any] = {**layout.limits, "q_offset": first}
        if arrays.mask is not None:
            limits = {"mask": layout.placed_among_all(arrays.mask, first)}
        if arrays.score_mod is not None:
            limits["score_mod"] = placed(arrays.score_mod, lambda h, q, k, first: (h, q + first, k), (first,))
        if arrays.bias is not None:
            has_rows = arrays.bias.shape[2] > 1
            limits["bias"] = jnp.split(arrays.bias, layout.chunks, 2)[chunk] if has_rows else arrays.bias
        yield {
            "query": query,
            "key": keys[chunk],
            "value": values[chunk],
            **limits,
            "segment_ids": None if all_ids is None else (q_ids, all_ids),
            "sinks": None if arrays.sinks is None else arrays.sinks[0],
            "return_lse": True,
            **dict(call.options),
        }


def _in_order(to: tuple[str, Layout], x: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays of all devices joined in sequence order, [B, S, ...], once for each chunk of a device's queries.

    to: (name of the mesh axis, layout). x: [B, T, ...], of this device. A copy for each chunk gives each chunk a
    gradient of its own.
    """
    axis_name, layout = to
    return (layout.in_order(lax.all_gather(x, axis_name, axis=1, tiled=True)),) * layout.chunks


def _gathered_forward(to: tuple[str, Layout], x: jax.Array) -> tuple[Any, Any]:
    return _gathered(to, x), None


def _gathered_backward(to: tuple[str, Layout], _: None, cotangents: Any) -> tuple[jax.Array]:
    """(The gradient of this device's x,): the sum over chunks and devices in float32, rounded once."""
    axis_name, layout = to
    dtype = cotangents[0].dtype
    total = functools.reduce(jnp.add, [x.astype(jnp.float32) for x in cotangents])
    total = layout.in_order(total, back=True)
    return (lax.psum_scatter(total, axis_name, scatter_dimension=1, tiled=True).astype(dtype),)


_gathered = in_both_modes(_in_order, _gathered_forward, _gathered_backward)
