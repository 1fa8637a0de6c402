"""Attention of a shared sequence under a window: a device gets the keys that its window reaches, and no others.

They are those of its neighbours that stand next to its own, the halo of its tokens. One call of the attention kernels
takes them with the device's own keys, so that no steps have to be merged.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.ops.attention.flash_attention import prepare
from jax_kernels.ops.attention.vjp import attention_forward, attention_gradients, with_options
from jax_kernels.ops.ring.call import RingArrays, RingCall
from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.ops.ring.steps import Pair, Rows, Visitors

__all__ = ["Halo", "forward", "gradients", "reason_against"]

TILE = 128  # tokens, of which a halo is a multiple where it can be: the kernels take whole blocks of keys


def reason_against(layout: Layout) -> str | None:
    """Why the tokens of this layout cannot be served, or None."""
    if layout.name == "striped":
        return "layout: got 'striped' with strategy='halo', want 'zigzag' or 'contiguous'"
    sides = layout.left, layout.right
    if None in sides or max(sides) > layout.chunk:
        return (
            f"window: got {tuple(-1 if side is None else side for side in sides)} with strategy='halo' and runs of "
            f"{layout.chunk} tokens on each device, want at most {layout.chunk} on both sides"
        )
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halo:
    """The tokens beside each chunk of a device's: `before` of them before its first, `after` behind its last.

    index: of the device, a traced number. A chunk with its halo has `extent` tokens, in their order, but for the first
    and the last chunk of the sequence: the halo on their outer side is zeros, and stands at the other end.
    """

    layout: Layout
    axis_name: str
    index: Any

    @property
    def before(self) -> int:
        return self._rounded(self.layout.left)

    @property
    def after(self) -> int:
        return self._rounded(self.layout.right)

    @property
    def extent(self) -> int:
        return self.before + self.layout.chunk + self.after

    def _rounded(self, side: int | None) -> int:
        if self.layout.devices * self.layout.chunks == 1:
            return 0
        assert side is not None
        return min(self.layout.chunk, -(-side // TILE) * TILE)

    @property
    def _is_last(self) -> Any:
        return self.index == self.layout.devices - 1

    @property
    def places(self) -> list[Any]:
        """Of each chunk, where its own first token stands: int32 numbers."""
        is_first = self.index == 0
        inner, end = jnp.int32(self.before), jnp.int32(self.before + self.after)
        if self.layout.chunks == 1:
            return [jnp.where(is_first, 0, jnp.where(self._is_last, end, inner))]
        return [jnp.where(is_first, 0, inner), jnp.where(is_first, end, inner)]

    def extended(self, tree: Visitors) -> Visitors:
        """Each chunk with its halo: arrays [B * chunks, extent, ...], of such as [B, T, ...]."""
        chunk, before = self.layout.chunk, self.before
        cut = lambda start, size: jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + size, axis=1), tree)
        tail, head = (lambda i: cut((i + 1) * chunk - before, before)), (lambda i: cut(i * chunk, self.after))
        if self.layout.chunks == 1:
            beside = [(self._sent(tail(0), 1), self._sent(head(0), -1))]
        else:
            # The second chunks come in the opposite order. Behind the last device's first chunk comes its own second.
            to_next, to_previous = _joined(tail(0), head(1)), _joined(tail(1), head(0))
            (before_0, after_1), (before_1, after_0) = (
                _parted(x, before)
                for x in (self._sent(to_next, 1), _chosen(self._is_last, to_next, self._sent(to_previous, -1)))
            )
            beside = [(before_0, after_0), (before_1, after_1)]

        def rotated(place: Any, before: jax.Array, own: jax.Array, after: jax.Array) -> jax.Array:
            around = jnp.concatenate([after, before, own, after, before], 1)
            return lax.dynamic_slice_in_dim(around, self.before + self.after - place, self.extent, 1)

        rows = []
        for number, (place, (before_it, after_it)) in enumerate(zip(self.places, beside, strict=True)):
            own = cut(number * chunk, chunk)
            rows.append(jax.tree.map(lambda *parts, place=place: rotated(place, *parts), before_it, own, after_it))
        return jax.tree.map(lambda *chunks: jnp.stack(chunks, 1).reshape(-1, *chunks[0].shape[1:]), *rows)

    def returned(self, pair: Pair) -> Pair:
        """The gradients of [B, T, ...] from those of `extended`: what was sent goes back, and is added where it was."""
        layout, chunk, before, after = self.layout, self.layout.chunk, self.before, self.after
        parts = jax.tree.map(lambda x: x.reshape(-1, layout.chunks, *x.shape[1:]), pair)

        def part(number: int, start: Any, size: int) -> Pair:
            at = lax.rem(self.places[number] + start + self.extent, jnp.int32(self.extent))
            return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x[:, number], at, size, 1), parts)

        of_before = [part(number, -before, before) for number in range(layout.chunks)]
        of_after = [part(number, chunk, after) for number in range(layout.chunks)]
        if layout.chunks == 1:
            tails, heads = [self._sent(of_before[0], -1)], [self._sent(of_after[0], 1)]
        else:
            to_next = _joined(of_before[1], of_after[0])
            of_next = self._sent(_joined(of_before[0], of_after[1]), -1)
            of_next = jax.tree.map(lambda x, own: x + jnp.where(self._is_last, own, 0), of_next, to_next)
            (tail_0, head_1), (tail_1, head_0) = (_parted(x, before) for x in (of_next, self._sent(to_next, 1)))
            tails, heads = [tail_0, tail_1], [head_0, head_1]

        def total(own: jax.Array, tail: jax.Array, head: jax.Array) -> jax.Array:
            padded = lambda x, low, high: jnp.pad(x, [(0, 0), (low, high)] + [(0, 0)] * (x.ndim - 2))
            return own + padded(tail, chunk - before, 0) + padded(head, 0, chunk - after)

        own = [part(number, 0, chunk) for number in range(layout.chunks)]
        sums = [jax.tree.map(total, *of_chunk) for of_chunk in zip(own, tails, heads, strict=True)]
        return jax.tree.map(lambda *chunks: jnp.concatenate(chunks, 1), *sums)

    def _sent(self, tree: Any, by: int) -> Any:
        """The arrays of the device `by` places before this one; zeros where there is none."""
        devices = self.layout.devices
        there = [(i, i + by) for i in range(devices) if 0 <= i + by < devices]
        if isinstance(tree, Visitors):
            return Visitors(self._sent(tree.pair, by), self._sent(tree.segment_ids, by))
        if isinstance(tree, Pair) and tree.key.size:
            sent = jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, there), Pair.of(tree.key, tree.value))
            return Pair((sent.key, sent.value))
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, there) if x.size else x, tree)


def _joined(one: Any, other: Any) -> Any:
    return jax.tree.map(lambda *both: jnp.concatenate(both, 1), one, other)


def _parted(tree: Any, at: int) -> tuple[Any, Any]:
    return jax.tree.map(lambda x: x[:, :at], tree), jax.tree.map(lambda x: x[:, at:], tree)


def _chosen(which: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(which, x, y), one, other)


def _halo(call: RingCall) -> Halo:
    return Halo(layout=call.layout, axis_name=call.axis_name, index=call.index)


def _in_chunks(layout: Layout, x: jax.Array, axis: int = 1) -> jax.Array:
    """The chunks of an array's tokens as a batch: with axis=1 of [B, T, ...], with axis=2 of [B, H, T]."""
    x = x.reshape(*x.shape[:axis], layout.chunks, layout.chunk, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis, 1)
    return x.reshape(-1, *x.shape[2:])


def _whole(layout: Layout, x: jax.Array, axis: int = 1) -> jax.Array:
    """The inverse of _in_chunks."""
    x = jnp.moveaxis(x.reshape(-1, layout.chunks, *x.shape[1:]), 1, axis)
    return x.reshape(*x.shape[:axis], layout.length, *x.shape[axis + 2 :])


def _prepared(call: RingCall, arrays: RingArrays, sinks: Any) -> tuple[Any, Any]:
    """The planned call of all chunks, a batch, and its arrays."""
    layout, halo, ids = call.layout, _halo(call), arrays.segment_ids
    extended = halo.extended(Visitors(Pair((arrays.key, arrays.value)), ids))
    return prepare(
        query=_in_chunks(layout, arrays.query),
        key=extended.pair.key,
        value=extended.pair.value,
        **layout.limits,
        q_offset=jnp.tile(jnp.stack(halo.places), arrays.query.shape[0]),
        segment_ids=None if ids is None else (_in_chunks(layout, ids), extended.segment_ids),
        sinks=sinks,
        return_lse=True,
        **dict(call.options),
    )


def forward(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of a device's queries."""
    out, lse, *_ = attention_forward(*_prepared(call, arrays, None if arrays.sinks is None else arrays.sinks[0]))
    return _whole(call.layout, out), _whole(call.layout, lse, 2)


def gradients(call: RingCall, arrays: RingArrays, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The float32 gradients of query, over the scale, and of key and value."""
    layout = call.layout
    # Opaque: else XLA keeps the keys with their halos from the forward.
    key, value = lax.optimization_barrier((arrays.key, arrays.value))
    planned, inputs = _prepared(call, arrays._replace(key=key, value=value), None)
    lse, delta = (_in_chunks(layout, x, 2) for x in (rows.lse, rows.delta))
    planned = with_options(planned, float32_gradients=True)
    found = attention_gradients(planned, inputs, lse, delta, _in_chunks(layout, rows.dout))
    pair = _halo(call).returned(Pair(tuple(x.astype(jnp.float32) for x in (found.key, found.value))))
    return _whole(layout, found.query).astype(jnp.float32) / call.scale, pair.key, pair.value
