"""Masks as block lists in the Triton kernels: dead blocks are neither loaded nor visited.

A program owns a block of queries, or of keys, and walks this block's list: first the full blocks, then the partial
blocks, whose mask bits it reads. Lists and bits are made before a kernel starts, as for the Hopper kernels, by
masks.block_lists. Source of the scheme: Dao et al., "FlashAttention" (2022), arXiv:2205.14135, section 3.3.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.block_lists import block_lists, block_status, packed_lists
from jax_kernels.masks.checks import offset as offset_of
from jax_kernels.masks.limits import key_lengths, whole_mask, without_limits
from jax_kernels.pallas.attention.listed_call import ListedCall, PreparedLists, rounded_up
from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.triton.tensors import iota

WORD = 32  # bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists[A]:
    """The block lists of a call as a kernel reads them, all int32.

    indices: [B or 1, H or 1, blocks, width], the blocks to visit, full blocks first. counts: [B or 1, H or 1, blocks,
    2], the number of full blocks and of all blocks of a list. H: query heads.

    A kernel evaluates `mask` in partial blocks. arrays: the mask's arrays. tree: its pytree structure, None if the mask
    is not arithmetic. Then entries, shaped as indices, has the index into `words` of each partial block. words: [entries, ceil(columns /
    32), rows], the bits of partial blocks: bit j % 32 of word [j // 32, i] is row i and column j. Rows belong to the
    side of the programs, columns to the visited blocks.

    offset: [B or 1], the position of query 0. by: "query" or "key", the side of the programs. lengths: of queries and
    keys. blocks: (block_q, block_kv).
    """

    indices: A
    counts: A
    offset: A
    arrays: list[A] = dataclasses.field(default_factory=list)
    entries: A | None = None
    words: A | None = None
    tree: Any = dataclasses.field(metadata={"static": True}, kw_only=True)
    by: str = dataclasses.field(metadata={"static": True}, kw_only=True)
    lengths: tuple[int, int] = dataclasses.field(metadata={"static": True}, kw_only=True)
    blocks: tuple[int, int] = dataclasses.field(metadata={"static": True}, kw_only=True)

    @property
    def mask(self) -> Mask | None:
        """The mask, with Refs as its arrays inside a kernel; None if it is not arithmetic."""
        return None if self.tree is None else jax.tree.unflatten(self.tree, self.arrays)

    def repeated(self, times: int, batch: int) -> "Lists | None":
        """The lists of a batch that is `times` as large as `batch`, if all entries have one list; else None."""
        return self if self.indices.shape[0] == 1 else None

    def of(self, b: Index, h: Index, block: Index) -> "ListedBlocks":
        """The list of a block of query head h of batch entry b, inside a kernel whose Lists are Refs."""
        of_block = (*first_indices(self.counts, b, h), block)
        return ListedBlocks(self, b, h, block, full=self.counts[(*of_block, 0)], count=self.counts[(*of_block, 1)])


@dataclasses.dataclass(frozen=True)
class ListedBlocks:
    """The blocks that a program visits: steps 0 ... count - 1, of which the first `full` are full blocks.

    b, h, block: the batch entry, the query head, and the block that the program owns.
    """

    lists: Lists
    b: Index
    h: Index
    block: Index
    full: Index
    count: Index

    @property
    def loops(self) -> tuple[tuple[Index, Index, bool], ...]:
        """The loops over the steps: (first step, end, whether its blocks are partial) each."""
        return (0, self.full, False), (self.full, self.count, True)

    def at(self, step: Index) -> jax.Array:
        """The index of the block that a step visits."""
        return self._of_step(self.lists.indices, step)

    def keep(self, step: Index) -> jax.Array:
        """Which pairs of a step's partial block the mask keeps: bool [rows, columns], [queries, keys] by query."""
        lists, mask = self.lists, self.lists.mask
        by_query = lists.by == "query"
        rows, columns = lists.blocks if by_query else lists.blocks[::-1]
        if mask is None:
            return kept_bits(lists.words, self._of_step(lists.entries, step), columns)
        own = (self.block * rows + iota(rows))[:, None]
        other = (self.at(step) * columns + iota(columns))[None, :]
        q, k = (own, other) if by_query else (other, own)
        offset = lists.offset[jnp.int32(0) if lists.offset.shape[0] == 1 else self.b]
        # Look-ups of queries and keys past the lengths stay within the arrays.
        within = [jnp.minimum(x, length - 1) for x, length in zip((q, k), lists.lengths, strict=True)]
        keep = mask.elements(self.b, self.h, *within, q_offset=offset)
        # Only keys past the length need a limit: results of other rows and columns past the lengths are dropped.
        keep = keep & (k < lists.lengths[1]) if by_query and lists.lengths[1] % columns else keep
        return jnp.broadcast_to(keep, (rows, columns))

    def _of_step(self, ref: Ref, step: Index) -> jax.Array:
        return ref[(*first_indices(ref, self.b, self.h), self.block, step)]


def first_indices(ref: Ref, b: Index, h: Index) -> tuple[Index, Index]:
    """The first two indices into an array [B or 1, H or 1, ...] for batch entry b and head h."""
    return jnp.int32(0) if ref.shape[0] == 1 else b, jnp.int32(0) if ref.shape[1] == 1 else h


def kept_bits(words: Ref, entry: Index, columns: int) -> jax.Array:
    """The bits of one entry of `words` [entries, ceil(columns / 32), rows]: bool [rows, columns]."""
    of_columns = iota(columns)[None, :]
    load_word = lambda i: plgpu.load(words.at[entry, jnp.int32(i), :])[:, None]
    word = load_word(0)
    for i in range(1, words.shape[1]):
        word = jnp.where(of_columns // WORD == i, load_word(i), word)
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
    return _built(whole_mask(inputs, options), offset, call, static_offset=static_offset)


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
    mask, statics = whole_mask(inputs, options), {"static_offset": call.q_offset}
    alive, full = block_status(mask, offset, lengths=call.lengths, blocks=call.blocks, **statics)
    if isinstance(alive, jax.core.Tracer):
        return PreparedLists(_built(mask, offset, call, **statics), call)
    most = min(rounded_up(int((alive & ~full).sum())), alive.size)
    lists = _built(mask, offset, call, most=most, **statics)
    width = min(rounded_up(int(lists.counts[..., 1].max())), lists.indices.shape[-1])
    entries = None if lists.entries is None else lists.entries[..., :width]
    return PreparedLists(dataclasses.replace(lists, indices=lists.indices[..., :width], entries=entries), call)


def _call_of(
    inputs: AttentionInputs, options: AttentionOptions, blocks: tuple[int, int], *, by: str
) -> ListedCall:
    heads = inputs.query.shape[2], inputs.key.shape[2]
    return ListedCall.of(inputs, options, *blocks, by=by, heads=heads)


def _built(
    mask: Mask, offset: jax.Array, call: ListedCall, *, static_offset: int | None, most: int | None = None
) -> Lists[jax.Array]:
    """The block lists of a mask that holds all limits of a call's keys.

    offset: int32 [B or 1], the position of query 0; static_offset: the same as an int, None if traced. most: at least
    the number of partial blocks of all batch entries and heads, for the size of `words`; None: not known.
    """
    sizes: dict[str, Any] = {"lengths": call.lengths, "blocks": call.blocks, "by": call.by}
    parts: dict[str, Any] = {"tree": None}
    if mask.is_arithmetic:
        lists = block_lists(mask, offset, **sizes, static_offset=static_offset)
        parts["arrays"], parts["tree"] = jax.tree.flatten(mask)
    else:
        lists, packed = packed_lists(mask, offset, **sizes, static_offset=static_offset, most=most)
        # The entry of a full block, -1, is not read.
        parts |= {"entries": packed.entries, "words": lax.bitcast_convert_type(packed.words, jnp.int32)}
    counts = jnp.stack([lists.full_count, lists.full_count + lists.partial_count], axis=-1)
    return Lists(indices=lists.indices, counts=counts, offset=offset, **parts, **sizes)


def without_listed_limits(
    inputs: AttentionInputs, options: AttentionOptions
) -> tuple[AttentionInputs, AttentionOptions]:
    """(inputs, options) without the limits that block lists hold.

    kv_lengths stays, and holds the prefix masks too: a kernel reads no key past it, which may be NaN.
    """
    lengths = key_lengths(inputs)
    inputs, options = without_limits(inputs, options)
    return inputs._replace(kv_lengths=lengths), options


def with_mask_of_keys_as_bias(
    inputs: AttentionInputs, options: AttentionOptions
) -> tuple[AttentionInputs, AttentionOptions]:
    """(inputs, options) where a mask array with one row for all queries is a bias of 0 and -inf, without a gradient.

    Lists would hold this row once for each block of queries. A call that has a bias or a score_mod is returned
    unchanged, as is one with another mask.
    """
    mask: Any = inputs.mask
    is_of_keys = mask is not None and not isinstance(mask, Mask) and mask.shape[2] == 1
    if not is_of_keys or inputs.bias is not None or inputs.score_mod is not None:
        return inputs, options
    bias = jnp.where(mask, 0.0, -jnp.inf).astype(jnp.float32)
    return inputs._replace(mask=None, bias=bias), dataclasses.replace(options, bias_gradient=False)
