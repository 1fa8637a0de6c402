"""The branches of dilated attention as views of its arrays: the rows and heads of each attention call, and back.

A piece is a run of equal segments of one branch. Its tokens, reshaped to [B * segments, rows, rate, heads, D], have one
residue class in each column `phase`, so a head is a strided slice. If a piece covers the sequence and its rate divides
its segments, this reshape is the array of a call, and a kernel reads the heads that take part (BranchCall.is_strided).
Otherwise the rows are gathered by reshapes, static slices, concatenations and selects, which XLA fuses unless an order
permutes the tokens. If several devices share a segment, a piece has this device's tokens of the segment, and the keys
of its classes travel round the ring of these devices. If segments begin or end within a device, a piece has all the
device's tokens of the branch, and numbers mark the tokens of each segment.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.hilbert import invert_order
from jax_kernels.inputs.attention import HeadView
from jax_kernels.ops.dilated.sharded_segments import ROW_MULTIPLE, Deal, Shards, Span, classes_of, dealt_out
from jax_kernels.pallas.attention.passes.merge_branches import Compact, Rows, Table

__all__ = [
    "BranchCall",
    "Piece",
    "arrays_of",
    "calls_of",
    "compact_rows",
    "gather_ids",
    "gather_rows",
    "merge_rows",
    "of_heads",
    "pieces_of",
    "scatter",
    "split_strided",
]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Equal segments next to each other.

    branch: its index. start: the first token. segments: their number; length: of each; rate: their dilation.
    offsets: the residue class that each query head takes, -1 for a head that the branch does not serve; None if every
    head takes all classes. order: as in dilated_attention. span: the devices of one segment that several devices share;
    length is then one device's part of the segment, and a multiple of the rate. deal: set if segments begin and end
    anywhere on the devices of a span: the piece then has one segment, all tokens of a device.
    """

    branch: int
    start: int
    segments: int
    length: int
    rate: int
    offsets: tuple[int, ...] | None
    order: str | None
    span: Span | None = None
    deal: Deal | None = None

    @property
    def rows(self) -> int:
        """The rows of a class. If some classes lack a token in the last row, rounded up to ROW_MULTIPLE."""
        if self.is_dealt_out:
            return self._dealt_out[0].shape[1] // self.rate
        rows, rest = divmod(self.length, self.rate)
        return -(-(rows + 1) // ROW_MULTIPLE) * ROW_MULTIPLE if rest else rows

    @property
    def heads(self) -> tuple[int, int]:
        """(first query head that is served, end)."""
        assert self.offsets is not None
        served = [head for head, offset in enumerate(self.offsets) if offset >= 0]
        return served[0], served[-1] + 1

    @property
    def boundaries(self) -> list[int]:
        """The query heads at which the class changes, with the first head and the end."""
        assert self.offsets is not None
        first, end = self.heads
        return [first, *(h for h in range(first + 1, end) if self.offsets[h] != self.offsets[h - 1]), end]

    @property
    def is_ordered(self) -> bool:
        """Whether the class of a token comes from a table."""
        return self.deal is not None or (self.order is not None and self.rate > 1)

    @property
    def is_dealt_out(self) -> bool:
        """Whether devices have different numbers of tokens of a class."""
        return self.span is not None and self.is_ordered

    @property
    def has_gaps(self) -> bool:
        """Whether an entry without a token may precede an entry with a token."""
        return self.is_dealt_out and self.rows * self.rate != self.length

    @property
    def _dealt_out(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.span is not None
        if self.deal is not None:
            return self.deal.tables.at, self.deal.tables.places
        return _dealt_out(self.length * self.span.devices, self.rate, self.span.devices)

    @property
    def table(self) -> Table:
        """The table of a piece that is ordered."""
        if self.is_dealt_out:
            assert self.span is not None
            return Table(*(self.span.mine(numbers) for numbers in self._dealt_out))
        tokens = _arrangement(self.length, self.rate)
        return Table(jnp.asarray(tokens), jnp.asarray(invert_order(tokens)))

    def arranged(self, x: jax.Array, fill: float) -> jax.Array:
        """[segments, length, ...], reordered: the tokens of a class, ascending, are at every rate-th index."""
        if self.has_gaps:
            return x.at[:, self.table.tokens].get(mode="fill", fill_value=fill)
        return _permuted(x, self.table.tokens) if self.is_ordered else x

    def in_sequence(self, x: jax.Array) -> jax.Array:
        """The inverse of arranged, for an x that may have padding at its end."""
        return _permuted(x, self.table.places) if self.is_ordered else x[:, : self.length]


@functools.lru_cache(maxsize=32)
def _arrangement(length: int, rate: int) -> np.ndarray:
    tokens = np.empty(length, np.int32)
    for phase, taken in enumerate(_hilbert_classes(length, rate)):
        # Ascending order keeps the causal mask a triangle. The result depends only on the set of tokens.
        tokens[phase::rate] = taken
    return tokens


def _hilbert_classes(length: int, rate: int) -> list[np.ndarray]:
    found = classes_of(length, rate, "hilbert")
    return np.split(np.argsort(found, kind="stable"), np.cumsum(np.bincount(found, minlength=rate))[:-1])


@functools.lru_cache(maxsize=32)
def _dealt_out(length: int, rate: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    return dealt_out(_hilbert_classes(length, rate), devices, ROW_MULTIPLE)


def pieces_of(
    length: int,
    num_heads: int,
    branches: tuple[tuple[int, int], ...],
    *,
    heads: str,
    layout: str,
    order: str | None,
    is_causal: bool = False,
    shards: Shards | None = None,
) -> list[Piece]:
    """The pieces of all branches; the pieces of a branch are in the order of its tokens.

    branches: (segment length, rate). shards: the devices of a sharded sequence, with `length` tokens each; or None.
    """
    total = length if shards is None else length * shards.devices
    if layout == "partition":
        whole = _partition(total, branches, order)
        return whole if shards is None else [_on_device(whole, length, shards, is_causal)]
    pieces: list[Piece] = []
    groups = np.array_split(np.arange(num_heads), len(branches))
    for index, (size, rate) in enumerate(branches):
        if heads == "all":
            in_class = -(-num_heads // rate)
            offsets = tuple(head // in_class for head in range(num_heads))
        else:
            offsets = tuple(index % rate if head in groups[index] else -1 for head in range(num_heads))
        size = min(size, total)
        count, rest = divmod(total, size)
        of_branch = [Piece(index, 0, count, size, rate, offsets, order)]
        # If no head takes the last tokens, they need no piece. A sharded sequence keeps a device's tokens together.
        if rest and (shards is not None or any(0 <= offset < rest for offset in offsets)):
            of_branch.append(Piece(index, count * size, 1, rest, rate, offsets, order))
        pieces += of_branch if shards is None else [_on_device(of_branch, length, shards, is_causal)]
    return pieces


def of_heads(pieces: Sequence[Piece], first: int, end: int) -> list[Piece]:
    """The pieces of query heads first ... end - 1, of the branches that serve any of these heads."""
    found = []
    for piece in pieces:
        offsets = None if piece.offsets is None else piece.offsets[first:end]
        if offsets is None or max(offsets) >= 0:
            found.append(dataclasses.replace(piece, offsets=offsets))
    return found


def _partition(length: int, branches: Sequence[tuple[int, int]], order: str | None) -> list[Piece]:
    """The pieces of segments that cut a sequence one after another, for layout="partition"."""
    pieces: list[Piece] = []
    start = 0
    for size, rate in (*branches, (length, 1)):
        size = min(size, length - start)
        if size == 0:
            break
        last = pieces[-1] if pieces else None
        if last is not None and (last.length, last.rate) == (size, rate):
            pieces[-1] = dataclasses.replace(last, segments=last.segments + 1)
        else:
            pieces.append(Piece(0, start, 1, size, rate, None, order))
        start += size
    return pieces


def _on_device(whole: Sequence[Piece], length: int, shards: Shards, is_causal: bool) -> Piece:
    """Turns a branch's pieces of the whole sequence into one piece for each device, with `length` tokens."""
    first, *others = whole
    if not others and shards.fits(first.length, first.rate, length):
        size = min(first.length, length)
        return dataclasses.replace(first, segments=length // size, length=size, span=shards.span(first.length, length))
    runs = [(piece.segments, piece.length, piece.rate) for piece in whole]
    deal = shards.deal(runs, length, first.order, is_by_class=first.offsets is not None)
    span = Span(shards.axis_name, deal.devices, shards.devices, deal.shifts(is_causal=is_causal))
    return dataclasses.replace(first, segments=1, length=length, rate=deal.rate, span=span, deal=deal)


@dataclasses.dataclass(frozen=True)
class BranchCall:
    """Pieces that one attention call serves, in batch entries of one shape.

    rows: queries, and keys, of an entry. heads, kv_heads: of an entry. is_masked: whether it needs segment ids: for the
    caller's ids, or for rows that some classes lack, if causality does not hide them. span: the devices whose keys each
    entry attends to, with equally many rows on each; None if only this device's. is_strided: the call takes some heads
    of a view of the whole arrays, and has one piece.
    """

    pieces: tuple[Piece, ...]
    rows: int
    heads: int
    kv_heads: int
    is_masked: bool
    span: Span | None = None
    is_strided: bool = False

    def entries(self, batch: int, num_heads: int) -> int:
        return sum(_entries(piece, batch, num_heads, self.heads) for piece in self.pieces)

    def head_view(self, num_heads: int, array_heads: int) -> HeadView | None:
        """The heads of a strided call within the heads of its view of query or key; None if it takes all heads.

        num_heads: of query. array_heads: of query or key.
        """
        (piece,) = self.pieces
        if piece.offsets is None or (piece.rate == 1 and self.heads == num_heads):
            return None
        group = num_heads // array_heads
        shared = _shared(piece, group)
        first, end = piece.heads
        return HeadView(
            count=(end - first) // shared,
            first=piece.offsets[first] * array_heads + first // group,
            run=(piece.boundaries[1] - first) // shared,
            skip=array_heads,
            part=group // shared,
        )


def calls_of(
    pieces: list[Piece], num_heads: int, kv_heads: int, *, is_causal: bool, has_segment_ids: bool
) -> tuple[BranchCall, ...]:
    """Groups the pieces by the shape of their batch entries."""
    calls: dict[tuple[int, int, int, bool, Span | None], list[Piece]] = {}
    for piece in pieces:
        is_masked = has_segment_ids or piece.has_gaps or piece.deal is not None
        is_masked = is_masked or (not is_causal and piece.length % piece.rate != 0)
        shared = _shared(piece, num_heads // kv_heads)
        if piece.offsets is None:
            # Ids differ between classes, but not between the heads of an entry.
            in_entry = num_heads if is_masked else num_heads * piece.rate
        else:
            ends = piece.boundaries
            in_entry = math.gcd(*(b - a for a, b in itertools.pairwise(ends))) if is_masked else ends[-1] - ends[0]
        calls.setdefault((piece.rows, in_entry, in_entry // shared, is_masked, piece.span), []).append(piece)
    return tuple(BranchCall(tuple(pieces), *key) for key, pieces in calls.items())


def split_strided(call: BranchCall, length: int, group: int) -> tuple[BranchCall, ...]:
    """Moves each piece that a view can serve into a strided call of its own. group: query heads per key head."""
    if call.is_masked:
        return (call,)
    strided = [piece for piece in call.pieces if _is_strided(piece, length, group)]
    others = tuple(piece for piece in call.pieces if piece not in strided)
    calls = [dataclasses.replace(call, pieces=(piece,), is_strided=True) for piece in strided]
    return *calls, *([dataclasses.replace(call, pieces=others)] if others else [])


def _is_strided(piece: Piece, length: int, group: int) -> bool:
    is_whole = piece.start == 0 and piece.segments * piece.length == length
    has_tiles = piece.length % piece.rate == 0 and piece.rows % ROW_MULTIPLE == 0
    # Otherwise the query heads would start in the middle of a key head.
    is_aligned = piece.offsets is None or piece.heads[0] % group == 0
    return is_whole and has_tiles and is_aligned and not piece.is_ordered and piece.span is None


def compact_rows(calls: Sequence[BranchCall], batch: int, num_heads: int, array_heads: int) -> Compact:
    """The map from tokens to the rows of the calls' results, for an array with array_heads heads, query's or key's.

    If the tokens of a head are in several heads of an entry, there is one Rows for each of them.
    """
    group, rows = num_heads // array_heads, []
    tables: dict[Any, Table] = {}
    for number, call in enumerate(calls):
        base = 0
        for piece in call.pieces:
            shared = _shared(piece, group)
            in_entry, parts = call.heads // shared, group // shared
            table = -1
            if piece.is_ordered:
                order = piece.length, piece.rate, piece.span, piece.deal
                tables.setdefault(order, piece.table)
                table = list(tables).index(order)
            place = number, base, piece.start, piece.segments, piece.length, piece.rate
            if piece.offsets is None:
                folds = array_heads * piece.rate // in_entry
                rows.append(Rows(*place, 0, folds, in_entry, 0, 1, classes=array_heads, table=table))
            else:
                first, end, boundary = (head // shared for head in (*piece.heads, piece.boundaries[1]))
                folds, offset = (end - first) // in_entry, piece.offsets[piece.heads[0]]
                which = first, folds, in_entry, offset, boundary - first, parts
                rows += [Rows(*place, *which, nth, table=table) for nth in range(parts)]
            base += batch * piece.segments * folds
    return Compact(tuple(rows), tuple(tables.values()))


def _shared(piece: Piece, group: int) -> int:
    """The number of neighbouring query heads that have the same key head and class, everywhere in the piece."""
    return group if piece.offsets is None else math.gcd(group, *piece.boundaries)


def _entries(piece: Piece, batch: int, num_heads: int, in_entry: int) -> int:
    served = num_heads * piece.rate if piece.offsets is None else piece.heads[1] - piece.heads[0]
    return batch * piece.segments * served // in_entry


def _rows(x: jax.Array, piece: Piece, fill: float = 0) -> jax.Array:
    """[B, T, ...] -> [B * segments, rows, rate, ...]."""
    batch, _, *rest = x.shape
    x = x[:, piece.start : piece.start + piece.segments * piece.length]
    x = piece.arranged(x.reshape(batch * piece.segments, piece.length, *rest), fill)
    missing = piece.rows * piece.rate - x.shape[1]
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * len(rest), constant_values=fill)
    return x.reshape(-1, piece.rows, piece.rate, *rest)


def _tokens(x: jax.Array, piece: Piece, batch: int) -> jax.Array:
    """The inverse of _rows: [B, segments * length, ...]."""
    x = piece.in_sequence(x.reshape(x.shape[0], -1, *x.shape[3:]))
    return x.reshape(batch, -1, *x.shape[2:])


def _permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    return x.at[:, order].get(mode="promise_in_bounds", unique_indices=True)


def arrays_of(x: jax.Array, call: BranchCall, num_heads: int) -> jax.Array:
    """[B, T, heads, ...] -> a call's array: gathered rows, or a view [entries, rows, rate * heads, ...]."""
    if not call.is_strided:
        return gather_rows(x, call, num_heads)
    (piece,) = call.pieces
    return x.reshape(-1, piece.rows, piece.rate * x.shape[2], *x.shape[3:])


def gather_rows(x: jax.Array, call: BranchCall, num_heads: int) -> jax.Array:
    """[B, T, heads, ...] -> the entries of a call, [entries, rows, heads of an entry, ...]."""
    group = num_heads // x.shape[2]
    return jnp.concatenate([_gathered(x, piece, group, call) for piece in call.pieces])


def _gathered(x: jax.Array, piece: Piece, group: int, call: BranchCall) -> jax.Array:
    shared = 1 if group == 1 else call.heads // call.kv_heads
    x = _rows(x, piece)
    if piece.offsets is None:
        x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    else:
        picks = [(piece.offsets[head], head // group) for head in range(*piece.heads, shared)]
        x = jnp.concatenate([x[:, :, phase, slice(*span)] for phase, span in _runs(picks)], axis=2)
    in_entry = call.heads // shared
    x = x.reshape(*x.shape[:2], -1, in_entry, *x.shape[3:])
    return jnp.moveaxis(x, 2, 1).reshape(-1, *x.shape[1:2], *x.shape[3:])


def _runs(picks: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """(class, (first head, end)) of each run of neighbouring heads of one class, in order."""
    runs: list[tuple[int, tuple[int, int]]] = []
    for phase, head in picks:
        if runs and runs[-1][0] == phase and runs[-1][1][1] == head:
            runs[-1] = (phase, (runs[-1][1][0], head + 1))
        else:
            runs.append((phase, (head, head + 1)))
    return runs


def gather_ids(ids: jax.Array | None, call: BranchCall, batch: int, length: int) -> jax.Array:
    """int32 [B, T], or None if all ids are equal -> [entries, rows]; rows without a token have -1."""
    parts = []
    for piece in call.pieces:
        if piece.deal is not None and piece.span is not None:
            x = piece.deal.joined(piece.span, ids, batch)
        else:
            x = jnp.zeros((batch, length), jnp.int32) if ids is None else ids
        x = _rows(x, piece, fill=-1)
        if piece.offsets is not None:
            x = x[:, :, np.array(piece.offsets[slice(*piece.heads, call.heads)])]
        parts.append(x.swapaxes(1, 2).reshape(-1, piece.rows))
    return jnp.concatenate(parts)


def scatter(
    x: jax.Array, call: BranchCall, batch: int, num_heads: int, out_heads: int, fill: float = 0
) -> list[tuple[Piece, jax.Array]]:
    """The inverse of gather_rows: for each piece [B, its tokens, out_heads, ...] in float32.

    out_heads: query's heads, or key's: then the values that entries have for one key head are added. fill: the value
    of heads that take no part.
    """
    group = num_heads // out_heads
    shared = 1 if group == 1 else call.heads // call.kv_heads
    ends = np.cumsum([_entries(piece, batch, num_heads, call.heads) for piece in call.pieces])
    parts = jnp.split(x.astype(jnp.float32), ends[:-1])
    scattered = (
        _scattered(part, piece, batch, group, shared, fill) for piece, part in zip(call.pieces, parts, strict=True)
    )
    return list(zip(call.pieces, scattered, strict=True))


def _scattered(x: jax.Array, piece: Piece, batch: int, group: int, shared: int, fill: float) -> jax.Array:
    folds = x.shape[0] // (batch * piece.segments)
    x = x.reshape(-1, folds, *x.shape[1:])
    x = jnp.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1, *x.shape[4:])
    if piece.offsets is None:
        x = x.reshape(*x.shape[:2], piece.rate, -1, *x.shape[3:])
        return _tokens(x, piece, batch)
    first, end = piece.heads
    rest = [(0, 0)] * (x.ndim - 3)
    x = jnp.pad(x, [(0, 0), (0, 0), (first // shared, (len(piece.offsets) - end) // shared), *rest])
    takes = np.arange(piece.rate)[:, None] == np.array(piece.offsets[::shared])
    x = jnp.where(takes.reshape(*takes.shape, *[1] * len(rest)), x[:, :, None], fill)
    if group > shared:
        x = x.reshape(*x.shape[:3], -1, group // shared, *x.shape[4:]).sum(axis=4)
    return _tokens(x, piece, batch)


def merge_rows(parts: list[tuple[Piece, jax.Array]], length: int, fill: float = 0) -> list[jax.Array]:
    """[B, T, ...] for each branch, from the results of scatter for its pieces. fill: the value outside of pieces."""
    branches: dict[int, list[tuple[Piece, jax.Array]]] = {}
    for piece, x in parts:
        branches.setdefault(piece.branch, []).append((piece, x))
    out = []
    for _, pieces in sorted(branches.items()):
        pieces.sort(key=lambda part: part[0].start)
        x = jnp.concatenate([x for _, x in pieces], axis=1)
        rest = [(0, 0)] * (x.ndim - 2)
        out.append(jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *rest], constant_values=fill))
    return out
