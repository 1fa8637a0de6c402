"""Rounds an operand and its transpose to 8 bits in one pass, for the matmuls of the backward.

In Triton, whose layout conversions do the transposition. For each 16-bit value 4 bytes pass through device memory:
0.064 ms for 8192 x 8192 at 4.24 TB/s. A separate pass for each direction moves 6 bytes.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.rounding import magnitude_bits, reciprocal, scale_of
from jax_kernels.pallas.triton.tensors import both, row_mask
from jax_kernels.pallas.varying import result_types

__all__ = ["BLOCK", "BothWays", "Joined", "both_ways", "joined_both_ways", "reciprocal"]

BLOCK = 128  # rows and columns of a block of values that share a scale
# Rows and columns of a program with given factors, and its warps: 105 us for 16384 x 5632 values on an H200. 128 x 128
# with 8 warps takes 118, 32 x 128 with 4 warps 106, 128 x 64 with 4 warps 116, 128 x 256 with 8 warps 157.
TILE, WARPS = (64, 128), 8


class BothWays(NamedTuple):
    """A matrix in 8 bits, and its transpose.

    values: [M, N]. transposed: [N, M]. scale: [ceil(M / 128), ceil(N / 128)] float32, one for each block of 128 x 128
    values; None if the caller gave the factors. largest: float32 [], the largest finite magnitude of x; None if it was
    not asked for.
    """

    values: Float[Array, "M N"]
    transposed: Float[Array, "N M"]
    scale: Float32[Array, "row_blocks column_blocks"] | None = None
    largest: Float32[Array, ""] | None = None


def both_ways(
    x: Float[Array, "M N"],
    factors: tuple[Float32[Array, " rows"], Float32[Array, " columns"]] | None,
    dtype: jnp.dtype,
    *,
    measures: bool = False,
    interpret: bool = False,
) -> BothWays:
    """Multiplies x by factors, and rounds it and its transpose to the 8-bit `dtype`.

    x: [M, N] of 16 or 32 bits. factors: (factors of x, factors of its transpose), float32: both [1], or [M] with one
    factor for each row of x, and [N] with one for each row of the transpose. None computes a scale for each block of
    128 x 128 values, and multiplies by its reciprocal. Finite values beyond the dtype's largest value are clipped to
    it; infinities become NaN. measures: whether the result has `largest`. interpret: runs the kernel in Pallas's
    interpreter.
    """
    rows, columns = x.shape
    tile_rows, tile_columns = (BLOCK, BLOCK) if factors is None else TILE
    grid = pl.cdiv(rows, tile_rows), pl.cdiv(columns, tile_columns)
    outs = {
        "values": jax.ShapeDtypeStruct((rows, columns), dtype),
        "transposed": jax.ShapeDtypeStruct((columns, rows), dtype),
    }
    if factors is None:
        outs["scale"] = jax.ShapeDtypeStruct(grid, jnp.float32)
    if measures:
        outs["largest"] = jax.ShapeDtypeStruct((grid[0] * grid[1],), jnp.float32)
    given = (x,) if factors is None else (x, *factors)

    shares = factors is None or factors[0].shape == factors[1].shape == (1,)

    def kernel(*refs):
        tile = _Tile(
            rows=rows,
            columns=columns,
            tile_rows=tile_rows,
            tile_columns=tile_columns,
            block=pl.program_id(0),
            blocks_across=grid[1],
        )
        out = dict(zip(outs, refs[len(given) :], strict=True))
        loaded = tile.load(refs[0]).astype(jnp.float32)
        if factors is None:
            scale, factor = _scale(loaded, dtype)
            plgpu.store(out["scale"].at[tile.row_block, tile.column_block], scale)
            by_rows = by_columns = factor
        else:
            by_rows, by_columns = tile.rows_of(refs[1]), tile.columns_of(refs[2])
        if measures:
            plgpu.store(out["largest"].at[tile.block], _largest_finite(loaded))
        values = _rounded(loaded * by_rows, dtype)
        tile.store(out["values"], values)
        transposed = values if shares else _rounded(loaded * by_columns, dtype)
        tile.store_transposed(out["transposed"], transposed)

    found = pl.pallas_call(
        kernel,
        grid=(grid[0] * grid[1],),
        out_shape=result_types(list(outs.values()), *given),
        compiler_params=plgpu.CompilerParams(num_warps=8 if factors is None else WARPS, num_stages=1),
        interpret=interpret,
        name="matmul_both_ways_triton",
    )(*given)
    results = BothWays(**dict(zip(outs, found, strict=True)))
    return results if results.largest is None else results._replace(largest=_maximum(results.largest))


class Joined(NamedTuple):
    """Matrices in 8 bits as one matrix, side by side, and their transposes.

    values: [M, the sum of all N]. transposed: [N, M] each. largest: float32 [], the largest finite magnitude of each;
    () if they were not asked for.
    """

    values: Float[Array, "M all_N"]
    transposed: tuple[Float[Array, "N M"], ...]
    largest: tuple[Float32[Array, ""], ...] = ()


def joined_both_ways(
    xs: Sequence[Float[Array, "M N"]],
    factors: Sequence[Float32[Array, " 1"]],
    dtype: jnp.dtype,
    *,
    measures: bool = False,
    interpret: bool = False,
) -> Joined:
    """Multiplies each x by its factor, and rounds it and its transpose to the 8-bit `dtype`, as both_ways does.

    xs: [M, N] each, of one M and one dtype of 16 or 32 bits, N in multiples of 128. factors: float32 [1] each.
    measures: whether the result has `largest`.
    """
    (rows, _), (tile_rows, tile_columns) = xs[0].shape, TILE
    widths, count = [x.shape[1] for x in xs], len(xs)
    outs = [jax.ShapeDtypeStruct((rows, sum(widths)), dtype)]
    outs += [jax.ShapeDtypeStruct((width, rows), dtype) for width in widths]
    blocks_across, row_blocks = sum(widths) // tile_columns, pl.cdiv(rows, tile_rows)
    if measures:
        outs.append(jax.ShapeDtypeStruct((row_blocks, blocks_across), jnp.float32))

    def kernel(*refs):
        sources, of_sources, written = refs[:count], refs[count : 2 * count], refs[2 * count :]
        values, transposed = written[0], written[1 : count + 1]
        row_block, column_block = pl.program_id(0) // blocks_across, pl.program_id(0) % blocks_across
        first = 0
        for i, width in enumerate(widths):
            last = first + width // tile_columns
            is_mine = (column_block >= first) & (column_block < last)
            block = row_block * (width // tile_columns) + column_block - first
            sizes = {"rows": rows, "columns": width, "tile_rows": tile_rows, "tile_columns": tile_columns}
            tile = _Tile(**sizes, block=block, blocks_across=width // tile_columns)

            @pl.when(is_mine)
            def _round(i=i, tile=tile, start=first * tile_columns):
                loaded = tile.load(sources[i]).astype(jnp.float32)
                rounded = _rounded(loaded * of_sources[i][0], dtype)
                if measures:
                    plgpu.store(written[-1].at[row_block, column_block], _largest_finite(loaded))
                tile.store(values, rounded, start)
                tile.store_transposed(transposed[i], rounded)

            first = last

    found = pl.pallas_call(
        kernel,
        grid=(row_blocks * blocks_across,),
        out_shape=result_types(outs, *xs, *factors),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="matmul_joined_both_ways_triton",
    )(*xs, *factors)
    transposed = tuple(found[1 : count + 1])
    if not measures:
        return Joined(found[0], transposed)
    ends = list(itertools.accumulate(width // tile_columns for width in widths))
    starts = [0, *ends[:-1]]
    largest = tuple(_maximum(found[-1][:, start:end]) for start, end in zip(starts, ends, strict=True))
    return Joined(found[0], transposed, largest)


class _Tile(NamedTuple):
    """The block of tile_rows x tile_columns values of a program, in a matrix of `rows` x `columns`.

    block: the index of the block, counted row by row. blocks_across: the number of blocks in a row of blocks.
    """

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int
    block: Any
    blocks_across: int

    @property
    def row_block(self) -> jax.Array:
        return self.block // self.blocks_across

    @property
    def column_block(self) -> jax.Array:
        return self.block % self.blocks_across

    @property
    def row_exists(self) -> jax.Array | None:
        """[tile_rows] bool: whether the matrix has the row; None if all blocks are whole."""
        return row_mask(self.row_block * self.tile_rows, self.tile_rows, self.rows)

    @property
    def column_exists(self) -> jax.Array | None:
        return row_mask(self.column_block * self.tile_columns, self.tile_columns, self.columns)

    @property
    def exists(self) -> jax.Array | None:
        """[tile_rows, tile_columns] bool: whether the matrix has the value; None if all blocks are whole."""
        return both(self.row_exists, self.column_exists, (self.tile_rows, self.tile_columns))

    @property
    def _rows(self) -> Any:
        return pl.ds(self.row_block * self.tile_rows, self.tile_rows)

    @property
    def _columns(self) -> Any:
        return pl.ds(self.column_block * self.tile_columns, self.tile_columns)

    def load(self, ref: Ref) -> jax.Array:
        """The block's part of a ref [rows, columns], with 0 outside the matrix."""
        mask = self.exists
        return plgpu.load(ref.at[self._rows, self._columns], mask=mask, other=None if mask is None else 0)

    def store(self, ref: Ref, values: jax.Array, start: int = 0) -> None:
        """Stores values to the block's part of a ref [rows, columns]. start: the matrix's first column in the ref."""
        columns = pl.ds(start + self.column_block * self.tile_columns, self.tile_columns)
        plgpu.store(ref.at[self._rows, columns], values, mask=self.exists)

    def store_transposed(self, ref: Ref, values: jax.Array) -> None:
        """Stores the transpose of values to the block's part of a ref [columns, rows]."""
        mask = self.exists
        plgpu.store(ref.at[self._columns, self._rows], values.T, mask=None if mask is None else mask.T)

    def rows_of(self, ref: Ref) -> jax.Array:
        """The block's rows of a ref [rows], as [tile_rows, 1]; a scalar if the ref has shape [1]."""
        if ref.shape == (1,):
            return ref[0]
        mask = self.row_exists
        return plgpu.load(ref.at[self._rows], mask=mask, other=None if mask is None else 0)[:, None]

    def columns_of(self, ref: Ref) -> jax.Array:
        """The block's columns of a ref [columns], as [1, tile_columns]; a scalar if the ref has shape [1]."""
        if ref.shape == (1,):
            return ref[0]
        mask = self.column_exists
        return plgpu.load(ref.at[self._columns], mask=mask, other=None if mask is None else 0)[None]


def _scale(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """(scale, 1 / scale) of a block x, float32 scalars.

    The scale is the largest magnitude divided by the largest value of the 8-bit `dtype`; 1 if all values are 0. If a
    value is not finite, the reciprocal is NaN.
    """
    return scale_of(magnitude_bits(x).max(axis=1).max(axis=0), dtype)


def _maximum(x: jax.Array) -> jax.Array:
    """The maximum of x, by a kernel of its own: XLA would compute it in one thread of the next loop that needs it."""
    return lax.optimization_barrier(x.max())


def _largest_finite(x: jax.Array) -> jax.Array:
    """The largest finite magnitude of a block, a float32 scalar."""
    magnitudes = jnp.abs(x)
    return jnp.where(magnitudes < jnp.inf, magnitudes, 0.0).max(axis=1).max(axis=0)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x in the 8-bit `dtype`. Finite values beyond its largest value are clipped; infinities become NaN."""
    top = float(jnp.finfo(dtype).max)
    clipped = jnp.where(x > top, top, jnp.where(x < -top, -top, x))  # a NaN passes
    return jnp.where(jnp.abs(x) < jnp.inf, clipped, jnp.nan).astype(dtype)
