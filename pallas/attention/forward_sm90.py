"""Attention forward on Hopper: a TMA producer, and two or three warpgroups that overlap wgmma and softmax.

Each compute warpgroup owns 64 queries. In a step it issues S = Q K^T of this block of keys and O += P V of the
block before, and does the softmax of S while the second product runs. A CTA is persistent: it walks tiles of
(batch, head, block of queries); a tile's blocks of keys come from tiles.py.

Per tile of 64 x block_kv: 4 * 64 * block_kv * head_dim FLOPs on the tensor cores and 64 * block_kv exp2; keys
and values are read from shared memory once per warpgroup. At head_dim 128 the two take about the same time,
which is why they have to overlap.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention import softmax, tiles
from jax_kernels.pallas.attention.hopper import SWIZZLED, WGMMA, named_barrier, pad_for_tma

# Hardware barriers that the warpgroups take turns on; the low numbers belong to the compiler.
FIRST_TURN_BARRIER = 8


def attention_forward(
    query, key, value, kv_lengths, q_offset, *, is_causal, scale, precision, out_dtype, config, core_count, interpret
):  # fmt: skip
    """See the package's docstring. config: AttentionForwardSm90."""
    del precision  # 16-bit inputs only
    v_head_dim, q_length, kv_length = value.shape[-1], query.shape[1], key.shape[1]
    query, key, value = (pad_for_tma(x) for x in (query, key, value))
    bounds = tiles.bounds_array(q_offset, kv_lengths, query.shape[0], kv_length)
    kernel = _kernel(
        query, key, value, bounds, q_offset, kv_length,
        is_causal=is_causal, scale=scale, out_dtype=out_dtype, config=config, core_count=core_count,
        interpret=interpret,
    )  # fmt: skip
    out, lse = kernel(*([] if bounds is None else [bounds]), query, key, value)
    return out[:, :q_length, :, :v_head_dim], lse[..., :q_length]


def _kernel(
    query, key, value, bounds, q_offset, kv_length, *, is_causal, scale, out_dtype, config, core_count, interpret
):  # fmt: skip
    batch, q_length, heads, head_dim = query.shape
    group = heads // key.shape[2]
    v_head_dim = value.shape[-1]
    dtype = query.dtype
    compute_wgs, block_q, block_kv, stages = config.compute_warpgroups, config.block_q, config.block_kv, config.stages
    take_turns = config.take_turns and not interpret
    share_q_out = config.share_q_out and out_dtype == dtype and v_head_dim == head_dim

    q_blocks = pl.cdiv(q_length, block_q)
    tile_count = q_blocks * batch * heads
    together = math.gcd(config.heads_together, batch * heads)
    ctas = min(core_count, tile_count)
    has_bounds = bounds is not None
    may_end = has_bounds or kv_length % block_kv != 0
    predicate = is_causal or may_end
    # Whether no block, beside the first that a warpgroup visits, can need the predicate.
    only_first = not is_causal or (not has_bounds and q_offset % 64 == 0)
    # Whether all warpgroups of a tile visit the same blocks. With bounds, what tells them apart would spill.
    same_blocks = not is_causal or has_bounds or (q_offset % block_q == 0 and block_kv % block_q == 0)
    may_be_dead = has_bounds or (is_causal and q_offset < 0)

    def body(refs, scratch):
        bounds_ref, q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem = refs
        q_smem, out_smem, k_smem, v_smem, lse_smem, q_ready, k_ready, v_ready, k_free, v_free = scratch
        wg = lax.axis_index("wg")
        cta = lax.axis_index("cta")

        def nth_tile(turn):
            """The tile that this CTA runs in a turn: every CTA takes one, and with `snake` each turn the other way."""
            place = jnp.where(lax.rem(turn, 2) == 1, ctas - 1 - cta, cta) if config.snake else cta
            return turn * ctas + place

        def for_each_tile(run):
            """before = run(turn, before) for this CTA's tiles."""
            more = lambda carry: nth_tile(carry[0]) < tile_count
            lax.while_loop(more, lambda carry: (carry[0] + 1, run(*carry)), (jnp.int32(0), jnp.int32(0)))

        def tile(index):
            """(batch entry, head, first query, its blocks of keys, its limits) of a tile."""
            round_, within = lax.div(index, q_blocks * together), lax.rem(index, q_blocks * together)
            batch_head = round_ * together + lax.rem(within, together)
            b, h = lax.div(batch_head, heads), lax.rem(batch_head, heads)
            q_index = lax.div(within, together)
            if is_causal:  # the longest first: the last ones to start are short
                q_index = q_blocks - 1 - q_index
            limits = tiles.limits(bounds_ref, b, q_offset, kv_length, is_causal=is_causal)
            blocks = limits.key_blocks(q_index * block_q, block_q, block_kv).at_least_one()
            return b, h, q_index * block_q, blocks, limits

        def memory():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def load_tile(turn, before):
                b, h, _, blocks, _ = tile(nth_tile(turn))
                kv_head = lax.div(h, jnp.int32(group)) if group > 1 else h

                def load(step, gmem, smem, ready, free):
                    slot = lax.rem(before + step, jnp.int32(stages))

                    @pl.when(before + step >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    rows = pl.ds(blocks.at(step) * block_kv, block_kv)
                    plgpu.copy_gmem_to_smem(gmem.at[b, rows, kv_head], smem.at[slot], ready.at[slot])

                load_k = functools.partial(load, gmem=k_gmem, smem=k_smem, ready=k_ready, free=k_free)
                load_v = functools.partial(load, gmem=v_gmem, smem=v_smem, ready=v_ready, free=v_free)

                def step_loads(step, _):  # values run one block behind the keys, as they are used
                    load_k(step)
                    load_v(step - 1)

                load_k(jnp.int32(0))
                lax.fori_loop(1, blocks.count, step_loads, None)
                load_v(blocks.count - 1)
                return before + blocks.count

            for_each_tile(load_tile)

        def compute(w):
            plgpu.set_max_registers(config.registers[0], action="increase")
            q_smem_wg = q_smem.at[w]
            out_smem_wg = q_smem_wg if share_q_out else out_smem.at[w]
            lse_smem_wg = lse_smem.at[w]

            def wait_turn():
                if take_turns:
                    named_barrier("sync", FIRST_TURN_BARRIER + w, 256)

            def pass_turn():
                if take_turns:
                    named_barrier("arrive", FIRST_TURN_BARRIER + (w + 1) % compute_wgs, 256)

            def load_q(turn):
                b, h, q_start, _, _ = tile(nth_tile(turn))
                rows = pl.ds(q_start + w * 64, 64)
                plgpu.copy_gmem_to_smem(q_gmem.at[b, rows, h], q_smem_wg, q_ready.at[w])

            if w == compute_wgs - 1:
                pass_turn()
            load_q(jnp.int32(0))

            def run_tile(turn, before):
                b, h, q_start, tile_blocks, limits = tile(nth_tile(turn))
                q_start = q_start + w * 64
                # The blocks right of this warpgroup's last key are the other warpgroups' alone.
                blocks = tile_blocks if same_blocks else limits.key_blocks(q_start, 64, block_kv).at_least_one()
                skipped = tile_blocks.count - blocks.count
                start = before + skipped

                def skip(step, _):
                    slot = lax.rem(before + step, jnp.int32(stages))
                    wait_turn()
                    pass_turn()
                    for ready, free in ((k_ready, k_free), (v_ready, v_free)):
                        plgpu.barrier_wait(ready.at[slot])  # every wait counts a phase
                        plgpu.barrier_arrive(free.at[slot])

                if not same_blocks:
                    lax.fori_loop(0, skipped, skip, None)

                def masked(s, step):
                    kv_start = blocks.at(step) * block_kv
                    keep = limits.keep(s.shape, kv_start, q_start, layout=WGMMA, kv_axis=1, may_end=may_end)
                    return jnp.where(keep, s, -jnp.inf)

                def load_next_q():
                    @pl.when(nth_tile(turn + 1) < tile_count)
                    def _():
                        load_q(turn + 1)

                def slot_of(step):
                    return lax.rem(start + step, jnp.int32(stages))

                def products(acc_ref, s_ref):
                    def issue_scores(slot):
                        s_ref[...] = plgpu.layout_cast(jnp.zeros((64, block_kv), jnp.float32), WGMMA)
                        plgpu.wgmma(s_ref, q_smem_wg, k_smem.at[slot].transpose((1, 0)))

                    slot = slot_of(0)
                    plgpu.barrier_wait(k_ready.at[slot])
                    wait_turn()
                    issue_scores(slot)
                    pass_turn()
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0)
                    plgpu.barrier_arrive(k_free.at[slot])
                    s = lax.optimization_barrier(s)
                    if predicate:
                        s = masked(s, jnp.int32(0))
                    p, state, _ = softmax.step(s, softmax.start(64), scale)
                    p = p.astype(dtype)
                    plgpu.barrier_wait(v_ready.at[slot])

                    def step(j, carry):
                        state, p = carry
                        slot, last_slot = slot_of(j), slot_of(j + (stages - 1))
                        plgpu.barrier_wait(k_ready.at[slot])
                        wait_turn()
                        issue_scores(slot)
                        plgpu.wgmma(acc_ref, p, v_smem.at[last_slot])
                        pass_turn()
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                        plgpu.barrier_arrive(k_free.at[slot])
                        s = lax.optimization_barrier(s)
                        if predicate and not only_first:  # one loop with a branch: two loops were slower
                            s = lax.cond(j < blocks.partial, lambda s: masked(s, j), lambda s: s, s)
                        p, state, alpha = softmax.step(s, state, scale)
                        p, state, alpha = lax.optimization_barrier((p, state, alpha))
                        # This wait is a branch: it keeps ptxas from hoisting the next one above the softmax.
                        plgpu.barrier_wait(v_ready.at[slot])
                        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                        plgpu.barrier_arrive(v_free.at[last_slot])
                        # P stays float32 until the product that read the last P has ended (ptxas C7513).
                        acc, p = lax.optimization_barrier((acc, p))
                        p = p.astype(dtype)
                        acc_ref[...] = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                        return state, p

                    state, p = lax.fori_loop(1, blocks.count, step, (state, p))
                    if not share_q_out:
                        load_next_q()
                    last_slot = slot_of(blocks.count - 1)
                    plgpu.wgmma(acc_ref, p, v_smem.at[last_slot])
                    acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    plgpu.barrier_arrive(v_free.at[last_slot])
                    return acc, state

                plgpu.barrier_wait(q_ready.at[w])
                accumulators = plgpu.ACC((64, v_head_dim), jnp.float32), plgpu.ACC((64, block_kv), jnp.float32)
                acc, state = pl.run_scoped(products, *accumulators)
                inverse, lse = softmax.finish(state, may_be_dead=may_be_dead)
                acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have left shared memory
                out_smem_wg[...] = acc.astype(out_dtype)
                lse_smem_wg[...] = lse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem_wg, out_gmem.at[b, pl.ds(q_start, 64), h])
                plgpu.copy_smem_to_gmem(lse_smem_wg, lse_gmem.at[b, h, pl.ds(q_start, 64)])
                if share_q_out:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_next_q()
                return start + blocks.count

            for_each_tile(run_tile)
            if w == 0:
                wait_turn()  # take the turn that the last warpgroup passed
            plgpu.wait_smem_to_gmem(0)

        for w in range(compute_wgs):
            pl.when(wg == w)(functools.partial(compute, w))
        pl.when(wg == compute_wgs)(memory)

    def entry(*refs):
        refs = refs if has_bounds else (None, *refs)
        tile_smem = lambda *shape, dtype=dtype: plgpu.SMEM(shape, dtype, transforms=SWIZZLED)
        barriers = lambda count, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        out_transforms = SWIZZLED if out_dtype.itemsize == 2 else ()
        pl.run_scoped(
            lambda *scratch: body(refs, scratch),
            tile_smem(compute_wgs, 64, head_dim),
            None if share_q_out else plgpu.SMEM((compute_wgs, 64, v_head_dim), out_dtype, transforms=out_transforms),
            tile_smem(stages, block_kv, head_dim),
            tile_smem(stages, block_kv, v_head_dim),
            plgpu.SMEM((compute_wgs, 64), jnp.float32),
            barriers(compute_wgs),
            barriers(stages),
            barriers(stages),
            barriers(stages, compute_wgs),
            barriers(stages, compute_wgs),
            collective_axes="wg",
        )

    return plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((batch, q_length, heads, v_head_dim), out_dtype),
            jax.ShapeDtypeStruct((batch, heads, q_blocks * block_q), jnp.float32),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=compute_wgs + 1,
        thread_name="wg",
        kernel_name="attention_forward_sm90",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
