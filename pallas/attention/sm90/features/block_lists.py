"""Masks as block lists in the Hopper kernels: dead blocks are neither loaded nor scheduled.

A work tile (a block of queries of a head, or a block of keys of a kv head) walks its list, which lies in device memory.
First come the full blocks, whose scores a running maximum can start from, then the partial blocks. In a partial block a
thread reads the mask bits of its part of a row as one word, straight into registers. An array of work tiles, longest
lists first within a few heads, gives the order in which CTAs process them. Only a few heads run at a time, so that
their keys and values stay in the L2 cache.

Lists and bits are made before a kernel starts. A mask that only its pairs define (an array, or a function) gets bits of
all blocks, and the live and full blocks are found from these bits. Source of the scheme: Dao et al., "FlashAttention"
(2022), arXiv:2205.14135, section 3.3 (block-sparse attention).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.arrays import KeyMask
from jax_kernels.masks.block_arithmetic import Grid, most_partial
from jax_kernels.masks.block_lists import BlockLists, block_lists, block_status, compress, packed_lists, sided
from jax_kernels.masks.checks import offset as offset_of
from jax_kernels.masks.limits import whole_mask
from jax_kernels.pallas.attention.listed_call import ListedCall, PreparedLists, rounded_up
from jax_kernels.pallas.attention.mask_predicate import MaskPredicate
from jax_kernels.pallas.attention.sm90.features import head_views, mask_bits
from jax_kernels.pallas.attention.sm90.features.bias import of_head
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.mosaic.layouts import COLUMN, PART, ROW, WGMMA

UNKNOWN = 4  # assumed ratio of a list's static width to its real length, when unknown
# Bits of partial blocks, 64 MiB: for more, a kernel evaluates the mask where it can.
MOST_BITS = 1 << 29
MOST_PAIRS = 1 << 32  # evaluated at once; more if the mask holds an array of at least half as many elements
# The least pairs of queries and keys for which a mask of keys gets lists. Not measured: making lists takes 0.02 ms, and
# a forward of 4096 x 4096 with two batch entries and 16 heads of 128 takes 0.45 ms: a twentieth of dead blocks pays.
KEYS_PAY = 4096 * 4096
COLUMNS = 8  # of the table: values that are read together lie in one sector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists[A: jax.Array | Ref]:
    """The block lists of a call as a kernel reads them, all int32.

    tiles: [tiles, COLUMNS], one row per work tile in the order of processing: batch entry, head, block, number of
    visited blocks, number of full blocks among them; the other columns are zeros.

    indices: [B or 1, H or 1, blocks, width], the blocks to visit, full blocks first. H: query heads, or kv heads for
    lists by key. entries: shaped like indices, the entry of `words` that belongs to a partial block. words: [entries,
    rows, PART], mask words of partial blocks.

    If entries is None, words are the mask words of all blocks: [B, H, blocks of columns, blocks of rows, rows, PART].
    Most blocks may then be partial, so that a kernel should read the words early. If words is None too, a kernel
    evaluates `predicate` in partial blocks. by: "query" or "key", the side of the work tiles. blocks: (block_q,
    block_kv).

    sharing: the number of query heads that visit each block of a list, one after another, before the next block. keys:
    for lists by query, the approximate number of keys that a query visits.
    """

    tiles: A
    indices: A
    entries: A | None = None
    words: A | None = None
    predicate: MaskPredicate[A] | None = None
    sharing: int = dataclasses.field(metadata={"static": True}, kw_only=True)
    keys: int = dataclasses.field(metadata={"static": True}, kw_only=True)
    by: str = dataclasses.field(metadata={"static": True}, kw_only=True)
    blocks: tuple[int, int] = dataclasses.field(metadata={"static": True}, kw_only=True)

    @property
    def has_all_words(self) -> bool:
        """Whether the mask words of all blocks, dead and full ones too, are stored."""
        return self.entries is None and self.words is not None

    def repeated(self, times: int, batch: int) -> "Lists | None":
        """The lists of a batch that is `times` as large as `batch`, if all entries have one list; else None.

        The table of tiles is repeated, for one part of the batch after another.
        """
        if self.indices.shape[0] > 1:
            return None
        first = jnp.arange(times, dtype=jnp.int32)[:, None, None] * batch
        tiles: Any = self.tiles + cast(Any, first) * (jnp.arange(COLUMNS, dtype=jnp.int32) == 0)
        return dataclasses.replace(self, tiles=tiles.reshape(-1, COLUMNS))

    def blocks_of(self, tile: Index) -> "ListedBlocks":
        """The list of work tile number `tile`, read from device memory."""
        return ListedBlocks(self, *(self.tiles[tile, i] for i in range(5)))


class ListedBlocks(NamedTuple):
    """A work tile and the blocks that it visits: steps 0 ... count - 1, the first `full` of them are full blocks.

    b, head, block: the work tile's batch entry, head, and block of queries (or of keys, for lists by key).
    """

    lists: Lists
    b: Index
    head: Index
    block: Index
    count: Index  # type: ignore[assignment]
    full: Index

    def at(self, step: Index) -> jax.Array:
        """The list's entry for a step: a block of keys, or in a list by key a block of queries.

        With several query heads per key head, a list by key has (head within the group) * q_blocks + block;
        query_place splits this number.
        """
        return self._of_step(self.lists.indices, step)

    def query_place(self, step: Index, group: int, q_blocks: int) -> tuple[Index, Index, bool | jax.Array]:
        """(query head, block of queries, whether the block is partial) of a step, for a list by key.

        group: query heads per kv head. q_blocks: the number of blocks of queries of a head.
        """
        block, of_group = self.at(step), jnp.int32(0)
        if self.lists.sharing > 1:
            of_group = lax.rem(step, jnp.int32(group))
        elif group > 1:
            of_group, block = lax.div(block, jnp.int32(q_blocks)), lax.rem(block, jnp.int32(q_blocks))
        return self.head * group + of_group, block, self.is_partial(step)

    def is_partial(self, step: Index) -> bool | jax.Array:
        """Whether a step's block is partial."""
        return step >= self.full

    def masked(self, scores: jax.Array, step: Index, row_start: Index, *, by_word: bool) -> jax.Array:
        """The scores of a partial block, with -inf where the mask drops the pair.

        scores: the block's rows from row_start on, in the layout of wgmma's results; the rows belong to the side of the
        work tiles. by_word: whether to test the bits by inline instructions on whole words, which takes half as many
        instructions and a few more registers.

        If the lists have the words of all blocks, only lists by query may call this method, because the entries of a
        list by key also number query heads. Lists by key take `words` and mask_bits.kept.
        """
        if self.lists.predicate is not None:
            keep = self._kept(self.lists.predicate, scores.shape, step, row_start)
            return jnp.where(keep, scores, -jnp.inf)
        if self.lists.has_all_words:
            words = self.words(self.head, self.at(step), row_start, scores.shape[0])
        else:
            entry = self._of_step(needed(self.lists.entries), step)
            words = mask_bits.load_words(needed(self.lists.words).at[entry, pl.ds(row_start, scores.shape[0])])
        return mask_bits.kept(scores, words, by_word=by_word)

    def _kept(self, predicate: MaskPredicate, shape: tuple[int, ...], step: Index, row_start: Index) -> jax.Array:
        """Which pairs of a partial block the predicate keeps: bool of this shape, in the layout of wgmma's results.

        The rows are the work tile's rows from row_start on, the columns the visited block's.
        """
        by_query = self.lists.by == "query"
        rows, columns = self.lists.blocks if by_query else self.lists.blocks[::-1]
        starts = self.block * rows + row_start, self.at(step) * columns
        own, other = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) + starts[axis] for axis in (0, 1))

        def load(values: Ref, leading: tuple[Index, ...], side: int) -> jax.Array:
            axis = side if by_query else 1 - side
            of_tile = values.at[(*leading, pl.ds(starts[axis], shape[axis]))]
            found = plgpu.load(of_tile, layout=COLUMN if axis else ROW, optimized=False)
            return lax.broadcast_in_dim(found, shape, [axis])

        return predicate.keep(self.b, self.head, *((own, other) if by_query else (other, own)), load)

    def words(self, head: Index, other: Index, row_start: Index, rows: int) -> jax.Array:
        """The mask words of `rows` rows of the work tile from row_start on: int32 [rows, PART] in registers.

        head: a query head. other: the index of the visited block. The lists must have the words of all blocks.
        """
        of_block = of_head(needed(self.lists.words), self.b, head).at[other, self.block]
        return mask_bits.load_words(of_block.at[pl.ds(row_start, rows)])

    def _of_step(self, ref: Ref, step: Index) -> jax.Array:
        sharing = self.lists.sharing
        step = lax.div(step, jnp.int32(sharing)) if sharing > 1 else step
        return of_head(ref, self.b, self.head)[self.block, step]


def has_lists(inputs: AttentionInputs, options: AttentionOptions) -> bool:
    """Whether a call needs block lists: for a prepared mask, a Mask, or a mask array that differs between queries.

    A mask array with one row for all queries has lists if skips_keys says so, with a bias per query, with a score_mod,
    and if options.deterministic. Otherwise it is a bias per key.
    """
    if isinstance(inputs.mask, Mask) or inputs.lists is not None:
        return True
    if inputs.mask is None:
        return False
    if not is_of_keys(inputs.mask.shape) or skips_keys(
        inputs.mask.shape, inputs.query.shape[1], inputs.bias is not None
    ):
        return True
    has_tiles = inputs.bias is not None and inputs.bias.shape[2] > 1
    return has_tiles or options.deterministic or inputs.score_mod is not None


def is_of_keys(mask_shape: tuple[int, ...]) -> bool:
    """Whether a mask array with four axes has one row for all queries."""
    return mask_shape[2] == 1 < mask_shape[3]


def skips_keys(mask_shape: tuple[int, ...], q_length: int, has_bias: bool) -> bool:
    """Whether dead blocks are skipped for a mask array that is the same for all queries; False for other mask arrays.

    Such a mask becomes a bias per key instead with a bias, for short sequences, and if heads have different masks.
    """
    return is_of_keys(mask_shape) and mask_shape[1] == 1 and not has_bias and q_length * mask_shape[3] >= KEYS_PAY


def _whole_mask(inputs: AttentionInputs, options: AttentionOptions) -> Mask:
    """All limits of a call as one Mask. A mask array that `skips_keys` is a KeyMask, which needs no bits."""
    mask, q_length, has_bias = inputs.mask, inputs.query.shape[1], inputs.bias is not None
    if mask is not None and not isinstance(mask, Mask) and skips_keys(mask.shape, q_length, has_bias):
        inputs = inputs._replace(mask=KeyMask(mask[:, :, 0]))
    return whole_mask(inputs, options)


def _has_key_mask(mask: Mask) -> bool:
    """Whether a KeyMask is among the parts of a mask that are joined by &."""
    return isinstance(mask, KeyMask) or any(isinstance(part, KeyMask) for part in mask.factors)


def _call_of(
    inputs: AttentionInputs, options: AttentionOptions, block_q: int, block_kv: int, **rest: Any
) -> ListedCall:
    """The ListedCall of a Hopper kernel's call, whose arrays may have more heads than the call."""
    heads = head_views.head_counts(inputs.query, inputs.key, options)
    return ListedCall.of(inputs, options, block_q, block_kv, heads=heads, **rest)


def lists_of(
    inputs: AttentionInputs, options: AttentionOptions, *, interpret: bool = True, **blocks: Any
) -> Lists | None:
    """The block lists of a call, which hold all limits of its keys; None if has_lists is False.

    interpret: whether XLA alone makes the lists, as on a CPU; otherwise Triton kernels may help. blocks: the arguments
    block_q, block_kv, by and head_group of ListedCall.of. Prepared lists in inputs.lists are used if they fit the
    call.
    """
    if not has_lists(inputs, options):
        return None
    call = _call_of(inputs, options, **blocks)
    assert call.heads == inputs.query.shape[2] or cast(Mask, inputs.mask).heads == 1, (
        options
    )  # otherwise the mask has other heads
    for prepared in inputs.lists or ():
        if (lists := prepared.of(call)) is not None:
            return lists
    static_offset, offset = offset_of(first_position(inputs, options))
    statics = {"static_offset": static_offset, "interpret": interpret}
    return _built(_whole_mask(inputs, options), offset, call=call, **statics)


def prepared_lists(
    inputs: AttentionInputs, options: AttentionOptions, *, interpret: bool = True, **blocks: Any
) -> PreparedLists:
    """Block lists made in advance, for later calls with the same mask and sizes.

    If the mask's values are known, the arrays have room for the longest list and for the partial blocks, plus at most
    an eighth. If they are traced, the arrays have room for the most blocks that the mask's structure allows, or hold
    the mask words of all blocks.
    query and key in inputs may be ShapeDtypeStructs. The mask must be the only array that limits the call's keys.
    interpret, blocks: as for lists_of: whether XLA alone makes them, and block_q, block_kv, by and head_group.
    """
    call = _call_of(inputs, options, **blocks)
    _, offset = offset_of(call.q_offset)
    mask, statics = _whole_mask(inputs, options), {"static_offset": call.q_offset}
    alive, full = block_status(mask, offset, lengths=call.lengths, blocks=call.blocks, **statics)
    if isinstance(alive, jax.core.Tracer):
        return PreparedLists(_built(mask, offset, call=call, **statics, interpret=interpret), call)
    most = min(rounded_up(int((alive & ~full).sum())), alive.size)
    lists = _built(mask, offset, call=call, most=most, **statics)
    visits = np.asarray(lists.tiles[:, 3]) // lists.sharing
    width = min(rounded_up(int(visits.max())), lists.indices.shape[-1])
    indices = lists.indices[..., :width]
    entries = None if lists.entries is None else lists.entries[..., :width]
    keys = rounded_up(math.ceil(visits.mean() * call.blocks[1]))
    return PreparedLists(dataclasses.replace(lists, indices=indices, entries=entries, keys=keys), call)


@functools.partial(jax.jit, static_argnames=("call", "static_offset", "most", "interpret"))
def _built(
    mask: Mask,
    offset: jax.Array,
    *,
    call: ListedCall,
    static_offset: int | None,
    most: int | None = None,
    interpret: bool = True,
) -> Lists:
    """The block lists of a mask that holds all limits of a call's keys.

    offset: int32 [B or 1], the position of query 0; static_offset: the same as an int, None if traced. most: at
    least the number of partial blocks of all batch entries and heads, for the size of `words`; None: not known.
    """
    group = 1 if call.by == "query" else call.heads // call.kv_heads
    sharing = group if mask.heads == 1 else 1
    parts: dict[str, Any] = {}
    sizes: dict[str, Any] = {"lengths": call.lengths, "blocks": call.blocks, "by": call.by}
    evaluates = most is None and mask.is_evaluated and _pairs(mask, call) <= max(MOST_PAIRS, 2 * _largest_array(mask))
    if evaluates:
        lists, parts["words"] = _evaluated(mask, offset, call, group // sharing, interpret=interpret)
    elif mask.is_arithmetic and (_has_key_mask(mask) or _bits(mask, offset, call, static_offset, most) > MOST_BITS):
        lists = block_lists(mask, offset, **sizes, static_offset=static_offset)
        parts["predicate"] = MaskPredicate.of(mask, offset, call.lengths, call.blocks)
    else:
        lists, packed = packed_lists(
            mask, offset, **sizes, static_offset=static_offset, joined=group // sharing, most=most
        )
        parts = {"words": _words_of_threads(packed.words), "entries": packed.entries}
    # A tile without blocks visits block 0. The mask keeps no pair of this block.
    total = lists.partial_count + lists.full_count
    if "entries" in parts:  # the last entry has the bits of no pair
        first = jnp.where(total == 0, parts["words"].shape[0] - 1, parts["entries"][..., 0])
        parts["entries"] = parts["entries"].at[..., 0].set(first)
    counts = jnp.maximum(total, 1) * sharing, lists.full_count * sharing
    heads, width = call.heads // group, lists.indices.shape[-1]
    tiles = _tiles(*counts, call.batch, heads, width * sharing, call.head_group)
    # In masks made of arrays, e.g. for padding, most blocks are probably live.
    keys = width * call.blocks[1] // (1 if evaluates else UNKNOWN)
    return Lists(tiles, lists.indices, **parts, sharing=sharing, keys=keys, by=call.by, blocks=call.blocks)


def _bits(mask: Mask, offset: jax.Array, call: ListedCall, static_offset: int | None, most: int | None) -> int:
    """The number of bits of the mask's partial blocks. Arguments: as for `_built`."""
    if most is None:
        grid = Grid.of(call.lengths, call.blocks, offset, static_offset)
        most = max(mask.batch, offset.shape[0]) * mask.heads * most_partial(mask.terms(False), grid)
    return most * math.prod(call.blocks)


def _pairs(mask: Mask, call: ListedCall) -> int:
    """The number of pairs of queries and keys for which the mask has to be evaluated."""
    return mask.batch * mask.heads * math.prod(call.lengths)


def _largest_array(mask: Mask) -> int:
    """The number of elements of the mask's largest array."""
    return max((x.size for x in jax.tree.leaves(mask)), default=0)


def _evaluated(
    mask: Mask, offset: jax.Array, call: ListedCall, joined: int, *, interpret: bool
) -> tuple[BlockLists, jax.Array]:
    """(lists, mask words of all blocks) of a mask, by evaluating all its pairs.

    joined: the number of query heads whose blocks of queries one list by key counts, head after head.
    """
    transposed = call.by == "key"
    rows, columns = reversed(call.blocks) if transposed else call.blocks
    sizes: dict[str, Any] = {"rows": rows, "columns": columns, "transposed": transposed}
    words = mask_bits.of_mask(mask, call.lengths, offset, **sizes, interpret=interpret)
    # `sided` takes arrays with queries first.
    judged = (x if transposed else x.swapaxes(2, 3) for x in mask_bits.judged(words, columns))
    alive, full = (sided(x, call.by, joined) for x in judged)
    return compress(alive, full, alive.shape[-1]), words


def _words_of_threads(words: jax.Array) -> jax.Array:
    """PackedBlocks.words [entries, words, rows], uint32, in the layout of mask_bits.kept: int32 [entries, rows,
    PART].
    """
    count, per_word = words.shape[1], 32 // PART
    word, part, column = (jnp.arange(n, dtype=jnp.uint32) for n in (count, per_word, PART))
    bits = words[:, :, None, :, None] >> (part[:, None, None] * PART + column) & 1
    bits = bits << (word[:, None, None, None] * per_word + part[:, None, None])
    return lax.bitcast_convert_type(bits.sum(axis=(1, 2), dtype=jnp.uint32), jnp.int32)


def _tiles(count: jax.Array, full: jax.Array, batch: int, heads: int, width: int, head_group: int) -> jax.Array:
    """The array Lists.tiles of all work tiles: groups of heads in order, and within a group the longest lists first.

    count, full: [B or 1, H or 1, blocks], the numbers of visited and of full blocks. width: the largest possible count.
    """
    blocks = count.shape[2]
    size = math.gcd(head_group, batch * heads) * blocks
    wide = lambda x: jnp.broadcast_to(x, (batch, heads, blocks)).reshape(-1, size)
    within = jnp.arange(size, dtype=jnp.int32)
    shorter = width - wide(count)
    if width * size < 1 << 31:  # length and index fit one integer, which is the fastest sort
        within = lax.rem(lax.sort(shorter * size + within, dimension=1), jnp.int32(size))
    else:
        within = jnp.argsort(shorter, axis=1, stable=True).astype(jnp.int32)
    number = (jnp.arange(len(within), dtype=jnp.int32)[:, None] * size + within).reshape(-1)
    head, block = lax.div(number, jnp.int32(blocks)), lax.rem(number, jnp.int32(blocks))
    columns = [lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads)), block]
    columns += [wide(x).reshape(-1)[number] for x in (count, full)]
    return jnp.stack(columns + [jnp.zeros_like(number)] * (COLUMNS - len(columns)), axis=1)
