"""Biases and dense masks in the Hopper kernels.

What has a number for every query and key of a tile goes through shared memory: the tensor memory accelerator brings a
tile of it while the products of the tile before run, and one stage is enough, as a step reads it early. A bias that
all queries share is a number for every key. A mask comes as bits, 32 to a word, which a thread reads for its two rows
straight into registers: an eighth of a byte for a query and a key, where the bools take one.

Axes of batch and heads that are broadcast are read in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.attention_inputs import AttentionInputs, AttentionOptions, first_position
from jax_kernels.pallas.attention.hopper import ROW, SWIZZLED, SWIZZLED_F32, WGMMA

WORD = 32  # bits of a word of the mask
PART = 8
# Blocks of keys and of queries divide it.
MOST_ROWS = 192 * 2


class Dense(NamedTuple):
    """The bias and the mask of a call as a kernel reads them; None where it lacks one.

    A tile's rows are queries and its columns keys, or if transposed the other way round. by_key: [B or 1, H or 1, S]
    float32, a bias of all queries. tiles: [B or 1, H or 1, rows, columns], a bias in its own dtype. bits: [B or 1,
    H or 1, columns / WORD, rows] int32, the mask.
    """

    by_key: Any = None
    tiles: Any = None
    bits: Any = None

    @property
    def has_bias(self) -> bool:
        return self.by_key is not None or self.tiles is not None

    @property
    def copies(self) -> int:
        """How many copies fill the shared memory of a step, where a tile takes one."""
        return (self.by_key is not None) + (self.tiles is not None)

    def scratch(self, rows: int, columns: int, keys: int) -> tuple[Any, Any]:
        """Shared memory of (tiles, by_key) for a step."""
        tile = by_key = None
        if self.tiles is not None:
            transforms = SWIZZLED if self.tiles.dtype.itemsize == 2 else SWIZZLED_F32
            tile = plgpu.SMEM((rows, columns), self.tiles.dtype, transforms=transforms)
        if self.by_key is not None:
            by_key = plgpu.SMEM((keys,), jnp.float32)
        return tile, by_key

    def copy(self, b, h, row_start, column_start, keys, smem, ready) -> None:
        """Fills a step's shared memory. keys: the slice of by_key."""
        tile, by_key = smem
        if tile is not None:
            rows, columns = (pl.ds(start, n) for start, n in zip((row_start, column_start), tile.shape, strict=True))
            plgpu.copy_gmem_to_smem(_of_head(self.tiles, b, h).at[rows, columns], tile, ready)
        if by_key is not None:
            plgpu.copy_gmem_to_smem(_of_head(self.by_key, b, h).at[keys], by_key, ready)

    def masked(self, scores, b, h, row_start, column_start):
        """The scores of a tile, -inf where the mask has a zero."""
        rows, columns = scores.shape
        bits = _of_head(self.bits, b, h)
        first = lax.div(column_start, jnp.int32(WORD))
        # A thread shifts its own part of the column out of a word once, for which it has no registers to keep: what is
        # left is a bit that is known when compiling. All in parts of eight columns, of which a thread has two.
        part = plgpu.broadcasted_iota(jnp.int32, (rows, PART), 1, layout=WGMMA)
        kept = []
        for start in range(0, columns, PART):
            if start % WORD == 0:
                word = bits.at[first + start // WORD, pl.ds(row_start, rows)]
                word = plgpu.load(word, layout=ROW, optimized=False)
                mine = lax.shift_right_logical(lax.broadcast_in_dim(word, part.shape, [0]), part)
                mine = lax.optimization_barrier(mine)
            keep = (mine & (1 << start % WORD)) != 0
            kept.append(jnp.where(keep, scores[:, start : start + PART], -jnp.inf))
        return jnp.concatenate(kept, axis=1)


def _of_head(ref: Any, b: Any, h: Any) -> Any:
    return ref.at[0 if ref.shape[0] == 1 else b, 0 if ref.shape[1] == 1 else h]


def added(scores, factor: float, tile_ref, by_key_ref, key_layout):
    """scores * factor, and the bias of a tile. key_layout: COLUMN, or ROW where rows are keys."""
    scores = scores * factor
    if by_key_ref is not None:
        by_key = plgpu.load(by_key_ref, layout=key_layout, optimized=False)
        scores = scores + lax.broadcast_in_dim(by_key, scores.shape, [0 if key_layout is ROW else 1])
    if tile_ref is not None:
        scores = scores + plgpu.load(tile_ref, layout=WGMMA).astype(jnp.float32)
    return scores


def dense_of(inputs: AttentionInputs, options: AttentionOptions, *, transposed: bool) -> Dense | None:
    """The call's bias and mask, padded to whole tiles; None where it has neither.

    Their last axis is not 1, and where the bias has an axis of queries, the mask has none but the bias's. Bits have the
    causal mask and the window in them: evaluated in the kernel, beside the bits, these would spill. Bits and by_key are
    small. A bias is copied where a side is no multiple of what the tensor memory accelerator moves, and where it is
    transposed.
    """
    bias, mask = inputs.bias, inputs.mask
    if bias is None and mask is None:
        return None
    by_key = tiles = bits = None
    if bias is not None and mask is not None and bias.shape[2] > 1:
        # Both in one: a kernel lacks the registers for a tile of each. It costs a copy of the bias.
        bias, mask = jnp.where(mask, bias, -jnp.inf), None
    if bias is not None and bias.shape[2] > 1:
        tiles = _padded(bias.swapaxes(2, 3) if transposed else bias, 8, 64 if bias.dtype.itemsize == 2 else 32)
    elif bias is not None:
        by_key = bias[:, :, 0].astype(jnp.float32)
    if mask is not None and mask.shape[2] > 1:
        bits = _packed(mask & _limits(inputs, options), transposed=transposed)
    elif mask is not None:
        of_mask = jnp.where(mask[:, :, 0], 0.0, -jnp.inf)
        by_key = of_mask if by_key is None else by_key + of_mask
    if by_key is not None:
        by_key = jnp.pad(by_key, [(0, 0), (0, 0), (0, -by_key.shape[2] % 8)])
    return Dense(by_key, tiles, bits)


def _limits(inputs: AttentionInputs, options: AttentionOptions) -> Any:
    """What the causal mask and the window let a query attend to: bool, [B or 1, 1, T, S]."""
    keys, queries = (jnp.arange(x.shape[1], dtype=jnp.int32) for x in (inputs.key, inputs.query))
    position = jnp.atleast_1d(first_position(inputs, options))[:, None, None, None] + queries[:, None]
    left, right = options.window or (-1, 0 if options.is_causal else -1)
    after = position - left <= keys if left >= 0 else True
    return after & (keys <= position + right) if right >= 0 else after


def _padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    pad = [(0, 0), (0, 0), (0, -x.shape[2] % rows), (0, -x.shape[3] % columns)]
    return jnp.pad(x, pad) if pad[2][1] or pad[3][1] else x


def _packed(mask: jax.Array, *, transposed: bool) -> jax.Array:
    """Bools [B, H, T, S] as int32 words [B, H, columns / WORD, rows]: bit n of a word is column n of its columns."""
    mask = _padded(mask, MOST_ROWS, MOST_ROWS)
    axis = 2 if transposed else 3
    words = mask.reshape(*mask.shape[:axis], -1, WORD, *mask.shape[axis + 1 :]).astype(jnp.uint32)
    weights = (jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)).reshape(-1, *[1] * (3 - axis))
    words = lax.bitcast_convert_type((words * weights).sum(axis=axis + 1, dtype=jnp.uint32), jnp.int32)
    return words if transposed else words.swapaxes(2, 3)
