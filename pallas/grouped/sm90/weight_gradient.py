"""The gradient of a grouped matmul's weights on Hopper: for each group, the sum of x[i]ᵀ dz[i] over its rows.

One CTA runs on each SM, and takes one block of 128 x block_n of a group's gradient after another. A memory warpgroup
loads blocks of 64 rows of both operands, from a multiple of 8 rows on. Each of two compute warpgroups owns 64 rows of
the block, whose sums stay in registers. In a group's first and last step the compute warpgroups replace rows of other
groups by 0 in shared memory, on both sides, so that their NaN stays in their group.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.group_tiles import group_offsets
from jax_kernels.inputs.group_tiles import largest_first as largest
from jax_kernels.inputs.grouped_matmul import GroupedOptions, WeightGradientInputs
from jax_kernels.pallas.block_specs.matmul_specs import GroupedSm90
from jax_kernels.pallas.grouped.sm90.state import (
    BLOCK_M,
    BUFFERS,
    COLUMNS,
    COMPUTE_WGS,
    ROWS,
    SHARED_MEMORY,
    Turn,
    run_tiles,
)
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref
from jax_kernels.pallas.matmul.work_tiles import banded
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import SWIZZLED, WGMMA
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref

STEP = 64  # rows of x and dz in a step
ATOM = 8  # rows of a swizzle atom


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch that computes a gradient [groups, m, n]. dtype: of the operands and the result."""

    config: GroupedSm90
    groups: int
    m: int
    n: int
    dtype: jnp.dtype

    @property
    def m_blocks(self) -> int:
        return pl.cdiv(self.m, BLOCK_M)

    @property
    def n_blocks(self) -> int:
        return pl.cdiv(self.n, self.config.block_n)

    @property
    def tiles(self) -> int:
        return self.groups * self.m_blocks * self.n_blocks

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline: config.stages, or fewer if shared memory has no room for as many."""
        of_stage = (BLOCK_M + self.config.block_n) * STEP * self.dtype.itemsize
        of_results = COMPUTE_WGS * BUFFERS * ROWS * COLUMNS * self.dtype.itemsize
        return min(self.config.stages, (SHARED_MEMORY - of_results) // of_stage)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Smem:
    """A CTA's shared memory.

    first: [stages, 64, 128]. second: [stages, 64, block_n]. out: [warpgroups, buffers, 64, 64], the output buffers.
    ready, free: [stages], barriers: a step's operands have arrived, or have been read by both warpgroups. cleared: both
    warpgroups have replaced the rows of other groups.
    """

    first: Ref
    second: Ref
    out: Ref
    ready: Barrier
    free: Barrier
    cleared: Barrier

    @classmethod
    def scratch(cls, traits: Traits) -> "Smem":
        """The scratch shapes for pl.run_scoped."""
        stages = traits.stages
        return cls(
            first=smem_ref((stages, STEP, BLOCK_M), traits.dtype, transforms=SWIZZLED),
            second=smem_ref((stages, STEP, traits.config.block_n), traits.dtype, transforms=SWIZZLED),
            out=smem_ref((COMPUTE_WGS, BUFFERS, ROWS, COLUMNS), traits.dtype, transforms=SWIZZLED),
            ready=barrier_ref(num_arrivals=2, num_barriers=stages),
            free=barrier_ref(num_arrivals=COMPUTE_WGS, num_barriers=stages),
            cleared=barrier_ref(num_arrivals=COMPUTE_WGS),
        )


class GroupOrder(NamedTuple):
    """The groups in the order of the launch, int32 [G] each: the group, its first row, and its end."""

    group: Any
    start: Any
    end: Any

    @classmethod
    def of(cls, offsets: jax.Array, largest_first: bool) -> "GroupOrder":
        """The order of the groups with these offsets: the largest first, or as in the arrays."""
        if largest_first:
            return cls(*largest(offsets))
        return cls(group=lax.iota(jnp.int32, offsets.shape[0] - 1), start=offsets[:-1], end=offsets[1:])


class WorkTile(NamedTuple):
    """A block of a group's gradient: its first row and column, and the group's rows of x, from `start` up to `end`."""

    group: Index
    row: Index
    column: Index
    start: Index
    end: Index

    @property
    def aligned(self) -> Index:
        """The first row of step 0."""
        return jnp.bitwise_and(self.start, -ATOM)

    @property
    def begins_with_others(self) -> Any:
        """Whether step 0 has rows of other groups, or rows past x's end."""
        return (self.start > self.aligned) | (self.end < self.aligned + STEP)

    @property
    def ends_with_others(self) -> jax.Array:
        """Whether the last step has rows past the group's end."""
        return jnp.bitwise_and(self.end - self.aligned, STEP - 1) > 0

    @property
    def steps(self) -> jax.Array:
        count = lax.div(self.end - self.aligned + STEP - 1, jnp.int32(STEP))
        return jnp.where(self.end > self.start, count, jnp.int32(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """The state of a CTA. ctas: of the launch. first, second, order, out: refs in device memory."""

    traits: Traits
    ctas: int
    first: Ref
    second: Ref
    order: GroupOrder
    out: Ref
    smem: Smem

    def for_each_tile(self, run: Callable[[WorkTile, Index], None]) -> None:
        """Calls run(tile, filled) for each work tile of the CTA. filled: the earlier tiles' number of steps."""
        tiles = self.traits.tiles

        def body(carry: tuple[Turn, Index, WorkTile]) -> tuple[Turn, Index, WorkTile]:
            turn, filled, tile = carry
            following = turn.following()
            loaded = self._tile(jnp.minimum(following.index, tiles - 1))  # read while the tile is computed
            row, column = (pl.multiple_of(jnp.int32(x), n) for x, n in ((tile.row, BLOCK_M), (tile.column, COLUMNS)))
            run(tile._replace(row=row, column=column), filled)
            return following, filled + tile.steps, loaded

        first = Turn.first(self.ctas, self.traits.config.snake)
        start = first, jnp.int32(0), self._tile(first.index)
        lax.while_loop(lambda carry: carry[0].index < tiles, body, start)

    def _tile(self, index: Index) -> WorkTile:
        """Work tile `index` of all: group by group, in the order of the launch."""
        traits = self.traits
        blocks = jnp.int32(traits.m_blocks * traits.n_blocks)
        nth = lax.div(index, blocks)
        m_block, n_block = banded(lax.rem(index, blocks), traits.m_blocks, traits.n_blocks, traits.config.row_group)
        return WorkTile(
            group=self.order.group[nth],
            row=m_block * BLOCK_M,
            column=n_block * traits.config.block_n,
            start=self.order.start[nth],
            end=self.order.end[nth],
        )

    def slot(self, number: Index) -> jax.Array:
        """The stage that step `number` of the CTA uses."""
        return lax.rem(number, jnp.int32(self.traits.stages))


def weight_gradient(
    inputs: WeightGradientInputs, options: GroupedOptions, *, config: GroupedSm90, core_count: int, interpret: bool
) -> jax.Array:
    """Computes the gradient of w on Hopper: [G, K, N] in x's dtype; [G, N, K] with transpose_w.

    x and dz have 16 bits, and options.out_dtype is their dtype. M is a multiple of 8, N and K are multiples of 64.
    core_count: the number of SMs. interpret: runs the kernel in JAX's interpreter.
    """
    first, second = (inputs.dz, inputs.x) if options.transpose_w else (inputs.x, inputs.dz)
    traits = Traits(
        config=config,
        groups=inputs.group_sizes.shape[0],
        m=first.shape[1],
        n=second.shape[1],
        dtype=first.dtype,
    )
    ctas = min(core_count, traits.tiles)

    def entry(first: Ref, second: Ref, *rest: Ref) -> None:
        *order, out = rest
        kernel = functools.partial(
            Kernel, traits=traits, ctas=ctas, first=first, second=second, order=GroupOrder(*order), out=out
        )
        run = lambda smem: run_tiles(kernel(smem=smem), _load_tile, _compute_tile)
        pl.run_scoped(run, Smem.scratch(traits), collective_axes="wg")

    return launch(
        entry,
        "grouped_weight_gradient_sm90",
        out_type=jax.ShapeDtypeStruct((traits.groups, traits.m, traits.n), traits.dtype),
        ctas=ctas,
        warpgroups=COMPUTE_WGS + 1,
        semantics=plgpu.LoweringSemantics.Warpgroup,
        interpret=interpret,
    )(first, second, *GroupOrder.of(group_offsets(inputs.group_sizes, first.shape[0]), config.largest_first))


def _load_tile(kernel: Kernel, tile: WorkTile, filled: Index) -> None:
    """Loads a work tile's blocks of both operands, step by step, as stages become free."""
    smem = kernel.smem

    def step(i, _):
        slot = kernel.slot(filled + i)

        @pl.when(filled + i >= kernel.traits.stages)
        def _wait():
            plgpu.barrier_wait(smem.free.at[slot])

        rows = pl.ds(pl.multiple_of(tile.aligned + i * STEP, ATOM), STEP)
        first = kernel.first.at[rows, pl.ds(tile.row, BLOCK_M)]
        second = kernel.second.at[rows, pl.ds(tile.column, kernel.traits.config.block_n)]
        plgpu.copy_gmem_to_smem(first, smem.first.at[slot], smem.ready.at[slot])
        plgpu.copy_gmem_to_smem(second, smem.second.at[slot], smem.ready.at[slot])

    lax.fori_loop(0, tile.steps, step, None)


def _compute_tile(kernel: Kernel, wg: Index, tile: WorkTile, filled: Index) -> None:
    """Computes and stores the 64 rows of a work tile that warpgroup `wg` has; zeros for a group without rows."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last work tile may have ended at either buffer

    def store(sums: jax.Array | None) -> None:
        for part in range(kernel.traits.config.block_n // COLUMNS):
            z = None if sums is None else sums[:, part * COLUMNS : (part + 1) * COLUMNS]
            _store_part(kernel, wg, tile, part, z)

    pl.when(tile.steps > 0)(lambda: store(_sums(kernel, wg, tile, filled)))
    pl.when(tile.steps == 0)(lambda: store(None))


def _sums(kernel: Kernel, wg: Index, tile: WorkTile, filled: Index) -> jax.Array:
    """The float32 sums [64, block_n] of a warpgroup's rows, over all steps of a work tile.

    A step's wgmma is issued before the wait for the previous step's. If the first or the last step has rows of other
    groups, these are cleared first.
    """
    smem, last = kernel.smem, tile.steps - 1
    clean = jnp.where(tile.ends_with_others, last, tile.steps)

    def multiply(acc, i):
        slot = kernel.slot(filled + i)
        plgpu.wgmma(acc, smem.first.at[slot, :, pl.ds(wg * ROWS, ROWS)].T, smem.second.at[slot])

    def sums(acc):
        def step(i, _):
            plgpu.barrier_wait(smem.ready.at[kernel.slot(filled + i)])
            multiply(acc, i)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(smem.free.at[kernel.slot(filled + i - 1)])  # its wgmma has ended

        def last_step(i, _):
            plgpu.barrier_wait(smem.ready.at[kernel.slot(filled + i)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(smem.free.at[kernel.slot(filled + i - 1)])
            _clear(kernel, wg, tile, i, filled)
            multiply(acc, i)

        multiply(acc, 0)
        lax.fori_loop(1, clean, step, None)
        lax.fori_loop(jnp.maximum(clean, 1), tile.steps, last_step, None)  # no step if the first one is the last one
        found = acc[...]
        plgpu.barrier_arrive(smem.free.at[kernel.slot(filled + last)])
        return found

    plgpu.barrier_wait(smem.ready.at[kernel.slot(filled)])
    pl.when(tile.begins_with_others)(lambda: _clear(kernel, wg, tile, 0, filled))
    return pl.run_scoped(sums, plgpu.ACC((ROWS, kernel.traits.config.block_n)))


def _clear(kernel: Kernel, wg: Index, tile: WorkTile, i: Index, filled: Index) -> None:
    """Replaces the rows of step i that are not in the group by 0, in both operands, by both warpgroups together."""
    smem, slot = kernel.smem, kernel.slot(filled + i)
    row = plgpu.broadcasted_iota(jnp.int32, (STEP, COLUMNS), 0, layout=WGMMA) + (tile.aligned + i * STEP)
    keep = (row >= tile.start) & (row < tile.end)
    chunks = kernel.traits.config.block_n // COLUMNS
    parts = [smem.first.at[slot, :, pl.ds(wg * ROWS, ROWS)]]
    share = -(-chunks // COMPUTE_WGS)
    for nth in range(share):  # an odd chunk is cleared by both
        chunk = jnp.minimum(wg * share + nth, chunks - 1)
        parts.append(smem.second.at[slot, :, pl.ds(chunk * COLUMNS, COLUMNS)])
    for part in parts:
        values = plgpu.load(part, layout=WGMMA).astype(jnp.float32)
        part[...] = jnp.where(keep, values, 0.0).astype(part.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.cleared)
    plgpu.barrier_wait(smem.cleared)


def _store_part(kernel: Kernel, wg: Index, tile: WorkTile, part: int, z: jax.Array | None) -> None:
    """Rounds 64 columns of a warpgroup's sums, and stores them. z: float32 [64, 64]; None stores 0."""
    traits = kernel.traits
    row, column = tile.row + wg * ROWS, tile.column + part * COLUMNS

    @pl.when((row < traits.m) & (column < traits.n))
    def _():
        buffer = kernel.smem.out.at[wg, part % BUFFERS]
        plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
        y = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), WGMMA) if z is None else z
        buffer[...] = y.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, kernel.out.at[tile.group, pl.ds(row, ROWS), pl.ds(column, COLUMNS)])
