"""The attention forward's kernel on Hopper: a TMA producer, and warpgroups that overlap wgmma and softmax.

Each of two or three compute warpgroups owns 64 queries. In a step it issues S = Q K^T of this block of keys and
O += P V of the block before, and does the softmax of S while the second product runs. A CTA is persistent: it walks
tiles of (batch, head, block of queries); a tile's blocks of keys come from block_ranges.py, or from a mask's lists
(block_lists.py). See forward_loop.py.

Per tile of 64 x block_kv: 4 * 64 * block_kv * head_dim FLOPs on the tensor cores and 64 * block_kv exp2; keys
and values are read from shared memory once per warpgroup. At head_dim 128 the two take about the same time,
which is why they have to overlap.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention import softmax
from jax_kernels.pallas.attention.sm90 import bias as bias_sm90
from jax_kernels.pallas.attention.sm90 import head_views, mask_bits
from jax_kernels.pallas.attention.sm90.forward_loop import Ring, Walk
from jax_kernels.pallas.attention.sm90.softcap import softcapped_tile, tanh_polynomial
from jax_kernels.pallas.mosaic import layouts, smem_tiles
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import WGMMA
from jax_kernels.pallas.mosaic.registers import all_of_warp


def kernel_of(arrays, tree, scheduler, options, calls, *, out_dtype, config, interpret):
    """The kernel, of the leaves of `arrays`, whose tree is `tree`: outs, then lses, with rows up to whole blocks.

    With a bias, or a score_mod that may mask, it also gives what each lse lacks of the exact log-sum-exp.

    calls: head_views.Calls. query, key and value are lists, with an array for each call; where there is more than one
    call, there is nothing beside them but a counter.
    """
    queries, keys = arrays["query"], arrays["key"]
    head_dim, v_head_dim = queries[0].shape[-1], arrays["value"][0].shape[-1]
    dtype = queries[0].dtype
    cap = options.softcap
    dense = arrays["dense"] or bias_sm90.Dense()
    has_bias, has_mod = dense.has_bias, arrays["mod"] is not None
    # With a bias for each query scores are in natural units, and under a score_mod that may mask.
    natural = dense.tiles is not None or (has_mod and arrays["mod"].may_mask)
    has_excess = has_bias or natural
    # Of what the softmax sees: with a bias for each key, and under another score_mod, that is in base 2 already.
    scale = softmax.LN2 if has_bias or has_mod else cap or options.scale
    softmax_step = softmax.natural_step if natural else functools.partial(softmax.step, scale=scale)
    compute_wgs, block_q, block_kv, stages = config.compute_warpgroups, config.block_q, config.block_kv, config.stages
    alike = out_dtype == dtype and v_head_dim == head_dim
    share_q_out = config.share_q_out and alike
    early_q = config.early_q and alike and not share_q_out
    any_rows = smem_tiles.has_odd_length(*queries, *keys)
    qk_tiles, v_tiles = smem_tiles.SmemTiles(head_dim, any_rows), smem_tiles.SmemTiles(v_head_dim, any_rows)
    out_tiles = smem_tiles.SmemTiles(v_head_dim, any_rows, swizzled=out_dtype == dtype)
    has_segments, has_sinks, bounded = (arrays[name] is not None for name in ("segments", "sinks", "largest"))

    def body(refs, scratch):
        given, outs_gmem, lses_gmem, excess_gmem = refs
        of_call = functools.partial(head_views.of_call, count=len(calls))
        q_smem, out_smem, k_smem, v_smem, rows_smem, q_ids_smem, kv_ids_smem, q_ready, ring, bias, fetched = scratch
        (q_smem, q_copied), (k_smem, k_copied) = qk_tiles.views(q_smem), qk_tiles.views(k_smem)
        v_smem, v_copied = v_tiles.views(v_smem)
        if share_q_out or early_q:
            out_smem, out_copied = q_smem, q_copied
        else:
            out_smem, out_copied = out_tiles.views(out_smem)
        walk = Walk.of(given, scheduler, options, calls, config=config, interpret=interpret)
        tile = walk.tile
        # Whether a head with small scores has a branch of its own, which a predicate or a mask would come before.
        has_small = given["small"] is not None and not (walk.predicate and not walk.only_first)

        def memory():
            def load_tile(index, turn, slot):
                scheduler.fetch(given["counter"], fetched, turn)
                here = tile(index)
                blocks = here.blocks

                def load(step, slot, gmem, smem, of, ready, free):
                    rows = pl.ds(blocks.at(step) * block_kv, block_kv)
                    plgpu.barrier_wait(free.at[slot])
                    of_call(
                        here.call,
                        run=lambda i: of.load(gmem[i].at[here.b, rows, here.kv_head], smem.at[slot], ready.at[slot]),
                    )

                keys, values = given["key"], given["value"]

                def load_k(step, slot):
                    load(step, slot, keys, k_copied, qk_tiles, ring.k_ready, ring.k_free)
                    if has_segments:
                        ids = given["segments"].kv_ids.at[here.b, pl.ds(blocks.at(step) * block_kv, block_kv)]
                        plgpu.copy_gmem_to_smem(ids, kv_ids_smem.at[slot], ring.k_ready.at[slot])

                def load_v(step, slot):
                    whole = lambda: load(step, slot, values, v_copied, v_tiles, ring.v_ready, ring.v_free)
                    if not walk.has("end"):
                        return whole()
                    end = given["end"]
                    rows = end.value.at[here.b, :, here.kv_head]

                    def load_end():
                        plgpu.barrier_wait(ring.v_free.at[slot])
                        v_tiles.load(rows, v_copied.at[slot], ring.v_ready.at[slot])

                    end.load(here.b, blocks.at(step) * block_kv, block_kv, whole, load_end)

                def load_bias(step):  # behind the values: it waits for the last step's scores
                    if has_bias:
                        plgpu.barrier_wait(bias.free)
                        kv_start = blocks.at(step) * block_kv
                        bias.fill(given["dense"], here.b, here.h, here.q_start, kv_start, kv_start)

                slot = ring.fill(slot, blocks.count, load_k, load_v, load_bias)
                return scheduler.following(fetched, index, turn), ring.following(slot)

            scheduler.for_each(walk.first_tile(), load_tile)

        def compute(w):
            lse_smem, *excess_smem = (rows_smem.at[i, w] for i in range(1 + has_excess))

            def place(turn):
                """In shared memory, of the warpgroup's queries and of its output, of the CTA's tile number `turn`."""
                return (turn & 1) * compute_wgs + w if early_q else w

            def load_q(index, turn):
                here = tile(index)
                rows, copied = pl.ds(here.q_start + w * 64, 64), q_copied.at[place(turn)]

                def load(i):
                    qk_tiles.load(given["query"][i].at[here.b, rows, here.q_head], copied, q_ready.at[w])

                of_call(here.call, run=load)
                if has_segments:
                    ids = given["segments"].q_ids.at[here.b, rows]
                    plgpu.copy_gmem_to_smem(ids, q_ids_smem.at[place(turn)], q_ready.at[w])

            def load_next_q(following, turn):
                @pl.when(following < scheduler.count)
                def _():
                    load_q(following, turn + 1)

            ring.free()
            if has_bias:
                plgpu.barrier_arrive(bias.free)
            walk.start_turns(w)
            load_q(walk.first_tile(), 0)

            def run_tile(index, turn, slot):
                whole = tile(index)
                own = walk.own(whole, w)
                b, h, blocks = own.b, own.h, own.blocks
                slot = walk.skip_others(whole, own, ring, slot, w, bias)
                numbers = given["mod"].of_head(b, h) if has_mod else None

                def modified(s, step, *, small=False):
                    """s under the score_mod."""
                    if not has_mod:
                        return s
                    here = tile(lax.optimization_barrier(index))
                    at = here.b, here.h, here.q_start + w * 64, blocks.at(step) * block_kv
                    return given["mod"].on(s, numbers, *at).scores(by_warp=True, small=small)

                def capped(s):
                    s = softcapped_tile(s, cap, options.scale) if cap else s
                    if has_bias:
                        plgpu.barrier_wait(bias.ready)
                        s = bias.added(s, cap or options.scale, 64 * w, transposed=False, natural=natural)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(bias.free)
                    return s

                def mask_words(blocks, step):
                    """Of a mask's words, what `masked` takes: read while the products run."""
                    return blocks.words(blocks.head, blocks.at(step), w * 64, 64) if walk.has_words else None

                def masked(s, step, words, slot):
                    if walk.has_words:
                        return mask_bits.kept(s, words, by_word=True)
                    ids = None
                    if has_segments:
                        load = functools.partial(plgpu.load, optimized=False)
                        columns = load(kv_ids_smem.at[slot], layout=layouts.COLUMN)
                        ids = load(q_ids_smem.at[place(turn)], layout=layouts.ROW), columns
                    s = walk.masked(s, index, step, w, ids)
                    if has_segments:
                        s = lax.optimization_barrier(s)
                        plgpu.commit_smem()  # behind what was read, which the next copies overwrite
                    return s

                def of_predicate(s, blocks, step, words, slot):
                    return lax.cond(blocks.is_partial(step), lambda s: masked(s, step, words, slot), lambda s: s, s)

                def free_keys(slot, *, behind_ids):
                    """Their segments' ids are read after the products."""
                    if behind_ids == has_segments:
                        plgpu.barrier_arrive(ring.k_free.at[slot])

                plgpu.barrier_wait(q_ready.at[w])
                q_smem_wg = q_smem.at[place(turn)]
                largest = given["largest"][b, own.q_head] if bounded else None
                if bounded and config.measures_q:
                    parts = [plgpu.load(q_smem_wg.at[c], layout=WGMMA) for c in range(qk_tiles.count)]
                    largest = largest * softmax.lengths(parts)
                    plgpu.commit_smem()  # behind what was read, which the next queries overwrite
                is_small: Any = given["small"][b, own.q_head] != 0 if has_small else None

                def products(acc_ref, s_ref):
                    def issue_scores(slot):
                        s_ref[...] = plgpu.layout_cast(jnp.zeros((64, block_kv), jnp.float32), WGMMA)
                        for c in range(qk_tiles.count):
                            plgpu.wgmma(s_ref, q_smem_wg.at[c], k_smem.at[slot, c].transpose((1, 0)))

                    def issue_values(p, slot):
                        for c in range(v_tiles.count):
                            acc = acc_ref.at[:, pl.ds(v_tiles.width * c, v_tiles.width)]
                            plgpu.wgmma(acc if v_tiles.count > 1 else acc_ref, p, v_smem.at[slot, c])

                    plgpu.barrier_wait(ring.k_ready.at[slot])
                    walk.wait_turn(w)
                    issue_scores(slot)
                    walk.pass_turn(w)
                    words = mask_words(blocks, jnp.int32(0))
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0)
                    free_keys(slot, behind_ids=False)
                    s = modified(capped(lax.optimization_barrier(s)), jnp.int32(0))
                    if walk.predicate:
                        s = of_predicate(s, blocks, jnp.int32(0), words, slot)
                    free_keys(slot, behind_ids=True)
                    p, highest, total, _ = softmax_step(s, *softmax.start(64, natural=natural))
                    # Whether no later score of the warp's rows can be far above what the first block has.
                    is_bounded: Any = all_of_warp(largest - highest <= softmax.room(dtype)) if bounded else None
                    if bounded and dtype == jnp.bfloat16:
                        lifted = functools.partial(softmax.lifted, largest=largest)
                        p, highest, total = lax.cond(is_bounded, lifted, lambda *state: state, p, highest, total)

                    def exponentials(s, highest, total):
                        """(P, the new maximum and sums, what to rescale by)"""
                        full = softmax_step
                        if not bounded:
                            return full(s, highest, total)

                        def short(s, highest, total):
                            p, total = softmax.bounded_step(s, highest, total, scale)
                            return p, highest, total, highest

                        return lax.cond(is_bounded, short, full, s, highest, total)

                    def of_small(s, highest, total, j):
                        """The same of scores as the products give them."""

                        def short(s, highest, total):
                            if cap:  # in base 2, so that the maximum joins the last product
                                s = tanh_polynomial(s, options.scale / cap, cap * softmax.LOG2E)
                            else:
                                s = modified(s, j, small=True)
                            p, total = softmax.bounded_step(s, highest, total, softmax.LN2)
                            return p, highest, total, highest

                        full = lambda s, highest, total: exponentials(modified(capped(s), j), highest, total)
                        return lax.cond(is_small & is_bounded, short, full, s, highest, total)

                    def rescaled(acc, alpha):
                        full = lambda acc: acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                        return lax.cond(is_bounded, lambda acc: acc, full, acc) if bounded else full(acc)

                    p = p.astype(dtype)
                    if early_q:
                        following = scheduler.following(fetched, index, turn)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last tile's output
                        load_next_q(following, turn)
                    plgpu.barrier_wait(ring.v_ready.at[slot])

                    def step(j, carry):
                        p16, highest, total, last_slot = carry
                        slot = ring.following(last_slot)
                        plgpu.barrier_wait(ring.k_ready.at[slot])
                        walk.wait_turn(w)
                        issue_scores(slot)
                        issue_values(p16, last_slot)
                        walk.pass_turn(w)
                        words = mask_words(blocks, j)
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=v_tiles.count)
                        free_keys(slot, behind_ids=False)
                        s = lax.optimization_barrier(s)
                        if not has_small:
                            s = modified(capped(s), j)
                        if walk.predicate and not walk.only_first:  # one loop with a branch: two loops were slower
                            # With segments, what it depends on is read again, not kept in registers.
                            again = tile(lax.optimization_barrier(index)).blocks if has_segments else blocks
                            s = of_predicate(s, again, j, words, slot)
                        free_keys(slot, behind_ids=True)
                        if has_small:
                            results = of_small(s, highest, total, j)
                        else:
                            results = exponentials(s, highest, total)
                        p, highest, total, alpha = lax.optimization_barrier(results)
                        # This wait is a branch: it keeps ptxas from hoisting the next one above the softmax.
                        plgpu.barrier_wait(ring.v_ready.at[slot])
                        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                        plgpu.barrier_arrive(ring.v_free.at[last_slot])
                        # P stays float32 until the product that read the last P has ended (ptxas C7513).
                        acc, p = lax.optimization_barrier((acc, p))
                        p = p.astype(dtype)
                        acc_ref[...] = rescaled(acc, alpha)
                        return p, highest, total, slot

                    p, highest, total, last_slot = lax.fori_loop(1, blocks.count, step, (p, highest, total, slot))
                    if not early_q:
                        following = scheduler.following(fetched, index, turn)
                    waits_for_scores = not share_q_out and not early_q
                    if walk.has("lists") and waits_for_scores:  # the last ones have read the queries
                        load_next_q(following, turn)
                    issue_values(p, last_slot)
                    acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    if not walk.has("lists") and waits_for_scores:
                        load_next_q(following, turn)
                    plgpu.barrier_arrive(ring.v_free.at[last_slot])
                    return acc, highest, total, last_slot, following

                accumulators = plgpu.ACC((64, v_head_dim), jnp.float32), plgpu.ACC((64, block_kv), jnp.float32)
                acc, highest, total, slot, following = pl.run_scoped(products, *accumulators)
                here = tile(lax.optimization_barrier(index))
                b, h, q_start = here.b, here.h, here.q_start + w * 64
                factor = 1.0
                if has_sinks:
                    highest, total, factor = softmax.with_sink(highest, total, given["sinks"][b, h], natural=natural)
                if has_excess:
                    inverse, lse, excess = softmax.finish_exactly(highest, total, natural=natural)
                else:
                    inverse, lse = softmax.finish(highest, total, may_be_dead=walk.may_be_dead)
                acc = acc * lax.broadcast_in_dim(inverse * factor, acc.shape, [0])
                if not early_q:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have left shared memory
                for c, part in enumerate(out_tiles.chunks(acc.astype(out_dtype))):
                    out_smem.at[place(turn), c][...] = part
                lse_smem[...] = lse
                if has_excess:
                    excess_smem[0][...] = excess
                plgpu.commit_smem()

                def store(i):
                    out_tiles.store(out_copied.at[place(turn)], outs_gmem[i].at[b, pl.ds(q_start, 64), h])
                    plgpu.copy_smem_to_gmem(lse_smem, lses_gmem[i].at[b, h, pl.ds(q_start, 64)])
                    if has_excess:
                        plgpu.copy_smem_to_gmem(excess_smem[0], excess_gmem[i].at[b, h, pl.ds(q_start, 64)])

                of_call(here.call, run=store)
                if share_q_out:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_next_q(following, turn)
                return following, ring.following(slot)

            scheduler.for_each(walk.first_tile(), run_tile)
            walk.end_turns(w)
            plgpu.wait_smem_to_gmem(0)

        walk.run(compute, memory)

    ends = [0, *itertools.accumulate((tree.num_leaves, len(calls), len(calls), len(calls) if has_excess else 0))]

    def entry(*refs):
        leaves, *results = (refs[start:end] for start, end in itertools.pairwise(ends))
        refs = jax.tree.unflatten(tree, leaves), *results
        pl.run_scoped(
            lambda *scratch: body(refs, scratch),
            qk_tiles.scratch((1 + early_q) * compute_wgs, 64, dtype=dtype),
            None if share_q_out or early_q else out_tiles.scratch(compute_wgs, 64, dtype=out_dtype),
            qk_tiles.scratch(stages, block_kv, dtype=dtype),
            v_tiles.scratch(stages, block_kv, dtype=dtype),
            plgpu.SMEM((1 + has_excess, compute_wgs, 64), jnp.float32),
            plgpu.SMEM(((1 + early_q) * compute_wgs, 64), jnp.int32) if has_segments else None,
            plgpu.SMEM((stages, block_kv), jnp.int32) if has_segments else None,
            plgpu.Barrier(num_arrivals=qk_tiles.copies(64) + has_segments, num_barriers=compute_wgs),
            Ring.scratch(stages, compute_wgs, qk_tiles.copies(block_kv) + has_segments, v_tiles.copies(block_kv)),
            dense.stage(block_q, block_kv, block_kv, compute_wgs),
            scheduler.scratch(compute_wgs + 1),
            collective_axes="wg",
        )

    shape = jax.ShapeDtypeStruct
    outs = [shape((*x.shape[:2], call.heads, v_head_dim), out_dtype) for x, call in zip(queries, calls, strict=True)]
    lses = [shape((of.batch, of.heads, of.blocks * block_q), jnp.float32) for of in scheduler.shapes]
    return launch(
        entry,
        "attention_forward_sm90",
        out_type=(*outs, *lses, *(lses if has_excess else ())),
        ctas=scheduler.ctas,
        warpgroups=compute_wgs + 1,
        semantics=plgpu.LoweringSemantics.Lane,
        interpret=interpret,
    )
