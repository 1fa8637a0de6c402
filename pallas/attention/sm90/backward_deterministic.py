"""dquery of attention on Hopper with the same bits on every run, beside backward_kernel's dkey and dvalue.

A CTA owns a block of queries of one head and schedule the keys, so that dquery stays in registers, in float32, and
is written once: nothing is added to device memory in order of arrival. Each of two compute warpgroups owns 64
queries; a memory warpgroup loads keys and values. dS is an operand in registers and never leaves them.

Per tile of block_q x block_kv: 6 * block_q * block_kv * head_dim FLOPs. With the four products that are left of
backward_kernel, the scores and dP are computed twice: seven products instead of five.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.sm90 import bias as bias_sm90
from jax_kernels.pallas.attention.sm90.softcap import softcapped
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import ROW, SWIZZLED, WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed

COMPUTE_WGS = 2
BLOCK_Q = 64 * COMPUTE_WGS
REGISTERS = (240, 24)  # per thread of a compute and of the memory warpgroup
# (block_kv, stages of keys, stages of values) by head_dim: what fits in shared memory and in registers.
BLOCKS = {64: (128, 3, 3), 128: (128, 2, 2), 256: (64, 2, 1)}
# The stages that leave room for a bias's tile, in 16 bits and in 32.
STAGES_BESIDE = {64: ((3, 3), (3, 2)), 128: ((2, 2), (2, 1)), 256: ((1, 1), (1, 1))}


def query_gradient(arrays, options, kv_length, *, config, interpret):
    """dquery, in query's shape and dtype, from the arrays of sm90.backward, with segments of blocks of queries.

    All have the same head_dim, 64, 128 or 256. lse (in base 2) and delta: [B, H, a multiple of BLOCK_Q] float32.
    """
    query = arrays.query
    batch, q_length, heads, head_dim = query.shape
    group = heads // arrays.key.shape[2]
    dtype = query.dtype
    scale, cap, is_causal = options.scale, options.softcap, options.is_causal
    block_kv, k_stages, v_stages = BLOCKS[head_dim]
    dense = arrays.dense or bias_sm90.Dense()
    has_bias = dense.has_bias
    if dense.tiles is not None:
        k_stages, v_stages = STAGES_BESIDE[head_dim][dense.tiles.dtype.itemsize == 4]
    # Whether the next step's scores are computed behind this step's dquery; at 256 the registers are lacking.
    ahead = head_dim <= 128
    q_blocks = pl.cdiv(q_length, BLOCK_Q)
    together = math.gcd(config.heads_together, batch * heads)
    has_segments, has_lists = (getattr(arrays, name) is not None for name in ("segments", "lists"))
    has_mod = arrays.mod is not None
    has_slope = has_mod and not arrays.mod.adds_only  # as in backward_kernel
    may_end = arrays.bounds is not None or kv_length % block_kv != 0
    natural = has_mod and arrays.mod.may_mask
    # To base 2, in which the biased scores are, and those of another score_mod.
    factor = 1.0 if has_bias or has_mod else (cap or scale) * LOG2E
    predicate = is_causal or may_end or options.window is not None or has_segments or has_lists

    def body(refs, scratch):
        given, dq_gmem = refs
        q_gmem, do_gmem, lse_gmem, delta_gmem, segments = (
            getattr(given, name) for name in ("query", "dout", "lse", "delta", "segments")
        )
        (
            q_smem, do_smem, k_smem, v_smem, lse_smem, delta_smem, q_ready, k_ready, v_ready, k_free, v_free, bias
        ) = scratch  # fmt: skip
        wg = lax.axis_index("wg")
        cta = lax.axis_index("cta")

        def tile(cta):
            """(batch entry, head, first query) of a CTA. Heads that run together alternate."""
            if has_lists:
                walk = given.lists.walk(cta)
                return walk.b, walk.head, walk.block * BLOCK_Q
            per_round = q_blocks * together
            round_, within = lax.div(cta, per_round), lax.rem(cta, per_round)
            batch_head = round_ * together + lax.rem(within, together)
            q_index = lax.div(within, together)
            if is_causal:  # the longest first: the last ones to start are short
                q_index = q_blocks - 1 - q_index
            return lax.div(batch_head, heads), lax.rem(batch_head, heads), q_index * BLOCK_Q

        b, head, q_start = tile(cta)
        if has_lists:
            blocks = given.lists.walk(cta)
        else:
            limits = block_ranges.limits(
                given.bounds, b, options.q_offset, kv_length, is_causal=is_causal, window=options.window
            )  # fmt: skip
            among = segments.among(b, lax.div(q_start, jnp.int32(BLOCK_Q))) if has_segments else None
            blocks = limits.key_blocks(q_start, BLOCK_Q, block_kv, among, in_order=True).at_least_one()

        @pl.when(wg == COMPUTE_WGS)
        def _memory():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            kv_head = lax.div(head, jnp.int32(group)) if group > 1 else head
            rows = pl.ds(q_start, BLOCK_Q)
            for w in range(COMPUTE_WGS):
                my_rows = pl.ds(q_start + 64 * w, 64)
                plgpu.copy_gmem_to_smem(q_gmem.at[b, my_rows, head], q_smem.at[w], q_ready)
                plgpu.copy_gmem_to_smem(do_gmem.at[b, my_rows, head], do_smem.at[w], q_ready)
            plgpu.copy_gmem_to_smem(lse_gmem.at[b, head, rows], lse_smem, q_ready)
            plgpu.copy_gmem_to_smem(delta_gmem.at[b, head, rows], delta_smem, q_ready)

            def load(step, _):
                rows = pl.ds(blocks.at(step) * block_kv, block_kv)

                def load_rows(name, smem, ready, free, stages):
                    slot = lax.rem(step, jnp.int32(stages))

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    copy = lambda source: plgpu.copy_gmem_to_smem(source, smem.at[slot], ready.at[slot])
                    whole = lambda: copy(getattr(given, name).at[b, rows, kv_head])
                    end = given.end
                    if end is None:
                        whole()
                    else:
                        from_end = lambda: copy(getattr(end, name).at[b, :, kv_head])
                        end.load(b, blocks.at(step) * block_kv, block_kv, whole, from_end)

                load_rows("key", k_smem, k_ready, k_free, k_stages)
                load_rows("value", v_smem, v_ready, v_free, v_stages)
                if has_bias:

                    @pl.when(step > 0)
                    def _():
                        plgpu.barrier_wait(bias.free)

                    kv_start = blocks.at(step) * block_kv
                    bias.fill(given.dense, b, head, q_start, kv_start, kv_start)

            lax.fori_loop(0, blocks.count, load, None)

        @pl.when(wg < COMPUTE_WGS)
        def _compute():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            plgpu.barrier_wait(q_ready)
            my_queries = q_start + 64 * wg
            mine = pl.ds(64 * wg, 64)
            lse = plgpu.load(lse_smem.at[mine], layout=ROW, optimized=False)
            delta = plgpu.load(delta_smem.at[mine], layout=ROW, optimized=False)
            numbers = given.mod.of_head(b, head) if has_mod else None

            def walk(dq_acc):
                def step(i, s):
                    w = recomputed(wg)
                    slot = lax.rem(i, jnp.int32(k_stages))
                    v_slot = lax.rem(i, jnp.int32(v_stages)) if v_stages > 1 else recomputed(0)
                    # Every wait stands before the accumulators: one between zeroing and product costs a fence (C7519).
                    if not ahead:
                        plgpu.barrier_wait(k_ready.at[slot])
                    plgpu.barrier_wait(v_ready.at[v_slot])
                    if has_bias:
                        plgpu.barrier_wait(bias.ready)

                    def apply_predicate(s):
                        if has_lists:
                            return given.lists.walk(recomputed(cta)).masked(s, i, 64 * w, by_word=False)
                        kv_start = blocks.at(i) * block_kv
                        ids = segments.load(b, my_queries, 64, kv_start, block_kv) if has_segments else None
                        if options.window is not None:
                            keep = limits.keep(
                                s.shape, kv_start, my_queries, layout=WGMMA, kv_axis=1, may_end=may_end, ids=ids
                            )  # fmt: skip
                            return jnp.where(keep, s, -jnp.inf)
                        # Not limits.keep: one comparison with a number per row takes fewer registers.
                        count = limits.kv_length - kv_start
                        if is_causal:
                            rows = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=ROW)
                            count = lax.broadcast_in_dim(limits.key_limit(my_queries + rows) - kv_start, s.shape, [0])
                        keep = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA) < count
                        if ids is not None:
                            keep &= lax.broadcast_in_dim(ids[0], s.shape, [0]) == lax.broadcast_in_dim(
                                ids[1], s.shape, [1]
                            )
                        return jnp.where(keep, s, -jnp.inf)

                    def modified(s):
                        """The score_mod on a tile."""
                        return given.mod.on(s, numbers, b, head, my_queries, blocks.at(i) * block_kv)

                    def biased(s):
                        return bias.added(s, cap or scale, 64 * w, transposed=False)

                    def masked(s):
                        if cap:
                            s = softcapped(s, cap, scale)
                        elif has_bias:  # softcap's derivative needs the scores without
                            s = biased(s)
                        return lax.cond(blocks.is_partial(i), apply_predicate, lambda s: s, s) if predicate else s

                    def dscores(dp_acc, *s_acc):
                        if not ahead:
                            plgpu.wgmma(s_acc[0], q_smem.at[w], k_smem.at[slot].T)
                        plgpu.wgmma(dp_acc, do_smem.at[w], v_smem.at[v_slot].T)
                        # Behind the issue of dP: with the branch before it ptxas serialises the products (C7511).
                        scores = s if ahead else plgpu.wgmma_accumulator_load(s_acc[0], wait_n=1)
                        scores = masked(modified(scores).scores() if has_mod and not has_slope else scores)
                        if has_slope:
                            live, tile = scores > -jnp.inf, modified(scores)
                            scores = tile.scores()
                        logits = biased(scores) if has_bias and cap else scores
                        if has_bias:
                            plgpu.commit_smem()  # behind what was read, which the next copy overwrites
                            plgpu.barrier_arrive(bias.free)
                        less = logits * factor - lax.broadcast_in_dim(lse, scores.shape, [0])
                        p = jnp.exp2(less * LOG2E if natural else less)
                        if has_bias or has_mod:
                            # Of a row that -1e30 masks, lse is too coarse to give P: keep it finite.
                            p = jnp.minimum(p, 1)
                        if has_slope:
                            p = jnp.where(live, p, 0) if predicate else p
                            p = tile.times_derivative(p, live if predicate else None)
                        if cap:
                            # tanh's derivative joins P. A masked score is -inf, whose square would be a NaN.
                            p = p * (1 - jnp.square(jnp.maximum(scores, -1)))
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        plgpu.barrier_arrive(v_free.at[v_slot])
                        ds = p * (dp - lax.broadcast_in_dim(delta, dp.shape, [0]))
                        return ds.astype(dtype)

                    ds = pl.run_scoped(dscores, *[plgpu.ACC((64, block_kv))] * (1 if ahead else 2))
                    next_slot = lax.rem(i + 1, jnp.int32(k_stages))

                    if ahead:

                        @pl.when(i + 1 < blocks.count)
                        def _():
                            plgpu.barrier_wait(k_ready.at[next_slot])

                    plgpu.wgmma(dq_acc, ds, k_smem.at[slot])

                    def next_scores(s_acc):
                        # In the last step this works on a stale tile, and is dropped.
                        plgpu.wgmma(s_acc, q_smem.at[w], k_smem.at[next_slot].T)
                        plgpu.wgmma_wait(1)
                        plgpu.barrier_arrive(k_free.at[slot])
                        return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

                    if ahead:
                        return pl.run_scoped(next_scores, plgpu.ACC((64, block_kv)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(k_free.at[slot])
                    return None

                def first_scores(s_acc):
                    plgpu.wgmma(s_acc, q_smem.at[wg], k_smem.at[0].T)
                    return s_acc[...]

                s = pl.run_scoped(first_scores, plgpu.ACC((64, block_kv))) if ahead else None
                lax.fori_loop(0, blocks.count, step, s)
                return dq_acc[...]

            if ahead:
                plgpu.barrier_wait(k_ready.at[0])
            dq = pl.run_scoped(walk, plgpu.ACC((64, head_dim)))
            entry, my_head, start = tile(recomputed(cta))
            w = recomputed(wg)
            q_smem.at[w][...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[w], dq_gmem.at[entry, pl.ds(start + 64 * w, 64), my_head])
            plgpu.wait_smem_to_gmem(0)

    leaves, tree = jax.tree.flatten(dataclasses.replace(arrays, dquery=None))

    def entry(*refs):
        *given, dq_gmem = refs
        refs = jax.tree.unflatten(tree, given), dq_gmem
        tile_smem = lambda *shape: plgpu.SMEM(shape, dtype, transforms=SWIZZLED)
        barriers = lambda count, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        pl.run_scoped(
            lambda *scratch: body(refs, scratch),
            tile_smem(COMPUTE_WGS, 64, head_dim),
            tile_smem(COMPUTE_WGS, 64, head_dim),
            tile_smem(k_stages, block_kv, head_dim),
            tile_smem(v_stages, block_kv, head_dim),
            plgpu.SMEM((BLOCK_Q,), jnp.float32),
            plgpu.SMEM((BLOCK_Q,), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * COMPUTE_WGS + 2),
            barriers(k_stages),
            barriers(v_stages),
            barriers(k_stages, COMPUTE_WGS),
            barriers(v_stages, COMPUTE_WGS),
            dense.stage(BLOCK_Q, block_kv, block_kv, COMPUTE_WGS),
            collective_axes="wg",
        )

    return launch(
        entry,
        "attention_backward_dq_sm90",
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        ctas=batch * heads * q_blocks,
        warpgroups=COMPUTE_WGS + 1,
        semantics=plgpu.LoweringSemantics.Warpgroup,
        interpret=interpret,
    )(*leaves)
