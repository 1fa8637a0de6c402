"""Exchanges between the devices of a ring: some tokens of all heads become all tokens of some heads, and back."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.tracing.derivatives import in_both_modes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["Exchange"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Exchanges between devices: arrays of a device's tokens and all heads become all tokens and a device's heads.

    heads, tokens: the arrays' axes of heads and of tokens. Device i of n gets the i-th of n equal ranges of heads.
    by_permutes: whether each pair of devices exchanges its part by permutes, instead of one all-to-all. The part that a
    device keeps is then not copied: XLA reads it in place, in the pass that sorts the tokens.
    """

    layout: Layout
    axis_name: str
    by_permutes: bool
    heads: int = 2
    tokens: int = 1

    def to_heads(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays with all tokens, in sequence order, of this device's heads. arrays: all heads of its own tokens.

        Their shapes may differ only in the number of heads: with by_permutes, they are sent as one array.
        """
        if self.by_permutes:
            return _to_heads(self, arrays)
        split = functools.partial(lax.all_to_all, split_axis=self.heads, concat_axis=self.tokens, tiled=True)
        return tuple(self.layout.in_order(split(x, self.axis_name), self.tokens) for x in arrays)

    def to_tokens(self, x: jax.Array) -> jax.Array:
        """The inverse of to_heads for one array: all heads of this device's tokens, in the layout's order."""
        if self.by_permutes:
            return _to_tokens(self, x)
        x = self.layout.in_order(x, self.tokens, back=True)
        return lax.all_to_all(x, self.axis_name, split_axis=self.tokens, concat_axis=self.heads, tiled=True)

    def arrivals(self, part: Callable[[Any], jax.Array]) -> list[jax.Array]:
        """The parts that the other devices send to this device. Entry i is from the device i + 1 before this one.

        part: takes the index of another device, a traced number, and returns the part that this device sends to it.
        """
        devices = self.layout.devices
        sent = [part(lax.rem(self.index + by, jnp.int32(devices))) for by in range(1, devices)]
        there = lambda by: [(i, (i + by) % devices) for i in range(devices)]
        return [lax.ppermute(x, self.axis_name, there(by)) for by, x in enumerate(sent, start=1)]

    @property
    def index(self) -> Any:
        return lax.axis_index(self.axis_name)


# JAX's own derivative of a slice would add arrays of zeros.
def _sent_to_heads(exchange: Exchange, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Arrays of a device's tokens and all heads become all tokens, in sequence order, of this device's heads.

    Each pair of devices exchanges its part by permutes. The arrays differ at most in the number of heads. It has no
    derivative of its own; Exchange.to_heads adds one.
    """
    devices, axis = exchange.layout.devices, exchange.heads
    sizes = [x.shape[axis] // devices for x in arrays]

    def part(device: Any) -> jax.Array:
        parts = [lax.dynamic_slice_in_dim(x, device * n, n, axis) for x, n in zip(arrays, sizes, strict=True)]
        return jnp.concatenate(parts, axis)

    own = [lax.dynamic_slice_in_dim(x, exchange.index * n, n, axis) for x, n in zip(arrays, sizes, strict=True)]
    ends = list(itertools.accumulate(sizes))[:-1]
    others = [jnp.split(x, ends, axis) for x in exchange.arrivals(part)]
    return tuple(_sorted_tokens(exchange, [mine, *rest]) for mine, *rest in zip(own, *others, strict=True))


def _sent_to_tokens(exchange: Exchange, x: jax.Array) -> jax.Array:
    """The inverse of _sent_to_heads for one array: all heads of this device's tokens, by permutes.

    The tokens are in the layout's order. It has no derivative of its own; Exchange.to_tokens adds one.
    """
    layout, axis = exchange.layout, exchange.tokens
    if layout.name != "zigzag":
        x = layout.in_order(x, axis, back=True)
        part = lambda device: lax.dynamic_slice_in_dim(x, device * layout.length, layout.length, axis)
    else:
        chunk = lambda number, device: lax.dynamic_slice_in_dim(x, layout.first(number, device), layout.chunk, axis)
        part = lambda device: jnp.concatenate([chunk(number, device) for number in range(2)], axis)
    out = _in_order_of_devices([part(exchange.index), *exchange.arrivals(part)], exchange.index, exchange.heads)
    # Without the barrier XLA fuses the concatenation with its consumer, e.g. a rotation of the keys' gradients, and
    # keeps the rotation's halves in float32.
    return lax.optimization_barrier(out)


def _sorted_tokens(exchange: Exchange, arrivals: Sequence[jax.Array]) -> jax.Array:
    """One array with the tokens of all devices, in sequence order.

    arrivals: parts with one device's tokens each: of this device, of the device before it, of the device before that.
    """
    layout, axis, index = exchange.layout, exchange.tokens, exchange.index
    if layout.name != "zigzag":
        return layout.in_order(_in_order_of_devices(arrivals, index, axis), axis)
    # Sequence order: the devices' first chunks in order, then their second chunks, starting with the last device.
    firsts, lasts = zip(*(jnp.split(arrived, 2, axis) for arrived in arrivals), strict=True)
    before = _around(lasts, lax.rem(index + 1, jnp.int32(layout.devices)), axis)
    return jnp.concatenate([_in_order_of_devices(firsts, index, axis), before], axis)


def _in_order_of_devices(arrivals: Sequence[jax.Array], index: Any, axis: int) -> jax.Array:
    """The parts of device 0, of device 1, and so on, concatenated along `axis`.

    arrivals: the parts of this device, of the device before it, and so on. index: this device's index, traced.
    """
    devices = len(arrivals)
    return _around([arrivals[0], *reversed(arrivals[1:])], lax.rem(devices - index, jnp.int32(devices)), axis)


def _around(pieces: Sequence[jax.Array], first: Any, axis: int) -> jax.Array:
    """The concatenation along `axis` of pieces[first:] and pieces[:first], for a traced `first`.

    XLA does not materialise the concatenation: it reads each value of the slice from the piece that has it.
    """
    size = pieces[0].shape[axis]
    twice = jnp.concatenate([*pieces, *pieces[:-1]], axis)
    return lax.dynamic_slice_in_dim(twice, first * size, len(pieces) * size, axis)


@under_defaults
def _to_heads_forward(exchange: Exchange, arrays: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
    return _to_heads(exchange, arrays), None


@under_defaults
def _to_heads_backward(exchange: Exchange, _: None, cotangents: tuple[jax.Array, ...]) -> Any:
    return (tuple(_to_tokens(exchange, x) for x in cotangents),)


@under_defaults
def _to_tokens_forward(exchange: Exchange, x: jax.Array) -> tuple[jax.Array, None]:
    return _to_tokens(exchange, x), None


@under_defaults
def _to_tokens_backward(exchange: Exchange, _: None, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    return _to_heads(exchange, (cotangent,))


_to_heads = in_both_modes(_sent_to_heads, _to_heads_forward, _to_heads_backward)
_to_tokens = in_both_modes(_sent_to_tokens, _to_tokens_forward, _to_tokens_backward)
