"""Counts the kept pairs of each block of a bool array: bound by reading each bool once.

XLA reads at a third of the bandwidth of a copy.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import MOST_PROGRAMS, iota, reaches

ELEMENTS = 16384  # pairs of a program: a thread has about eight loads of 16 bytes in flight
WARPS = 4
LEAST_ROWS = 16


def takes(shape: tuple[int, ...], block_q: int, block_kv: int) -> bool:
    """Whether this kernel can count a bool array of this shape [B, H, T, S]; if not, XLA has to.

    It needs Pallas-Triton, a block_kv that is a power of two and at most S, and a block_q with a large enough factor of
    two. A program must have room for its rows of a block, and T at least as many rows. Triton must be able to address
    the array, and CUDA's grid must have room for the programs.
    """
    batch, heads, q_length, kv_length = shape
    rows, columns = _tile(kv_length, block_q, block_kv)
    return (
        backend.AVAILABLE
        and block_kv & (block_kv - 1) == 0
        and LEAST_ROWS <= rows <= q_length
        and block_kv <= kv_length
        and rows * columns <= ELEMENTS
        and max(batch * heads, pl.cdiv(q_length, rows)) <= MOST_PROGRAMS
        and reaches(batch * heads * q_length * kv_length, itemsize=1)
    )


def _tile(kv_length: int, block_q: int, block_kv: int) -> tuple[int, int]:
    """(rows, columns) that one program counts: some rows of a block, and all columns of one or more neighbouring
    blocks.
    """
    rows = min(block_q & -block_q, max(LEAST_ROWS, ELEMENTS // block_kv))
    columns = block_kv
    while 2 * columns * rows <= ELEMENTS and columns < kv_length:
        columns *= 2
    return rows, columns


def counts(
    keep: Bool[Array, "B H T S"], block_q: int, block_kv: int, *, interpret: bool
) -> Int32[Array, "B H rows columns"]:
    """The number of True values in each block of block_q x block_kv: int32 [B, H, ceil(T / block_q), ceil(S /
    block_kv)].

    The caller has checked `takes`.
    """
    batch, heads, q_length, kv_length = keep.shape
    rows, columns = _tile(kv_length, block_q, block_kv)
    blocks, parts = pl.cdiv(q_length, block_q), block_q // rows
    side_by_side = columns // block_kv
    grid = (pl.cdiv(kv_length, columns), pl.cdiv(q_length, rows), batch * heads)
    is_whole = q_length % rows == 0 and kv_length % columns == 0
    # For whole programs, also past the last block. In shard_map it varies as the array does.
    shape = (batch, heads, grid[1], grid[0] * side_by_side)
    of_parts = jax.typeof(keep).update(shape=shape, dtype=jnp.dtype(jnp.int32))

    def kernel(keep_ref, out_ref):
        inside = None
        if not is_whole:
            q, k = pl.program_id(1) * rows + iota(rows), pl.program_id(0) * columns + iota(columns)
            inside = (q < q_length)[:, None] & (k < kv_length)[None, :]
        x = plgpu.load(keep_ref, mask=inside, other=None if is_whole else False).astype(jnp.int32)
        # Sum along rows first: a thread adds its loaded values in registers.
        x = x.reshape(rows, side_by_side, block_kv).sum(axis=2) if side_by_side > 1 else x.sum(axis=1)[:, None]
        plgpu.store(out_ref, x.sum(axis=0))

    sums = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((None, None, rows, columns), lambda x, y, n: (n // heads, n % heads, y, x))],
        out_specs=pl.BlockSpec((None, None, None, side_by_side), lambda x, y, n: (n // heads, n % heads, y, x)),
        out_shape=of_parts,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="attention_dense_blocks",
    )(keep)[..., : pl.cdiv(kv_length, block_kv)]
    if parts == 1:
        return sums
    pad = ((0, 0), (0, 0), (0, blocks * parts - grid[1]), (0, 0))
    return jnp.pad(sums, pad).reshape(batch, heads, blocks, parts, -1).sum(axis=3, dtype=jnp.int32)
