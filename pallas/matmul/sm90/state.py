"""State of the Hopper matmul: sizes, shared memory, and the order of the work tiles."""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulSm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref
from jax_kernels.pallas.matmul.refs import MatmulInputRefs, MatmulResultRefs
from jax_kernels.pallas.matmul.work_tiles import banded
from jax_kernels.pallas.mosaic.launch import CLUSTER
from jax_kernels.pallas.mosaic.layouts import SWIZZLED, SWIZZLED_8BIT, SWIZZLED_32, SWIZZLED_F32, Transforms
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref

ROWS = 64  # rows of a warpgroup's wgmma
DEPTH_BYTES = 128  # bytes of the inner dimension in a step: 64 values of 16 bits
SCALE_BLOCK = 128  # rows and columns that share a scale
PROMOTED = 128  # columns of 8-bit accumulators that are promoted to float32 sums at a time
BUFFERS = 2  # output buffers of a warpgroup, used in turn
SHARED_MEMORY = 225 << 10  # bytes of a CTA's shared memory, without its barriers


class WorkTile(NamedTuple):
    """A block of the result that a CTA or a warpgroup computes at a time: its first row and first column."""

    row: Index
    column: Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch that multiplies x [m, k] by w [k, n].

    dtype, w_dtype: of x and w. derives: whether the epilogue is the derivative of an earlier call, which gives its
    preactivation. derives_up: whether that call had a gated unit, and gives its x @ w_up too. adds_products: whether
    x_up @ w_up is added to x @ w.
    """

    options: MatmulOptions
    config: MatmulSm90
    m: int
    n: int
    k: int
    dtype: jnp.dtype
    w_dtype: jnp.dtype
    has_bias: bool
    has_residual: bool
    derives: bool
    derives_up: bool
    is_gated: bool
    adds_products: bool

    @classmethod
    def of(cls, inputs: MatmulInputs, options: MatmulOptions, config: MatmulSm90) -> "Traits":
        """The static facts of a launch with these inputs."""
        m, n, k = options.sizes(inputs)
        return cls(
            options=options,
            config=config,
            m=m,
            n=n,
            k=k,
            dtype=inputs.x.dtype,
            w_dtype=inputs.w.dtype,
            has_bias=inputs.bias is not None,
            has_residual=inputs.residual is not None,
            derives=inputs.preactivation is not None,
            derives_up=inputs.up is not None,
            is_gated=inputs.is_gated,
            adds_products=inputs.x_up is not None,
        )

    @property
    def out_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.options.out_dtype)

    @property
    def compute_wgs(self) -> int:
        return self.config.compute_wgs

    @property
    def tile_wgs(self) -> int:
        """The number of compute warpgroups that work on one work tile together."""
        return 1 if self.config.pingpong else self.compute_wgs

    @property
    def halves(self) -> int:
        """The number of 64-row blocks that a warpgroup has in a work tile."""
        return self.config.wg_rows // ROWS

    @property
    def block_m(self) -> int:
        """The number of rows of a work tile."""
        return self.config.wg_rows * self.tile_wgs

    def block_of(self, wg: Index, half: int) -> Index:
        """The index, among a work tile's blocks of 64 rows, of the block `half` of warpgroup `wg`."""
        if self.config.pingpong:
            return half
        return wg if self.halves == 1 else wg * self.halves + half

    def first_row(self, wg: Index, half: int) -> Index:
        """The first row, counted from the work tile's first row, of the 64-row block `half` of warpgroup `wg`."""
        return self.block_of(wg, half) * ROWS

    @property
    def block_n(self) -> int:
        """The number of columns of a work tile. A gated unit has half as many, because it accumulates two matmuls."""
        return self.config.block_n // 2 if self.is_gated else self.config.block_n

    @property
    def is_joined(self) -> bool:
        """Whether a step's blocks of w and w_up lie one below the other in shared memory, so that one wgmma reads both.

        The wgmma then reads x once. Only the blocks of transposed weights are rows of shared memory; otherwise they
        are columns.
        """
        return self.is_gated and not self.is_8_bit and self.options.transpose_w

    @property
    def columns(self) -> int:
        """The number of columns of an output buffer, and of the swizzled tiles of 16-bit operands: 32 or 64."""
        return 32 if self.block_n % 64 else 64

    @property
    def parts(self) -> int:
        """The number of parts of a work tile, of `columns` columns, that the epilogue stores one after the other."""
        return self.block_n // self.columns

    @property
    def transforms(self) -> Transforms:
        """The transforms of the operands in shared memory."""
        return SWIZZLED_8BIT if self.is_8_bit else SWIZZLED if self.columns == 64 else SWIZZLED_32

    @property
    def out_transforms(self) -> Transforms:
        """The transforms of the output buffers."""
        if self.out_dtype.itemsize == 4:
            return SWIZZLED_F32
        return SWIZZLED if self.columns == 64 else SWIZZLED_32

    @property
    def is_8_bit(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def block_k(self) -> int:
        """The number of values of the inner dimension in a step."""
        return DEPTH_BYTES // self.dtype.itemsize

    @property
    def promoted(self) -> int:
        """The number of columns whose 8-bit accumulators are promoted (added to float32 sums) at a time."""
        return min(PROMOTED, self.block_n)

    @property
    def promoted_steps(self) -> int:
        """The number of steps after which 8-bit accumulators are promoted (added to float32 sums).

        Block scales need a promotion after each step. With one step the sums have only the error of float32. With two
        steps the error is 2**-12 of the sums' magnitude, which is visible in float32 results.
        """
        if self.options.scaling == "block" or self.out_dtype == jnp.float32 or len(self.results) == 3:  # three spill
            return 1
        return min(self.config.promoted_steps, self.stages - 1)

    @property
    def has_second_part(self) -> bool:
        """Whether 8-bit accumulators form two parts of columns, which are added to float32 sums in turn."""
        return self.is_8_bit and (self.is_gated or self.block_n > PROMOTED)

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline: config.stages, or fewer if shared memory has no room for as many."""
        of_stage = (self.block_m + self.config.block_n) * DEPTH_BYTES
        of_results = self.compute_wgs * BUFFERS * ROWS * self.columns * self.out_dtype.itemsize
        return min(self.config.stages, (SHARED_MEMORY - of_results) // of_stage)

    @property
    def loads_residual(self) -> bool:
        """Whether there is a residual that the compute warpgroups load, instead of the memory warpgroup."""
        return self.has_residual and "residual" not in self.epilogue_inputs

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the fields of MatmulResult that the kernel writes, in the order of its outputs."""
        if self.derives:
            return ("out", "up", "activated") if self.derives_up else ("out", "activated")
        saved = ("preactivation", "up") if self.is_gated else ("preactivation",)
        return ("out", *saved) if self.options.saves_preactivation else ("out",)

    @property
    def epilogue_inputs(self) -> tuple[str, ...]:
        """The names of the inputs [m, n] of the epilogue that the memory warpgroup loads through the pipeline of
        stages.

        They are fields of MatmulInputs, all in w's dtype. With pingpong the residual does not come through the
        pipeline: its stages would block the other warpgroup's steps until the epilogue ends.
        """
        if self.out_dtype != self.w_dtype:
            return ()
        of_ring = self.has_residual and not self.config.pingpong
        found = {"preactivation": self.derives, "up": self.derives_up, "residual": of_ring}
        return tuple(name for name, is_there in found.items() if is_there)

    @property
    def epilogue_fills(self) -> int:
        """The number of fills of a stage that a work tile's operands of the epilogue take."""
        return len(self.epilogue_inputs) * (self.block_m // ROWS)

    @property
    def fills(self) -> int:
        """The number of times that a work tile fills a stage of the pipeline.

        This is once for each step, and once for each 64 rows of each operand of the epilogue.
        """
        return self.steps + self.epilogue_fills

    @property
    def m_blocks(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def n_blocks(self) -> int:
        return pl.cdiv(self.n, self.block_n)

    @property
    def k_steps(self) -> int:
        """The number of steps of one matmul of a work tile."""
        return pl.cdiv(self.k, self.block_k)

    @property
    def steps(self) -> int:
        """The number of steps of a work tile: for x @ w, then for x_up @ w_up if there is an x_up."""
        return self.k_steps * (2 if self.adds_products else 1)

    @property
    def cluster(self) -> int:
        """The number of CTAs of a cluster. Their work tiles lie one below the other, and use the same blocks of w."""
        return min(self.config.cluster, self.m_blocks)

    @property
    def tiles(self) -> int:
        """The number of work tiles of the result, where the tiles of a cluster, one below the other, count as one."""
        return pl.cdiv(self.m_blocks, self.cluster) * self.n_blocks

    def place(self, index: Index, nth: Index = 0) -> WorkTile:
        """The work tile of one CTA of a cluster.

        index: the number of the cluster's work, 0 to tiles - 1: its CTAs take work tiles that lie one below the other.
        nth: the index of the CTA in the cluster; 0 without clusters. In a cluster, the tile may lie below the last row.
        """
        rows = pl.cdiv(self.m_blocks, self.cluster)
        row, n_block = banded(index, rows, self.n_blocks, max(1, self.config.row_group // self.cluster))
        return WorkTile((row * self.cluster + nth) * self.block_m, n_block * self.block_n)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Smem:
    """A CTA's shared memory. A field is None if the call does not need it.

    x, w, w_up: [stages, rows, columns], the blocks of a step, as they lie in device memory. If traits.is_joined, w also
      holds w_up's block.
    out: [warpgroups, buffers, 64, columns], the output buffers. A residual that does not come through the pipeline is
      loaded through the same buffers.
    ready, free: [stages], barriers: a step's operands have arrived, or have been read.
    epilogue_ready: [stages], barriers: the blocks of an epilogue's fill have arrived. With pingpong ready and
      epilogue_ready have [warpgroups * stages] barriers, because a thread must wait for each phase of a barrier.
    second_ready: [stages], barriers: the weights of the second part of 8-bit columns have arrived.
    residual_ready: [warpgroups], barriers: a part of a warpgroup's residual has arrived.
    """

    x: Ref
    w: Ref
    w_up: Ref | None
    out: Ref
    ready: Barrier
    second_ready: Barrier | None
    free: Barrier
    epilogue_ready: Barrier | None
    residual_ready: Barrier | None

    @classmethod
    def scratch(cls, traits: Traits) -> "Smem":
        """The scratch shapes for pl.run_scoped."""
        options, stages, block_n, block_k = traits.options, traits.stages, traits.block_n, traits.block_k
        operand = lambda dtype, *shape: smem_ref((stages, *shape), dtype, transforms=traits.transforms)
        rows = 2 * block_n if traits.is_joined else block_n
        w = operand(traits.w_dtype, *((rows, block_k) if options.transpose_w else (block_k, block_n)))
        out = traits.compute_wgs, BUFFERS, ROWS, traits.columns
        return cls(
            x=operand(traits.dtype, *((block_k, traits.block_m) if options.transpose_x else (traits.block_m, block_k))),
            w=w,
            w_up=w if traits.is_gated and not traits.is_joined else None,
            out=smem_ref(out, traits.out_dtype, transforms=traits.out_transforms),
            ready=barrier_ref(
                num_arrivals=3 if traits.is_gated and not traits.is_8_bit else 2, num_barriers=_ready_barriers(traits)
            ),
            second_ready=barrier_ref(num_barriers=stages) if traits.has_second_part else None,
            free=_free_barrier(traits),
            epilogue_ready=_operand_barriers(traits),
            residual_ready=barrier_ref(num_barriers=traits.compute_wgs) if traits.loads_residual else None,
        )


def _ready_barriers(traits: Traits) -> int:
    """The number of `ready` barriers: one per stage, with pingpong one per stage and warpgroup."""
    return traits.stages * (traits.compute_wgs // traits.tile_wgs)


def _free_barrier(traits: Traits) -> Barrier:
    """The barriers [stages] by which the memory warpgroup learns that a stage is free.

    A stage is free when all warpgroups of its work tile have read it; in a cluster, when all its CTAs have.
    """
    if traits.cluster == 1:
        return barrier_ref(num_arrivals=traits.tile_wgs, num_barriers=traits.stages)
    barriers = plgpu.ClusterBarrier(
        collective_axes=(CLUSTER,), num_arrivals=traits.tile_wgs, num_barriers=traits.stages
    )
    return cast(Barrier, barriers)


def _operand_barriers(traits: Traits) -> Barrier | None:
    """The barriers of the epilogue's operands, one per stage; None without operands that come through the pipeline.

    A barrier waits for all blocks of a fill. With pingpong there is one per stage and warpgroup.
    """
    if not traits.epilogue_inputs:
        return None
    arrivals = traits.parts if traits.options.transpose_w else 1  # copies of a fill, as in epilogue_operands.py
    return barrier_ref(num_arrivals=arrivals, num_barriers=_ready_barriers(traits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """The state of a CTA.

    clusters: the number of clusters in the launch; without clusters, of CTAs. inputs, results: refs in device memory.
    """

    traits: Traits
    clusters: int
    inputs: MatmulInputRefs
    results: MatmulResultRefs
    smem: Smem

    def for_each_tile(self, run, wg: Index | None = None) -> Index:
        """Calls run(tile, nth) for each work tile of the CTA, and returns the number of tiles.

        tile: a WorkTile. nth: the number of the CTA's earlier tiles, of all warpgroups. wg: the index of the calling
        compute warpgroup; None for the memory warpgroup. With pingpong each of n compute warpgroups takes only every
        n-th tile, from tile wg on. The result is then nth of the tile that it would take next, which may be larger than
        the number of tiles.
        """
        every = self.traits.compute_wgs if self.traits.config.pingpong and wg is not None else 1

        def body(carry):
            index, nth = carry
            run(self.traits.place(index, lax.axis_index(CLUSTER) if self.traits.cluster > 1 else 0), nth)
            return index + every * self.clusters, nth + every

        start: tuple[Index, Index] = lax.axis_index("cta"), jnp.int32(0)
        if every > 1 and wg is not None:
            start = start[0] + wg * self.clusters, wg
        return lax.while_loop(lambda carry: carry[0] < self.traits.tiles, body, start)[1]

    def barrier_of(self, slot: Index, nth: Index) -> Index:
        """The index, in smem.ready and smem.epilogue_ready, of the barrier of stage `slot`.

        nth: the number of work tiles that the CTA took before. With pingpong each warpgroup has its own barriers.
        """
        if not self.traits.config.pingpong:
            return slot
        return slot + self.traits.stages * lax.rem(nth, jnp.int32(self.traits.compute_wgs))

    def load_w(self, w: Ref, smem: Ref, ready: Barrier) -> None:
        """Starts to load a block of weights from device memory, w, to shared memory.

        In a cluster each CTA loads a part of the block, which arrives in all CTAs; so all of them have to call this.
        smem: the block's memory in a stage. ready: the barrier, in each CTA, that waits for the whole block.
        """
        plgpu.copy_gmem_to_smem(w, smem, ready, collective_axes=None if self.traits.cluster == 1 else CLUSTER)
