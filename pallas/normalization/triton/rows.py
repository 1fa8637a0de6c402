"""Blocks of rows in the Triton kernels of normalisation: loads, stores, and loops over chunks of columns."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.normalization import NormInputs, NormOptions
from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, masked_slice, padded


class Refs(NamedTuple):
    """The arrays of a norm's kernel in device memory; None if the call lacks the array.

    outs: the results: a NormResult of refs in a forward, NormGradients of refs in a backward.
    """

    x: Ref
    residual: Ref | None = None
    scale: Ref | None = None
    bias: Ref | None = None
    mean: Ref | None = None
    inverse: Ref | None = None
    dout: Ref | None = None
    dtotal: Ref | None = None
    outs: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The sizes and options of a launch for an array [rows, columns].

    block_rows: rows that a program holds at once. chunk: columns that a program holds at once, a power of two.
    """

    options: NormOptions
    rows: int
    columns: int
    block_rows: int
    chunk: int

    @classmethod
    def of(cls, inputs: NormInputs, options: NormOptions, block_rows: int, largest_chunk: int) -> "Traits":
        """The sizes of a launch for inputs.x, [rows, columns]. The chunk is largest_chunk, or less for short rows."""
        rows, columns = inputs.x.shape
        return cls(
            options=options,
            rows=rows,
            columns=columns,
            block_rows=block_rows,
            chunk=min(largest_chunk, padded(columns)),
        )

    @property
    def chunks(self) -> int:
        """The number of chunks of a row."""
        return pl.cdiv(self.columns, self.chunk)

    @property
    def row_blocks(self) -> int:
        """The number of blocks of block_rows rows."""
        return pl.cdiv(self.rows, self.block_rows)


class Tile(NamedTuple):
    """The block of an array that a program works on: block_rows rows and chunk columns, with masks.

    row, column: the index of the block's first row and first column, traced integers or 0.
    """

    traits: Traits
    row: Index
    column: Index

    @property
    def row_exists(self) -> jax.Array:
        """[block_rows] bool: whether the array has the row."""
        return self.row + iota(self.traits.block_rows) < self.traits.rows

    @property
    def column_exists(self) -> jax.Array:
        """[chunk] bool: whether the array has the column."""
        return self.column + iota(self.traits.chunk) < self.traits.columns

    @property
    def exists(self) -> jax.Array:
        """[block_rows, chunk] bool: whether the array has the value."""
        mask = self.row_exists[:, None]
        if self.traits.columns % self.traits.chunk:
            mask = mask & self.column_exists[None]
        return jnp.broadcast_to(mask, (self.traits.block_rows, self.traits.chunk))

    def _view(self, ref: Ref) -> Ref:
        rows, columns = self.traits.block_rows, self.traits.chunk
        return ref.at[masked_slice(self.row, rows), masked_slice(self.column, columns)]

    def load(self, ref: Ref) -> jax.Array:
        """Loads the block of an array [rows, columns]: [block_rows, chunk] in its dtype, with 0 outside the array."""
        return plgpu.load(self._view(ref), mask=self.exists, other=0)

    def store(self, ref: Ref, x: jax.Array) -> None:
        """Stores x, [block_rows, chunk], as the block of an array [rows, columns], in the array's dtype."""
        plgpu.store(self._view(ref), x.astype(ref.dtype), mask=self.exists)

    def load_numbers(self, ref: Ref) -> jax.Array:
        """Loads the block's rows of a float32 array [rows], as [block_rows, 1], with 0 past the end."""
        view = ref.at[masked_slice(self.row, self.traits.block_rows)]
        return plgpu.load(view, mask=self.row_exists, other=0)[:, None]

    def store_numbers(self, ref: Ref, x: jax.Array) -> None:
        """Stores x, [block_rows], as the block's rows of an array [rows]."""
        plgpu.store(ref.at[masked_slice(self.row, self.traits.block_rows)], x, mask=self.row_exists)

    def load_columns(self, ref: Ref) -> jax.Array:
        """Loads the block's columns of an array [columns], as [1, chunk] float32, with 0 past the end."""
        view = ref.at[masked_slice(self.column, self.traits.chunk)]
        return plgpu.load(view, mask=self.column_exists, other=0).astype(jnp.float32)[None]

    def inputs(self, refs: Refs) -> jax.Array:
        """Loads the block of x, [block_rows, chunk]; with a residual, of x + residual rounded to x's dtype."""
        x = self.load(refs.x)
        if refs.residual is None:
            return x
        return (x.astype(jnp.float32) + self.load(refs.residual).astype(jnp.float32)).astype(x.dtype)

    def weight(self, refs: Refs) -> jax.Array | None:
        """scale + scale_offset of the block's columns, [1, chunk] float32; None without a scale."""
        if refs.scale is None:
            return None
        return self.load_columns(refs.scale) + self.traits.options.scale_offset


def chunk_loop[State](traits: Traits, step: Callable[[jax.Array, State], State], state: State) -> State:
    """Calls step(first column, state) -> state for each chunk of a row, and returns the last state.

    The loop is a lax.fori_loop; if there is only one chunk, a plain call.
    """
    if traits.chunks == 1:
        return step(jnp.int32(0), state)
    return lax.fori_loop(0, traits.chunks, lambda i, state: step(i * traits.chunk, state), state)
