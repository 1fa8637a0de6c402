"""The branches of dilated attention put together, each read once and the result written once: bound by memory.

A branch's results are compact: they hold the tokens that its heads take, and no others. A program owns a block of
tokens of one head, finds where each branch has them, and loads only those: written as a selection, XLA would load every
row as many times as the branch's rate.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_kernels.pallas.attention.shared_triton import head_mask, iota, padded, whole_array

ELEMENTS = 8192  # of a program's block of tokens


class Rows(NamedTuple):
    """Which tokens a compact array [entries, rows, in_entry, ...] has of an array [B, T, heads, ...].

    Of the compact arrays it is number `array`, of which it is entries base ... base + B * segments * folds - 1. These
    are those of an array [B * segments, folds, rows, in_entry, ...] where fold f has heads f * in_entry ... of heads
    0 ... folds * in_entry - 1. Head h of the array is number part * h + nth among `part` times as many, and that is
    first + c of one of these heads, c. Row r of segment s and head c is the token start + s * length + r * rate +
    offset + c // run, where that is below start + (s + 1) * length.
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

    def find(self, tokens, head, batch_index):
        """(whether there is a place for each token, its entry, its row, its head in the entry)."""
        place = tokens - self.start
        segment, within = lax.div(place, self.length), lax.rem(place, self.length)
        row, phase = lax.div(within, self.rate), lax.rem(within, self.rate)
        compact = head * self.part + (self.nth - self.first)
        taken = phase == self.offset + lax.div(compact, self.run)
        taken = taken & (place >= 0) & (segment < self.segments)
        taken = taken & (compact >= 0) & (compact < self.folds * self.in_entry)
        entry = (batch_index * self.segments + segment) * self.folds + lax.div(compact, self.in_entry)
        return taken, self.base + entry, row, lax.rem(compact, self.in_entry)


def merge(
    rows: Sequence[Rows], outs: Sequence[jax.Array], lses: Sequence[jax.Array], *, like, share, interpret
) -> tuple[jax.Array, jax.Array]:
    """(out, in the shape and dtype of `like`, [B, T, H, D]; lse [B, H, T]) of compact ones [entries, heads, rows].

    share: what each out counts; None for the softmax of the lses. A token that no branch has gets 0 and -inf.
    """
    batch, length, heads, head_dim = like.shape

    def kernel(*refs):
        *given, out_ref, lse_ref = refs
        out_refs, lse_refs = given[: len(outs)], given[len(outs) :]
        tokens, head, b = _program(head_dim)
        exists = tokens < length
        places = [x.find(tokens, head, b) for x in rows]
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
        for x, place, weight in zip(rows, places, weights, strict=True):
            weight = (weight / safe)[:, None] if share is None else share
            acc += weight * _load(out_refs[x.array], place, exists, head_dim)
        _store(out_ref, acc, exists, head_dim)

    shapes = [like, jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
    arrays = [_lines(x) for x in outs] + [x.reshape(-1, x.shape[2]) for x in lses]
    return tuple(_run(kernel, "dilated_merge", [whole_array(x) for x in arrays], shapes, interpret))


def total(
    rows: Sequence[Rows], parts: Sequence[jax.Array], whole: jax.Array | None, factor: float, *, like, interpret
) -> jax.Array:
    """factor times the sum of the compact parts, and of `whole` (float32) where there is that: typed as `like`."""
    _, length, _, head_dim = like.shape

    def kernel(*refs):
        *given, out_ref = refs
        tokens, head, b = _program(head_dim)
        exists = tokens < length
        acc = jnp.zeros((len(tokens), padded(head_dim)), jnp.float32)
        if whole is not None:
            acc += plgpu.load(given[-1], mask=head_mask(exists, len(exists), head_dim), other=0.0)
        for x in rows:
            acc += _load(given[x.array], x.find(tokens, head, b), exists, head_dim)
        _store(out_ref, acc * factor, exists, head_dim)

    arrays = [whole_array(_lines(x)) for x in parts]
    if whole is not None:
        arrays.append((whole, _tile(head_dim)))
    return _run(kernel, "dilated_total", arrays, [like], interpret)[0]


def _program(head_dim: int):
    """(its tokens, its head, its batch entry)."""
    block = _block(head_dim)
    return pl.program_id(0) * block + iota(block), pl.program_id(1), pl.program_id(2)


def _block(head_dim: int) -> int:
    return ELEMENTS // padded(head_dim)


def _tile(head_dim: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, _block(head_dim), None, padded(head_dim)), lambda i, h, b: (b, i, h, 0))


def _run(kernel: Any, name: str, arrays: Sequence[Any], shapes: Sequence[Any], interpret: bool):
    """pallas_call of (array, spec)s. shapes: of out and, if there is that, of lse."""
    batch, length, heads, head_dim = shapes[0].shape
    block = _block(head_dim)
    out_specs = [_tile(head_dim), pl.BlockSpec((None, None, block), lambda i, h, b: (b, h, i))]
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(length, block), heads, batch),
        in_specs=[spec for _, spec in arrays],
        out_specs=out_specs[: len(shapes)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*(array for array, _ in arrays))


def _lines(x: jax.Array) -> jax.Array:
    """[entries, rows, heads, D] -> [entries, rows, heads * D]."""
    return x.reshape(*x.shape[:2], -1)


def _load(ref: Any, place: Any, exists: Any, head_dim: int) -> jax.Array:
    """The tokens of a block that a compact array has, zeros for others: float32 [block, padded head_dim]."""
    taken, entry, row, head = place
    shape = (len(row), padded(head_dim))
    wide = lambda x: jnp.broadcast_to(x[:, None], shape)
    column = head * head_dim + lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = head_mask(taken & exists, len(row), head_dim)
    return plgpu.load(ref.at[wide(entry), wide(row), column], mask=mask, other=0.0).astype(jnp.float32)


def _store(ref: Any, x: jax.Array, exists: Any, head_dim: int) -> None:
    plgpu.store(ref, x.astype(ref.dtype), mask=head_mask(exists, len(exists), head_dim))
