"""Dilated attention's segments that several devices share: each device has some of their tokens."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kernels.hilbert import hilbert_order

__all__ = ["ROW_MULTIPLE", "Deal", "Shards", "Span", "classes_of", "dealt_out"]

ROW_MULTIPLE = 8  # tiles of the tensor memory accelerator have a multiple of this many rows


@dataclasses.dataclass(frozen=True)
class Span:
    """The devices that share a segment: `devices` neighbours along a mesh axis of `everyone` devices.

    The neighbours form a ring. shifts: the distances over which keys travel round it, ascending from 0. For each shift
    s there is a step in which device i attends to the keys of device (i - s) % devices.
    """

    axis_name: str
    devices: int
    everyone: int
    shifts: tuple[int, ...]

    @property
    def moves(self) -> tuple[int | None, ...]:
        """For each of `shifts`, the number of devices by which keys travel on to the next shift; None for the last."""
        return *(later - shift for shift, later in itertools.pairwise(self.shifts)), None

    @property
    def index(self) -> jax.Array:
        """This device's index among the devices of its segment, a traced int32."""
        return lax.axis_index(self.axis_name) % self.devices

    def shifted(self, tree: Any, by: int) -> Any:
        """The tree of the device that is `by` devices before this one in the ring. tree: this device's arrays."""
        n = self.devices
        there = [(first + i, first + (i + by) % n) for first in range(0, self.everyone, n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, there), tree)

    def mine(self, table: np.ndarray) -> jax.Array:
        """This device's row of a table [devices, ...] with one row for each device of a segment."""
        return jnp.asarray(table)[self.index]


@dataclasses.dataclass(frozen=True)
class Deal:
    """The rule that sorts each device's tokens by class, if segments begin or end within a device.

    The segments lie on `devices` neighbouring devices with `length` tokens each, and no segment crosses to others.
    runs: (number of segments, tokens of each, rate) of adjacent equal segments, which together are all tokens of these
    devices. order: None, or "hilbert" for positions along the Hilbert curve. is_by_class: whether a head takes one
    class of each segment. Then the tokens of class c have the indices c, c + rate, c + 2 * rate, ... with the rate of
    the first run. Else a head takes all tokens, and the tokens of each class of each segment are stored next to each
    other.
    """

    length: int
    devices: int
    runs: tuple[tuple[int, int, int], ...]
    order: str | None
    is_by_class: bool

    @property
    def rate(self) -> int:
        """The distance between the indices of neighbouring tokens of one class, in a device's sorted tokens.

        It is the rate of the first run if is_by_class, else 1.
        """
        return self.runs[0][2] if self.is_by_class else 1

    @property
    def tables(self) -> "Tables":
        return _tables(self)

    def shifts(self, *, is_causal: bool) -> tuple[int, ...]:
        """The distances round the ring between devices that have tokens of one segment, ascending from 0 (Span.shifts).

        is_causal: leave out distances that only bring keys of later devices.
        """
        reach = start = 0
        for count, size, _ in self.runs:
            first = start + size * np.arange(count)
            reach = max(reach, int(((first + size - 1) // self.length - first // self.length).max()))
            start += count * size
        behind = () if is_causal else (self.devices - distance for distance in range(1, reach + 1))
        return tuple(sorted({*range(reach + 1), *behind}))

    def joined(self, span: Span, ids: jax.Array | None, batch: int) -> jax.Array:
        """int32 [B, length]: segment ids for this device's tokens. Equal ids mean that two tokens may attend.

        Two tokens of the span get equal ids if their `groups` in Tables and the caller's ids are equal. A caller's id
        below 0 gives -1. ids: int32 [B, length], the caller's ids of this device's tokens, or None. The ids of all
        devices are gathered, so that all devices give a pair (group, id) the same number: its rank among the pairs.
        """
        groups = span.mine(self.tables.groups)
        if ids is None:
            return jnp.broadcast_to(groups, (batch, self.length))
        first = lax.axis_index(span.axis_name) // self.devices * (self.devices * self.length)
        every = lax.all_gather(ids, span.axis_name, axis=1, tiled=True)
        every = lax.dynamic_slice_in_dim(every, first, self.devices * self.length, axis=1)
        of_every = jnp.broadcast_to(self.tables.groups.reshape(-1), every.shape)
        places = lax.broadcasted_iota(jnp.int32, every.shape, 1)
        *pairs, places = lax.sort((of_every, every, places), dimension=1, num_keys=2)
        is_new = functools.reduce(jnp.logical_or, (x[:, 1:] != x[:, :-1] for x in pairs))
        ranks = jnp.cumsum(jnp.pad(is_new, [(0, 0), (1, 0)]), axis=1, dtype=jnp.int32)
        _, ranks = lax.sort((places, ranks), dimension=1, num_keys=1)
        mine = lax.dynamic_slice_in_dim(ranks, span.index * self.length, self.length, axis=1)
        return jnp.where(ids < 0, -1, mine)


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """The int32 tables of a Deal, with one row for each device.

    at: [devices, indices], the device's token at each index of its sorted tokens; the number of its tokens at an index
    without a token. `places`: [devices, tokens], the index of each token. groups: [devices, tokens], the number of each
    token's segment if Deal.is_by_class; else the number of its class, counted over all segments.
    """

    at: np.ndarray
    places: np.ndarray
    groups: np.ndarray


@dataclasses.dataclass(frozen=True)
class Shards:
    """A mesh axis over which a sequence is sharded: device i has the i-th of `devices` equal runs of tokens."""

    axis_name: str
    devices: int

    def fits(self, size: int, rate: int, length: int) -> bool:
        """Whether no Deal is needed: each segment is on one device, or each segment consists of whole devices.

        In the second case, the rate must divide a device's tokens, so that all classes have equally many tokens on a
        device. size: the tokens of a segment, at most the tokens of all devices. length: the tokens of a device.
        """
        if size <= length:
            return length % size == 0
        return size % length == 0 and self.devices % (size // length) == 0 and length % rate == 0

    def span(self, size: int, length: int) -> Span | None:
        """The Span of segments for which `fits` is True; None if each segment is on one device.

        size: the tokens of a segment. length: the tokens of a device.
        """
        count = size // length
        return Span(self.axis_name, count, self.devices, tuple(range(count))) if size > length else None

    def deal(self, runs: Sequence[tuple[int, int, int]], length: int, order: str | None, *, is_by_class: bool) -> Deal:
        """The Deal of segments for which `fits` is False.

        runs: (number of segments, tokens of each, rate) of adjacent equal segments, for the whole sequence. length: the
        tokens of a device. order: None or "hilbert". is_by_class: whether each head takes one class of each segment.
        """
        (_, size, rate), *others = runs
        devices = math.lcm(size, length) // length
        if others or self.devices % devices:
            return Deal(length, self.devices, tuple(runs), order, is_by_class)
        return Deal(length, devices, ((devices * length // size, size, rate),), order, is_by_class)


def classes_of(length: int, rate: int, order: str | None) -> np.ndarray:
    """int32 [length]: the class of each token of a segment: its position modulo the rate.

    The position of token i is i. With order="hilbert", it is the index of i in hilbert_order(length).
    """
    if order is None or rate == 1:
        return np.arange(length, dtype=np.int32) % rate
    found = np.empty(length, np.int32)
    found[hilbert_order(length)] = np.arange(length) % rate
    return found


@functools.lru_cache(maxsize=32)
def _tables(deal: Deal) -> Tables:
    """The Tables of a Deal; cached, because all pieces of a program ask for them."""
    classes, segments, number = [], [], 0
    for count, size, rate in deal.runs:
        classes.append(np.tile(classes_of(size, rate, deal.order), count))
        segments.append(np.repeat(np.arange(number, number + count, dtype=np.int64), size))
        number += count
    of_class, groups = np.concatenate(classes), np.concatenate(segments)
    if not deal.is_by_class:
        pairs = groups * (int(of_class.max()) + 1) + of_class
        groups = np.unique(pairs, return_inverse=True)[1]
    numbers = groups.astype(np.int32).reshape(deal.devices, deal.length)
    if deal.is_by_class:
        in_order = np.argsort(of_class, kind="stable")
        ends = np.cumsum(np.bincount(of_class, minlength=deal.rate))
        at, places = dealt_out(np.split(in_order, ends[:-1]), deal.devices, ROW_MULTIPLE)
        return Tables(at, places, numbers)
    by_group = np.argsort(numbers, axis=1, kind="stable")
    return Tables(by_group.astype(np.int32), np.argsort(by_group, axis=1).astype(np.int32), numbers)


def dealt_out(classes: Sequence[np.ndarray], devices: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """The tables that sort each device's tokens by class. Each device keeps its own tokens.

    classes: the tokens of each class, ascending; together 0 ... T - 1 of the whole segment. Their number is the rate.
    Row r of class c has the index r * rate + c. All devices and classes have the same number of rows: the size of the
    largest class of any device, rounded up to `multiple` unless all rows are filled.

    Returns:
      int32 [devices, rows * rate], the token at each index, counted within the device; at an index without a token, the
      number of the device's tokens. And int32 [devices, T / devices], the index of each token.
    """
    rate, length = len(classes), sum(map(len, classes)) // devices
    counts = np.array([np.bincount(taken // length, minlength=devices) for taken in classes])
    rows = counts.max()
    if rows * rate != length:
        rows = -(-rows // multiple) * multiple
    at = np.full((devices, rows * rate), length, np.int32)
    places = np.empty((devices, length), np.int32)
    for phase, taken in enumerate(classes):
        device, token = np.divmod(taken, length)
        row = np.arange(len(taken)) - np.concatenate([[0], counts[phase].cumsum()])[device]
        at[device, row * rate + phase] = token
        places[device, token] = row * rate + phase
    return at, places
