"""The state of the Hopper kernel of a deterministic dquery: static facts, shared memory, and a CTA's block of
queries.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.block_ranges import BlockRange
from jax_kernels.pallas.attention.sm90.backward.arrays import Arrays
from jax_kernels.pallas.attention.sm90.features.bias import Bias, Stage
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90, AttentionDquerySm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref
from jax_kernels.pallas.mosaic.layouts import ROW, SWIZZLED
from jax_kernels.pallas.mosaic.registers import recomputed
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref
from jax_kernels.pallas.mosaic.tile_scheduler import Shape, TileScheduler

COMPUTE_WGS = 2
BLOCK_Q = 64 * COMPUTE_WGS


@dataclasses.dataclass(frozen=True, kw_only=True)
class DqueryTraits:
    """The static facts of a launch that computes a deterministic dquery.

    group: query heads per kv head. scheduler: numbers the blocks of queries, one block per CTA. has_slope: whether the
    score_mod's derivative with respect to the score is not 1. natural: whether scores are in natural units, not in base
    2. may_end: whether a block of keys may reach past the last key.
    """

    options: AttentionOptions
    blocks: AttentionDquerySm90
    batch: int
    q_length: int
    kv_length: int
    heads: int
    group: int
    head_dim: int
    dtype: jnp.dtype
    scheduler: TileScheduler
    bias: Bias
    has_segments: bool
    has_lists: bool
    has_mod: bool
    has_slope: bool
    natural: bool
    may_end: bool

    @classmethod
    def of(
        cls, arrays: Arrays, options: AttentionOptions, kv_length: int, *, config: AttentionBackwardSm90
    ) -> "DqueryTraits":
        """The static facts of a launch with these arrays. kv_length: the unpadded number of keys."""
        batch, q_length, heads, head_dim = arrays.query.shape
        bias, mod = arrays.bias or Bias(), arrays.mod
        assert config.dquery is not None, config
        return cls(
            options=options,
            blocks=config.dquery,
            batch=batch,
            q_length=q_length,
            kv_length=kv_length,
            heads=heads,
            group=heads // arrays.key.shape[2],
            head_dim=head_dim,
            dtype=arrays.query.dtype,
            scheduler=TileScheduler(
                shapes=(Shape.of(batch, heads, q_length, BLOCK_Q),),
                longest_last=options.is_causal,
                head_group=config.head_group,
                dynamic=False,
                core_count=1,
            ),
            bias=bias,
            has_segments=arrays.segments is not None,
            has_lists=arrays.lists is not None,
            has_mod=mod is not None,
            has_slope=mod is not None and not mod.adds_only,
            natural=mod is not None and mod.may_mask,
            may_end=arrays.bounds is not None or kv_length % config.dquery.block_kv != 0,
        )

    @property
    def q_blocks(self) -> int:
        return pl.cdiv(self.q_length, BLOCK_Q)

    @property
    def has_bias(self) -> bool:
        return self.bias.has_bias

    @property
    def scores_ahead(self) -> bool:
        """Whether a step also issues the next step's scores, behind its own dquery. head_dim 256 leaves too few
        registers.
        """
        return self.head_dim <= 128

    @property
    def predicate(self) -> bool:
        """Whether a block may hold pairs that the call's limits, segments or mask drop."""
        has_limits = self.options.is_causal or self.may_end or self.options.window is not None
        return has_limits or self.has_segments or self.has_lists


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DquerySmem:
    """A CTA's shared memory and barriers, allocated in the order of the fields.

    q, do: queries and dout, [warpgroups, 64, head_dim]. k, v: [stages, block_kv, head_dim]. lse, delta: [BLOCK_Q]
    float32. bias: of a step, None without a bias. q_ready: queries, dout, lse and delta have arrived. k_ready, v_ready:
    a stage of keys or values has arrived. k_free, v_free: a stage has been read, so that it may be overwritten.
    """

    q: Ref
    do: Ref
    k: Ref
    v: Ref
    lse: Ref
    delta: Ref
    q_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier
    k_free: Barrier
    v_free: Barrier
    bias: Stage | None

    @classmethod
    def scratch(cls, traits: DqueryTraits) -> "DquerySmem":
        """The scratch specifications of these fields, for pl.run_scoped."""
        blocks, head_dim = traits.blocks, traits.head_dim
        tile = lambda *shape: smem_ref(shape, traits.dtype, transforms=SWIZZLED)
        barriers = lambda count, arrivals=1: barrier_ref(num_arrivals=arrivals, num_barriers=count)
        return cls(
            q=tile(COMPUTE_WGS, 64, head_dim),
            do=tile(COMPUTE_WGS, 64, head_dim),
            k=tile(blocks.k_stages, blocks.block_kv, head_dim),
            v=tile(blocks.v_stages, blocks.block_kv, head_dim),
            lse=smem_ref((BLOCK_Q,), jnp.float32),
            delta=smem_ref((BLOCK_Q,), jnp.float32),
            q_ready=barrier_ref(num_arrivals=2 * COMPUTE_WGS + 2),
            k_ready=barriers(blocks.k_stages),
            v_ready=barriers(blocks.v_stages),
            k_free=barriers(blocks.k_stages, COMPUTE_WGS),
            v_free=barriers(blocks.v_stages, COMPUTE_WGS),
            bias=traits.bias.stage(BLOCK_Q, blocks.block_kv, blocks.block_kv, COMPUTE_WGS),
        )


class QueryBlock(NamedTuple):
    """The block of queries that a CTA owns: batch entry, head, first query. All are traced scalars."""

    b: Any
    head: Any
    q_start: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class DqueryKernel:
    """The state that a CTA's warpgroups have in common.

    arrays, dq_gmem: inputs and result in device memory. wg, cta: indices of the warpgroup and the CTA, traced scalars.
    tile: the CTA's block of queries. blocks: the blocks of keys that it visits, a block_ranges.BlockRange or
    block_lists.ListedBlocks. limits: the limits of its keys; None if block lists hold them.
    """

    traits: DqueryTraits
    arrays: Arrays
    dq_gmem: Ref
    smem: DquerySmem
    wg: Index
    cta: Index
    tile: QueryBlock
    blocks: BlockRange
    limits: block_ranges.Limits | None

    @classmethod
    def of(cls, traits: DqueryTraits, arrays: Arrays, dq_gmem: Ref, smem: DquerySmem) -> "DqueryKernel":
        """The state of the calling CTA and warpgroup, with its block of queries. dq_gmem: dquery in device memory."""
        options, limits = traits.options, None
        wg = lax.axis_index("wg")
        cta = lax.axis_index("cta")
        tile = _query_block(traits, arrays, cta)
        blocks: Any
        if arrays.lists is not None:
            blocks = arrays.lists.blocks_of(cta)
        else:
            limits = block_ranges.limits(
                arrays.bounds,
                tile.b,
                options.q_offset,
                traits.kv_length,
                is_causal=options.is_causal,
                window=options.window,
            ).of_queries(tile.q_start)
            among = None
            if arrays.segments is not None:
                among = arrays.segments.among(tile.b, lax.div(tile.q_start, jnp.int32(BLOCK_Q)))
            block_kv = traits.blocks.block_kv
            blocks = limits.key_blocks(tile.q_start, BLOCK_Q, block_kv, among, in_order=True).at_least_one()
        return cls(
            traits=traits,
            arrays=arrays,
            dq_gmem=dq_gmem,
            smem=smem,
            wg=wg,
            cta=cta,
            tile=tile,
            blocks=blocks,
            limits=limits,
        )

    def tile_again(self) -> QueryBlock:
        """The CTA's block of queries, recomputed: kept, it would occupy registers through all steps."""
        return _query_block(self.traits, self.arrays, recomputed(self.cta))


def _query_block(traits: DqueryTraits, arrays: Arrays, cta: Index) -> QueryBlock:
    """The block of queries that CTA number `cta` owns: from the block lists if present, else from the scheduler."""
    if arrays.lists is not None:
        listed = arrays.lists.blocks_of(cta)
        return QueryBlock(listed.b, listed.head, listed.block * BLOCK_Q)
    b, head, q_index = traits.scheduler.place(cta)
    return QueryBlock(b, head, q_index * BLOCK_Q)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryRows:
    """The 64 queries of a warpgroup, with values in registers.

    q_start: the index of the first query. lse, delta: float32 [64]. mod_numbers: for each operand of the score_mod its
    scalar for this batch entry and head, or None if the operand varies along queries or keys; None without a score_mod.
    """

    kernel: DqueryKernel
    q_start: Index
    lse: jax.Array
    delta: jax.Array
    mod_numbers: Any

    @classmethod
    def of(cls, kernel: DqueryKernel) -> "QueryRows":
        """The 64 queries of the calling warpgroup, with lse and delta loaded from shared memory to registers."""
        tile, mod = kernel.tile, kernel.arrays.mod
        q_start = tile.q_start + 64 * kernel.wg
        mine = pl.ds(64 * kernel.wg, 64)
        return cls(
            kernel=kernel,
            q_start=q_start,
            lse=plgpu.load(kernel.smem.lse.at[mine], layout=ROW, optimized=False),
            delta=plgpu.load(kernel.smem.delta.at[mine], layout=ROW, optimized=False),
            mod_numbers=None if mod is None else mod.of_head(tile.b, tile.head),
        )
