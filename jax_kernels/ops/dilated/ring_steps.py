"""Attention of a segment that several devices share: its keys travel round the ring of these devices.

In the step of shift s, device i of the segment's n devices has the keys of device (i - s) mod n.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionResult
from jax_kernels.ops.attention import vjp as attention
from jax_kernels.ops.attention.vjp import AttentionCall
from jax_kernels.ops.dilated.sharded_segments import Span
from jax_kernels.ops.ring.partial_results import BackwardInputs, Pair, Visitors, forward_onto, with_norms

__all__ = ["forward", "gradients"]


def forward(span: Span, planned: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
    """The result (out, lse) of this device's queries over the keys of all devices that share the segment.

    planned: the attention call of one step. inputs: this device's compact arrays: query [entries, rows, heads, D], key
    and value alike. out has the dtype planned.out_dtype, lse is float32.
    """
    total, visitors = None, Visitors(Pair((inputs.key, inputs.value)), inputs.kv_segment_ids)
    upcoming: Any = Visitors(Pair.of(inputs.key, inputs.value), inputs.kv_segment_ids)
    for number, onward in zip(span.shifts, span.moves, strict=True):
        is_last = onward is None
        upcoming = None if onward is None else span.shifted(upcoming, onward)
        call, of_step = _step(span, number, planned, inputs, visitors)
        is_rounded = is_last and planned.out_dtype == str(inputs.query.dtype)
        total = forward_onto(call, with_norms(call, of_step, visitors.pair), total, is_last=is_rounded)
        # Without the barrier XLA may fuse work on the next keys with work on these keys, which then waits for both.
        total, visitors = lax.optimization_barrier((total, upcoming))
        upcoming = visitors
    assert total is not None
    return AttentionResult(total[0].astype(planned.out_dtype), total[1])


def gradients(
    span: Span, planned: AttentionCall, inputs: AttentionInputs, backward: BackwardInputs, so_far: jax.Array | None
) -> AttentionGradients:
    """The float32 gradients of this device's query, key and value, in the shapes of `inputs`.

    backward: dout and the row terms of this device's queries over the keys of all devices. so_far: None, or a float32
    array to which query's gradient, divided by the scale, is added; this sum is then returned as query's gradient. The
    gradients of keys and values follow the keys and values round the ring, one step behind.
    """
    planned = dataclasses.replace(planned, options=dataclasses.replace(planned.options, float32_gradients=True))
    # The barrier keeps XLA from saving the keys that arrived in the forward, which are the keys of all devices.
    inputs, backward = lax.optimization_barrier((inputs, backward))
    visitors = Visitors(Pair((inputs.key, inputs.value)), inputs.kv_segment_ids)
    upcoming: Any = Visitors(Pair.of(inputs.key, inputs.value), inputs.kv_segment_ids)
    dquery, mine, travelling, came = so_far, None, None, 0
    for number, onward in zip(span.shifts, span.moves, strict=True):
        upcoming = None if onward is None else span.shifted(upcoming, onward)
        travelling = None if travelling is None else span.shifted(travelling, number - came)
        call, of_step = _step(span, number, planned, inputs, visitors)
        given = () if so_far is None else (dquery,)
        found = attention.attention_gradients(call, of_step, backward.lse, backward.delta, backward.dout, *given)
        of_query, pair = found.query.astype(jnp.float32), Pair.of(found.key, found.value)
        dquery = of_query if so_far is not None or dquery is None else dquery + of_query
        (dquery, pair), visitors, travelling = lax.optimization_barrier(((dquery, pair), upcoming, travelling))
        upcoming = visitors
        if number == 0:
            mine = pair
        else:
            travelling = pair if travelling is None else jax.tree.map(jnp.add, travelling, pair)
        came = number
    assert mine is not None
    assert dquery is not None
    home = mine
    if travelling is not None:
        home = jax.tree.map(jnp.add, span.shifted(travelling, span.devices - came), mine)
    return AttentionGradients(dquery, home.key, home.value)


def _step(
    span: Span, number: int, planned: AttentionCall, inputs: AttentionInputs, visitors: Visitors
) -> tuple[AttentionCall, AttentionInputs]:
    """(call, arrays) of the step in which this device attends to the keys of the device that is `number` before it.

    planned: the call of step 0. visitors: that device's keys, values and segment ids. Under a causal mask, a device's
    queries see all keys of earlier devices and no keys of later devices.
    """
    key, value, kv_ids = visitors.pair.key, visitors.pair.value, visitors.segment_ids
    inputs = inputs._replace(key=key, value=value, kv_segment_ids=kv_ids)
    if not planned.options.is_causal or number == 0:
        return planned, attention.vary_alike(inputs)
    batch, rows = inputs.query.shape[:2]
    if planned.implementation == "mosaic_gpu":
        end = jnp.where(span.index >= number, jnp.int32(rows), 0)
        reach = jnp.broadcast_to(jnp.stack([jnp.int32(0), end]), (batch, 2))
        options = dataclasses.replace(planned.options, is_causal=False)
        return dataclasses.replace(planned, options=options), attention.vary_alike(inputs._replace(reach=reach))
    source = lax.rem(span.index - number + span.devices, jnp.int32(span.devices))
    first = jnp.full((batch,), (span.index - source) * rows, jnp.int32)
    options = dataclasses.replace(planned.options, q_offset=None)
    return dataclasses.replace(planned, options=options), attention.vary_alike(inputs._replace(q_offset=first))
