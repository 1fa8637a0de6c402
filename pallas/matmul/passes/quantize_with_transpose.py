"""Rounds an operand and its transpose to 8 bits in one pass, for the matmuls of the backward.

In Triton, whose layout conversions do the transposition. For each 16-bit value 4 bytes pass through device memory:
0.064 ms for 8192 x 8192 at 4.24 TB/s. A separate pass for each direction moves 6 bytes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.rounding import magnitude_bits, reciprocal, scale_of
from jax_kernels.pallas.triton.tensors import iota
from jax_kernels.pallas.varying import result_types

__all__ = ["BLOCK", "BothWays", "both_ways", "reciprocal"]

BLOCK = 128  # rows and columns of a program, and of a block of values that share a scale


class BothWays(NamedTuple):
    """A matrix in 8 bits, and its transpose.

    values: [M, N]. transposed: [N, M]. scale: [ceil(M / 128), ceil(N / 128)] float32, one for each block of 128 x 128
    values; None if the caller gave the factors.
    """

    values: Float[Array, "M N"]
    transposed: Float[Array, "N M"]
    scale: Float32[Array, "row_blocks column_blocks"] | None = None


def both_ways(
    x: Float[Array, "M N"],
    factors: tuple[Float32[Array, " rows"], Float32[Array, " columns"]] | None,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> BothWays:
    """Multiplies x by factors, and rounds it and its transpose to the 8-bit `dtype`.

    x: [M, N] of 16 or 32 bits. factors: (factors of x, factors of its transpose), float32: both [1], or [M] with one
    factor for each row of x, and [N] with one for each row of the transpose. None computes a scale for each block of
    128 x 128 values, and multiplies by its reciprocal. Finite values beyond the dtype's largest value are clipped to
    it; infinities become NaN. interpret: runs the kernel in Pallas's interpreter.
    """
    rows, columns = x.shape
    grid = pl.cdiv(rows, BLOCK), pl.cdiv(columns, BLOCK)
    outs = [jax.ShapeDtypeStruct((rows, columns), dtype), jax.ShapeDtypeStruct((columns, rows), dtype)]
    if factors is None:
        outs.append(jax.ShapeDtypeStruct(grid, jnp.float32))
    given = (x,) if factors is None else (x, *factors)

    shares = factors is None or factors[0].shape == factors[1].shape == (1,)

    def kernel(*refs):
        tile = _Tile(rows=rows, columns=columns, block=pl.program_id(0), blocks_across=grid[1])
        out = refs[len(given) :]
        loaded = plgpu.load(tile.of(refs[0]), mask=tile.exists, other=0).astype(jnp.float32)
        if factors is None:
            scale, factor = _scale(loaded, dtype)
            plgpu.store(out[2].at[tile.row_block, tile.column_block], scale)
            by_rows = by_columns = factor
        else:
            by_rows, by_columns = tile.rows_of(refs[1]), tile.columns_of(refs[2])
        values = _rounded(loaded * by_rows, dtype)
        plgpu.store(tile.of(out[0]), values, mask=tile.exists)
        transposed = values if shares else _rounded(loaded * by_columns, dtype)
        plgpu.store(tile.transposed_of(out[1]), transposed.T, mask=tile.exists.T)

    found = pl.pallas_call(
        kernel,
        grid=(grid[0] * grid[1],),
        out_shape=result_types(outs, *given),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="matmul_both_ways_triton",
    )(*given)
    return BothWays(*found)


class _Tile(NamedTuple):
    """The block of 128 x 128 values of a program, in a matrix of `rows` x `columns`.

    block: the index of the block, counted row by row. blocks_across: the number of blocks in a row of blocks.
    """

    rows: int
    columns: int
    block: Any
    blocks_across: int

    @property
    def row_block(self) -> jax.Array:
        return self.block // self.blocks_across

    @property
    def column_block(self) -> jax.Array:
        return self.block % self.blocks_across

    @property
    def row_exists(self) -> jax.Array:
        return self.row_block * BLOCK + iota(BLOCK) < self.rows

    @property
    def column_exists(self) -> jax.Array:
        return self.column_block * BLOCK + iota(BLOCK) < self.columns

    @property
    def exists(self) -> jax.Array:
        """[BLOCK, BLOCK] bool: whether the matrix has the value."""
        return self.row_exists[:, None] & self.column_exists[None]

    def of(self, ref: Ref) -> Ref:
        """The block's part of a ref [rows, columns]."""
        return ref.at[pl.ds(self.row_block * BLOCK, BLOCK), pl.ds(self.column_block * BLOCK, BLOCK)]

    def transposed_of(self, ref: Ref) -> Ref:
        """The block's part of a ref [columns, rows]."""
        return ref.at[pl.ds(self.column_block * BLOCK, BLOCK), pl.ds(self.row_block * BLOCK, BLOCK)]

    def rows_of(self, ref: Ref) -> jax.Array:
        """The block's rows of a ref [rows], as [BLOCK, 1]; a scalar if the ref has shape [1]."""
        if ref.shape == (1,):
            return ref[0]
        return plgpu.load(ref.at[pl.ds(self.row_block * BLOCK, BLOCK)], mask=self.row_exists, other=0)[:, None]

    def columns_of(self, ref: Ref) -> jax.Array:
        """The block's columns of a ref [columns], as [1, BLOCK]; a scalar if the ref has shape [1]."""
        if ref.shape == (1,):
            return ref[0]
        return plgpu.load(ref.at[pl.ds(self.column_block * BLOCK, BLOCK)], mask=self.column_exists, other=0)[None]


def _scale(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """(scale, 1 / scale) of a block x, float32 scalars.

    The scale is the largest magnitude divided by the largest value of the 8-bit `dtype`; 1 if all values are 0. If a
    value is not finite, the reciprocal is NaN.
    """
    return scale_of(magnitude_bits(x).max(axis=1).max(axis=0), dtype)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x in the 8-bit `dtype`. Finite values beyond its largest value are clipped; infinities become NaN."""
    top = float(jnp.finfo(dtype).max)
    clipped = jnp.where(x > top, top, jnp.where(x < -top, -top, x))  # a NaN passes
    return jnp.where(jnp.abs(x) < jnp.inf, clipped, jnp.nan).astype(dtype)
