"""Attention of a sharded sequence under a window: a device gets only the keys that its window reaches.

The halo of a device is the keys of its neighbours that the window reaches. The halo travels while the device's queries
attend to the device's own keys. Then a second call takes the queries that see the halo, and merges its results with the
results of the first call. The backward begins with the halo: the halo's gradients travel back while the gradients of
the own keys are computed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention.flash_attention import prepare
from jax_kernels.ops.attention.vjp import with_options
from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.ops.ring.partial_results import BackwardInputs, Pair, Visitors, forward_onto, gradients_onto
from jax_kernels.ops.ring.ring_call import RingArrays, RingCall

__all__ = ["forward", "gradients", "planned_calls", "reason_against"]

TILE = 128  # tokens; halos are rounded up to a multiple of it if they can be: kernels take whole blocks of keys


def reason_against(layout: Layout) -> str | None:
    """The reason, in words for users, why strategy "halo" does not support a layout and its window; None if it does."""
    if layout.name == "striped":
        return "layout: got 'striped' with strategy='halo', want 'zigzag' or 'contiguous'"
    sides = layout.left, layout.right
    if any(side is None or side > layout.chunk for side in sides):
        return (
            f"window: got {tuple(-1 if side is None else side for side in sides)} with strategy='halo' and runs of "
            f"{layout.chunk} tokens on each device, want at most {layout.chunk} on both sides"
        )
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The halos on one side of the device's chunks: `count` tokens before the start of each chunk, or after its end.

    reach: the window's limit on this side, in tokens. index: this device's index, a traced number. The chunks of a
    device are merged into the batch: arrays are [B * chunks, tokens, ...].
    """

    call: RingCall
    is_before: bool
    reach: int
    index: Any

    @property
    def count(self) -> int:
        """The tokens of a halo: `reach` rounded up to whole tiles, at most a chunk."""
        return min(self.call.layout.chunk, -(-self.reach // TILE) * TILE)

    @property
    def rows(self) -> slice:
        """The queries of a chunk that may see the halo: its first `count` if is_before, else its last `count`."""
        return slice(0, self.count) if self.is_before else slice(self.call.layout.chunk - self.count, None)

    @property
    def edge(self) -> slice:
        """The keys of a chunk that are the halo of the chunk after it (is_before) or before it in the sequence."""
        return slice(self.call.layout.chunk - self.count, None) if self.is_before else slice(0, self.count)

    @property
    def offsets(self) -> jax.Array:
        """int32 [chunks]: for each chunk, the position of the first query in `rows` minus the halo's first position.

        It is the q_offset of the call of these queries with the halo. At an end of the sequence the halo is zeros. The
        distance is then larger than the window, so that no query of the chunk sees the halo.
        """
        is_inner, is_not_last = self.index > 0, self.index < self.call.layout.devices - 1
        if self.call.layout.chunks == 1:
            goes_on = [is_inner if self.is_before else is_not_last]
        else:
            goes_on = [is_inner, True] if self.is_before else [True, is_inner]
        # At twice the distance, the nearest query and key are count + 1 apart, which is more than the reach.
        distances = jnp.where(jnp.stack(goes_on), self.count, 2 * self.count)
        return distances if self.is_before else -distances

    @property
    def _arrivals(self) -> tuple[int, int]:
        """(index of the zigzag chunk whose halo comes from the device before this one, index of the other chunk)."""
        return (0, 1) if self.is_before else (1, 0)

    def exchanged(self, edges: Visitors) -> Visitors:
        """The halo of each chunk of this device, which other devices send.

        edges: the keys, values and ids that this device sends: of the tokens in `edge` of each of its chunks.
        """
        if self.call.layout.chunks == 1:
            return self._sent(edges, 1 if self.is_before else -1)
        of_chunks, (one, other) = self._apart(edges), self._arrivals
        from_previous, from_next = self._sent(of_chunks[one], 1), self._sent(of_chunks[other], -1)
        # The chunks of the last device are next to each other.
        found = [from_previous, self._on_last(of_chunks[one], from_next)]
        return self._together([found[one], found[other]])

    def given_back(self, pair: Pair) -> Pair:
        """The gradients of this device's edges, which other devices send. pair: the gradients of this device's halos.

        It is the transpose of `exchanged`.
        """
        if self.call.layout.chunks == 1:
            return self._sent(pair, -1 if self.is_before else 1)
        of_chunks, (one, other) = self._apart(pair), self._arrivals
        zeros = jax.tree.map(jnp.zeros_like, of_chunks[other])
        of_own = self._on_last(of_chunks[other], zeros)
        found = [
            jax.tree.map(jnp.add, self._sent(of_chunks[one], -1), of_own),
            self._sent(of_chunks[other], 1),
        ]
        return self._together([found[one], found[other]])

    def _on_last(self, tree: Any, others: Any) -> Any:
        """`tree` on the last device of the mesh axis, `others` on all other devices. Both have equal shapes."""
        is_last = self.index == self.call.layout.devices - 1
        return jax.tree.map(lambda x, y: jnp.where(is_last, x, y), tree, others)

    def _sent(self, tree: Any, by: int) -> Any:
        """The Pair or Visitors of the device `by` devices before this one; zeros if there is no such device."""
        devices = self.call.layout.devices
        there = [(i, i + by) for i in range(devices) if 0 <= i + by < devices]
        send = lambda tree: jax.tree.map(lambda x: lax.ppermute(x, self.call.axis_name, there), tree)
        pair = tree if isinstance(tree, Pair) else tree.pair
        sent = _as_two(send(Pair.of(pair.key, pair.value)))
        return sent if isinstance(tree, Pair) else Visitors(sent, send(tree.segment_ids))

    def _apart(self, tree: Any) -> list[Any]:
        """[the arrays of the first chunk, the arrays of the second], [B, ...] each, from arrays [B * 2, ...]."""
        return [jax.tree.map(lambda x, i=i: x.reshape(-1, 2, *x.shape[1:])[:, i], tree) for i in range(2)]

    def _together(self, trees: list[Any]) -> Any:
        return jax.tree.map(lambda *chunks: jnp.stack(chunks, 1).reshape(-1, *chunks[0].shape[1:]), *trees)


def _as_two(pair: Pair) -> Pair:
    return Pair((pair.key, pair.value))


def _sides(call: RingCall) -> list[Side]:
    """The sides on which a device gets a halo: none for one device, and no side on which the window's limit is 0."""
    if call.layout.devices == 1:  # its tokens are one chunk
        return []
    index, reaches = call.index, (call.layout.left, call.layout.right)
    return [
        Side(call=call, is_before=is_before, reach=reach, index=index)
        for is_before, reach in zip((True, False), reaches, strict=True)
        if reach
    ]


def _in_chunks(layout: Layout, x: Any, axis: int = 1) -> Any:
    """A device's array with its chunks merged into the batch: [B, T, ...] -> [B * chunks, tokens of a chunk, ...].

    axis: the axis of the tokens: 2 for an array [B, H, T]. None stays None.
    """
    if x is None:
        return None
    x = x.reshape(*x.shape[:axis], layout.chunks, layout.chunk, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis, 1)
    return x.reshape(-1, *x.shape[2:])


def _whole(layout: Layout, x: jax.Array, axis: int = 1) -> jax.Array:
    """[B * chunks, tokens of a chunk, ...] -> [B, T, ...]: the inverse of _in_chunks."""
    x = jnp.moveaxis(x.reshape(-1, layout.chunks, *x.shape[1:]), 1, axis)
    return x.reshape(*x.shape[:axis], layout.length, *x.shape[axis + 2 :])


def _replaced(x: jax.Array, rows: slice, part: jax.Array, axis: int = 1) -> jax.Array:
    """x with `part` in its first rows if rows.start is 0, else in its last rows. Returns part's dtype."""
    size = x.shape[axis] - part.shape[axis]
    if rows.start == 0:
        rest = lax.slice_in_dim(x, part.shape[axis], None, axis=axis)
        return jnp.concatenate([part, rest.astype(part.dtype)], axis) if size else part
    rest = lax.slice_in_dim(x, 0, size, axis=axis)
    return jnp.concatenate([rest.astype(part.dtype), part], axis) if size else part


def _own(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, Visitors]:
    """(query, Visitors of the device's own keys), with the device's chunks merged into the batch."""
    query, key, value, ids = (_in_chunks(call.layout, x) for x in arrays[:4])
    return query, Visitors(Pair((key, value)), ids)


def _prepared(call: RingCall, query: Any, q_ids: Any, of_keys: Visitors, offsets: Any, sinks: Any = None) -> Any:
    """(AttentionCall, AttentionInputs) of some queries of each chunk, with some keys for each chunk.

    All arrays have the chunks merged into the batch. query: [B * chunks, queries, H, D]. q_ids: the queries' segment
    ids, or None. of_keys: the Visitors of the keys. offsets: int32 [chunks], the position of the first query minus the
    position of the first key, for each chunk; None is 0. sinks: float32 [H] or None.
    """
    batch = query.shape[0] // call.layout.chunks
    arguments = FlashArguments(
        query=query,
        key=of_keys.pair.key,
        value=of_keys.pair.value,
        **call.layout.limits,
        q_offset=0 if offsets is None else jnp.tile(offsets, batch),
        segment_ids=None if q_ids is None else (q_ids, of_keys.segment_ids),
        sinks=sinks,
        return_lse=True,
        **dict(call.options),
    )
    return prepare(arguments)


def _of_side(call: RingCall, side: Side, query: jax.Array, own: Visitors, halo: Visitors) -> tuple[Any, Any]:
    """(AttentionCall, AttentionInputs) of the queries that see the halo of one side, with the halo as keys.

    query, own: all queries of this device and the Visitors of its own keys, whose ids are the queries' too. halo: the
    Visitors of the halo. The chunks are merged into the batch.
    """
    ids = own.segment_ids
    return _prepared(call, query[:, side.rows], None if ids is None else ids[:, side.rows], halo, side.offsets)


def _halos(call: RingCall, own: Visitors) -> list[Visitors]:
    """The halo of each side, received from the other devices. own: the keys of this device."""
    return [side.exchanged(jax.tree.map(lambda x, at=side.edge: x[:, at], own)) for side in _sides(call)]


def planned_calls(call: RingCall, arrays: RingArrays) -> dict[str, Callable[[], Any]]:
    """Functions without arguments that return the AttentionCall of each call of `forward`.

    The dict's keys describe, for users, the keys to which the call attends.
    """
    query, own = _own(call, arrays)

    def of_halo(side: Side) -> Any:
        halo = jax.tree.map(lambda x: x[:, side.edge], own)  # a halo has the shapes of an edge
        return _of_side(call, side, query, own, halo)[0]

    sinks = None if arrays.sinks is None else arrays.sinks[0]
    found: dict[str, Callable[[], Any]] = {
        "own keys": lambda: _prepared(call, query, own.segment_ids, own, None, sinks)[0]
    }
    for side in _sides(call):
        found[f"{side.count} keys {'before' if side.is_before else 'after'} each run"] = functools.partial(
            of_halo, side
        )
    return found


def forward(call: RingCall, arrays: RingArrays) -> tuple[jax.Array, jax.Array, list[Visitors]]:
    """(out [B, T, H, Dv], lse float32 [B, H, T], halos) of a device's queries, over own keys, halos and sinks.

    out is float32 or has query's dtype. halos: the Visitors of each side that arrived, which `gradients` takes.
    """
    sides, (query, own) = _sides(call), _own(call, arrays)
    halos = _halos(call, own)
    sinks = None if arrays.sinks is None else arrays.sinks[0]
    planned, inputs = _prepared(call, query, own.segment_ids, own, None, sinks)
    out, lse = forward_onto(planned, inputs, None, is_last=not sides)
    for side, halo in zip(sides, halos, strict=True):
        rows = side.rows
        planned, inputs = _of_side(call, side, query, own, halo)
        some, lse_of_some = forward_onto(planned, inputs, (out[:, rows], lse[:, :, rows]), is_last=side is sides[-1])
        out, lse = _replaced(out, rows, some), _replaced(lse, rows, lse_of_some, 2)
    return _whole(call.layout, out), _whole(call.layout, lse, 2), halos


def gradients(
    call: RingCall, arrays: RingArrays, backward: BackwardInputs, halos: list[Visitors] | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query (divided by the scale), key and value, all float32, [B, T, heads, ...].

    halos: from `forward`; None if not kept: then devices exchange them again.
    """
    layout, sides, (query, own) = call.layout, _sides(call), _own(call, arrays)
    halos = _halos(call, own) if halos is None else halos
    lse, delta, dout = (
        _in_chunks(layout, x, axis) for x, axis in ((backward.lse, 2), (backward.delta, 2), (backward.dout, 1))
    )
    dquery = jnp.zeros_like(query, jnp.float32)
    returning = []
    for side, halo in zip(sides, halos, strict=True):
        some = side.rows
        planned, inputs = _of_side(call, side, query, own, halo)
        of_some = BackwardInputs(lse[:, :, some], delta[:, :, some], dout[:, some])
        planned = with_options(planned, float32_gradients=True)
        found, pair = gradients_onto(planned, inputs, of_some, dquery[:, some], call.scale)
        dquery = _replaced(dquery, some, found)
        returning.append(side.given_back(_as_two(pair)))
    planned, inputs = _prepared(call, query, own.segment_ids, own, None)
    planned = with_options(planned, float32_gradients=True)
    dquery, pair = gradients_onto(planned, inputs, BackwardInputs(lse, delta, dout), dquery, call.scale)
    total = _as_two(pair)
    for side, of_edge in zip(sides, returning, strict=True):
        total = jax.tree.map(lambda x, part, side=side: x + _padded(x, side.edge, part), total, of_edge)
    return _whole(layout, dquery), _whole(layout, total.key), _whole(layout, total.value)


def _padded(x: jax.Array, rows: slice, part: jax.Array) -> jax.Array:
    """`part`, padded with zeros to the rows of x: it has the first rows if rows.start is 0, else the last rows."""
    rest = x.shape[1] - part.shape[1]
    return jnp.pad(part, [(0, 0), (0, rest) if rows.start == 0 else (rest, 0), (0, 0), (0, 0)])
