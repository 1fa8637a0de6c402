"""Dilated attention's segments that several devices share, each of which has some of their tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["Shards", "Span", "dealt_out"]


@dataclasses.dataclass(frozen=True)
class Span:
    """The devices of a segment: `devices` neighbours of the `everyone` along a mesh axis."""

    axis_name: str
    devices: int
    everyone: int

    @property
    def index(self) -> jax.Array:
        """This device's, within its segment."""
        return lax.axis_index(self.axis_name) % self.devices

    def shifted(self, tree: Any, by: int) -> Any:
        """The arrays of the device `by` places before this one, round the ring of the segment's devices."""
        n = self.devices
        there = [(first + i, first + (i + by) % n) for first in range(0, self.everyone, n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, there), tree)

    def mine(self, table: np.ndarray) -> jax.Array:
        """This device's line of a table with one for each device of a segment."""
        return jnp.asarray(table)[self.index]


@dataclasses.dataclass(frozen=True)
class Shards:
    """A mesh axis along which devices have as many neighbouring tokens each."""

    axis_name: str
    devices: int

    def fitted(self, branches: tuple[tuple[int, int], ...], length: int) -> tuple[tuple[int, int], ...]:
        """The branches, with segments no longer than the sequence; raises ValueError for one that does not fit.

        length: a device's tokens.
        """
        branches = tuple((min(size, length * self.devices), rate) for size, rate in branches)
        for index, (size, rate) in enumerate(branches):
            is_shared = size > length
            if size % length or self.devices % (size // length) if is_shared else length % size:
                raise ValueError(
                    f"segment_lengths[{index}]: got {size} with {length} tokens on each of {self.devices} devices, "
                    f"want a divisor of {length}, or {length} times a divisor of {self.devices}"
                )
            if is_shared and length % rate:
                raise ValueError(
                    f"dilation_rates[{index}]: got {rate} for segments longer than the {length} tokens of a device, "
                    f"want a divisor of {length}"
                )
        return branches

    def span(self, size: int, length: int) -> Span | None:
        """The Span of segments of this size; None where a device has them whole. length: a device's tokens."""
        return Span(self.axis_name, size // length, self.devices) if size > length else None


def dealt_out(tokens: np.ndarray, rate: int, devices: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """An arrangement of a segment's tokens, as its devices have them.

    tokens: int32 [T], each class ascending, at every rate-th place. Every device gets the classes of its own tokens in
    the same form, in as many rows as the largest of them has: of `multiple` of them, unless there is no gap.

    Returns:
      int32 [devices, rows * rate], the device's token at each place, or its number of tokens where none is; and int32
      [devices, its tokens], the place of each of them.
    """
    length = len(tokens) // devices
    classes = [tokens[phase::rate] for phase in range(rate)]
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
