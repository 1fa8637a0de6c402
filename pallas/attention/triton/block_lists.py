"""Masks as block lists in the Triton kernels: dead blocks are neither loaded nor visited.

A program owns a block of queries, or of keys, and walks this block's list: first the full blocks, then the partial
blocks, whose mask bits it reads. Lists and bits are made before a kernel starts, as for the Hopper kernels, by
masks.block_lists. Source of the scheme: Dao et al., "FlashAttention" (2022), arXiv:2205.14135, section 3.3.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.arrays import Dense, KeyMask
from jax_kernels.masks.block_lists import BlockLists, block_lists, block_status, compress, packed_lists
from jax_kernels.masks.checks import offset as offset_of
from jax_kernels.masks.limits import key_lengths, whole_mask, without_limits
from jax_kernels.masks.mask import And, Not, Or
from jax_kernels.pallas.attention.listed_call import ListedCall, PreparedLists, rounded_up
from jax_kernels.pallas.attention.mask_predicate import MaskPredicate
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota

WORD = 32  # bits

type Whole = tuple[jax.Array, pl.BlockSpec]  # an input of a kernel whose programs all have the whole array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists[A: jax.Array | Ref | Whole]:
    """The block lists of a call as a kernel reads them, all int32.

    indices: [B or 1, H or 1, blocks or 1, width], the blocks to visit, full blocks first. counts: [B or 1, H or 1,
    blocks or 1, 2], the number of full blocks and of all blocks of a list. H: query heads.

    A kernel evaluates `predicate` in partial blocks. It is None if the mask is not arithmetic. Then entries, shaped as
    indices, has the index into `words` of each partial block. words: [entries, ceil(columns / 32), rows], the bits of
    partial blocks: bit j % 32 of word [j // 32, i] is row i and column j. Rows belong to the side of the programs,
    columns to the visited blocks. If entries is None too, words are the bits of all pairs, [B or 1, H or 1, all columns
    / 32, all rows].

    by: "query" or "key", the side of the programs. blocks: (block_q, block_kv).
    """

    indices: A
    counts: A
    predicate: MaskPredicate[A] | None = None
    entries: A | None = None
    words: A | None = None
    by: str = dataclasses.field(metadata={"static": True}, kw_only=True)
    blocks: tuple[int, int] = dataclasses.field(metadata={"static": True}, kw_only=True)

    def repeated(self, times: int, batch: int) -> "Lists | None":
        """The lists of a batch that is `times` as large as `batch`, if all entries have one list; else None."""
        return self if cast(jax.Array, self.counts).shape[0] == 1 else None

    def of(self, b: Index, h: Index, block: Index) -> "ListedBlocks":
        """The list of a block of query head h of batch entry b, inside a kernel whose Lists are Refs."""
        counts = cast(Ref, self.counts)
        of_block = first_indices(counts, b, h, block)
        return ListedBlocks(self, b, h, block, full=counts[(*of_block, 0)], count=counts[(*of_block, 1)])


class Visit(NamedTuple):
    """One visit of a program: its number, from 0 on, and the index of the block that it visits."""

    step: Index
    block: Index


@dataclasses.dataclass(frozen=True)
class ListedBlocks:
    """The blocks that a program visits: steps 0 ... count - 1. The first `full` blocks are full.

    b, h, block: the batch entry, the query head, and the block that the program owns.
    """

    lists: Lists
    b: Index
    h: Index
    block: Index
    full: Index
    count: Index

    def at(self, step: Index) -> jax.Array:
        """The index of the block that a step visits; any block's from step `count` on."""
        indices = self.lists.indices
        return self._of_step(indices, jnp.minimum(step, indices.shape[3] - 1))

    def keep(self, visit: Visit) -> jax.Array:
        """Which pairs of a partial block the mask keeps: bool [rows, columns], [queries, keys] by query."""
        lists = self.lists
        by_query = lists.by == "query"
        rows, columns = lists.blocks if by_query else lists.blocks[::-1]
        row, column = self.block * rows, visit.block * columns
        if lists.predicate is None and lists.entries is None:
            words, of_head = needed(lists.words), first_indices(needed(lists.words), self.b, self.h)
            first = lax.div(column, jnp.int32(WORD))
            return unpacked(lambda i: words.at[(*of_head, first + i, pl.ds(row, rows))], columns)
        if lists.predicate is None:
            return kept_bits(needed(lists.words), self._of_step(needed(lists.entries), visit.step), columns)
        own, other = (row + iota(rows))[:, None], (column + iota(columns))[None, :]
        q, k = (own, other) if by_query else (other, own)

        def load(values: Ref, leading: tuple[Index, ...], side: int) -> jax.Array:
            of_rows, at = (side == 0) == by_query, first_indices(values, *leading)
            these = pl.ds(row, rows) if of_rows else pl.ds(column, columns)
            found = plgpu.load(values.at[(*at, these)])
            return found[:, None] if of_rows else found[None, :]

        return jnp.broadcast_to(lists.predicate.keep(self.b, self.h, q, k, load), (rows, columns))

    def _of_step(self, ref: Ref, step: Index) -> jax.Array:
        return ref[(*first_indices(ref, self.b, self.h, self.block), step)]


def first_indices(ref: Ref, *indices: Index) -> tuple[Index, ...]:
    """The indices into the first axes of an array [B or 1, H or 1, ...]: 0 where an axis has length 1."""
    return tuple(jnp.int32(0) if size == 1 else i for size, i in zip(ref.shape, indices, strict=False))


def kept_bits(words: Ref, entry: Index, columns: int) -> jax.Array:
    """The bits of one entry of `words` [entries, ceil(columns / 32), rows]: bool [rows, columns]."""
    return unpacked(lambda i: words.at[entry, jnp.int32(i), :], columns)


def unpacked(words: Callable[[int], Ref], columns: int) -> jax.Array:
    """The bits of a tile: bool [rows, columns]. words(i): the words [rows] of columns 32 * i to 32 * i + 31."""
    of_columns = iota(columns)[None, :]
    word = plgpu.load(words(0))[:, None]
    for i in range(1, pl.cdiv(columns, WORD)):
        word = jnp.where(of_columns // WORD == i, plgpu.load(words(i))[:, None], word)
    return (word >> of_columns % WORD) & 1 != 0


def lists_of(
    inputs: AttentionInputs, options: AttentionOptions, blocks: tuple[int, int], *, by: str
) -> Lists[jax.Array] | None:
    """The block lists of a call, which hold all limits of its keys; None without a mask.

    blocks: (block_q, block_kv). by: "query" or "key", the side whose blocks the programs own. Prepared lists in
    inputs.lists are used if they fit the call.
    """
    if inputs.mask is None:
        return None
    call = _call_of(inputs, options, blocks, by=by)
    for prepared in inputs.lists or ():
        if (lists := prepared.of(call)) is not None:
            return lists
    static_offset, offset = offset_of(first_position(inputs, options))
    return _built(_whole_mask(inputs, options), offset, call=call, static_offset=static_offset)


def prepared_lists(
    inputs: AttentionInputs, options: AttentionOptions, blocks: tuple[int, int], *, by: str
) -> PreparedLists:
    """Block lists made in advance, for later calls with the same mask and sizes. Arguments: as for lists_of.

    If the mask's values are known, the arrays have room for the longest list and for the partial blocks, plus at most
    an eighth. If they are traced, the arrays have room for the most blocks that the mask's structure allows. query and
    key in inputs may be ShapeDtypeStructs.
    """
    call = _call_of(inputs, options, blocks, by=by)
    _, offset = offset_of(call.q_offset)
    mask, statics = _whole_mask(inputs, options), {"static_offset": call.q_offset}
    alive, full = block_status(mask, offset, lengths=call.lengths, blocks=call.blocks, **statics)
    if isinstance(alive, jax.core.Tracer):
        return PreparedLists(_built(mask, offset, call=call, **statics), call)
    most = min(rounded_up(int((alive & ~full).sum())), alive.size)
    lists = _built(mask, offset, call=call, most=most, **statics)
    width = min(max(1, rounded_up(int(lists.counts[..., 1].max()))), lists.indices.shape[-1])
    entries = None if lists.entries is None else lists.entries[..., :width]
    return PreparedLists(dataclasses.replace(lists, indices=lists.indices[..., :width], entries=entries), call)


def _whole_mask(inputs: AttentionInputs, options: AttentionOptions) -> Mask:
    """All limits of a call as one Mask. An array with one row for all queries becomes a KeyMask, without bits."""

    def with_key_masks(mask: Mask) -> Mask:
        if isinstance(mask, Dense) and mask.array.shape[2] == 1:
            return KeyMask(jnp.broadcast_to(mask.array[:, :, 0], (*mask.array.shape[:2], inputs.key.shape[1])))
        # Only in compositions of this call's masks: a Placed mask's arrays have the keys of the whole sequence.
        if isinstance(mask, And | Or):
            return type(mask)(tuple(map(with_key_masks, mask.masks)))
        return Not(with_key_masks(mask.mask)) if isinstance(mask, Not) else mask

    return with_key_masks(whole_mask(inputs, options))


def _call_of(inputs: AttentionInputs, options: AttentionOptions, blocks: tuple[int, int], *, by: str) -> ListedCall:
    heads = inputs.query.shape[2], inputs.key.shape[2]
    return ListedCall.of(inputs, options, *blocks, by=by, heads=heads)


@functools.partial(jax.jit, static_argnames=("call", "static_offset", "most"))
def _built(
    mask: Mask, offset: jax.Array, *, call: ListedCall, static_offset: int | None, most: int | None = None
) -> Lists[jax.Array]:
    """The block lists of a mask that holds all limits of a call's keys.

    offset: int32 [B or 1], the position of query 0; static_offset: the same as an int, None if traced. most: at least
    the number of partial blocks of all batch entries and heads, for the size of `words`; None: not known.
    """
    sizes: dict[str, Any] = {"lengths": call.lengths, "blocks": call.blocks, "by": call.by}
    parts: dict[str, Any] = {}
    if mask.is_arithmetic:
        if mask.is_of_keys:
            lists = _lists_of_keys(mask, call)
        else:
            lists = block_lists(mask, offset, **sizes, static_offset=static_offset)
        parts = {"predicate": MaskPredicate.of(mask, offset, call.lengths, call.blocks)}
    elif most is None and mask.is_evaluated and not any(block % WORD for block in call.blocks):
        lists, parts["words"] = _evaluated(mask, offset, call)
    else:
        lists, packed = packed_lists(mask, offset, **sizes, static_offset=static_offset, most=most)
        # The entry of a full block, -1, is not read.
        parts = {"entries": packed.entries, "words": lax.bitcast_convert_type(packed.words, jnp.int32)}
    counts = jnp.stack([lists.full_count, lists.full_count + lists.partial_count], axis=-1)
    return Lists(indices=lists.indices, counts=counts, **parts, by=call.by, blocks=call.blocks)


def _lists_of_keys(mask: Mask, call: ListedCall) -> BlockLists:
    """The block lists of a mask that keeps the same keys for every query.

    By query, all blocks of queries have one list. By key, a live block of keys visits all blocks of queries.
    """
    (q_length, kv_length), (block_q, block_kv) = call.lengths, call.blocks
    first, sizes = jnp.zeros((1,), jnp.int32), {"lengths": (1, kv_length), "blocks": (1, block_kv), "static_offset": 0}
    if call.by == "query":
        return block_lists(mask, first, **sizes, by="query")
    alive, full = (x[:, :, 0] for x in block_status(mask, first, **sizes))
    count = pl.cdiv(q_length, block_q)
    indices = jnp.arange(count, dtype=jnp.int32)[None, None, None]
    return BlockLists(indices, count * full.astype(jnp.int32), count * (alive & ~full).astype(jnp.int32))


def _evaluated(mask: Mask, offset: jax.Array, call: ListedCall) -> tuple[BlockLists, jax.Array]:
    """(lists, words of all pairs) of a mask, by evaluating all its pairs."""
    keep = mask.to_dense(*call.lengths, q_offset=offset)
    rows, columns = call.blocks
    if call.by == "query":
        keep = keep.swapaxes(2, 3)
    else:
        rows, columns = columns, rows
    keep = jnp.pad(keep, ((0, 0), (0, 0), (0, -keep.shape[2] % columns), (0, -keep.shape[3] % rows)))
    bits = keep.reshape(*keep.shape[:2], -1, WORD, keep.shape[3]).astype(jnp.uint32)
    words = (bits << jnp.arange(WORD, dtype=jnp.uint32)[:, None]).sum(axis=3, dtype=jnp.uint32)
    blocks = words.reshape(*words.shape[:2], -1, columns // WORD, words.shape[3] // rows, rows)
    alive, full = (blocks != 0).any(axis=(3, 5)), (blocks == ~jnp.uint32(0)).all(axis=(3, 5))
    alive, full = alive.swapaxes(2, 3), full.swapaxes(2, 3)
    return compress(alive, full, alive.shape[-1]), lax.bitcast_convert_type(words, jnp.int32)


def without_listed_limits(
    inputs: AttentionInputs, options: AttentionOptions
) -> tuple[AttentionInputs, AttentionOptions]:
    """(inputs, options) without the limits that block lists hold.

    kv_lengths stays, and holds the prefix masks too: a kernel reads no key past it, which may be NaN.
    """
    lengths = key_lengths(inputs)
    inputs, options = without_limits(inputs, options)
    return inputs._replace(kv_lengths=lengths), options
