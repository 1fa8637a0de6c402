"""State of the Triton matmul: sizes of a launch, and work tiles with their masks."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.kernel_types import Index, Ref, Slice
from jax_kernels.pallas.matmul.work_tiles import banded
from jax_kernels.pallas.triton.tensors import SMALLEST, both, fit, row_mask


class Sums(NamedTuple):
    """The float32 sums of a call's matmuls: x @ w, and x @ w_up of a gated unit."""

    product: Any
    up: Any = None


class EpilogueTraits(Protocol):
    """The traits of a launch that the epilogue and the addition of the splits' sums read."""

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
    """Sizes and features of a launch: [m, k] @ [k, n] in work tiles of [block_m, block_n].

    splits: the number of programs for a work tile, each with a part of the inner dimension.
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
        """Whether the sums of splits are [splits, n, m]."""
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
        return pl.cdiv(self.k, self.block_k)

    @property
    def steps_of_split(self) -> int:
        """Steps of a program: at least split_steps, and at least the number that gives each SM one program."""
        most = self.core_count // self.tiles
        if self.config.split_steps is None or most < 2:
            return self.k_steps
        return min(self.k_steps, max(self.config.split_steps, pl.cdiv(self.k_steps, most)))

    @property
    def splits(self) -> int:
        return pl.cdiv(self.k_steps, self.steps_of_split)

    def tile(self, index: Index) -> "Part":
        m_block, n_block = banded(index, self.m_blocks, self.n_blocks, self.config.rows_together)
        return Part(
            rows=Span(start=m_block * self.block_m, size=self.block_m, length=self.m),
            columns=Span(start=n_block * self.block_n, size=self.block_n, length=self.n),
        )

    def depth(self, step: Index) -> "Span":
        """The part of the inner dimension of a step."""
        return Span(start=step * self.block_k, size=self.block_k, length=self.k)

    def dot(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The float32 matmul of a step's operands in their memory layout. float32 operands use tf32."""
        axes = ((0 if self.options.transpose_x else 1,), (1 if self.options.transpose_w else 0,))
        return lax.dot_general(
            x, w, (axes, ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
        )


class Span(NamedTuple):
    """A part of an axis: `size` indices from `start`, a traced integer.

    length: of the axis. block: the size of the axis's blocks, if this is a part of a block; None for `size`.
    """

    start: Any
    size: int
    length: int
    block: int | None = None

    @property
    def slice(self) -> Slice:
        return pl.ds(self.start, self.size)

    @property
    def exists(self) -> jax.Array | None:
        """Whether each index is within the axis, [size] bool; None if all blocks are within it."""
        return row_mask(self.start, self.size, self.length, self.block)


class Part(NamedTuple):
    """A part of a matrix."""

    rows: Span
    columns: Span

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.size, self.columns.size

    @property
    def exists(self) -> jax.Array | None:
        return both(self.rows.exists, self.columns.exists, self.shape)

    def parts(self, columns: int) -> list["Part"]:
        """This part, cut into parts of at most `columns` columns."""
        whole = self.columns
        size = min(columns, whole.size)
        part = whole._replace(size=size, block=whole.block or whole.size)
        return [self._replace(columns=part._replace(start=whole.start + start)) for start in range(0, whole.size, size)]

    def load(self, ref: Ref, *leading: Index) -> jax.Array:
        """[rows, columns] in the array's dtype, 0 outside the array. leading: indices of the axes before the rows."""
        exists = self.exists
        other = None if exists is None else jnp.zeros((), ref.dtype)
        return plgpu.load(ref.at[(*leading, self.rows.slice, self.columns.slice)], mask=exists, other=other)

    def load_columns(self, ref: Ref) -> jax.Array:
        """[1, columns] float32, from an array with one value per column."""
        exists = self.columns.exists
        other = None if exists is None else jnp.zeros((), ref.dtype)
        return plgpu.load(ref.at[self.columns.slice], mask=exists, other=other).astype(jnp.float32)[None]

    def store(self, ref: Ref, x: jax.Array, *leading: Index) -> None:
        view = ref.at[(*leading, self.rows.slice, self.columns.slice)]
        plgpu.store(view, x.astype(ref.dtype), mask=self.exists)
