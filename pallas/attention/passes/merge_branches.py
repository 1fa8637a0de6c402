"""Kernels that gather the branches of dilated attention into compact arrays, and that merge or add up the branches.

They read each branch once and write the result once: bound by memory. A branch's results are compact: they hold only
the tokens that its heads take. A program owns a block of tokens of one head, finds these tokens in each branch, and
loads only their rows. If this were a selection, XLA would load every row as many times as the branch's rate.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Shaped

from jax_kernels.pallas.attention.triton.arrays import head_mask
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, padded
from jax_kernels.pallas.varying import result_types


class ProgramShape(NamedTuple):
    """The work of a Triton program: a block of neighbouring tokens (or of compact rows) of one head.

    elements: the number of tokens of the block times the padded head_dim. warps: of a program. heads_first: whether
    neighbouring programs have neighbouring heads; otherwise they have neighbouring blocks of tokens.
    """

    elements: int
    warps: int
    heads_first: bool = True

    def block(self, head_dim: int) -> int:
        """The number of tokens of a program's block."""
        return self.elements // padded(head_dim)

    def axes(self, of_heads: Any, of_tokens: Any) -> tuple[Any, Any]:
        """Puts two values, one for heads and one for blocks of tokens, into the order of the grid's first two axes.

        The reverse is the same function: two values in the grid's order give (of_heads, of_tokens).
        """
        return (of_heads, of_tokens) if self.heads_first else (of_tokens, of_heads)

    def program(self, head_dim: int):
        """(tokens or rows of the running program's block, its head, its batch entry or compact entry), all indices."""
        head, nth = self.axes(pl.program_id(0), pl.program_id(1))
        block = self.block(head_dim)
        return nth * block + iota(block), head, pl.program_id(2)

    def spec(self, shape: tuple[int | None, ...], index: Any) -> pl.BlockSpec:
        """The BlockSpec of blocks of `shape`. index(head, block of tokens, batch entry) returns the block's index."""
        return pl.BlockSpec(shape, lambda x, y, b: index(*self.axes(x, y), b))

    def tile(self, head_dim: int) -> pl.BlockSpec:
        """The BlockSpec of a program's block of an array [B, T, heads, head_dim]."""
        return self.spec((None, self.block(head_dim), None, padded(head_dim)), lambda h, i, b: (b, i, h, 0))


# H200, five branches of 32,768 tokens, 16 x 128 and 12 x 64. merge takes 0.128 and 0.050 ms with heads first; 16 x 128
# takes 0.121 ms with tokens first (3.4 TB/s). With 8192 elements and 4 warps, weights first: 0.188 and 0.056 ms. total
# takes 0.096 and 0.039 ms (0.102, 0.051), gather 0.051 and 0.021 ms.
MERGE = ProgramShape(1024, 1, heads_first=False)
MOVE = ProgramShape(2048, 4)


class BranchRows(NamedTuple):
    """The map of one branch between tokens of an array [B, T, heads, ...] and rows of a compact array.

    A compact array is [entries, rows, in_entry, ...]; it may hold several branches. `array`: its index in the list of
    compact arrays. The branch has entries base ... base + B * segments * folds - 1, which are an array [B * segments,
    folds, rows, in_entry, ...]: fold f has the compact heads f * in_entry ... (f + 1) * in_entry - 1.

    Segment s has the tokens start + s * length ... start + (s + 1) * length - 1. `part` neighbouring compact heads
    belong to one head of the array: compact head c to head (first + c) // part. `find` knows only the compact heads
    where (first + c) % part is nth; so a branch has `part` maps. Slot r * rate + offset + c // run of a segment is row
    r of compact head c. Without a table, slot i of a segment is its token i.

    classes: 0, or the number of the array's heads if the compact heads have all classes of a segment: compact head c is
    then head c % classes of the array and class c // classes. table: the index, in the Compact's tables, of the Table
    that gives the tokens of the slots; -1 without a table.
    """

    array: int
    base: int
    start: int
    segments: int
    length: int
    rate: int
    first: int
    folds: int
    in_entry: int
    offset: int
    run: int
    part: int = 1
    nth: int = 0
    classes: int = 0
    table: int = -1

    def find(self, tokens, head, batch_index, tables):
        """(whether each token has a row, its entry, its row, its head within the entry): indices in the compact array.

        tokens: int32 [block], indices along T. head, batch_index: the tokens' head and batch entry in the array [B, T,
        heads, ...]. tables: a ref to the `places` of each of the Compact's tables. The results are [block], except that
        the head is a scalar without `classes`. Where a token has no row, its entry, row and head have no meaning.
        """
        from_start = tokens - self.start
        segment, place = lax.div(from_start, self.length), lax.rem(from_start, self.length)
        taken = (from_start >= 0) & (segment < self.segments)
        if self.table >= 0:
            place = plgpu.load(tables[self.table].at[place], mask=taken, other=0)
        row, phase = lax.div(place, self.rate), lax.rem(place, self.rate)
        if self.classes:
            compact = phase * self.classes + head
        else:
            compact = head * self.part + (self.nth - self.first)
            taken = taken & (phase == self.offset + lax.div(compact, self.run))
            taken = taken & (compact >= 0) & (compact < self.folds * self.in_entry)
        entry = (batch_index * self.segments + segment) * self.folds + lax.div(compact, self.in_entry)
        return taken, self.base + entry, row, lax.rem(compact, self.in_entry)

    def head_of(self, compact):
        """(head of the array, class) of a compact head, whose index counts over all folds."""
        if self.classes:
            return lax.rem(compact, self.classes), lax.div(compact, self.classes)
        return lax.div(self.first + compact, self.part), self.offset + lax.div(compact, self.run)


class Table(NamedTuple):
    """A permutation of a segment's tokens, for branches whose classes are not the positions modulo the rate. Both
    int32.

    tokens: [slots], the token in each slot, counted within the segment; `length` or more in an empty slot. `places`:
    [length], the slot of each token.
    """

    tokens: jax.Array
    places: jax.Array


class Compact(NamedTuple):
    """The layout of compact arrays: a BranchRows for each branch or part of a branch, and the tables that they name."""

    rows: tuple[BranchRows, ...]
    tables: tuple[Table, ...]


def merge(
    compact: Compact,
    outs: Sequence[Float[Array, "entries rows heads D"]],
    lses: Sequence[Float32[Array, "entries heads rows"]],
    *,
    like: jax.ShapeDtypeStruct,
    share: float | None,
    interpret: bool,
) -> tuple[Float[Array, "B T H D"], Float32[Array, "B H T"]]:
    """(out [B, T, H, D], lse [B, H, T]): the branches' results merged at every token.

    compact: the layout of outs and lses. like: shape and dtype of out. share: the constant weight of every branch's
    out; None: the weights are the softmax of the branches' lses. With both, lse is their log-sum-exp. A token in no
    branch gets out = 0 and lse = -inf.
    """
    batch, length, heads, head_dim = like.shape
    rows = compact.rows

    def kernel(*refs):
        *given, out_ref, lse_ref = refs
        out_refs, lse_refs, tables = given[: len(outs)], given[len(outs) : 2 * len(outs)], given[2 * len(outs) :]
        tokens, head, b = MERGE.program(head_dim)
        exists = tokens < length
        places = [x.find(tokens, head, b, tables) for x in rows]
        # Before the weights, so that neither load waits for the other.
        loaded = [_load(out_refs[x.array], place, exists, head_dim) for x, place in zip(rows, places, strict=True)]
        parts = []
        for x, (taken, entry, row, in_entry) in zip(rows, places, strict=True):
            view = lse_refs[x.array].at[entry * x.in_entry + in_entry, row]
            parts.append(plgpu.load(view, mask=taken & exists, other=-jnp.inf))
        highest = functools.reduce(jnp.maximum, parts)
        highest = jnp.where(highest == -jnp.inf, 0.0, highest)
        weights = [jnp.exp(x - highest) for x in parts]
        total = functools.reduce(jnp.add, weights)
        safe = jnp.where(total == 0, 1.0, total)
        plgpu.store(lse_ref, jnp.where(total == 0, -jnp.inf, highest + jnp.log(safe)), mask=exists)
        acc = jnp.zeros((len(tokens), padded(head_dim)), jnp.float32)
        for out, weight in zip(loaded, weights, strict=True):
            acc += ((weight / safe)[:, None] if share is None else share) * out
        _store(out_ref, acc, exists, head_dim)

    results = [like, jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
    arrays = [_lines(x) for x in outs] + [x.reshape(-1, x.shape[2]) for x in lses]
    arrays += [x.places for x in compact.tables]
    return tuple(_run(kernel, "dilated_merge", MERGE, [(x, _whole(x)) for x in arrays], results, interpret))


def total(
    compact: Compact,
    parts: Sequence[Float[Array, "entries rows heads D"]],
    whole: Float32[Array, "B T H D"] | None,
    factor: float,
    *,
    like: jax.ShapeDtypeStruct,
    interpret: bool,
) -> Float[Array, "B T H D"]:
    """factor * (the sum of all branches' parts at every token + whole), in the shape and dtype of `like`.

    compact: the layout of the parts. whole: an array that is already [B, T, H, D], or None.
    """
    _, length, _, head_dim = like.shape
    block = MOVE.block(head_dim)

    def kernel(*refs):
        *given, out_ref = refs
        tokens, head, b = MOVE.program(head_dim)
        exists = tokens < length
        acc = jnp.zeros((block, padded(head_dim)), jnp.float32)
        if whole is not None:
            acc += plgpu.load(given[-1], mask=head_mask(exists, block, head_dim), other=0.0)
        tables = given[len(parts) : len(parts) + len(compact.tables)]
        for x in compact.rows:
            acc += _load(given[x.array], x.find(tokens, head, b, tables), exists, head_dim)
        _store(out_ref, acc * factor, exists, head_dim)

    lines = [_lines(x) for x in parts] + [x.places for x in compact.tables]
    arrays: list[Any] = [(x, _whole(x)) for x in lines]
    if whole is not None:
        arrays.append((whole, MOVE.tile(head_dim)))
    return _run(kernel, "dilated_total", MOVE, arrays, [like], interpret)[0]


def gather(
    compact: Compact, arrays: Sequence[Shaped[Array, "B T H D"]], count: int, *, interpret: bool
) -> list[Shaped[Array, "entries count in_entry D"]]:
    """The compact arrays [entries, count, in_entry, D] of arrays [B, T, heads, D], which have equal shapes.

    compact: the layout of one compact array. count: its rows per entry. A row without a token is zeros. XLA takes three
    times as long.
    """
    pieces = [x for x in compact.rows if x.nth == 0]
    batch, head_dim, in_entry = len(arrays[0]), arrays[0].shape[3], pieces[0].in_entry
    entries = sum(batch * x.segments * x.folds for x in pieces)
    block = MOVE.block(head_dim)

    def kernel(*refs):
        row, head, entry = MOVE.program(head_dim)
        tables = refs[len(arrays) : len(arrays) + len(compact.tables)]
        b = of_array = jnp.int32(0)
        token, taken = row, row < 0
        for piece in pieces:
            nth = entry - piece.base
            fold, segment = lax.rem(nth, piece.folds), lax.div(nth, piece.folds)
            here = (nth >= 0) & (nth < batch * piece.segments * piece.folds)
            head_here, phase = piece.head_of(fold * piece.in_entry + head)
            within = row * piece.rate + phase
            if piece.table >= 0:
                tokens = compact.tables[piece.table].tokens
                there = here & (within < tokens.shape[0])
                within = plgpu.load(tables[piece.table].at[within], mask=there, other=piece.length)
            start = piece.start + lax.rem(segment, piece.segments) * piece.length
            b = jnp.where(here, lax.div(segment, piece.segments), b)
            of_array = jnp.where(here, head_here, of_array)
            token = jnp.where(here, start + within, token)
            taken = taken | (here & (within < piece.length))
        exists = row < count
        mask = head_mask(exists & taken, block, head_dim)
        token = jnp.broadcast_to(token[:, None], (block, padded(head_dim)))
        column = of_array * head_dim + lax.broadcasted_iota(jnp.int32, token.shape, 1)
        for ref, out_ref in zip(refs[: len(arrays)], refs[len(refs) - len(arrays) :], strict=True):
            _store(out_ref, plgpu.load(ref.at[b, token, column], mask=mask, other=0), exists, head_dim)

    given = [_lines(x) for x in arrays] + [x.tokens for x in compact.tables]
    results = [jax.ShapeDtypeStruct((entries, count, in_entry, head_dim), x.dtype) for x in arrays]
    tiles = [MOVE.tile(head_dim)] * len(arrays)
    return _run(kernel, "dilated_gather", MOVE, [(x, _whole(x)) for x in given], results, interpret, tiles)


def _run(
    kernel, name: str, shape: ProgramShape, arrays: Sequence[Any], results: Sequence[Any], interpret: bool, tiles=None
):
    """Runs pallas_call and returns its list of results.

    arrays: (array, BlockSpec) pairs. results: ShapeDtypeStructs, either of out [B, T, heads, D] and, optionally, lse
    [B, heads, T]; or of any arrays, whose BlockSpecs are then `tiles`.
    """
    batch, length, heads, head_dim = results[0].shape
    block, given = shape.block(head_dim), [array for array, _ in arrays]
    out_specs = tiles or [shape.tile(head_dim), shape.spec((None, None, block), lambda h, i, b: (b, h, i))]
    return pl.pallas_call(
        kernel,
        grid=(*shape.axes(heads, pl.cdiv(length, block)), batch),
        in_specs=[spec for _, spec in arrays],
        out_specs=out_specs[: len(results)],
        out_shape=result_types([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results], *given),
        compiler_params=plgpu.CompilerParams(num_warps=shape.warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*given)


def _whole(x: jax.Array) -> pl.BlockSpec:
    """The BlockSpec that gives every program the whole array x, for look-ups."""
    return pl.BlockSpec(x.shape, lambda *grid: (0,) * x.ndim)


def _lines(x: jax.Array) -> jax.Array:
    """x [entries, rows, heads, D] as [entries, rows, heads * D]."""
    return x.reshape(*x.shape[:2], -1)


def _load(ref: Any, place: Any, exists: Any, head_dim: int) -> jax.Array:
    """The rows of a block's tokens in a compact array, zeros for absent tokens: float32 [block, padded head_dim].

    ref: the compact array, [entries, rows, heads * D]. `place`: the tuple that BranchRows.find returns: whether each
    token has a row, and the token's entry, row and head. exists: bool [block], the tokens within the array. A token
    without a row counts as absent.
    """
    taken, entry, row, head = place
    shape = (len(row), padded(head_dim))
    wide = lambda x: jnp.broadcast_to(x[:, None], shape)
    head = head if jnp.ndim(head) == 0 else wide(head)  # one head for all tokens, or a head per token
    column = head * head_dim + lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = head_mask(taken & exists, len(row), head_dim)
    return plgpu.load(ref.at[wide(entry), wide(row), column], mask=mask, other=0.0).astype(jnp.float32)


def _store(ref: Any, x: jax.Array, exists: Any, head_dim: int) -> None:
    """Stores x [block, padded head_dim] in ref's dtype, without the rows that do not exist and the padding columns."""
    plgpu.store(ref, x.astype(ref.dtype), mask=head_mask(exists, len(exists), head_dim))
