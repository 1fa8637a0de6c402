"""Biases and dense masks in the Hopper kernels.

What has a number for every query and key of a tile goes through shared memory: the tensor memory accelerator brings a
tile of it while the products of the tile before run, and one stage is enough, as a step reads it early. A bias that
all queries share is a number for every key. A mask comes as bits, those of a thread's part of a row in one word, which
it reads straight into registers.

Axes of batch and heads that are broadcast are read in place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.attention_inputs import AttentionInputs, AttentionOptions, first_position
from jax_kernels.pallas.attention import hopper
from jax_kernels.pallas.attention.hopper import COLUMN, ROW, SWIZZLED, SWIZZLED_F32, WGMMA
from jax_kernels.pallas.attention.softmax import LOG2E

PART = 8  # columns of which a thread has two


class Dense(NamedTuple):
    """The bias and the mask of a call as a kernel reads them; None where it lacks one.

    A tile's rows are queries and its columns keys, or if transposed the other way round. by_key: [B or 1, H or 1, S]
    float32, a bias of all queries, times log2(e). tiles: [B or 1, H or 1, rows, columns], a bias in its own dtype.
    bits: int32 [B or 1, H or 1, blocks of columns, rows, PART], the mask: of a block as wide as a tile, bit i of word j
    is column i * PART + j.
    """

    by_key: Any = None
    tiles: Any = None
    bits: Any = None

    @property
    def has_bias(self) -> bool:
        return self.by_key is not None or self.tiles is not None

    def stage(self, rows: int, columns: int, keys: int, warpgroups: int) -> "Stage | None":
        """The scratch memory of a step's bias; None without a bias. keys: of by_key. warpgroups: that read it."""
        if not self.has_bias:
            return None
        tile = by_key = None
        if self.tiles is not None:
            transforms = SWIZZLED if self.tiles.dtype.itemsize == 2 else SWIZZLED_F32
            tile = plgpu.SMEM((rows, columns), self.tiles.dtype, transforms=transforms)
        if self.by_key is not None:
            by_key = plgpu.SMEM((keys,), jnp.float32)
        copies = (tile is not None) + (by_key is not None)
        return Stage(tile, by_key, plgpu.Barrier(num_arrivals=copies), plgpu.Barrier(num_arrivals=warpgroups))

    def words(self, shape: tuple[int, int], b, h, row_start, column_start) -> Any:
        """The bits of a tile, for `kept`."""
        block = of_head(self.bits, b, h).at[lax.div(column_start, jnp.int32(shape[1]))]
        return load_words(block.at[pl.ds(row_start, shape[0])])


def kept(scores, words, *, by_word: bool):
    """scores [rows, columns], -inf where a bit is 0. words: int32 [rows, PART], as Dense.bits has them.

    by_word: in half as many instructions, and with a few registers more.
    """
    if hopper.INTERPRETED or not by_word:
        parts = [scores[:, i : i + PART] for i in range(0, scores.shape[1], PART)]
        parts = [jnp.where((words & (1 << i)) != 0, part, -jnp.inf) for i, part in enumerate(parts)]
        return jnp.concatenate(parts, axis=1)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA), return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=WGMMA)
    )
    def select(_, scores, words):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        element = lambda x, i: vector.extract(x, dynamic_position=[], static_position=[i])
        constant = lambda x: utils.c(x, ir.IntegerType.get_signless(32))
        masked = utils.c(float("-inf"), ir.F32Type.get())
        of_rows = words.registers.reshape(-1)
        given = scores.registers.reshape(-1, len(of_rows))
        numbers = np.empty((*given.shape, 2), dtype=object)
        # A word's bits one after the other: ptxas then moves seven at a time into predicates.
        for row, i, part in np.ndindex(len(of_rows), 2, len(given)):
            bit = arith.andi(element(of_rows[row], i), constant(1 << part))
            keep = arith.cmpi(arith.CmpIPredicate.ne, bit, constant(0))
            numbers[part, row, i] = arith.select(keep, element(given[part, row], i), masked)
        registers = np.empty(given.shape, dtype=object)
        for place in np.ndindex(given.shape):
            registers[place] = vector.from_elements(given[place].type, list(numbers[place]))
        registers = registers.reshape(scores.registers.shape)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=scores.layout, _is_signed=None)

    return select(scores, words)


def load_words(ref: Any) -> Any:
    return plgpu.load(ref, layout=WGMMA, optimized=False)


def of_head(ref: Any, b: Any, h: Any) -> Any:
    return ref.at[0 if ref.shape[0] == 1 else b, 0 if ref.shape[1] == 1 else h]


class Stage(NamedTuple):
    """The bias of one step in shared memory, with the barriers that say that it is there, and that it was read.

    Between its loads and the arrival at `free`, a warpgroup commits its shared memory.
    """

    tile: Any
    by_key: Any
    ready: Any
    free: Any

    def fill(self, dense: Dense, b, h, row_start, column_start, key_start) -> None:
        """Copies a step's bias, for a thread that has waited for `free`."""
        if self.tile is not None:
            starts = zip((row_start, column_start), self.tile.shape, strict=True)
            source = of_head(dense.tiles, b, h).at[tuple(pl.ds(start, size) for start, size in starts)]
            plgpu.copy_gmem_to_smem(source, self.tile, self.ready)
        if self.by_key is not None:
            source = of_head(dense.by_key, b, h).at[pl.ds(key_start, self.by_key.shape[0])]
            plgpu.copy_gmem_to_smem(source, self.by_key, self.ready)

    def added(self, scores, factor: float, row_start, *, transposed: bool):
        """scores * factor and the bias of their rows, times log2(e). transposed: rows are keys, P is clamped.

        In base 2 the maximum is subtracted as it is: of a product with log2(e) it would miss the rounding, which under
        a bias of -1e10 is hundreds. For the same reason the sum comes last, unless P is clamped: it costs registers.
        """
        rows = pl.ds(row_start, scores.shape[0])
        if self.tile is not None:
            bias = plgpu.load(self.tile.at[rows], layout=WGMMA).astype(jnp.float32)
            return (scores * factor + bias) * LOG2E if transposed else scores * (factor * LOG2E) + bias * LOG2E
        ref, layout = (self.by_key.at[rows], ROW) if transposed else (self.by_key, COLUMN)
        by_key = plgpu.load(ref, layout=layout, optimized=False)
        return scores * (factor * LOG2E) + lax.broadcast_in_dim(by_key, scores.shape, [0 if transposed else 1])


def dense_of(
    inputs: AttentionInputs, options: AttentionOptions, rows: int, columns: int, *, transposed: bool
) -> Dense | None:
    """The call's bias and mask, for tiles of rows x columns; None where it has neither.

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
        by_key = bias[:, :, 0].astype(jnp.float32) * LOG2E
    if mask is not None and mask.shape[2] > 1:
        bits = _packed(mask & _limits(inputs, options), rows, columns, transposed=transposed)
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


def _packed(mask: jax.Array, rows: int, columns: int, *, transposed: bool) -> jax.Array:
    """Bools [B, H, T, S] as Dense.bits."""
    if transposed:  # a tile without any block of queries visits the one behind the last
        mask = jnp.pad(mask, [(0, 0), (0, 0), (0, columns), (0, 0)])
    mask = _padded(mask, *((columns, rows) if transposed else (rows, columns)))
    axis = 2 if transposed else 3
    parts = mask.reshape(*mask.shape[:axis], -1, columns // PART, PART, *mask.shape[axis + 1 :])
    weights = (jnp.uint32(1) << jnp.arange(columns // PART, dtype=jnp.uint32)).reshape(-1, 1, *[1] * (3 - axis))
    words = (parts.astype(jnp.uint32) * weights).sum(axis=axis + 1, dtype=jnp.uint32)
    words = words.swapaxes(3, 4) if transposed else words.swapaxes(2, 3)
    return lax.bitcast_convert_type(words, jnp.int32)
