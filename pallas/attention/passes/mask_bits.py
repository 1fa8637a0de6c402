"""Packs a bool mask into mask words, which the Hopper kernels read: bound by reading each bool once.

XLA takes five times as long if each head has its own mask (16 heads of 8192 x 8192 on an H200: 2.25 ms against 0.43 ms;
transposed, 0.60 ms against 0.50 ms).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

from jax_kernels.pallas.mosaic.layouts import PART
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, reaches
from jax_kernels.pallas.varying import result_types

ELEMENTS = 8192  # pairs of a program
WARPS = 4


def takes(pairs: int, columns: int) -> bool:
    """Whether this kernel can pack a bool mask for blocks of `columns` columns; if not, XLA has to.

    It can if this JAX has Pallas-Triton, if `columns` is a power of two, 8 or more, and if Triton can address the mask.
    pairs: the number of elements of the whole array, over all batch entries and heads. columns: block_kv, or block_q of
    a transposed mask.
    """
    is_whole = columns & (columns - 1) == 0 and columns % PART == 0
    return backend.AVAILABLE and is_whole and reaches(pairs, itemsize=1)


def packed(
    keep: Bool[Array, "B H T S"], rows: int, columns: int, *, transposed: bool, interpret: bool
) -> Int32[Array, "B H blocks rows 8"]:
    """The mask words of a mask: int32 [B, H, blocks of columns, rows padded to whole blocks, PART], zeros past the end.

    PART is 8, and bit i of word j is column i * 8 + j of its block of columns. keep: bool [B, H, T, S]. rows, columns:
    the block size. Rows are queries and columns keys; if transposed, the reverse. The caller has checked `takes`.
    """
    batch, heads, q_length, kv_length = keep.shape
    row_count, column_count = (kv_length, q_length) if transposed else (q_length, kv_length)
    row_count = pl.cdiv(row_count, rows) * rows
    count, block, bits = pl.cdiv(column_count, columns), ELEMENTS // columns, columns // PART
    # The first axis of the grid is the axis that is contiguous in memory.
    grid = (pl.cdiv(row_count, block), count) if transposed else (count, pl.cdiv(row_count, block))

    def kernel(keep_ref, out_ref):
        row_block, column_block = pl.program_id(1 - transposed), pl.program_id(0 + transposed)
        of_rows, of_columns = row_block * block + iota(block), column_block * columns + iota(columns)
        q, k = (of_columns, of_rows) if transposed else (of_rows, of_columns)
        inside = (q < q_length)[:, None] & (k < kv_length)[None, :]
        x = plgpu.load(keep_ref, mask=inside, other=False).astype(jnp.int32)
        shape = (bits, PART, block) if transposed else (block, bits, PART)
        axis = 0 if transposed else 1
        words = (x.reshape(shape) << lax.broadcasted_iota(jnp.int32, shape, axis)).sum(axis=axis)
        words = words.T if transposed else words
        exists = jnp.broadcast_to((of_rows < row_count)[:, None], words.shape)
        plgpu.store(out_ref, words, mask=exists)

    sides = (columns, block) if transposed else (block, columns)
    word_of = lambda x, y, n: (n // heads, n % heads, *((y, x) if transposed else (x, y)), 0)
    return pl.pallas_call(
        kernel,
        grid=(*grid, batch * heads),
        in_specs=[pl.BlockSpec((None, None, *sides), lambda x, y, n: (n // heads, n % heads, y, x))],
        out_specs=pl.BlockSpec((None, None, None, block, PART), word_of),
        out_shape=result_types(jax.ShapeDtypeStruct((batch, heads, count, row_count, PART), jnp.int32), keep),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="attention_mask_bits",
    )(keep)
