"""State of the Triton matmul: sizes of a launch, and work tiles with their masks."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.kernel_types import Index, Ref, Slice
from jax_kernels.pallas.matmul.work_tiles import banded
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import SMALLEST, both, fit, iota, row_mask


class Sums(NamedTuple):
    """The float32 sums of a call's matmuls: product is x @ w; up is x @ w_up of a gated unit, else None.

    A field is an array of a work tile, or a whole array or its ref, or its shape and dtype.
    """

    product: Any
    up: Any = None


class EpilogueTraits(Protocol):
    """The facts of a launch that the epilogue, and the addition of the splits' sums, read.

    options: of the call. m, n: of the result. splits: the number of programs that split a work tile's inner dimension.
    transposes_sums: whether the splits' sums are [splits, n, m or more], not [splits, m, n].
    """

    @property
    def options(self) -> MatmulOptions: ...
    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def transposes_sums(self) -> bool: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch that multiplies x [m, k] by w [k, n] in work tiles of [block_m, block_n].

    block_k: values of the inner dimension in a step. core_count: the number of SMs.
    """

    options: MatmulOptions
    config: MatmulTriton
    m: int
    n: int
    k: int
    block_m: int
    block_n: int
    block_k: int
    core_count: int

    @classmethod
    def of(cls, inputs: MatmulInputs, options: MatmulOptions, config: MatmulTriton, core_count: int) -> "Traits":
        """The static facts of a launch with these inputs. Blocks shrink to fit a small matmul."""
        m, n, k = options.sizes(inputs)
        # A gated unit has the sums of two matmuls, hence half the columns.
        block_n = max(SMALLEST, config.block_n // 2) if inputs.is_gated else config.block_n
        return cls(
            options=options,
            config=config,
            m=m,
            n=n,
            k=k,
            block_m=fit(config.block_m, m),
            block_n=fit(block_n, n),
            block_k=fit(config.block_k, k),
            core_count=core_count,
        )

    @property
    def transposes_sums(self) -> bool:
        """Whether the splits' sums in device memory are [splits, n, m], and not [splits, m, n]: never."""
        return False

    @property
    def m_blocks(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def n_blocks(self) -> int:
        return pl.cdiv(self.n, self.block_n)

    @property
    def tiles(self) -> int:
        return self.m_blocks * self.n_blocks

    @property
    def k_steps(self) -> int:
        """The number of steps of a work tile over the whole inner dimension."""
        return pl.cdiv(self.k, self.block_k)

    @property
    def steps_of_split(self) -> int:
        """The number of steps of a program: all k_steps if a work tile is not split.

        Otherwise at least config.split_steps, and enough that each SM has at most one program.
        """
        most = self.core_count // self.tiles
        if self.config.split_steps is None or most < 2:
            return self.k_steps
        return min(self.k_steps, max(self.config.split_steps, pl.cdiv(self.k_steps, most)))

    @property
    def splits(self) -> int:
        """The number of programs for a work tile, each with a part (a split) of the inner dimension."""
        return pl.cdiv(self.k_steps, self.steps_of_split)

    def tile(self, index: Index) -> "Tile":
        """The rows and columns of the result that are work tile `index`."""
        m_block, n_block = banded(index, self.m_blocks, self.n_blocks, self.config.row_group)
        return Tile(
            rows=Span(start=m_block * self.block_m, size=self.block_m, length=self.m),
            columns=Span(start=n_block * self.block_n, size=self.block_n, length=self.n),
        )

    def depth(self, step: Index) -> "Span":
        """The indices of the inner dimension in a step."""
        return Span(start=step * self.block_k, size=self.block_k, length=self.k)

    def dot(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The matmul of a step's blocks, float32 [block_m, block_n].

        x, w: the blocks as they lie in device memory: transposed if options.transpose_x or transpose_w. float32
        operands use tf32.
        """
        axes = ((0 if self.options.transpose_x else 1,), (1 if self.options.transpose_w else 0,))
        return lax.dot_general(
            x, w, (axes, ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
        )


class Span(NamedTuple):
    """A part of an axis: `size` indices from `start` on. start: a traced integer.

    length: the length of the axis, or a traced index at which the valid part of the axis ends. block: the size of the
    blocks that divide the axis, if this span is a part of such a block; None if the span is a block.
    """

    start: Any
    size: int
    length: Index
    block: int | None = None

    @property
    def slice(self) -> Slice:
        return pl.ds(self.start, self.size)

    @property
    def exists(self) -> jax.Array | None:
        """Whether each index is within the axis, [size] bool; None if the axis has only whole blocks."""
        return row_mask(self.start, self.size, self.length, self.block)


class Gathered(NamedTuple):
    """Rows of a matrix, by index. slice: their indices, int32 [size]. exists: whether the matrix has each of them."""

    slice: jax.Array
    exists: jax.Array

    @classmethod
    def of(cls, gather: Ref, rows: Span, length: int) -> "Gathered":
        """The rows gather[rows] of a matrix of `length` rows. An index outside of the matrix is a row of 0."""
        index = plgpu.load(
            gather.at[rows.slice], mask=rows.exists, other=None if rows.exists is None else jnp.int32(-1)
        )
        exists = (index >= 0) & (index < length)
        return cls(slice=jnp.where(exists, index, 0), exists=exists)

    @property
    def size(self) -> int:
        return self.slice.shape[0]


class Tile(NamedTuple):
    """A part of a matrix: the values in these rows and columns."""

    rows: Any
    columns: Span

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.size, self.columns.size

    @property
    def exists(self) -> jax.Array | None:
        """Whether the matrix has each value, bool of this shape; None if it has all values."""
        return both(self.rows.exists, self.columns.exists, self.shape)

    def parts(self, columns: int) -> list["Tile"]:
        """Cuts this part into parts of at most `columns` columns, from left to right."""
        whole = self.columns
        size = min(columns, whole.size)
        part = whole._replace(size=size, block=whole.block or whole.size)
        return [self._replace(columns=part._replace(start=whole.start + start)) for start in range(0, whole.size, size)]

    def load(self, ref: Ref, *leading: Index) -> jax.Array:
        """Loads this part of an array in device memory: [rows, columns] in its dtype, 0 outside the array.

        leading: indices of the array's axes before its rows.
        """
        exists, index = self.exists, (self.rows.slice, self.columns.slice)
        other = None if exists is None else jnp.zeros((), ref.dtype)
        if isinstance(self.rows, Gathered):  # Pallas takes no mixture of slices and indices
            index = self.rows.slice[:, None], (self.columns.start + iota(self.columns.size))[None]
        return plgpu.load(ref.at[(*leading, *index)], mask=exists, other=other)

    def load_columns(self, ref: Ref) -> jax.Array:
        """Loads this part's columns of an array with one value per column, as [1, columns] float32, 0 past its end."""
        exists = self.columns.exists
        other = None if exists is None else jnp.zeros((), ref.dtype)
        return plgpu.load(ref.at[self.columns.slice], mask=exists, other=other).astype(jnp.float32)[None]

    def store(self, ref: Ref, x: jax.Array, *leading: Index) -> None:
        """Stores x, [rows, columns], as this part of an array in device memory, in the array's dtype.

        leading: indices of the array's axes before its rows. Values outside the array are dropped.
        """
        view = ref.at[(*leading, self.rows.slice, self.columns.slice)]
        plgpu.store(view, x.astype(ref.dtype), mask=self.exists)
