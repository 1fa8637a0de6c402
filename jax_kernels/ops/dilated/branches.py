"""The branches of dilated attention as views of its arrays: the rows and heads of each attention call, and back.

If a piece (see pieces.py) covers the sequence and its rate divides its segments, the array of a call is the caller's
array, reshaped, and a kernel reads the heads that take part (BranchCall.is_strided). Otherwise the rows are gathered by
reshapes, static slices, concatenations and selects, which XLA fuses unless an order permutes the tokens.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.inputs.attention import HeadView
from jax_kernels.ops.dilated.pieces import Piece
from jax_kernels.ops.dilated.sharded_segments import ROW_MULTIPLE, Span
from jax_kernels.pallas.attention.passes.merge_branches import BranchRows, Compact, Table

__all__ = [
    "BranchCall",
    "arrays_of",
    "calls_of",
    "compact_rows",
    "gather_ids",
    "gather_rows",
    "merge_rows",
    "scatter",
    "split_strided",
]


@dataclasses.dataclass(frozen=True)
class BranchCall:
    """One attention call for some pieces. All its batch entries have one shape.

    rows: the number of queries of an entry, and of its keys on one device. heads, kv_heads: the query and key heads of
    an entry. is_masked: whether the call takes segment ids. It does if the caller gave ids, or if rows without a token
    must be excluded and a causal mask does not already exclude them. span: the devices whose keys each entry attends
    to, `rows` rows on each; None if an entry attends only to keys of this device. is_strided: whether the kernel reads
    the caller's arrays in place, as a view. Such a call has one piece, and takes some heads of the view.
    """

    pieces: tuple[Piece, ...]
    rows: int
    heads: int
    kv_heads: int
    is_masked: bool
    span: Span | None = None
    is_strided: bool = False

    def entries(self, batch: int, num_heads: int) -> int:
        """The number of batch entries of the call. batch, num_heads: of the caller's query."""
        return sum(_entries(piece, batch, num_heads, self.heads) for piece in self.pieces)

    def head_view(self, num_heads: int, array_heads: int) -> HeadView | None:
        """The heads that a strided call takes of a view [entries, rows, rate * array_heads, D]; None if it takes all.

        num_heads: the heads of query. array_heads: the heads of the viewed array, query or key.
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
    """The attention calls that compute the pieces. Pieces share a call if their batch entries have equal shapes.

    They must also agree in is_masked and in their span. num_heads, kv_heads: of the caller's query and key.
    has_segment_ids: whether the caller gave segment ids.
    """
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
    """Splits a call: each piece that a kernel can read as a view gets a strided call, the other pieces share one call.

    A call with segment ids is not split. length: the tokens of the caller's arrays. group: query heads per key head.
    """
    if call.is_masked:
        return (call,)
    strided = [piece for piece in call.pieces if _is_strided(piece, length, group)]
    others = tuple(piece for piece in call.pieces if piece not in strided)
    calls = [dataclasses.replace(call, pieces=(piece,), is_strided=True) for piece in strided]
    return *calls, *([dataclasses.replace(call, pieces=others)] if others else [])


def _is_strided(piece: Piece, length: int, group: int) -> bool:
    """Whether a kernel can read the piece as a view of arrays with `length` tokens. group: query heads per key head."""
    is_whole = piece.start == 0 and piece.segments * piece.length == length
    has_tiles = piece.length % piece.rate == 0 and piece.rows % ROW_MULTIPLE == 0
    # Otherwise the query heads would start in the middle of a key head.
    is_aligned = piece.offsets is None or piece.heads[0] % group == 0
    return is_whole and has_tiles and is_aligned and not piece.is_ordered and piece.span is None


def compact_rows(calls: Sequence[BranchCall], batch: int, num_heads: int, array_heads: int) -> Compact:
    """The map from tokens of an array [batch, T, array_heads, ...] to rows of the calls' compact arrays (one per call).

    Kernels gather, merge and sum by it. It has one BranchRows for each piece, by call, and the tables of pieces with
    is_ordered. If one head of key belongs to several heads of an entry, a piece has one BranchRows for each of them.
    num_heads: the heads of query. array_heads: the heads of the array, as many as query or key has.
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
                rows.append(BranchRows(*place, 0, folds, in_entry, 0, 1, classes=array_heads, table=table))
            else:
                first, end, boundary = (head // shared for head in (*piece.heads, piece.boundaries[1]))
                folds, offset = (end - first) // in_entry, piece.offsets[piece.heads[0]]
                which = first, folds, in_entry, offset, boundary - first, parts
                rows += [BranchRows(*place, *which, nth, table=table) for nth in range(parts)]
            base += batch * piece.segments * folds
    return Compact(tuple(rows), tuple(tables.values()))


def _shared(piece: Piece, group: int) -> int:
    """The largest n such that query heads n * i ... n * i + n - 1 have one key head and one class, for every i.

    group: query heads per key head. If every head takes all classes, only the key head counts.
    """
    return group if piece.offsets is None else math.gcd(group, *piece.boundaries)


def _entries(piece: Piece, batch: int, num_heads: int, in_entry: int) -> int:
    """The number of batch entries that hold a piece, with in_entry query heads in each entry."""
    served = num_heads * piece.rate if piece.offsets is None else piece.heads[1] - piece.heads[0]
    return batch * piece.segments * served // in_entry


def _rows(x: jax.Array, piece: Piece, fill: float = 0) -> jax.Array:
    """The piece's tokens of x [B, T, ...], as [B * segments, rows, rate, ...] with class c at index c of axis 2.

    fill: the value in rows without a token.
    """
    batch, _, *rest = x.shape
    x = x[:, piece.start : piece.start + piece.segments * piece.length]
    x = piece.arranged(x.reshape(batch * piece.segments, piece.length, *rest), fill)
    missing = piece.rows * piece.rate - x.shape[1]
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * len(rest), constant_values=fill)
    return x.reshape(-1, piece.rows, piece.rate, *rest)


def _tokens(x: jax.Array, piece: Piece, batch: int) -> jax.Array:
    """[B * segments, rows, rate, ...] -> the piece's tokens in sequence order, [B, segments * length, ...]."""
    x = piece.in_sequence(x.reshape(x.shape[0], -1, *x.shape[3:]))
    return x.reshape(batch, -1, *x.shape[2:])


def arrays_of(x: jax.Array, call: BranchCall, num_heads: int) -> jax.Array:
    """A call's input array, from x [B, T, heads, ...]. num_heads: the heads of query; x may have the heads of key.

    It is x itself, reshaped to [entries, rows, rate * heads, ...], for a strided call; else the array of gather_rows,
    [entries, rows, heads of an entry, ...].
    """
    if not call.is_strided:
        return gather_rows(x, call, num_heads)
    (piece,) = call.pieces
    return x.reshape(-1, piece.rows, piece.rate * x.shape[2], *x.shape[3:])


def gather_rows(x: jax.Array, call: BranchCall, num_heads: int) -> jax.Array:
    """The compact array of a call, [entries, rows, heads of an entry, ...], gathered from x [B, T, heads, ...].

    num_heads: the heads of query; x may have the heads of key. Rows without a token are 0.
    """
    group = num_heads // x.shape[2]
    return jnp.concatenate([_gathered(x, piece, group, call) for piece in call.pieces])


def _gathered(x: jax.Array, piece: Piece, group: int, call: BranchCall) -> jax.Array:
    """The compact array of one piece of the call, [its entries, rows, heads of an entry, ...].

    x: [B, T, heads, ...], all tokens. group: the number of query heads for each head of x. Rows without a token are 0.
    """
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
    """Joins picked heads to slices: (class, (first head, end)) of each run of consecutive heads of one class.

    picks: (class, head) of each head to gather, in order; head is its index in the gathered array. The runs keep this
    order, and together have each pick once.
    """
    runs: list[tuple[int, tuple[int, int]]] = []
    for phase, head in picks:
        if runs and runs[-1][0] == phase and runs[-1][1][1] == head:
            runs[-1] = (phase, (runs[-1][1][0], head + 1))
        else:
            runs.append((phase, (head, head + 1)))
    return runs


def gather_ids(ids: jax.Array | None, call: BranchCall, batch: int, length: int) -> jax.Array:
    """int32 [entries, rows]: the segment id of each row of a call; -1 in rows without a token.

    ids: int32 [batch, length], or None if all tokens have one id.
    """
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
    """(piece, float32 [batch, its tokens, out_heads, ...]) for each piece of a call: the inverse of gather_rows.

    x: a compact array of the call, [entries, rows, heads of an entry, ...]. num_heads: the heads of query. out_heads:
    the heads of query or of key. For key, the values of several query heads of one key head are added. fill: the value
    of tokens that a head does not take.
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
    """The tokens of one piece, [batch, its tokens, heads, ...], from the piece's compact array.

    x: [entries of the piece, rows, heads of an entry, ...]. group: query heads per head of the result. shared: query
    heads per head of x; if it is less than group, the heads of x of one head of the result are added. fill: the value
    of tokens that a head does not take.
    """
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
    """One array [B, T, ...] for each branch, in order: the tokens of its pieces, joined. length: T.

    parts: (piece, [B, its tokens, ...]), as scatter returns them. fill: the value of tokens after the last piece.
    """
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
