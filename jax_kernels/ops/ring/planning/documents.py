"""DocumentLayout: the layout of a ring in which packed documents give all devices equal work."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_kernels.ops.ring.planning.balance import Dealt, deal
from jax_kernels.plain_numbers import plain

__all__ = ["DocumentLayout", "DocumentSteps"]

TILE = 128  # tokens; the rows that travel are rounded up to it, so that few programs are compiled
# The time by which a step prolongs a call, and a GPU's FLOP/s in attention, for two H200s with NVLink. A call without
# sends saves also the copy of its keys into one array.
STEP_SECONDS, FLOPS = 0.12e-3, 650e12
LINK = 370e9  # bytes/s that a device sends, as in the costs of a ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentSteps:
    """The facts of a DocumentLayout on which the program of a ring depends. It is hashable, for static arguments.

    devices: of the ring. length: the tokens of a device. shared: the first `shared` tokens of each device include all
    its tokens of cut documents; only their keys and values travel. steps: the numbers of the ring's steps, ascending,
    in which a device shares a document with the device that is so far before it; 0 is not included. sends_all: whether
    a forward sends the keys and values of all tokens, so that it need not copy the first `shared` tokens of them.
    """

    devices: int
    length: int
    shared: int
    steps: tuple[int, ...]
    sends_all: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DocumentLayout:
    """The assignment of packed documents to the devices of a ring: a layout of ring_attention and shard_sequence.

    All devices have equally many tokens, and nearly equally many pairs of a query and a key of the same document.
    Documents are whole on a device where this costs no balance. The longest documents are cut, each over all devices:
    device 0 has the first piece and the last piece, device 1 the second and the last but one, and so on, as in the
    layout "zigzag". The pieces differ in length, and may be empty. `of` makes a DocumentLayout on the host.

    All arrays are NumPy arrays in sequence order; shard_sequence(array, mesh, axis_name, layout=documents) puts them
    into the layout. Only `order` and `ring_ids` are in the order of the devices.

    segment_ids: int32 [B, S], for ring_attention: 2 * document + 1 for tokens in the second half of the pieces of a
    document, else 2 * document; -1 for padding. positions: int32 [B, S], each token's index in its document, e.g. for
    rotary embeddings; 0 for padding. order: int32 [B, S], the index in the sequence of each token of device 0, then of
    device 1, and so on. pairs: float [devices], each device's pairs of a query and a key in a head. steps: the facts
    that the program depends on: calls whose layouts have equal steps share a program.
    """

    segment_ids: np.ndarray
    positions: np.ndarray
    order: np.ndarray
    pairs: np.ndarray
    steps: DocumentSteps

    @classmethod
    def of(
        cls, segment_ids: Any, devices: int, *, is_causal: bool = True, heads: int = 16, head_dim: int = 128
    ) -> "DocumentLayout":
        """The layout of packed documents on a number of devices.

        Equal ids in a row are a document. Documents are cut only if this saves more time than sends of keys take.

        Args:
          segment_ids: integers [B, S] or [S], known outside of jit, in sequence order; an id below 0 marks padding. S
            is a multiple of `devices`.
          devices: the number of devices along the mesh axis of the sequence, 1 or more.
          is_causal: whether the attention is causal. Results are right for both, but the work is balanced only for this
            value.
          heads, head_dim: the query heads of a device and their size, for the time of attention.

        Raises:
          TypeError: segment_ids are traced, or not integers. ValueError: a size that does not fit.
        """
        ids, devices = _checked(segment_ids, plain(devices))
        step_pairs = STEP_SECONDS * FLOPS / (4 * heads * head_dim) / len(ids)
        rows = [_Row.of(row, devices, is_causal, step_pairs) for row in ids]
        length = ids.shape[1] // devices
        most = max((row.shared for row in rows), default=0)
        numbers = sorted(set().union(*(row.steps for row in rows)))
        steps = DocumentSteps(
            devices=devices,
            length=length,
            shared=min(length, -(-most // TILE) * TILE),
            steps=tuple(numbers),
            sends_all=_hides_all(rows, [0, *numbers], length, is_causal),
        )
        stacked = lambda name: np.stack([getattr(row, name) for row in rows]).astype(np.int32)
        return cls(
            segment_ids=stacked("ids"),
            positions=stacked("positions"),
            order=stacked("order"),
            pairs=np.sum([row.pairs for row in rows], axis=0),
            steps=steps,
        )

    @property
    def ring_ids(self) -> np.ndarray:
        """int32 [B, S]: segment_ids in the order of the devices, for each device as a whole. Then no ids are sent."""
        return np.take_along_axis(self.segment_ids, self.order, 1)

    def __str__(self) -> str:
        shares = ", ".join(f"{x:.1%}" for x in self.pairs / max(1.0, self.pairs.sum()))
        count = self.steps.length if self.steps.sends_all else self.steps.shared
        sent = f"steps {', '.join(map(str, self.steps.steps))} send {count} of {self.steps.length} tokens"
        return f"{self.steps.devices} devices, pairs {shares}; {sent if self.steps.steps else 'no sends'}"


class _Row(NamedTuple):
    """The layout of one row of packed documents. ids, positions, order: [S], as in DocumentLayout. dealt: the tokens of
    each document on each device.
    """

    ids: np.ndarray
    positions: np.ndarray
    order: np.ndarray
    pairs: np.ndarray
    shared: int
    steps: set[int]
    dealt: Dealt

    @classmethod
    def of(cls, ids: np.ndarray, devices: int, is_causal: bool, step_pairs: float) -> "_Row":
        """ids: int [S]. step_pairs: as in `deal`."""
        document, lengths = _documents(ids)
        dealt = deal(lengths, int((ids < 0).sum()), devices, is_causal=is_causal, step_pairs=step_pairs)
        # Cut documents have the first numbers, and are first on their devices.
        rank = np.empty(len(lengths), int)
        rank[np.argsort(~dealt.cut, kind="stable")] = np.arange(len(lengths))
        device, is_late = _owners(document, dealt)
        number = np.where(document < 0, len(lengths), rank[document] if len(lengths) else 0)
        positions = _positions(document, lengths)
        order = np.lexsort((np.arange(len(ids)), number, device))
        sizes = (dealt.early + dealt.late)[dealt.cut]
        has = sizes > 0
        steps = {
            (i - j) % devices
            for i in range(devices)
            for j in range(devices)
            if i != j and (has[:, i] & has[:, j]).any()
        }
        return cls(
            ids=np.where(document < 0, -1, 2 * number + is_late),
            positions=positions,
            order=order,
            pairs=dealt.pairs,
            shared=int(sizes.sum(0).max(initial=0)),
            steps=steps,
            dealt=dealt,
        )


def _hides_all(rows: list[_Row], numbers: list[int], length: int, is_causal: bool) -> bool:
    """Whether each step that hides a send takes at least twice as long as a send of all keys and values.

    numbers: of all steps, ascending; all but the last hide a send. length: the tokens of a device.
    """
    pairs = [sum(row.dealt.pairs_of_step(number, is_causal).min() for row in rows) for number in numbers[:-1]]
    # 4 FLOPs for each pair, and 4 bytes for each token, of each column of a head.
    return bool(pairs and min(pairs) / FLOPS >= 2 * len(rows) * length / LINK)


def _documents(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(each token's document, numbered from 0 in the order of their first tokens, -1 for padding; their lengths)."""
    kept = np.flatnonzero(ids >= 0)
    _, first, inverse, counts = np.unique(ids[kept], return_index=True, return_inverse=True, return_counts=True)
    by_first = np.argsort(first)
    rank = np.empty_like(by_first)
    rank[by_first] = np.arange(len(by_first))
    document = np.full(len(ids), -1)
    document[kept] = rank[inverse]
    return document, counts[by_first]


def _positions(document: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int [S]: each token's index in its document; 0 for padding."""
    found = np.zeros(len(document), int)
    by_document = np.argsort(document, kind="stable")[np.count_nonzero(document < 0) :]
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    found[by_document] = np.arange(len(by_document)) - starts
    return found


def _owners(document: np.ndarray, dealt: Dealt) -> tuple[np.ndarray, np.ndarray]:
    """(each token's device, whether it is one of its document's late tokens). document: int [S], -1 for padding."""
    documents, devices = dealt.early.shape
    pieces = np.concatenate([dealt.early, dealt.late[:, ::-1]], 1).reshape(-1)
    owners = np.tile(np.concatenate([np.arange(devices), np.arange(devices)[::-1]]), documents)
    late = np.tile(np.arange(2 * devices) >= devices, documents)
    by_document = np.argsort(document, kind="stable")  # padding first
    device = np.empty(len(document), int)
    device[by_document] = np.concatenate([np.repeat(np.arange(devices), dealt.padding), np.repeat(owners, pieces)])
    is_late = np.zeros(len(document), bool)
    is_late[by_document] = np.concatenate([np.zeros(dealt.padding.sum(), bool), np.repeat(late, pieces)])
    return device, is_late


def _checked(segment_ids: Any, devices: int) -> tuple[np.ndarray, int]:
    """(ids as int [B, S], devices). Raises the errors of DocumentLayout.of."""
    if isinstance(segment_ids, jax.core.Tracer):
        raise TypeError("segment_ids: got a traced array, want known ids: make the layout outside of jit")
    ids = np.asarray(segment_ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"segment_ids: got dtype {ids.dtype}, want integers")
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices: got {devices!r}, want an int of 1 or more")
    if ids.ndim not in (1, 2) or 0 in ids.shape:
        raise ValueError(f"segment_ids: got shape {ids.shape}, want [batch, length] or [length], without a size of 0")
    if ids.shape[-1] % devices:
        raise ValueError(
            f"segment_ids: got {ids.shape[-1]} tokens for {devices} devices, want a multiple; pad them, with ids of -1"
        )
    return np.atleast_2d(ids).astype(np.int64), devices
