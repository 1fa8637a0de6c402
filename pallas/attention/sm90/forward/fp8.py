"""Attention forward on Hopper in 8 bits: the loop of step.py with e4m3 query, key, value and P.

Per tile of 64 x block_kv, the 4 * 64 * block_kv * head_dim FLOPs take half as long as in 16 bits, and the 64 * block_kv
exp2 take the same time. At head_dim 128 a tile's matmuls take 512 cycles, and so do its exponentials.

wgmma takes 8-bit operands only with the contracted axis contiguous. For P V this is the axis of the keys, so that
passes/fp8_values.py transposes the values beforehand. Q K^T leaves P spread over the threads in pairs of keys, but P V
takes P in quadruples of keys. P does not move; the values' keys are permuted to match (KEY_ORDER).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import block_ranges, softmax
from jax_kernels.pallas.attention.passes import fp8_values
from jax_kernels.pallas.attention.sm90.features.head_views import LaunchCall
from jax_kernels.pallas.attention.sm90.forward.compute import ComputeWarpgroup
from jax_kernels.pallas.attention.sm90.forward.loop import KvLoop, KvPipeline, PingPong, WorkTile, run_warpgroups
from jax_kernels.pallas.attention.sm90.forward.step import (
    Accumulators,
    LoopState,
    QueryTile,
    Softmax,
    TileSums,
    first_scores,
    mma_step,
    with_accumulators,
)
from jax_kernels.pallas.block_specs.specs import AttentionForwardFp8Sm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref
from jax_kernels.pallas.mosaic import interpreter, registers
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import SWIZZLED, WGMMA
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref
from jax_kernels.pallas.mosaic.smem_tiles import pad_for_tma
from jax_kernels.pallas.mosaic.tile_scheduler import Fetched, Shape, TileScheduler

E4M3 = jnp.float8_e4m3fn
# LARGEST_P: log2 of P at a row's maximum. LIMIT: log2 of the largest P for which this maximum is kept. e4m3 has normal
# values from 2**-6 to 448: scores may rise by 2.75 before a rescaling, and fall by 12 before P loses digits.
LARGEST_P = 6.0
LIMIT = 8.75


def swizzled(columns: int):
    """The shared-memory transforms of 8-bit tiles with this many columns, as wgmma reads them."""
    swizzle = math.gcd(columns, 128)
    return plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def as_operand(p):
    """P rounded to e4m3, as the first operand of wgmma: [64, block_kv]. p: P, float32, in the layout WGMMA.

    The keys are permuted: of every 16 keys, column i of the result has key fp8_values.KEY_ORDER[i]. The values have the
    same order. No data move between threads.
    """
    if interpreter.INTERPRETED:
        return reorder_keys(p, axis=1).astype(E4M3)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(p.shape, E4M3, layout=plgpu.Layout.WGMMA_8BIT)
    )
    def convert(_, p):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array, utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        quadruple = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        assembly = (
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
        )
        pairs = p.registers.reshape(-1, 2, 2)  # 16 keys, 8 keys, 8 rows
        registers = np.empty((len(pairs), 2), dtype=object)
        for group, rows in np.ndindex(registers.shape):
            numbers = [
                vector.extract(pairs[group, half, rows], dynamic_position=[], static_position=[i])
                for half in range(2)
                for i in range(2)
            ]
            packed = llvm.inline_asm(i32, numbers, assembly, "=r,f,f,f,f")
            registers[group, rows] = utils.bitcast(packed, quadruple)
        layout = fragmented_array.WGMMA_LAYOUT_8BIT
        shape = layout.registers_shape(tuple(p.shape))
        return fragmented_array.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=None)

    return convert(p)


def reorder_keys(x: jax.Array, axis: int) -> jax.Array:
    """x with every 16 keys along `axis` permuted: the key at index i is key fp8_values.KEY_ORDER[i]."""
    shape = x.shape
    x = x.reshape(*shape[:axis], -1, 2, 4, 2, *shape[axis + 1 :])
    return x.swapaxes(axis + 1, axis + 2).reshape(shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Arrays[A: jax.Array | Ref]:
    """The arrays that the kernel reads, in device memory, in the order of its operands.

    bounds: int32 [B, 2], the position of query 0 and the number of keys that count; None if tracing knows both.
    counter: int32 [1], the next work tile, or None. factors: [B, H, 2] float32, the factor of a head's scores and the
    factor of its output. query, key: [B, length, heads, D] e4m3. value: [B, Hkv, Dv, S] e4m3, transposed; of every 16
    keys, index i along S has key fp8_values.KEY_ORDER[i].
    """

    bounds: A | None
    counter: Ref | None
    factors: A
    key: A
    query: A
    value: A


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Scratch:
    """A CTA's shared memory and barriers: scratch specifications for pl.run_scoped, which passes the Refs in the same
    fields.

    q_smem, out_smem: a tile per compute warpgroup. k_smem, v_smem: a block per slot of the pipeline. q_ready: the
    queries of a compute warpgroup have arrived. fetched: the next work tile from the scheduler's counter.
    """

    q_smem: Ref
    out_smem: Ref
    k_smem: Ref
    v_smem: Ref
    q_ready: Barrier
    pipeline: KvPipeline
    fetched: Fetched

    @classmethod
    def of(
        cls, config: AttentionForwardFp8Sm90, head_dim: int, v_head_dim: int, scheduler: TileScheduler
    ) -> "Fp8Scratch":
        """The scratch specifications for a block spec row, head dims and a scheduler."""
        compute_wgs, block_kv, stages = config.compute_warpgroups, config.block_kv, config.stages
        tile_smem = lambda *shape: smem_ref(shape, E4M3, transforms=swizzled(shape[-1]))
        return cls(
            q_smem=tile_smem(compute_wgs, 64, head_dim),
            out_smem=smem_ref((compute_wgs, 64, v_head_dim), jnp.bfloat16, transforms=SWIZZLED),
            k_smem=tile_smem(stages, block_kv, head_dim),
            v_smem=tile_smem(stages, v_head_dim, block_kv),
            q_ready=barrier_ref(num_barriers=compute_wgs),
            pipeline=KvPipeline.scratch(stages, compute_wgs),
            fetched=scheduler.scratch(compute_wgs + 1),
        )


def attention_forward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    factors: Float32[Array, "B H 2"],
    *,
    config: AttentionForwardFp8Sm90,
    core_count: int,
    interpret: bool,
) -> tuple[BFloat16[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """(out [B, T, H, Dv] bfloat16, lse [B, H, T] float32, natural log) of attention with e4m3 query, key and value.

    inputs: query, key and value, kv_lengths and q_offset; its other fields are None. options: only is_causal and
    q_offset count. factors: the positive factor of each head's scores and the factor of its output. config: the block
    spec row.
    """
    q_length, v_head_dim = inputs.query.shape[1], inputs.value.shape[-1]
    query, key = pad_for_tma(inputs.query), pad_for_tma(inputs.key)
    value = fp8_values.transposed(inputs.value, inputs.kv_lengths, interpret=interpret)
    scheduler = TileScheduler(
        shapes=(Shape.of(query.shape[0], query.shape[2], q_length, config.block_q),),
        longest_last=options.is_causal,
        head_group=config.head_group,
        dynamic=config.dynamic and not interpret,
        core_count=core_count,
    )
    arrays = Fp8Arrays(
        bounds=block_ranges.bounds_array(inputs, options),
        factors=factors,
        query=query,
        key=key,
        value=value,
        counter=scheduler.counter(),
    )
    out, lse = _run(arrays, scheduler, options, LaunchCall.of(inputs, options), config=config, interpret=interpret)
    return out[:, :q_length, :, :v_head_dim], lse[..., :q_length]


def _run(
    arrays: Fp8Arrays, scheduler: TileScheduler, options: AttentionOptions, call: LaunchCall, *, config, interpret: bool
):
    """Launches the kernel and returns (out, lse). lse is padded to whole blocks of queries."""
    batch, q_length, heads, head_dim = arrays.query.shape
    v_head_dim = arrays.value.shape[2]
    leaves, tree = jax.tree.flatten(arrays)

    def entry(*refs):
        *given, out_gmem, lse_gmem = refs
        given = jax.tree.unflatten(tree, given)

        def body(scratch: Fp8Scratch) -> None:
            wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
            kv_loop = KvLoop(
                cta=cta,
                scheduler=scheduler,
                options=options,
                calls=(call,),
                block_q=config.block_q,
                block_kv=config.block_kv,
                bounds=given.bounds,
            )
            pingpong = PingPong.of(config, interpret=interpret)

            def compute(w: int) -> None:
                Fp8Compute(
                    kv_loop=kv_loop,
                    pingpong=pingpong,
                    pipeline=scratch.pipeline,
                    fetched=scratch.fetched,
                    w=w,
                    arrays=given,
                    scratch=scratch,
                    out_gmem=out_gmem,
                    lse_gmem=lse_gmem,
                ).run()

            run_warpgroups(wg, config, compute, Fp8Loader(arrays=given, scratch=scratch, kv_loop=kv_loop).run)

        pl.run_scoped(body, Fp8Scratch.of(config, head_dim, v_head_dim, scheduler), collective_axes="wg")

    kernel = launch(
        entry,
        "attention_forward_fp8_sm90",
        out_type=(
            jax.ShapeDtypeStruct((batch, q_length, heads, v_head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, heads, scheduler.shapes[0].blocks * config.block_q), jnp.float32),
        ),
        ctas=scheduler.ctas,
        warpgroups=config.compute_warpgroups + 1,
        semantics=plgpu.LoweringSemantics.Lane,
        interpret=interpret,
        reduction_scratch_bytes=0,  # no reduction leaves a warp
    )
    return kernel(*leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Loader:
    """The memory warpgroup of a CTA: it loads the blocks of keys and values that work tiles visit."""

    arrays: Fp8Arrays
    scratch: Fp8Scratch
    kv_loop: KvLoop

    def run(self) -> None:
        self.kv_loop.for_each_tile(self._load_tile)

    def _load_tile(self, index: Index, turn: Index, slot: Index) -> tuple[Index, Index]:
        """Loads the blocks of work tile `index`, the `turn`-th of the CTA, from `slot` on.

        Returns (the following work tile, the next slot).
        """
        scheduler, pipeline, fetched = self.kv_loop.scheduler, self.scratch.pipeline, self.scratch.fetched
        scheduler.fetch(self.arrays.counter, fetched, turn)
        tile = self.kv_loop.work_tile(index)
        load_k, load_v = functools.partial(self._load_k, tile), functools.partial(self._load_v, tile)
        slot = pipeline.fill(slot, tile.blocks.count, load_k, load_v)
        return scheduler.following(fetched, index, turn), pipeline.following(slot)

    def _load_k(self, tile: WorkTile, step: Index, slot: Index) -> None:
        """Loads a step's block of keys, after `slot` is free."""
        pipeline, block_kv = self.scratch.pipeline, self.kv_loop.block_kv
        plgpu.barrier_wait(pipeline.k_free.at[slot])
        keys = self.arrays.key.at[tile.b, pl.ds(tile.blocks.at(step) * block_kv, block_kv), tile.kv_head]
        plgpu.copy_gmem_to_smem(keys, self.scratch.k_smem.at[slot], pipeline.k_ready.at[slot])

    def _load_v(self, tile: WorkTile, step: Index, slot: Index) -> None:
        """Loads a step's block of values, after `slot` is free."""
        pipeline, block_kv = self.scratch.pipeline, self.kv_loop.block_kv
        plgpu.barrier_wait(pipeline.v_free.at[slot])
        values = self.arrays.value.at[tile.b, tile.kv_head, :, pl.ds(tile.blocks.at(step) * block_kv, block_kv)]
        plgpu.copy_gmem_to_smem(values, self.scratch.v_smem.at[slot], pipeline.v_ready.at[slot])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8QueryTile(QueryTile):
    """A compute warpgroup's 64 queries of a work tile, in 8 bits. scale: the factor of S."""

    scratch: Fp8Scratch
    kv_loop: KvLoop
    scale: jax.Array

    def issue_scores(self, accs: Accumulators, slot: Index) -> None:
        accs.s_ref[...] = plgpu.layout_cast(jnp.zeros((64, self.kv_loop.block_kv), jnp.float32), WGMMA)
        plgpu.wgmma(accs.s_ref, self.scratch.q_smem.at[self.w], self.scratch.k_smem.at[slot].transpose((1, 0)))

    def issue_values(self, accs: Accumulators, p: jax.Array, slot: Index) -> None:
        plgpu.wgmma(accs.acc_ref, p, self.scratch.v_smem.at[slot].transpose((1, 0)))

    def scores(self, accs: Accumulators, step: Index, slot: Index, *, is_first: bool) -> jax.Array:
        kv_loop = self.kv_loop
        s = plgpu.wgmma_accumulator_load(accs.s_ref, wait_n=0 if is_first else 1)
        plgpu.barrier_arrive(self.pipeline.k_free.at[slot])
        s = lax.optimization_barrier(s)
        if not kv_loop.has_partial or (kv_loop.only_first_partial and not is_first):
            return s
        # One loop with a branch: two loops were slower.
        masked = lambda s: kv_loop.masked(s, self.index, registers.as_int32(step), self.w)
        return lax.cond(self.own.blocks.is_partial(step), masked, lambda s: s, s)

    def softmax_step(self, s: jax.Array, step: Index, state: LoopState) -> Softmax:
        p, row_max, row_sum, alpha, rises = softmax.lazy_step(
            s, state.row_max, state.row_sum, self.scale, LARGEST_P, LIMIT, registers.any_of_warp_above
        )

        def rescaled(acc, alpha):
            full = lambda acc: acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
            return lax.cond(rises, full, lambda acc: acc, acc)

        return Softmax(p=p, row_max=row_max, row_sum=row_sum, alpha=alpha, rescaled=rescaled)

    def rescaled_and_rounded(
        self, acc: jax.Array, p: jax.Array, rescaled: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        acc, p = lax.optimization_barrier((rescaled(acc), p))
        return acc, as_operand(p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Compute(ComputeWarpgroup):
    """A compute warpgroup of the 8-bit forward. out_gmem, lse_gmem: the results in device memory."""

    arrays: Fp8Arrays
    scratch: Fp8Scratch
    out_gmem: Ref
    lse_gmem: Ref

    def load_q(self, index: Index, turn: Index) -> None:
        tile = self.kv_loop.work_tile(index)
        rows = pl.ds(tile.q_start + self.w * 64, 64)
        queries = self.arrays.query.at[tile.b, rows, tile.q_head]
        plgpu.copy_gmem_to_smem(queries, self.scratch.q_smem.at[self.w], self.scratch.q_ready.at[self.w])

    def run_tile(self, index: Index, turn: Index, slot: Index) -> tuple[Index, Index]:
        scheduler, v_head_dim = self.kv_loop.scheduler, self.arrays.value.shape[2]
        own, slot = self.own_tile(index, slot)
        plgpu.barrier_wait(self.scratch.q_ready.at[self.w])
        tile = Fp8QueryTile(
            pipeline=self.pipeline,
            pingpong=self.pingpong,
            w=self.w,
            index=index,
            own=own,
            scratch=self.scratch,
            kv_loop=self.kv_loop,
            scale=self.arrays.factors[own.b, own.h, 0],
        )
        attend = functools.partial(self.attend, tile, slot)
        sums = with_accumulators(attend, v_head_dim=v_head_dim, block_kv=self.kv_loop.block_kv)
        following = scheduler.following(self.fetched, index, turn)

        @pl.when(following < scheduler.count)
        def _():
            self.load_q(following, turn)

        self.epilogue(index, sums)
        return following, self.pipeline.following(sums.slot)

    def attend(self, tile: Fp8QueryTile, slot: Index, accs: Accumulators) -> TileSums:
        """The sums of the loop over the warpgroup's blocks of keys: O = P V before the division, and the softmax state.

        slot: of the first block.
        """
        s = first_scores(tile, accs, slot)
        row_max, row_sum = softmax.start(64)
        p, row_max, row_sum, _ = softmax.step(s, row_max, row_sum, tile.scale, LARGEST_P)
        state = LoopState(p=as_operand(p), row_max=row_max, row_sum=row_sum, slot=slot)
        plgpu.barrier_wait(self.pipeline.v_ready.at[slot])
        state = lax.fori_loop(1, tile.own.blocks.count, functools.partial(mma_step, tile, accs), state)
        # O += P V, of the last block
        tile.issue_values(accs, state.p, state.slot)
        acc = plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        plgpu.barrier_arrive(self.pipeline.v_free.at[state.slot])
        return TileSums(acc=acc, row_max=state.row_max, row_sum=state.row_sum, slot=state.slot)

    def epilogue(self, index: Index, sums: TileSums) -> None:
        """Stores out and lse of the warpgroup's queries of work tile `index`.

        out = O / row_sum, times the head's factor of the output, in bfloat16. lse = log(row_sum) + row_max * ln 2, in
        natural log, since row_max is in base 2. A query without keys has out = 0 and lse = -inf.
        """
        tile, out_smem = self.kv_loop.work_tile(lax.optimization_barrier(index)), self.scratch.out_smem.at[self.w]
        b, h, q_start = tile.b, tile.h, tile.q_start + self.w * 64
        inverse, lse = softmax.finish(sums.row_max, sums.row_sum, may_be_dead=self.kv_loop.may_be_dead)
        acc = sums.acc * lax.broadcast_in_dim(inverse * self.arrays.factors[b, h, 1], sums.acc.shape, [0])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have left shared memory
        out_smem[...] = acc.astype(jnp.bfloat16)
        self.lse_gmem[b, h, pl.ds(q_start, 64)] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, self.out_gmem.at[b, pl.ds(q_start, 64), h])
