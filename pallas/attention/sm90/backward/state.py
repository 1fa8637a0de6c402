"""The state of the Hopper backward's kernel: shared memory, barriers, and data that warpgroups exchange."""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward.arrays import Arrays
from jax_kernels.pallas.attention.sm90.backward.schedule import KeyBlock, QLoop, Schedule
from jax_kernels.pallas.attention.sm90.backward.traits import Traits
from jax_kernels.pallas.attention.sm90.backward.widths import COMPUTE_WGS
from jax_kernels.pallas.attention.sm90.features.bias import Stage
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.barriers import Barriers, BarrierSlice
from jax_kernels.pallas.mosaic.layouts import swizzle, swizzle_float32
from jax_kernels.pallas.mosaic.scratch import smem_ref


class StepNumbers(NamedTuple):
    """The block of queries of a step, and flags: int32 values that the memory warpgroup of a persistent CTA writes to
    shared memory with the step's queries.

    A compute warpgroup reads them there: recomputing them takes a tenth of a step's instructions, and keeping them
    spills registers. kv_block: index of the block of keys. index: the step's number within the work tile. goes_on:
    whether the work tile has another step.
    """

    b: Index
    head: Index
    q_block: Index
    kv_block: Index
    index: Index  # type: ignore[assignment]
    is_partial: bool | jax.Array
    goes_on: bool | jax.Array

    @staticmethod
    def scratch(stages: int) -> Ref:
        """The scratch specification of the StepNumbers of `stages` steps, for pl.run_scoped."""
        return smem_ref((stages, 8), jnp.int32)

    @classmethod
    def read(cls, smem: Ref, slot: Index) -> "StepNumbers":
        """The block of queries and flags of the step in stage `slot`, loaded from shared memory."""
        return cls(*(smem[slot, i] for i in range(len(cls._fields))))

    def leave(self, smem: Ref, slot: Index, ready: Barrier) -> None:
        """Writes these values to stage `slot` of shared memory, and arrives at the barrier `ready`."""
        for i, number in enumerate(self):
            smem[slot, i] = cast(jax.Array, number).astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)


class TileRefs(NamedTuple):
    """Two views of the same shared memory: for matmuls and stores (mma), and for copies from device memory (tma)."""

    mma: Ref
    tma: Ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Smem:
    """A CTA's shared memory, allocated in the order of the fields. None: the call does not need it.

    k, v, q, do: keys, values, queries and dout, [stages, ...] in the layouts Traits.k_tiles, v_tiles, q_tiles and
    do_tiles. ds: [warpgroups, chunks of queries, 64, 64], a step's dS^T. dq: [warpgroups, 64, chunk] float32, on its
    way to device memory. dv: the same memory as [warpgroups, chunk / v_chunk, 64, v_chunk] tiles; None if v_chunk is
    chunk. lse, delta: [stages, block_q], of a step's queries. spans: of the keys' segment ids, [stages of keys, 2,
    block_kv]. barriers:
    arrays of barriers, from which KernelBarriers takes its fields. bias: of a step. arrived: [warpgroups] int32, how
    many parts of a split work tile have finished. dbias: [warpgroups, 64] float32. tile: [stages of keys] int32,
    indices of work tiles. steps: [stages, ...] of StepNumbers.
    """

    k: TileRefs
    v: TileRefs
    q: TileRefs
    do: TileRefs
    ds: Ref
    dq: Ref
    dv: Ref | None
    lse: Ref
    delta: Ref
    spans: Ref | None
    barriers: list[Barrier]
    bias: Stage | None
    arrived: Ref | None
    dbias: Ref | None
    tile: Ref | None
    steps: Ref | None

    @classmethod
    def scratch(cls, traits: Traits, barriers: Barriers) -> "Smem":
        """The scratch specifications of these fields, for pl.run_scoped."""
        schedule, config, dtype = traits.schedule, traits.config, traits.dtype
        key_groups, halves, block_q, block_kv = traits.key_groups, traits.halves, traits.block_q, traits.block_kv
        q_stages, do_stages = config.q_stages, config.do_stages
        to_view = functools.partial(cast, TileRefs)  # by viewed()
        return cls(
            k=to_view(traits.k_tiles.scratch(schedule.k_stages, traits.chunks, key_groups, 64, dtype=dtype)),
            v=to_view(traits.v_tiles.scratch(schedule.v_stages, key_groups, halves, 64, dtype=dtype)),
            q=to_view(traits.q_tiles.scratch(q_stages, halves, block_q, dtype=dtype)),
            do=to_view(traits.do_tiles.scratch(do_stages, halves, block_q, dtype=dtype)),
            ds=smem_ref((COMPUTE_WGS, traits.q_chunks, 64, 64), dtype, transforms=swizzle(traits.chunk)),
            dq=_dq_memory(traits),
            dv=None,  # by viewed()
            lse=smem_ref((q_stages, block_q), jnp.float32),
            delta=smem_ref((do_stages, block_q), jnp.float32),
            spans=smem_ref((schedule.k_stages, 2, block_kv), jnp.int32) if traits.has_segments else None,
            barriers=barriers.scratch(),
            bias=traits.bias.stage(block_kv, block_q, block_kv, COMPUTE_WGS),
            arrived=smem_ref((COMPUTE_WGS,), jnp.int32) if schedule.split.parts > 1 else None,
            dbias=smem_ref((COMPUTE_WGS, 64), jnp.float32) if traits.bias_gradient else None,
            tile=smem_ref((schedule.k_stages,), jnp.int32) if schedule.is_persistent else None,
            steps=StepNumbers.scratch(q_stages) if schedule.is_persistent else None,
        )

    def viewed(self, traits: Traits) -> "Smem":
        """The same fields, with a TileRefs in each of k, v, q and do, and with dv."""
        dq, dv = cast(Any, self.dq) if _has_dv(traits) else (self.dq, None)
        return dataclasses.replace(
            self,
            dq=dq,
            dv=dv,
            k=TileRefs(*traits.k_tiles.views(cast(Ref, self.k))),
            v=TileRefs(*traits.v_tiles.views(cast(Ref, self.v))),
            q=TileRefs(*traits.q_tiles.views(cast(Ref, self.q))),
            do=TileRefs(*traits.do_tiles.views(cast(Ref, self.do))),
        )

    def dv_of(self, wg: Index, v_chunk: int) -> Ref:
        """The memory [64, v_chunk] for a copy of a warpgroup's dvalue in float32."""
        if self.dv is not None:
            return self.dv.at[wg, 0]
        dq = self.dq.at[wg]
        return dq if dq.shape[1] == v_chunk else dq.at[:, :v_chunk]  # narrower only in the interpreter


def _has_dv(traits: Traits) -> bool:
    """Whether copies of dvalue need tiles of their own: copies take whole tiles, except in the interpreter."""
    return traits.v_chunk != traits.chunk and not interpreter.INTERPRETED


def _dq_memory(traits: Traits) -> Ref:
    """The request for the memory of Smem.dq and Smem.dv."""

    def tiles(*shape: int) -> Ref:
        return smem_ref((COMPUTE_WGS, *shape), jnp.float32, transforms=swizzle_float32(shape[-1]))

    of_dq = tiles(64, traits.chunk)
    if not _has_dv(traits):
        return of_dq
    return cast(Ref, plgpu.RefUnion(of_dq, tiles(traits.chunk // traits.v_chunk, 64, traits.v_chunk)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelBarriers:
    """The barriers of a CTA. None: the launch does not use the barrier.

    q_ready, do_ready: a stage of queries or of dout has arrived. q_free, do_free: it has been read and may be
    overwritten. ds_ready: both warpgroups have written a step's dS. ds_free: both have read it. last_read: both
    warpgroups have read the keys of a work tile for the last time; None if the last step's ds_free shows the same.

    k_ready: a block of keys is loaded. In a CTA with one work tile it also covers the values, and v_ready, k_free and
    v_free are None. A persistent CTA has a k_ready and a v_ready for each stage. The index of a work tile arrives with
    its keys, except for the first work tile; after the last keys an index past the work tiles arrives.

    k_free: completes in the first step of a work tile. The gradients of the work tile before were stored through the
    shared memory of its keys, and have left it, so that the keys of the work tile after this one can be loaded there.
    v_free: used if values have one stage; completes in the last step of a work tile, when its values have been read.
    """

    q_ready: BarrierSlice
    do_ready: BarrierSlice
    q_free: BarrierSlice
    do_free: BarrierSlice
    ds_ready: BarrierSlice
    ds_free: BarrierSlice
    last_read: BarrierSlice | None
    k_ready: BarrierSlice
    v_ready: BarrierSlice | None
    k_free: BarrierSlice | None
    v_free: BarrierSlice | None

    @staticmethod
    def wanted(traits: Traits) -> Barriers:
        """The barriers to allocate: for each name how many, and how many arrivals complete a phase of each."""
        schedule, config, halves = traits.schedule, traits.config, traits.halves
        is_persistent, q_stages, do_stages = schedule.is_persistent, config.q_stages, config.do_stages
        k_copies = traits.key_groups * traits.chunks + traits.has_segments
        v_copies = traits.key_groups * halves * traits.v_tiles.count
        q_copies = halves * traits.q_tiles.count + 1
        do_copies = halves * traits.do_tiles.count + 1
        if is_persistent:
            wanted = {"k_ready": (schedule.k_stages, k_copies + 1), "v_ready": (schedule.v_stages, v_copies)}
            wanted |= {"k_free": (1, COMPUTE_WGS), "v_free": (1, COMPUTE_WGS)}
        else:
            wanted = {"k_ready": (1, k_copies + v_copies)}
        wanted |= {
            "q_ready": (q_stages, q_copies + is_persistent),
            "do_ready": (do_stages, do_copies),
            "q_free": (q_stages, COMPUTE_WGS),
            "do_free": (do_stages, COMPUTE_WGS),
            "ds_ready": (1, COMPUTE_WGS),
            "ds_free": (1, COMPUTE_WGS),
        }
        if not is_persistent or not traits.exchanges_ds:  # otherwise ds_free signals the same
            wanted["last_read"] = 1, COMPUTE_WGS
        return Barriers(wanted, merged=is_persistent)

    @classmethod
    def of(cls, wanted: Barriers, arrays: list[Barrier]) -> "KernelBarriers":
        """The barriers by name. wanted: the result of the method `wanted`. arrays: the barriers that pl.run_scoped
        allocated for it (Smem.barriers).
        """
        found: dict[str, Any] = {field.name: wanted.of(arrays, field.name) for field in dataclasses.fields(cls)}
        return cls(**found)


class Results[A: jax.Array | Ref](NamedTuple):
    """The gradients that the kernel writes, in device memory.

    dkey, dvalue: [B, S, Hkv, columns]. dbias: of a bias per key, float32 [B, Hkv, whole blocks of keys]; None if not
    requested.
    """

    dkey: A
    dvalue: A
    dbias: A | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """The state that a CTA's warpgroups have in common.

    arrays, results: inputs and gradients in device memory. wg, cta: indices of the warpgroup and the CTA, traced
    scalars.
    """

    traits: Traits
    arrays: Arrays[Ref]
    results: Results[Ref]
    smem: Smem
    barriers: KernelBarriers
    wg: Index
    cta: Index

    @classmethod
    def of(
        cls, traits: Traits, barriers: Barriers, arrays: Arrays[Ref], results: Results[Ref], scratch: Smem
    ) -> "Kernel":
        """The state of the calling CTA and warpgroup.

        scratch: the CTA's memory, which pl.run_scoped allocated for Smem.scratch(traits, barriers). barriers: the
        result of KernelBarriers.wanted.
        """
        return cls(
            traits=traits,
            arrays=arrays,
            results=results,
            smem=scratch.viewed(traits),
            barriers=KernelBarriers.of(barriers, scratch.barriers),
            wg=lax.axis_index("wg"),
            cta=lax.axis_index("cta"),
        )

    @property
    def schedule(self) -> Schedule:
        return self.traits.schedule

    def block(self, tile: Index) -> KeyBlock:
        """The block of keys of work tile number `tile`."""
        return self.schedule.block(self.arrays, tile)

    def q_loop(self, tile: Index, block: KeyBlock) -> QLoop:
        """The loop over the queries that attend to the block of keys of work tile number `tile`."""
        return self.schedule.q_loop(self.arrays, tile, block)
