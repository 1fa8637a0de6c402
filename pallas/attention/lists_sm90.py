"""Masks as lists of live blocks in the Hopper kernels: dead blocks are neither loaded nor scheduled.

A tile (a block of queries of a head, or a block of keys of a kv head) walks its list, which stands in device memory:
first the full blocks, whose scores a running maximum can start from, then the partial ones, of which it reads the bits,
32 to a word, for its own rows straight into registers. The tiles stand in a table, those of the longest lists first:
a few heads at a time, whose keys and values the L2 cache holds.

Lists and bits are made by XLA before a kernel starts. Source of the scheme: Dao et al., "FlashAttention" (2022),
arXiv:2205.14135, section 3.3 (block-sparse attention).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels import masks
from jax_kernels.attention_inputs import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.checks import offset as offset_of
from jax_kernels.masks.lists import packed_lists
from jax_kernels.pallas.attention.dense_sm90 import PART, kept, load_words, of_head

COLUMNS = 8  # of the table: numbers that are read together stand in one sector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists:
    """The lists of a call as a kernel reads them, all int32.

    tiles: [tiles, COLUMNS]: batch entry, head, block, how many blocks it visits, how many of these are full.
    indices, entries: [B or 1, H or 1, blocks, width], as BlockLists and PackedBlocks have them; H: the tiles' heads.
    words: [entries, rows, PART], of PackedBlocks' bits those that a thread reads in one word.
    sharing: so many query heads visit each block of a list, one after another, before the next block.
    """

    tiles: Any
    indices: Any
    entries: Any
    words: Any
    sharing: int = dataclasses.field(metadata={"static": True})

    def walk(self, tile: Any) -> "Walk":
        return Walk(self, *(self.tiles[tile, i] for i in range(5)))


class Walk(NamedTuple):
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
        """Of a list by key: (query head, block of queries, whether it is partial)."""
        block, of_group = self.at(step), jnp.int32(0)
        if self.lists.sharing > 1:
            of_group = lax.rem(step, jnp.int32(group))
        elif group > 1:
            of_group, block = lax.div(block, jnp.int32(q_blocks)), lax.rem(block, jnp.int32(q_blocks))
        return self.head * group + of_group, block, self.is_partial(step)

    def is_partial(self, step: Any) -> Any:
        return step >= self.full

    def masked(self, scores: Any, step: Any, row_start: Any, *, by_word: bool) -> Any:
        """The scores of a partial block from a row on, -inf where the mask has a zero."""
        entry = self._of_step(self.lists.entries, step)
        rows = pl.ds(row_start, scores.shape[0])
        return kept(scores, load_words(self.lists.words.at[entry, rows]), by_word=by_word)

    def _of_step(self, ref: Any, step: Any) -> Any:
        sharing = self.lists.sharing
        step = lax.div(step, jnp.int32(sharing)) if sharing > 1 else step
        return of_head(ref, self.b, self.head)[self.block, step]


def lists_of(
    inputs: AttentionInputs, options: AttentionOptions, block_q: int, block_kv: int, *, by: str, heads_together: int
) -> Lists | None:
    """The call's lists, None where its mask is no Mask. What else limits its keys is in them.

    by: "query" or "key". Lists by key are of a kv head. Where the mask tells heads apart, they are of its group's heads
    together, whose blocks of queries are numbered one head after another. heads_together: of so many heads the tiles
    stand in the table together.
    """
    if not isinstance(inputs.mask, Mask):
        return None
    q_length, kv_length = inputs.query.shape[1], inputs.key.shape[1]
    batch, kv_heads = inputs.key.shape[0], inputs.key.shape[2]
    heads = inputs.query.shape[2] if by == "query" else kv_heads
    static_offset, offset = offset_of(first_position(inputs, options))
    group = 1 if by == "query" else inputs.query.shape[2] // kv_heads
    sharing = group if inputs.mask.heads == 1 else 1
    lists, packed = packed_lists(
        _whole_mask(inputs, options),
        offset,
        lengths=(q_length, kv_length),
        blocks=(block_q, block_kv),
        static_offset=static_offset,
        by=by,
        joined=group // sharing,
    )
    # A tile without a block visits block 0, under the bits of the last entry, which are zeros.
    total = lists.partial_count + lists.full_count
    dead = total == 0
    entries = packed.entries.at[..., 0].set(jnp.where(dead, packed.words.shape[0] - 1, packed.entries[..., 0]))
    counts = jnp.maximum(total, 1) * sharing, lists.full_count * sharing
    tiles = _tiles(*counts, batch, heads, lists.indices.shape[-1] * sharing, heads_together)
    return Lists(tiles, lists.indices, entries, _words_of_threads(packed.words), sharing)


def _words_of_threads(words: jax.Array) -> jax.Array:
    """PackedBlocks.words [entries, words, rows] as `kept` takes them, [entries, rows, PART]."""
    count, per_word = words.shape[1], 32 // PART
    word, part, column = (jnp.arange(n, dtype=jnp.uint32) for n in (count, per_word, PART))
    bits = words[:, :, None, :, None] >> (part[:, None, None] * PART + column) & 1
    bits = bits << (word[:, None, None, None] * per_word + part[:, None, None])
    return lax.bitcast_convert_type(bits.sum(axis=(1, 2), dtype=jnp.uint32), jnp.int32)


def without_limits(inputs: AttentionInputs, options: AttentionOptions) -> tuple[AttentionInputs, AttentionOptions]:
    """The call without what lists_of has in its lists; as it is where its mask is no Mask."""
    if not isinstance(inputs.mask, Mask):
        return inputs, options
    arrays = ("mask", "q_segment_ids", "kv_segment_ids", "kv_lengths", "q_offset")
    options = dataclasses.replace(options, is_causal=False, window=None, q_offset=0)
    return inputs._replace(**dict.fromkeys(arrays)), options


def _whole_mask(inputs: AttentionInputs, options: AttentionOptions) -> Mask:
    mask = inputs.mask
    if options.is_causal:
        mask &= masks.causal()
    if options.window is not None:
        mask &= masks.sliding_window(*options.window)
    if inputs.q_segment_ids is not None:
        mask &= masks.segments(inputs.q_segment_ids, inputs.kv_segment_ids)
    if inputs.kv_lengths is not None:
        mask &= masks.prefix(inputs.kv_lengths)
    return mask


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
