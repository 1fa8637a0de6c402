"""Attention forward on Hopper in 8 bits: forward_loop.py's walk with e4m3 query, key, value and probabilities.

Per tile of 64 x block_kv, 4 * 64 * block_kv * head_dim FLOPs take half the time of 16-bit ones, and 64 * block_kv exp2
as long as there: at head_dim 128 both products of a tile and its exponentials take 512 cycles each.

wgmma takes 8-bit operands only with the contracted axis contiguous. For P V that is the axis of the keys: the values
come transposed, from fp8_values.py. P comes out of Q K^T spread over the threads in pairs of keys, and goes into
P V in quadruples; it stays where it is, and the values' keys are permuted to match (KEY_ORDER).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.attention_inputs import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import block_ranges, softmax
from jax_kernels.pallas.attention.passes import fp8_values
from jax_kernels.pallas.attention.sm90.forward_loop import Ring, Walk
from jax_kernels.pallas.attention.sm90.head_views import Call
from jax_kernels.pallas.mosaic import interpreter, registers
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import SWIZZLED, WGMMA
from jax_kernels.pallas.mosaic.smem_tiles import pad_for_tma
from jax_kernels.pallas.mosaic.tile_scheduler import Shape, TileScheduler

E4M3 = jnp.float8_e4m3fn
# Log2 of P at a row's maximum, and of the largest P for which that maximum is kept. e4m3 has normal numbers from 2**-6
# to 448: scores may rise by 2.75 before anything is rescaled, and fall by 12 before P loses digits.
LARGEST_P = 6.0
LIMIT = 8.75


def swizzled(columns: int):
    """The transforms of 8-bit tiles of so many columns, as wgmma reads them."""
    swizzle = math.gcd(columns, 128)
    return plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def as_operand(p):
    """P float32 [64, block_kv], rounded to e4m3 as the first operand of wgmma, its keys in KEY_ORDER."""
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
    """x with every 16 keys along `axis` in KEY_ORDER."""
    shape = x.shape
    x = x.reshape(*shape[:axis], -1, 2, 4, 2, *shape[axis + 1 :])
    return x.swapaxes(axis + 1, axis + 2).reshape(shape)


def attention_forward(inputs: AttentionInputs, options: AttentionOptions, factors, *, config, core_count, interpret):
    """(out [B, T, H, Dv] bfloat16, lse [B, H, T] float32).

    inputs: query, key and value e4m3, kv_lengths and q_offset. options: is_causal, q_offset; what to multiply scores
    by, positive, and the output, are the factors [B, H, 2] float32. config: AttentionForwardFp8Sm90.
    """
    q_length, v_head_dim = inputs.query.shape[1], inputs.value.shape[-1]
    query, key = pad_for_tma(inputs.query), pad_for_tma(inputs.key)
    value = fp8_values.transposed(inputs.value, inputs.kv_lengths, interpret=interpret)
    scheduler = TileScheduler(
        shapes=(Shape.of(query.shape[0], query.shape[2], q_length, config.block_q),),
        is_causal=options.is_causal,
        heads_together=config.heads_together,
        dynamic=config.dynamic and not interpret,
        core_count=core_count,
    )
    arrays = {
        "bounds": block_ranges.bounds_array(inputs, options),
        "factors": factors,
        "query": query,
        "key": key,
        "value": value,
        "counter": scheduler.counter(),
    }
    leaves, tree = jax.tree.flatten(arrays)
    kernel = _kernel(arrays, tree, scheduler, options, Call.of(inputs, options), config=config, interpret=interpret)
    out, lse = kernel(*leaves)
    return out[:, :q_length, :, :v_head_dim], lse[..., :q_length]


def _kernel(arrays, tree, scheduler, options, call, *, config, interpret):
    batch, q_length, heads, head_dim = arrays["query"].shape
    v_head_dim = arrays["value"].shape[2]
    compute_wgs, block_q, block_kv, stages = config.compute_warpgroups, config.block_q, config.block_kv, config.stages

    def body(refs, scratch):
        given, out_gmem, lse_gmem = refs
        q_gmem, k_gmem, v_gmem = (given[name] for name in ("query", "key", "value"))
        q_smem, out_smem, k_smem, v_smem, q_ready, ring, fetched = scratch
        walk = Walk.of(given, scheduler, options, (call,), config=config, interpret=interpret)
        tile = walk.tile

        def memory():
            def load_tile(index, turn, slot):
                scheduler.fetch(given["counter"], fetched, turn)
                here = tile(index)
                b, kv_head, blocks = here.b, here.kv_head, here.blocks

                def load_k(step, slot):
                    plgpu.barrier_wait(ring.k_free.at[slot])
                    rows = pl.ds(blocks.at(step) * block_kv, block_kv)
                    plgpu.copy_gmem_to_smem(k_gmem.at[b, rows, kv_head], k_smem.at[slot], ring.k_ready.at[slot])

                def load_v(step, slot):
                    plgpu.barrier_wait(ring.v_free.at[slot])
                    columns = pl.ds(blocks.at(step) * block_kv, block_kv)
                    plgpu.copy_gmem_to_smem(v_gmem.at[b, kv_head, :, columns], v_smem.at[slot], ring.v_ready.at[slot])

                slot = ring.fill(slot, blocks.count, load_k, load_v)
                return scheduler.following(fetched, index, turn), ring.following(slot)

            scheduler.for_each(walk.first_tile(), load_tile)

        def compute(w):
            q_smem_wg, out_smem_wg = q_smem.at[w], out_smem.at[w]

            def load_q(index):
                here = tile(index)
                rows = pl.ds(here.q_start + w * 64, 64)
                plgpu.copy_gmem_to_smem(q_gmem.at[here.b, rows, here.q_head], q_smem_wg, q_ready.at[w])

            ring.free()
            walk.start_turns(w)
            load_q(walk.first_tile())

            def run_tile(index, turn, slot):
                whole = tile(index)
                own = walk.own(whole, w)
                b, h, blocks = own.b, own.h, own.blocks
                slot = walk.skip_others(whole, own, ring, slot, w)
                masked = lambda s, step: walk.masked(s, index, step, w)

                plgpu.barrier_wait(q_ready.at[w])
                scale = given["factors"][b, h, 0]

                def rescaled(acc, alpha, rises):
                    full = lambda acc: acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                    return lax.cond(rises, full, lambda acc: acc, acc)

                def products(acc_ref, s_ref):
                    def issue_scores(slot):
                        s_ref[...] = plgpu.layout_cast(jnp.zeros((64, block_kv), jnp.float32), WGMMA)
                        plgpu.wgmma(s_ref, q_smem_wg, k_smem.at[slot].transpose((1, 0)))

                    plgpu.barrier_wait(ring.k_ready.at[slot])
                    walk.wait_turn(w)
                    issue_scores(slot)
                    walk.pass_turn(w)
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0)
                    plgpu.barrier_arrive(ring.k_free.at[slot])
                    s = lax.optimization_barrier(s)
                    if walk.predicate:
                        s = lax.cond(blocks.is_partial(0), lambda s: masked(s, jnp.int32(0)), lambda s: s, s)
                    highest, total = softmax.start(64)
                    p, highest, total, _ = softmax.step(s, highest, total, scale, LARGEST_P)
                    p = as_operand(p)
                    plgpu.barrier_wait(ring.v_ready.at[slot])

                    def step(j, carry):
                        p8, highest, total, last_slot = carry
                        slot = ring.following(last_slot)
                        plgpu.barrier_wait(ring.k_ready.at[slot])
                        walk.wait_turn(w)
                        issue_scores(slot)
                        plgpu.wgmma(acc_ref, p8, v_smem.at[last_slot].transpose((1, 0)))
                        walk.pass_turn(w)
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                        plgpu.barrier_arrive(ring.k_free.at[slot])
                        s = lax.optimization_barrier(s)
                        if walk.predicate and not walk.only_first:  # one loop with a branch: two loops were slower
                            s = lax.cond(blocks.is_partial(j), lambda s: masked(s, j), lambda s: s, s)
                        *results, rises = softmax.lazy_step(
                            s, highest, total, scale, LARGEST_P, LIMIT, registers.any_of_warp_above
                        )
                        p, highest, total, alpha = lax.optimization_barrier(tuple(results))
                        # This wait is a branch: it keeps ptxas from hoisting the next one above the softmax.
                        plgpu.barrier_wait(ring.v_ready.at[slot])
                        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                        plgpu.barrier_arrive(ring.v_free.at[last_slot])
                        # P stays float32 until the product that read the last P has ended (ptxas C7513).
                        acc, p = lax.optimization_barrier((acc, p))
                        acc, p = lax.optimization_barrier((rescaled(acc, alpha, rises), p))
                        p = as_operand(p)
                        acc_ref[...] = acc
                        return p, highest, total, slot

                    p, highest, total, last_slot = lax.fori_loop(1, blocks.count, step, (p, highest, total, slot))
                    plgpu.wgmma(acc_ref, p, v_smem.at[last_slot].transpose((1, 0)))
                    acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    plgpu.barrier_arrive(ring.v_free.at[last_slot])
                    return acc, highest, total, last_slot

                accumulators = plgpu.ACC((64, v_head_dim), jnp.float32), plgpu.ACC((64, block_kv), jnp.float32)
                acc, highest, total, slot = pl.run_scoped(products, *accumulators)
                following = scheduler.following(fetched, index, turn)

                @pl.when(following < scheduler.count)
                def _():
                    load_q(following)

                here = tile(lax.optimization_barrier(index))
                b, h, q_start = here.b, here.h, here.q_start + w * 64
                inverse, lse = softmax.finish(highest, total, may_be_dead=walk.may_be_dead)
                acc = acc * lax.broadcast_in_dim(inverse * given["factors"][b, h, 1], acc.shape, [0])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have left shared memory
                out_smem_wg[...] = acc.astype(jnp.bfloat16)
                lse_gmem[b, h, pl.ds(q_start, 64)] = lse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem_wg, out_gmem.at[b, pl.ds(q_start, 64), h])
                return following, ring.following(slot)

            scheduler.for_each(walk.first_tile(), run_tile)
            walk.end_turns(w)
            plgpu.wait_smem_to_gmem(0)

        walk.run(compute, memory)

    def entry(*refs):
        *leaves, out_gmem, lse_gmem = refs
        refs = jax.tree.unflatten(tree, leaves), out_gmem, lse_gmem
        tile_smem = lambda *shape: plgpu.SMEM(shape, E4M3, transforms=swizzled(shape[-1]))
        pl.run_scoped(
            lambda *scratch: body(refs, scratch),
            tile_smem(compute_wgs, 64, head_dim),
            plgpu.SMEM((compute_wgs, 64, v_head_dim), jnp.bfloat16, transforms=SWIZZLED),
            tile_smem(stages, block_kv, head_dim),
            tile_smem(stages, v_head_dim, block_kv),
            plgpu.Barrier(num_barriers=compute_wgs),
            Ring.scratch(stages, compute_wgs),
            scheduler.scratch(compute_wgs + 1),
            collective_axes="wg",
        )

    return launch(
        entry,
        "attention_forward_fp8_sm90",
        out_type=(
            jax.ShapeDtypeStruct((batch, q_length, heads, v_head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, heads, scheduler.shapes[0].blocks * block_q), jnp.float32),
        ),
        ctas=scheduler.ctas,
        warpgroups=compute_wgs + 1,
        semantics=plgpu.LoweringSemantics.Lane,
        interpret=interpret,
        reduction_scratch_bytes=0,  # no reduction leaves a warp
    )
