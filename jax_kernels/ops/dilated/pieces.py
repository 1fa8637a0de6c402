"""The pieces of dilated attention: runs of equal segments of one branch, with their tokens and classes.

The tokens of a piece, reshaped to [B * segments, rows, rate, heads, D], have one residue class in each column `phase`,
so a head is a strided slice. If several devices share a segment, a piece has this device's tokens of the segment, and
the keys of its classes travel round the ring of these devices. If segments begin or end within a device, a piece has
all the device's tokens of the branch, and segment ids mark the tokens of each segment.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.hilbert import invert_order
from jax_kernels.ops.dilated.sharded_segments import ROW_MULTIPLE, Deal, Shards, Span, classes_of, dealt_out
from jax_kernels.pallas.attention.passes.merge_branches import Table

__all__ = ["Piece", "of_heads", "pieces_of"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of adjacent segments of one branch that have equal lengths.

    branch: the branch's index. start: the first token. segments: the number of segments. length: the tokens of each
    segment. rate: the branch's dilation rate. offsets: for each query head the class that it takes, -1 if the branch
    does not serve the head; None if every head takes all classes. order: None, or "hilbert" if a token's position is
    its index in hilbert_order of the segment. span: the devices that share each segment, None if each segment is on one
    device. With a span, length is one device's part of a segment; it is a multiple of the rate if deal is None. deal:
    the tables that sort the device's tokens by class, if segments begin or end within a device; else None. With a deal,
    the piece has one segment: all tokens of this device.
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
        """The rows that hold one class of one segment: the size of the largest class.

        If not all classes have this size, it is rounded up to a multiple of ROW_MULTIPLE.
        """
        if self.is_dealt_out:
            return self._dealt_out[0].shape[1] // self.rate
        rows, rest = divmod(self.length, self.rate)
        return -(-(rows + 1) // ROW_MULTIPLE) * ROW_MULTIPLE if rest else rows

    @property
    def heads(self) -> tuple[int, int]:
        """(first, end): the branch serves the query heads first ... end - 1. Needs offsets."""
        assert self.offsets is not None
        served = [head for head, offset in enumerate(self.offsets) if offset >= 0]
        return served[0], served[-1] + 1

    @property
    def boundaries(self) -> list[int]:
        """Query heads, ascending: the first served head, each head with another class than the head before, the end.

        The first and the last value are the two values of `heads`. Needs offsets.
        """
        assert self.offsets is not None
        first, end = self.heads
        return [first, *(h for h in range(first + 1, end) if self.offsets[h] != self.offsets[h - 1]), end]

    @property
    def is_ordered(self) -> bool:
        """Whether tokens must be permuted by `table` to sort them by class.

        If not, token i of a segment has class i % rate: the tokens are sorted already.
        """
        return self.deal is not None or (self.order is not None and self.rate > 1)

    @property
    def is_dealt_out(self) -> bool:
        """Whether the devices of a segment may have different numbers of tokens of a class, and so need padding."""
        return self.span is not None and self.is_ordered

    @property
    def has_gaps(self) -> bool:
        """Whether the result of `arranged` may have padding before a token, not only after the last token."""
        return self.is_dealt_out and self.rows * self.rate != self.length

    @property
    def _dealt_out(self) -> tuple[np.ndarray, np.ndarray]:
        """The tables of all devices of a segment, for a piece with is_dealt_out.

        int32 [devices, rows * rate]: the token, counted within the device, at each index of `arranged`; the number of
        the device's tokens at an index without a token. And int32 [devices, length]: the index of each token of the
        device.
        """
        assert self.span is not None
        if self.deal is not None:
            return self.deal.tables.at, self.deal.tables.places
        return _dealt_out(self.length * self.span.devices, self.rate, self.span.devices)

    @property
    def table(self) -> Table:
        """The permutation of this device's tokens of a segment that sorts them by class, as a Table.

        tokens: the token at each index of the sorted order, which may have gaps (has_gaps). `places`: the index of each
        token. Needs is_ordered.
        """
        if self.is_dealt_out:
            assert self.span is not None
            return Table(*(self.span.mine(numbers) for numbers in self._dealt_out))
        tokens = _arrangement(self.length, self.rate)
        return Table(jnp.asarray(tokens), jnp.asarray(invert_order(tokens)))

    def arranged(self, x: jax.Array, fill: float) -> jax.Array:
        """x [segments, length, ...] with each segment's tokens sorted by class.

        The tokens of class c, ascending, get the indices c, c + rate, c + 2 * rate, ... A deal at rate 1 instead stores
        the tokens of each class of each segment next to each other. With has_gaps the result has rows * rate indices,
        and indices without a token have the value `fill`.
        """
        if self.has_gaps:
            return x.at[:, self.table.tokens].get(mode="fill", fill_value=fill)
        return _permuted(x, self.table.tokens) if self.is_ordered else x

    def in_sequence(self, x: jax.Array) -> jax.Array:
        """[segments, length, ...] in sequence order: the inverse of arranged. x may have padding at its end."""
        return _permuted(x, self.table.places) if self.is_ordered else x[:, : self.length]


@functools.lru_cache(maxsize=32)
def _arrangement(length: int, rate: int) -> np.ndarray:
    """int32 [length]: the token at each index of a segment that is sorted by the classes of order="hilbert".

    The tokens of class c, ascending, are at the indices c, c + rate, c + 2 * rate, ...
    """
    tokens = np.empty(length, np.int32)
    for phase, taken in enumerate(_hilbert_classes(length, rate)):
        # Ascending order keeps the causal mask a triangle. The result depends only on the set of tokens.
        tokens[phase::rate] = taken
    return tokens


def _hilbert_classes(length: int, rate: int) -> list[np.ndarray]:
    """The tokens of each class of a segment, ascending, for order="hilbert"."""
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
    """The pieces of all branches of a dilated_attention, by branch and then by first token.

    length: the tokens of the arrays. num_heads: query heads. branches: (segment length, rate) of each branch. heads,
    layout, order, is_causal: as the arguments of dilated_attention. shards: the mesh axis over which the sequence is
    sharded, or None. With shards, `length` is the number of tokens of one device, and each branch has one piece, or all
    branches together with layout="partition".
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
    """The pieces, restricted to the query heads first ... end - 1. Pieces that serve none of these heads are left out.

    The heads of the result are counted from `first`.
    """
    found = []
    for piece in pieces:
        offsets = None if piece.offsets is None else piece.offsets[first:end]
        if offsets is None or max(offsets) >= 0:
            found.append(dataclasses.replace(piece, offsets=offsets))
    return found


def _partition(length: int, branches: Sequence[tuple[int, int]], order: str | None) -> list[Piece]:
    """The pieces for layout="partition": one segment for each branch, one after another.

    Tokens after the last branch's segment form a segment at rate 1. Adjacent equal segments are one piece.
    """
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
    """The piece that each device has of a branch. Its fields are the same on all devices.

    whole: the branch's pieces of the whole sequence. length: the tokens of one device. is_causal: then keys do not
    travel to earlier devices.
    """
    first, *others = whole
    if not others and shards.fits(first.length, first.rate, length):
        size = min(first.length, length)
        return dataclasses.replace(first, segments=length // size, length=size, span=shards.span(first.length, length))
    runs = [(piece.segments, piece.length, piece.rate) for piece in whole]
    deal = shards.deal(runs, length, first.order, is_by_class=first.offsets is not None)
    span = Span(shards.axis_name, deal.devices, shards.devices, deal.shifts(is_causal=is_causal))
    return dataclasses.replace(first, segments=1, length=length, rate=deal.rate, span=span, deal=deal)


def _permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    return x.at[:, order].get(mode="promise_in_bounds", unique_indices=True)
