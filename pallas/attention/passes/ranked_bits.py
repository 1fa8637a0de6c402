"""Packs a Ranked mask (jax_kernels.masks.ranked_mask) into mask words from its ranks.

Bound by writing the words; no bool per pair exists. XLA takes about fifteen instructions per bit. This kernel takes
four, and none for pairs past all intervals, which are half of a causal mask.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from jax_kernels.masks.ranked_mask import Ranked, is_kept
from jax_kernels.pallas.mosaic.layouts import PART
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import MOST_PROGRAMS, iota, padded
from jax_kernels.pallas.varying import result_types

ROWS = 128  # rows of a program: a thread has eight words
WARPS = 4


def takes(mask: Ranked, columns: int) -> bool:
    """Whether this kernel can pack the mask: this JAX has Pallas-Triton, the columns fill whole words, and CUDA's grid
    has room for it.
    """
    longest = max(mask.last.shape[2], mask.rank.shape[2])
    programs = max(mask.batch * mask.heads, pl.cdiv(longest, columns))
    return backend.AVAILABLE and columns % PART == 0 and programs <= MOST_PROGRAMS


def packed(
    mask: Ranked, rows: int, columns: int, *, transposed: bool, interpret: bool
) -> Int32[Array, "B H blocks rows 8"]:
    """The mask words of a Ranked mask: int32 [B, H, blocks of columns, rows padded to whole blocks, PART].

    A Ranked mask keeps, for each query, the keys of an interval whose rank by score is at most the query's limit. B and
    H are its batch and heads, where 1 means that all share an entry. PART is 8, and bit i of word j is column i * 8 + j
    of its block of columns; words past the end are zeros. rows, columns: the block size. Rows are queries and columns
    keys; if transposed, the reverse. The caller has checked `takes`.
    """
    batch, heads, q_length, kv_length = mask.batch, mask.heads, mask.last.shape[2], mask.rank.shape[2]
    row_count, column_count = (kv_length, q_length) if transposed else (q_length, kv_length)
    row_count = pl.cdiv(row_count, rows) * rows
    count = pl.cdiv(column_count, columns)

    def kernel(rank_ref, last_ref, start_ref, end_ref, out_ref):
        row_start, column_start = pl.program_id(0) * ROWS, pl.program_id(1) * columns
        q_start, q_size = (column_start, padded(columns)) if transposed else (row_start, ROWS)
        k_start, k_size = (row_start, ROWS) if transposed else (column_start, columns)

        def of_queries(first, size):
            q = first + iota(size)
            refs = (last_ref, start_ref, end_ref)  # an empty interval past the last query
            return [plgpu.load(ref.at[pl.ds(first, size)], mask=q < q_length, other=0) for ref in refs]

        def of_keys(first, size):
            k = first + iota(size)  # past the last key: a rank that no query reaches
            return k, plgpu.load(rank_ref.at[pl.ds(first, size)], mask=k < kv_length, other=kv_length)

        _, start, end = of_queries(q_start, q_size)
        is_some = (start.min(axis=0) < k_start + k_size) & (end.max(axis=0) > k_start)

        def words():
            along = of_keys(row_start, ROWS) if transposed else of_queries(row_start, ROWS)
            along = [x[:, None] for x in along]
            found = jnp.zeros((ROWS, PART), jnp.int32)
            for bit in range(columns // PART):
                across = (of_queries if transposed else of_keys)(column_start + bit * PART, PART)
                across = [x[None, :] for x in across]
                (k, rank), (last, start, end) = (along, across) if transposed else (across, along)
                keep = is_kept(k, rank, last, start, end)
                found |= jnp.where(keep, jnp.int32(np.uint32(1 << bit).astype(np.int32)), 0)
            return found

        exists = jnp.broadcast_to((row_start + iota(ROWS) < row_count)[:, None], (ROWS, PART))

        @pl.when(is_some)
        def _store_words():
            plgpu.store(out_ref, words(), mask=exists)

        @pl.when(jnp.logical_not(is_some))
        def _store_zeros():
            plgpu.store(out_ref, jnp.zeros((ROWS, PART), jnp.int32), mask=exists)

    vector = lambda length: pl.BlockSpec((None, None, length), lambda x, y, n: (n // heads, n % heads, 0))
    of_batch = pl.BlockSpec((None, q_length), lambda x, y, n: (n // heads, 0))
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(row_count, ROWS), count, batch * heads),
        in_specs=[vector(kv_length), vector(q_length), of_batch, of_batch],
        out_specs=pl.BlockSpec((None, None, None, ROWS, PART), lambda x, y, n: (n // heads, n % heads, y, x, 0)),
        out_shape=result_types(jax.ShapeDtypeStruct((batch, heads, count, row_count, PART), jnp.int32), mask),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="attention_ranked_bits",
    )(mask.rank, mask.last, mask.start, mask.end)
