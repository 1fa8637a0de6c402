"""Layouts of a ring: the tokens that each device holds, and the attention calls of each step.

In step s, the device with index i holds the keys of device (i - s) mod n. This source device is s devices before it,
or, if i < s, n - s devices after it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kernels.masks import Mask, sliding_window
from jax_kernels.masks.limits import joined_band
from jax_kernels.masks.placed_mask import Placed
from jax_kernels.masks.restriction import position_of
from jax_kernels.ops.ring.planning.documents import DocumentSteps
from jax_kernels.score_mod.restriction import placed
from jax_kernels.score_mod.trace import ScoreMod

__all__ = ["DOCUMENTS", "LAYOUTS", "Chunks", "Layout", "Whole", "axis_size", "not_an_axis"]

LAYOUTS = ("zigzag", "striped", "contiguous")
DOCUMENTS = "documents"  # the name of the layout of a DocumentLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """A pair of chunks in a step: chunk `query` of the device's queries attends to chunk `key` of its visiting keys.

    query, key: the chunk's index on its device, an int or traced. q_offset: the position of the first query minus the
    position of the first key, in tokens ("striped": in rows of the device); None if no limit applies.
    """

    query: Any
    key: Any
    q_offset: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """The limits of a step that is one call of all the device's queries with all its visiting keys.

    q_offset, is_causal, window: the arguments of flash_attention for this call; q_offset may be traced. reach:
    (first, end), two numbers that may be traced: queries from row `first` on see the keys before row `end`, earlier
    queries see no key. None without such a limit.
    """

    q_offset: Any = 0
    reach: tuple[Any, Any] | None = None
    is_causal: bool = False
    window: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The assignment of a sequence's tokens to `devices` devices, `length` tokens on each, and the limits of its mask.

    "contiguous": device i has the tokens from i * length on. "striped": device i has every devices-th token from i on.
    "zigzag": the sequence has 2 * devices chunks, and device i has chunks i and 2 * devices - 1 - i. All devices then
    have equal work under a causal mask. "documents": see DocumentLayout; the positions are in arrays, so the methods
    that compute positions do not support it. left, right: a query at position p sees keys from p - left to p + right;
    None is no limit on that side. A causal mask has right = 0.

    documents: with "documents", the facts of the DocumentLayout; None if only arrays have them.
    """

    name: str
    devices: int
    length: int
    left: int | None
    right: int | None
    documents: DocumentSteps | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """{"is_causal": bool, "window": (left, right) or None}, the arguments of flash_attention; -1 is no limit."""
        left, right = (-1 if side is None else side for side in (self.left, self.right))
        return {"is_causal": right == 0, "window": (left, right) if left >= 0 or right > 0 else None}

    @property
    def chunks(self) -> int:
        """The number of chunks of a device: 2 for "zigzag", else 1. The tokens of a chunk are `stride` apart."""
        return 2 if self.name == "zigzag" else 1

    @property
    def chunk(self) -> int:
        """The number of tokens of a chunk."""
        return self.length // self.chunks

    def tokens(self, device: int) -> np.ndarray:
        """int [length]: the positions of a device's tokens in the sequence, in the device's order."""
        if self.name == "striped":
            return np.arange(device, self.devices * self.length, self.devices)
        firsts = (device, 2 * self.devices - 1 - device) if self.name == "zigzag" else (device,)
        return np.concatenate([np.arange(self.chunk) + first * self.chunk for first in firsts])

    def in_order(self, x: Any, axis: int = 1, *, back: bool = False) -> Any:
        """x with all tokens along `axis` in sequence order, from an x with the tokens of device 0, then device 1, ...

        back=True: the inverse.
        """
        if self.name == "contiguous":
            return x
        if self.name == "striped":
            sizes = (self.length, self.devices) if back else (self.devices, self.length)
            stripes = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
            return stripes.swapaxes(axis, axis + 1).reshape(x.shape)
        order = [chunk for device in range(self.devices) for chunk in (device, 2 * self.devices - 1 - device)]
        parts = jnp.split(x, len(order), axis)
        return jnp.concatenate([parts[i] for i in (order if back else np.argsort(order))], axis)

    def ranges(self, device: int) -> list[range]:
        """The positions of each chunk's tokens, for a device whose index is an int."""
        stride = self.stride
        firsts = self.tokens(device)[:: self.chunk]
        return [range(int(first), int(first) + stride * (self.chunk - 1) + 1, stride) for first in firsts]

    @property
    def stride(self) -> int:
        """The distance, in sequence positions, between two neighbouring tokens of a chunk."""
        return self.devices if self.name == "striped" else 1

    def firsts(self, device: Any) -> Any:
        """int32 [chunks]: the position of the first token of each chunk of a device. device: a traced index."""
        if self.name == "striped":
            return jnp.stack([device])
        return jnp.stack([self.first(chunk, device) for chunk in range(self.chunks)])

    def positions(self, device: Any) -> Any:
        """int32 [length]: the positions of a device's tokens, in the device's order. device: a traced index."""
        return (self.firsts(device)[:, None] + self.stride * jnp.arange(self.chunk, dtype=jnp.int32)).reshape(-1)

    def source(self, step: int, index: Any) -> Any:
        """The index of the device whose keys the device `index` attends to in a step. index: a traced number."""
        return lax.rem(index - step + self.devices, jnp.int32(self.devices))

    def placed(self, mask: Mask | None, step: int, index: Any) -> Placed:
        """The mask of a step's call [length queries, length keys], including the layout's left and right limits.

        mask: of the whole sequence, or None. index: this device's index, a traced number.
        """
        return Placed(
            joined_band(sliding_window(None, None) if mask is None else mask, self.left, self.right),
            self.firsts(index),
            self.firsts(self.source(step, index)),
            lengths=(self.length, self.length),
            stride=self.stride,
            shift=step if self.name == "striped" else 0,
        )

    def placed_among_all(self, mask: Mask, first: Any) -> Placed:
        """The mask of a call of one chunk of queries with all keys in sequence order, including the layout's limits.

        mask: of the whole sequence. first: the position of the chunk's first query, a traced number.
        """
        length = self.devices * self.length
        return Placed(
            joined_band(mask, self.left, self.right),
            jnp.stack([first]),
            jnp.zeros((1,), jnp.int32),
            lengths=(self.chunk, length),
        )

    def placed_score_mod(self, mod: ScoreMod, step: int, index: Any) -> ScoreMod:
        """The score_mod of a step's call. It calls `mod` with the queries' and keys' positions in the whole sequence.

        index: this device's index, a traced number.
        """
        count = self.chunks
        numbers = [x for device in (index, self.source(step, index)) for x in self.firsts(device)]

        def positions(h: Any, q: Any, k: Any, *firsts: Any) -> Any:
            position = lambda index, firsts: position_of(index, firsts, self.chunk, self.stride)
            return h, position(q, firsts[:count]), position(k, firsts[count:])

        return placed(mod, positions, tuple(numbers))

    def keys_of(self, x: Any, device: Any) -> Any:
        """x[..., keys of a device]: [..., S] -> [..., length]. x has all S keys in sequence order.

        device: a traced index.
        """
        if self.name == "striped":
            return lax.dynamic_index_in_dim(self._stripes(x), device, -1, keepdims=False)
        parts = [lax.dynamic_slice_in_dim(x, first, self.chunk, -1) for first in self.firsts(device)]
        return jnp.concatenate(parts, -1)

    def with_keys(self, x: Any, part: Any, device: Any) -> Any:
        """x [..., S] with the values at a device's keys replaced by `part` [..., length]: the inverse of keys_of."""
        if self.name == "striped":
            return lax.dynamic_update_index_in_dim(self._stripes(x), part, device, -1).reshape(x.shape)
        for first, of_chunk in zip(self.firsts(device), jnp.split(part, self.chunks, -1), strict=True):
            x = lax.dynamic_update_slice_in_dim(x, of_chunk, first, -1)
        return x

    def _stripes(self, x: Any) -> Any:
        return x.reshape(*x.shape[:-1], self.length, self.devices)

    def dead_steps(self, mask: Mask) -> tuple[int, ...]:
        """The numbers of the steps in which the mask keeps no pair on any device, as far as is known while tracing.

        mask: of the whole sequence. Step 0 is never included.
        """

        def is_dead(device: int, source: int) -> bool:
            return all(mask.keeps_none(q, k) for q in self.ranges(device) for k in self.ranges(source))

        steps, devices = range(1, self.devices), range(self.devices)
        return tuple(s for s in steps if all(is_dead(device, (device - s) % self.devices) for device in devices))

    def first(self, chunk: int, device: Any) -> Any:
        """The position of the first token of a chunk of a device. Not for "striped".

        chunk: its index on the device. device: an int or a traced index.
        """
        number = device if chunk == 0 else 2 * self.devices - 1 - device
        return number * self.chunk

    def is_dead(self, step: int) -> bool:
        """Whether the layout's limits leave no pair of a query and a key in a step, on any device."""
        if self.name == DOCUMENTS:
            return step > 0 and self.documents is not None and step not in self.documents.steps
        if self.name == "striped":
            left, right = self._of_stripes(step)
            return left is not None and right is not None and left + right < 0
        for device in range(self.devices):
            q, k = (self._spans(i) for i in (device, (device - step) % self.devices))
            if any(self._touch(of_q, of_k) for of_q in q for of_k in k):
                return False
        return True

    def _spans(self, device: int) -> list[tuple[int, int]]:
        """(position of the first token, position of the last token) of each chunk of a device."""
        return [(int(x[0]), int(x[-1])) for x in np.split(self.tokens(device), self.chunks)]

    def _touch(self, q: tuple[int, int], k: tuple[int, int]) -> bool:
        """Whether any query of chunk q may see any key of chunk k. q, k: (first position, last position)."""
        behind = self.right is None or k[0] - q[1] <= self.right
        return behind and (self.left is None or q[0] - k[1] <= self.left)

    def window(self, step: int) -> tuple[bool, tuple[int, int] | None]:
        """(is_causal, window or None), the arguments of flash_attention for the calls of a step; -1 is no limit.

        They count positions. For "striped", they count rows instead, and hold with the q_offset of `pairs`, which may
        be shifted to keep the limits from being below 0.
        """
        left, right = self.left, self.right
        if self.name == "striped":
            left, right = self._of_stripes(step)
            shift = self._shift(step)
            left, right = None if left is None else left + shift, None if right is None else right - shift
        if left is None and right is None:
            return False, None
        if left is None and right == 0:
            return True, None
        return False, (-1 if left is None else left, -1 if right is None else right)

    def _of_stripes(self, step: int) -> tuple[int | None, int | None]:
        """(left, right): the limits of a step of "striped": query row r sees the key rows r - left ... r + right.

        This holds on devices with index >= source. On other devices, row r sees rows r - 1 - left ... r - 1 + right.
        Row r of device i is token r * devices + i. None is no limit; a limit may be below 0.
        """
        left = None if self.left is None else (self.left - step) // self.devices
        right = None if self.right is None else (self.right + step) // self.devices
        return left, right

    def _shift(self, step: int) -> int:
        """The rows by which a step of "striped" shifts its queries: added to q_offset and left, subtracted from right.

        In a step with a pair, the shifted limits are 0 or more, as flash_attention needs. 0 if they are so already.
        """
        left, right = self._of_stripes(step)
        return -left if left is not None and left < 0 else min(0, right or 0)

    def whole(self, step: int, index: Any) -> Whole | None:
        """The limits of a step as one call of all queries with all keys; None if the step needs more than one call.

        index: this device's index, a traced number.
        Under a causal mask without a window, in each step but the first, a query sees all keys or no key of a chunk.
        With "documents", `ids_of_step` replaces the causal limit of these steps.
        """
        if self.name == DOCUMENTS:
            return Whole(is_causal=step == 0 and self.right == 0)
        is_causal, window = self.window(step)
        if self.left is None and self.right is None:
            return Whole()
        source = self.source(step, index)
        if self.name == "striped":
            return Whole(q_offset=self.pairs(step, index)[0].q_offset, is_causal=is_causal, window=window)
        if self.left is None and self.right == 0:
            if step == 0:
                return Whole(is_causal=True)
            is_later = index > source
            if self.name == "contiguous":
                return Whole(reach=(0, jnp.where(is_later, self.length, 0)))
            # All queries of the later device see the first chunk of keys. On the earlier device only the last chunk of
            # queries sees keys, and it sees all of them.
            return Whole(reach=(jnp.where(is_later, 0, self.chunk), jnp.where(is_later, self.chunk, self.length)))
        if self.name == "contiguous":
            q_offset = 0 if step == 0 else (index - source) * self.chunk
            return Whole(q_offset=q_offset, is_causal=is_causal, window=window)
        return None

    @property
    def shared(self) -> int:
        """The number of a device's tokens, from its first on, whose keys and values other devices need."""
        return self.length if self.documents is None else self.documents.shared

    @property
    def sends_all(self) -> bool:
        """Whether a forward sends the keys and values of all of a device's tokens, also if no device needs them."""
        return self.documents is None or self.documents.sends_all

    def ids_of_step(self, step: int, index: Any, q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
        """The segment ids of a step's queries and keys, from the ids of both devices' tokens. -1 is no segment.

        index: this device's index, a traced number.

        With "documents" and a causal mask, a later device's queries of a document see all early keys of an earlier
        device, and no late keys. An earlier device's late queries see all keys of a later device, its early queries see
        none. So the queries and keys with a pair in a step see each other completely.
        """
        if self.name != DOCUMENTS:
            return q_ids, kv_ids
        q_ids, q_late, kv_ids, kv_late = q_ids >> 1, q_ids & 1, kv_ids >> 1, kv_ids & 1
        if step == 0 or self.right != 0:
            return q_ids, kv_ids
        is_later = index > self.source(step, index)
        sees, is_seen = is_later | (q_late == 1), jnp.logical_not(is_later) | (kv_late == 0)
        return jnp.where(sees, q_ids, -1), jnp.where(is_seen, kv_ids, -1)

    def pairs(self, step: int, index: Any) -> list[Chunks]:
        """The pairs of chunks that the device `index` computes in a step, for all devices equally many.

        index: a traced number.
        """
        source = self.source(step, index)
        no_limit = self.left is None and self.right is None
        if self.name == "striped":
            offset_of_stripe = jnp.where(index >= source, 0, -1) + self._shift(step)
            return [Chunks(query=0, key=0, q_offset=None if no_limit else offset_of_stripe)]
        if self.name == "contiguous":
            return [Chunks(query=0, key=0, q_offset=None if no_limit else (index - source) * self.chunk)]
        firsts = lambda device: (device, 2 * self.devices - 1 - device)
        offset = lambda q, k: None if no_limit else (firsts(index)[q] - firsts(source)[k]) * self.chunk
        if self.right != 0:
            return [Chunks(query=q, key=k, q_offset=offset(q, k)) for q in range(2) for k in range(2)]
        if step == 0:
            return [Chunks(query=q, key=k, q_offset=offset(q, k)) for q, k in ((0, 0), (1, 1), (1, 0))]
        # A causal mask leaves two of the four calls without a pair. The last chunk of queries sees the first chunk of
        # keys. In addition, the first chunk of queries sees the first chunk of keys, or the last sees the last.
        both = jnp.where(index > source, 0, 1)
        near = jnp.abs(index - source) * self.chunk
        is_full = self.left is None
        return [
            Chunks(query=1, key=0, q_offset=None if is_full else offset(1, 0)),
            Chunks(query=both, key=both, q_offset=None if is_full else near),
        ]


def axis_size(axis_name: Any) -> int:
    """The number of devices along a mesh axis of the jax.shard_map around the call.

    Raises TypeError for a name that is no str, and ValueError if no shard_map around the call has this axis.
    """
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: got {type(axis_name).__name__}, want the name of a mesh axis")
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise not_an_axis(axis_name) from None


def not_an_axis(axis_name: str) -> ValueError:
    """Returns the error for a name that is not an axis of the jax.shard_map around the call. It is not raised here."""
    return ValueError(f"axis_name: got {axis_name!r}, want an axis of the jax.shard_map around this call")
