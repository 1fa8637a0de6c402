"""Mask words in the Hopper kernels: a thread reads the bits of its part of a row as one word, into registers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.masks import Mask
from jax_kernels.masks.arrays import Dense
from jax_kernels.masks.ranked_mask import Ranked
from jax_kernels.pallas.attention.passes import mask_bits as mask_bits_pass
from jax_kernels.pallas.attention.passes import ranked_bits
from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import PART, WGMMA


def kept(scores, words, *, by_word: bool):
    """The scores with -inf where the mask drops the pair.

    scores: float32 [rows, columns] in the layout of wgmma's results. words: int32 [rows, PART], PART = 8, mask words:
    bit i of word j is column i * 8 + j, and 0 drops the pair. by_word: takes half as many instructions and a few more
    registers.
    """
    if interpreter.INTERPRETED or not by_word:
        parts = [scores[:, i : i + PART] for i in range(0, scores.shape[1], PART)]
        parts = [jnp.where((words & (1 << i)) != 0, part, -jnp.inf) for i, part in enumerate(parts)]
        return jnp.concatenate(parts, axis=1)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA), return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=WGMMA)
    )
    def select(_, scores, words):
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        element = lambda x, i: vector.extract(x, dynamic_position=[], static_position=[i])
        constant = lambda x: utils.c(x, ir.IntegerType.get_signless(32))
        masked = utils.c(float("-inf"), ir.F32Type.get())
        of_rows = words.registers.reshape(-1)
        given = scores.registers.reshape(-1, len(of_rows))
        numbers = np.empty((*given.shape, 2), dtype=object)
        # A word's bits one after the other: ptxas then moves seven bits at a time into predicates.
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


def load_words(ref: Ref) -> jax.Array:
    """Mask words [rows, PART] from device memory, in registers in the layout that `kept` takes."""
    return plgpu.load(ref, layout=WGMMA, optimized=False)


def of_mask(
    mask: Mask,
    lengths: tuple[int, int],
    offset: jax.Array,
    rows: int,
    columns: int,
    *,
    transposed: bool,
    interpret: bool,
) -> jax.Array:
    """The mask words of all blocks of a mask: int32 [B, H, blocks of columns, blocks of rows, rows, PART].

    PART is 8, and bit i of word j is column i * 8 + j of a block. lengths: of queries and keys. offset: int32 [B or 1],
    the position of query 0. rows, columns: the block size. Rows are queries and columns keys; if transposed, the
    reverse. interpret: whether XLA alone makes the words.
    """
    sizes: dict[str, Any] = {"rows": rows, "columns": columns, "transposed": transposed}
    pairs = lambda mask: mask.to_dense(*lengths, q_offset=offset)
    if isinstance(mask, Dense) and mask.array.shape[2] == 1:
        return _of_one_row(mask.rows(np.arange(1), lengths[1], q_offset=offset), lengths[0], **sizes)
    is_ranked = isinstance(mask, Ranked) and len(offset) in (1, mask.batch) and ranked_bits.takes(mask, columns)
    if interpret or not is_ranked:
        return packed(pairs(mask), **sizes, interpret=interpret)

    by_rank = lambda mask: _of_blocks(ranked_bits.packed(mask, **sizes, interpret=False), rows)

    return lax.platform_dependent(mask, cuda=by_rank, default=lambda mask: packed(pairs(mask), **sizes))


def packed(keep: jax.Array, rows: int, columns: int, *, transposed: bool, interpret: bool = True) -> jax.Array:
    """The mask words of all blocks of a bool array: int32 [B, H, blocks of columns, blocks of rows, rows, PART].

    PART is 8, and bit i of word j is column i * 8 + j of a block. keep: bool [B, H, T, S]. rows, columns: the block
    size. Rows are queries and columns keys; if transposed, the reverse. Words past the end are zeros. interpret:
    whether XLA alone makes the words, as on a CPU.
    """
    if interpret or not mask_bits_pass.takes(keep.size, columns):
        return _by_xla(keep, rows, columns, transposed)

    sizes: dict[str, Any] = {"rows": rows, "columns": columns, "transposed": transposed}
    by_triton = lambda keep: _of_blocks(mask_bits_pass.packed(keep, **sizes, interpret=False), rows)
    return lax.platform_dependent(keep, cuda=by_triton, default=functools.partial(_by_xla, **sizes))


def _of_blocks(words: jax.Array, rows: int) -> jax.Array:
    """Mask words [..., rows of all blocks, PART] as [..., blocks, rows, PART]."""
    return words.reshape(*words.shape[:3], -1, rows, PART)


def _of_one_row(keep: jax.Array, q_length: int, *, rows: int, columns: int, transposed: bool) -> jax.Array:
    """The mask words of all blocks of a mask with one row: int32 [B, H, blocks of columns, blocks of rows, rows, PART].

    keep: bool [B, H, 1, S], equal for all q_length queries. The words are made once and written for all queries.
    """
    if not transposed:
        exists = jnp.arange(-(-q_length // rows) * rows) < q_length
        return jnp.where(exists.reshape(-1, rows, 1), _by_xla(keep, 1, columns, transposed), 0)
    words = _by_xla(jnp.ones((1, 1, q_length, 1), bool), 1, columns, transposed)  # of a key that all queries keep
    keep = jnp.pad(keep, ((0, 0), (0, 0), (0, 0), (0, -keep.shape[3] % rows)))
    return jnp.where(keep.reshape(*keep.shape[:2], 1, -1, rows, 1), words, 0)


def _by_xla(keep: jax.Array, rows: int, columns: int, transposed: bool) -> jax.Array:
    """The mask words of all blocks of keep, bool [B, H, T, S], computed by XLA alone.

    The result is int32 [B, H, blocks of columns, blocks of rows, rows, PART]. rows, columns:
    the block size. transposed: rows are keys.
    """
    sides = (columns, rows) if transposed else (rows, columns)
    pad = [(0, 0), (0, 0), *((0, -size % side) for size, side in zip(keep.shape[2:], sides, strict=True))]
    keep = jnp.pad(keep, pad) if pad[2][1] or pad[3][1] else keep
    axis = 2 if transposed else 3
    parts = keep.reshape(*keep.shape[:axis], -1, columns // PART, PART, *keep.shape[axis + 1 :])
    weights = (jnp.uint32(1) << jnp.arange(columns // PART, dtype=jnp.uint32)).reshape(-1, 1, *[1] * (3 - axis))
    words = (parts.astype(jnp.uint32) * weights).sum(axis=axis + 1, dtype=jnp.uint32)
    words = words.swapaxes(3, 4) if transposed else words.swapaxes(2, 3)
    return _of_blocks(lax.bitcast_convert_type(words, jnp.int32), rows)


def judged(words: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """(live, full) of each block, bool: whether any pair of the block is kept, and whether all pairs are.

    words: mask words of all blocks, whose blocks have `columns` columns. The results lack the last two axes of words.
    """
    everything = (1 << columns // PART) - 1
    return (words != 0).any(axis=(-2, -1)), (words == everything).all(axis=(-2, -1))
