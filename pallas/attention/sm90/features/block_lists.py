"""Masks as lists of live blocks in the Hopper kernels: dead blocks are neither loaded nor scheduled.

A tile (a block of queries of a head, or a block of keys of a kv head) walks its list, which stands in device memory:
first the full blocks, whose scores a running maximum can start from, then the partial ones, of which a thread reads the
bits of its part of a row in one word, straight into registers. The tiles stand in a table, those of the longest lists
first: a few heads at a time, whose keys and values the L2 cache holds.

Lists and bits are made before a kernel starts. Of a mask that only its pairs tell (an array, or a function) there are
bits of all blocks, which tell the live and the full ones. Source of the scheme: Dao et al., "FlashAttention" (2022),
arXiv:2205.14135, section 3.3 (block-sparse attention).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.block_lists import BlockLists, block_status, compress, packed_lists, sided
from jax_kernels.masks.checks import offset as offset_of
from jax_kernels.masks.limits import whole_mask
from jax_kernels.pallas.attention.sm90.features import head_views, mask_bits
from jax_kernels.pallas.attention.sm90.features.bias import of_head
from jax_kernels.pallas.mosaic.layouts import PART

UNKNOWN = 4  # how many times longer lists can be than they are taken to be where nothing tells
MOST_PAIRS = 1 << 32  # that are evaluated at once, but for those of an array that is there already
COLUMNS = 8  # of the table: numbers that are read together stand in one sector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists:
    """The lists of a call as a kernel reads them, all int32.

    tiles: [tiles, COLUMNS]: batch entry, head, block, how many blocks it visits, how many of these are full.
    indices, entries: [B or 1, H or 1, blocks, width], as BlockLists and PackedBlocks have them; H: the tiles' heads.
    words: [entries, rows, PART], of PackedBlocks' bits those that a thread reads in one word. Where entries is None,
    there are words of all blocks, as sm90.mask_bits has them, and most may be partial: a kernel had better read them
    early.
    sharing: so many query heads visit each block of a list, one after another, before the next block.
    keys: of lists by query, how many keys a query has to look at, about.
    """

    tiles: Any
    indices: Any
    entries: Any
    words: Any
    sharing: int = dataclasses.field(metadata={"static": True})
    keys: int = dataclasses.field(metadata={"static": True})

    @property
    def has_all_words(self) -> bool:
        return self.entries is None

    def blocks_of(self, tile: Any) -> "ListedBlocks":
        return ListedBlocks(self, *(self.tiles[tile, i] for i in range(5)))


class ListedBlocks(NamedTuple):
    """A tile and its blocks, numbered in the order it visits them."""

    lists: Lists
    b: Any
    head: Any
    block: Any
    count: Any
    full: Any

    def at(self, step: Any) -> Any:
        return self._of_step(self.lists.indices, step)

    def query_place(self, step: Any, group: int, q_blocks: int) -> tuple[Any, Any, Any]:
        """The place of a step in a list by key: (query head, block of queries, whether it is partial)."""
        block, of_group = self.at(step), jnp.int32(0)
        if self.lists.sharing > 1:
            of_group = lax.rem(step, jnp.int32(group))
        elif group > 1:
            of_group, block = lax.div(block, jnp.int32(q_blocks)), lax.rem(block, jnp.int32(q_blocks))
        return self.head * group + of_group, block, self.is_partial(step)

    def is_partial(self, step: Any) -> Any:
        return step >= self.full

    def masked(self, scores: Any, step: Any, row_start: Any, *, by_word: bool) -> Any:
        """The scores of a partial block from a row on, -inf where the mask has a zero.

        Where there are words of all blocks, of a list by query: one by key has its query heads in the steps.
        """
        if self.lists.has_all_words:
            words = self.words(self.head, self.at(step), row_start, scores.shape[0])
        else:
            entry = self._of_step(self.lists.entries, step)
            words = mask_bits.load_words(self.lists.words.at[entry, pl.ds(row_start, scores.shape[0])])
        return mask_bits.kept(scores, words, by_word=by_word)

    def words(self, head: Any, other: Any, row_start: Any, rows: int) -> Any:
        """The words of some rows of the tile, for a query head's block `other`, where there are words of all blocks."""
        of_block = of_head(self.lists.words, self.b, head).at[other, self.block]
        return mask_bits.load_words(of_block.at[pl.ds(row_start, rows)])

    def _of_step(self, ref: Any, step: Any) -> Any:
        sharing = self.lists.sharing
        step = lax.div(step, jnp.int32(sharing)) if sharing > 1 else step
        return of_head(ref, self.b, self.head)[self.block, step]


@dataclasses.dataclass(frozen=True)
class ListedCall:
    """The static part of a call that its lists depend on, beside its mask. limits: its is_causal, window and q_offset.

    q_offset is None where it is an array.
    """

    batch: int
    heads: int
    kv_heads: int
    lengths: tuple[int, int]
    blocks: tuple[int, int]
    by: str
    heads_together: int
    is_causal: bool
    window: tuple[int, int] | None
    q_offset: int | None

    @staticmethod
    def of(
        inputs: AttentionInputs,
        options: AttentionOptions,
        block_q: int,
        block_kv: int,
        *,
        by: str,
        heads_together: int,
    ) -> "ListedCall":
        """by: "query" or "key". Lists by key are of a kv head. Where the mask tells heads apart, they are of a group's
        heads together, whose blocks of queries are numbered one head after another. heads_together: of so many heads
        the tiles stand in the table together.
        """
        (batch, q_length), kv_length = inputs.query.shape[:2], inputs.key.shape[1]
        heads, kv_heads = head_views.head_counts(inputs.query, inputs.key, options)
        sizes = (batch, heads, kv_heads, (q_length, kv_length), (block_q, block_kv), by, heads_together)
        q_offset = options.q_offset if inputs.q_offset is None else None
        return ListedCall(*sizes, options.is_causal, options.window, q_offset)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedLists:
    """The lists of a call, made beforehand: what a PreparedMask carries."""

    lists: Lists
    call: ListedCall = dataclasses.field(metadata={"static": True})

    def of(self, call: ListedCall) -> Lists | None:
        """The lists of this call, None where they are not known to be the same."""
        mine, times = self.call, call.batch // self.call.batch
        if dataclasses.replace(mine, batch=call.batch) != call or times * mine.batch != call.batch:
            return None
        if times == 1:
            return self.lists
        if self.lists.indices.shape[0] > 1:
            return None
        # Batch entries that the mask does not tell apart, one table of tiles after another.
        first = jnp.arange(times, dtype=jnp.int32)[:, None, None] * mine.batch
        tiles = self.lists.tiles + first * (jnp.arange(COLUMNS, dtype=jnp.int32) == 0)
        return dataclasses.replace(self.lists, tiles=tiles.reshape(-1, COLUMNS))


def has_lists(inputs: AttentionInputs, options: AttentionOptions) -> bool:
    """Whether a call's limits are in lists: of a prepared mask, a Mask, or an array that tells queries apart.

    One for all queries is a bias for each key where it may be: beside a bias for each query, or a score_mod, and where
    the backward is deterministic, there is none.
    """
    if isinstance(inputs.mask, Mask) or inputs.lists is not None:
        return True
    if inputs.mask is None:
        return False
    is_of_keys = inputs.mask.shape[2] == 1 < inputs.mask.shape[3]
    has_tiles = inputs.bias is not None and inputs.bias.shape[2] > 1
    return not is_of_keys or has_tiles or options.deterministic or inputs.score_mod is not None


def lists_of(
    inputs: AttentionInputs, options: AttentionOptions, *, interpret: bool = True, **blocks: Any
) -> Lists | None:
    """The call's lists, which hold all its limits; None where they are not in lists.

    interpret: whether XLA alone makes them. blocks: ListedCall.of's. Prepared lists are taken where they are of this
    very call.
    """
    if not has_lists(inputs, options):
        return None
    call = ListedCall.of(inputs, options, **blocks)
    assert call.heads == inputs.query.shape[2] or inputs.mask.heads == 1, options  # else the mask is of other heads
    for prepared in inputs.lists or ():
        if (lists := prepared.of(call)) is not None:
            return lists
    static_offset, offset = offset_of(first_position(inputs, options))
    statics = {"static_offset": static_offset, "interpret": interpret}
    return _built(whole_mask(inputs, options), offset, call=call, **statics)


def prepared_lists(
    inputs: AttentionInputs, options: AttentionOptions, *, interpret: bool = True, **blocks: Any
) -> PreparedLists:
    """The lists of lists_of for these arguments, to be carried. Where the mask is known, they are as short as can be.

    query and key may be ShapeDtypeStructs. Nothing but the mask may be an array that limits the call's keys.
    """
    call = ListedCall.of(inputs, options, **blocks)
    _, offset = offset_of(call.q_offset)
    mask, statics = whole_mask(inputs, options), {"static_offset": call.q_offset}
    alive, full = block_status(mask, offset, lengths=call.lengths, blocks=call.blocks, **statics)
    if isinstance(alive, jax.core.Tracer):
        return PreparedLists(_built(mask, offset, call=call, **statics, interpret=interpret), call)
    most = min(_rounded_up(int((alive & ~full).sum())), alive.size)
    lists = _built(mask, offset, call=call, most=most, **statics)
    visits = np.asarray(lists.tiles[:, 3]) // lists.sharing
    width = min(_rounded_up(int(visits.max())), lists.indices.shape[-1])
    indices, entries = (x[..., :width] for x in (lists.indices, lists.entries))
    keys = _rounded_up(math.ceil(visits.mean() * call.blocks[1]))
    return PreparedLists(dataclasses.replace(lists, indices=indices, entries=entries, keys=keys), call)


def _rounded_up(count: int) -> int:
    """By an eighth at most: masks that are alike, such as those of layers, have lists of one shape and one program."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit


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
    """The lists of all that limits a call's keys. most: so many partial blocks at most; None: as many as can be."""
    group = 1 if call.by == "query" else call.heads // call.kv_heads
    sharing = group if mask.heads == 1 else 1
    evaluates = most is None and mask.is_evaluated and _pairs(mask, call) <= max(MOST_PAIRS, 2 * _largest_array(mask))
    if evaluates:
        lists, words = _evaluated(mask, offset, call, group // sharing, interpret=interpret)
    else:
        lists, packed = packed_lists(
            mask,
            offset,
            lengths=call.lengths,
            blocks=call.blocks,
            static_offset=static_offset,
            by=call.by,
            joined=group // sharing,
            most=most,
        )
        words = _words_of_threads(packed.words)
    entries: Any = None if evaluates else packed.entries
    # A tile without a block visits block 0, under bits that are zeros.
    total = lists.partial_count + lists.full_count
    dead = total == 0
    if not evaluates:  # the last entry's
        entries = entries.at[..., 0].set(jnp.where(dead, words.shape[0] - 1, entries[..., 0]))
    counts = jnp.maximum(total, 1) * sharing, lists.full_count * sharing
    heads, width = call.heads // group, lists.indices.shape[-1]
    tiles = _tiles(*counts, call.batch, heads, width * sharing, call.heads_together)
    # Of arrays, such as those for padding, most blocks are likely live.
    keys = width * call.blocks[1] // (1 if evaluates else UNKNOWN)
    return Lists(tiles, lists.indices, entries, words, sharing, keys)


def _pairs(mask: Mask, call: ListedCall) -> int:
    return mask.batch * mask.heads * math.prod(call.lengths)


def _largest_array(mask: Mask) -> int:
    """Numbers in it."""
    return max((x.size for x in jax.tree.leaves(mask)), default=0)


def _evaluated(
    mask: Mask, offset: jax.Array, call: ListedCall, joined: int, *, interpret: bool
) -> tuple[BlockLists, jax.Array]:
    """(lists, words of all blocks) of a mask all of whose pairs are evaluated. joined: as in packed_lists."""
    transposed = call.by == "key"
    rows, columns = reversed(call.blocks) if transposed else call.blocks
    sizes: dict[str, Any] = {"rows": rows, "columns": columns, "transposed": transposed}
    words = mask_bits.of_mask(mask, call.lengths, offset, **sizes, interpret=interpret)
    # Queries first, as `sided` takes them.
    judged = (x if transposed else x.swapaxes(2, 3) for x in mask_bits.judged(words, columns))
    alive, full = (sided(x, call.by, joined) for x in judged)
    return compress(alive, full, alive.shape[-1]), words


def _words_of_threads(words: jax.Array) -> jax.Array:
    """PackedBlocks.words [entries, words, rows] as `kept` takes them, [entries, rows, PART]."""
    count, per_word = words.shape[1], 32 // PART
    word, part, column = (jnp.arange(n, dtype=jnp.uint32) for n in (count, per_word, PART))
    bits = words[:, :, None, :, None] >> (part[:, None, None] * PART + column) & 1
    bits = bits << (word[:, None, None, None] * per_word + part[:, None, None])
    return lax.bitcast_convert_type(bits.sum(axis=(1, 2), dtype=jnp.uint32), jnp.int32)


def _tiles(count: Any, full: Any, batch: int, heads: int, width: int, heads_together: int) -> jax.Array:
    """Lists.tiles, from count and full [B or 1, H or 1, blocks] of lists up to `width` long."""
    blocks = count.shape[2]
    size = math.gcd(heads_together, batch * heads) * blocks
    wide = lambda x: jnp.broadcast_to(x, (batch, heads, blocks)).reshape(-1, size)
    within = jnp.arange(size, dtype=jnp.int32)
    shorter = width - wide(count)
    if width * size < 1 << 31:  # one number to sort by, the shortest way
        within = lax.rem(lax.sort(shorter * size + within, dimension=1), jnp.int32(size))
    else:
        within = jnp.argsort(shorter, axis=1, stable=True).astype(jnp.int32)
    number = (jnp.arange(len(within), dtype=jnp.int32)[:, None] * size + within).reshape(-1)
    head, block = lax.div(number, jnp.int32(blocks)), lax.rem(number, jnp.int32(blocks))
    columns = [lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads)), block]
    columns += [wide(x).reshape(-1)[number] for x in (count, full)]
    return jnp.stack(columns + [jnp.zeros_like(number)] * (COLUMNS - len(columns)), axis=1)
