"""The kernel of the attention backward on Hopper: dquery, dkey and dvalue in one pass, five products per tile.

A CTA owns a block of keys of one kv head and schedule the queries of every head of its group, so that dkey and
dvalue stay in registers, in float32, from the first query to the last. The scores are computed transposed:
P^T and dS^T are then operands in registers. dS goes through shared memory once, transposed for dquery, which
the tensor memory accelerator adds to a float32 array in device memory, in the order of arrival.

Two compute warpgroups share the work. Up to head_dim 128 each owns 64 of 128 keys ("keys"); above that the
float32 sums of 64 keys fill the registers of two warpgroups, so each owns half of the columns of the same 64
keys ("columns") and both compute the scores: seven products instead of five.

Per tile of block_q x block_kv: 10 * block_q * block_kv * head_dim FLOPs (14 with "columns"); block_q * head_dim
float32 additions to device memory, which the L2 cache absorbs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90 import bias as bias_sm90
from jax_kernels.pallas.attention.sm90 import head_views
from jax_kernels.pallas.attention.sm90.backward_load import Handover, Loads, Staged, Step
from jax_kernels.pallas.attention.sm90.backward_schedule import Schedule
from jax_kernels.pallas.attention.sm90.backward_scores import Scores
from jax_kernels.pallas.attention.sm90.backward_store import Store
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.mosaic import smem_tiles
from jax_kernels.pallas.mosaic.barriers import Barriers
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import COLUMN, PART, SWIZZLED, SWIZZLED_F32, WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed, zeros_stay

COMPUTE_WGS = 2
REGISTERS = (240, 24)  # per thread of a compute and of the memory warpgroup


def block_kv_of(head_dim: int) -> int:
    return 64 if head_dim > 128 else 64 * COMPUTE_WGS


def key_gradients(arrays, options, kv_length, *, bias_gradient, config, core_count, interpret):
    """(dkey, dvalue, dbias). Where arrays have dquery, a float32 ref, it adds dquery / scale to that.

    dquery has all heads of query, or those that the call takes alone.

    dbias: None, or if bias_gradient that of a bias for each key, float32 [B, Hkv, a multiple of the block of keys],
    summed over the queries of the heads that share a head of keys. It is not that under a softcap.

    All have the same head_dim, 64, 128 or 256. lse (in base 2) and delta: [B, H, a multiple of block_q] float32.
    """
    batch, _, _, head_dim = arrays.query.shape
    key = arrays.key
    dq_head_of = head_views.dquery_head_map(arrays.query, arrays.dquery, options)
    scale, cap = options.scale, options.softcap
    dtype = key.dtype
    block_q, q_stages, do_stages = config.block_q, config.q_stages, config.do_stages
    columns = head_dim > 128  # else "keys"
    row_groups = 1 if columns else COMPUTE_WGS
    halves = COMPUTE_WGS if columns else 1
    width = head_dim // halves
    block_kv = block_kv_of(head_dim)
    # Whether the next step's scores are computed behind this step's gradients; "columns" lacks the registers.
    ahead = not columns
    with_dq = arrays.dquery is not None
    # Whether the warpgroups give one another their dS.
    exchange = with_dq and not columns
    # Of a score_mod with a derivative the predicate masks what it gets: of what it gives, both would have to be kept.
    has_mod = arrays.mod is not None
    has_slope = has_mod and not arrays.mod.adds_only
    # Whether the branch of the predicate stands before the issue of dP. Without the exchange, the products would be
    # serialised by it (C7511); softcap's exponentials, and a score_mod, had better run behind dP.
    mask_first = exchange and not cap and has_slope == has_mod
    chunks, q_chunks = head_dim // 64, block_q // 64
    any_rows = smem_tiles.has_odd_length(arrays.query, key)
    k_tiles, v_tiles = smem_tiles.SmemTiles(64, any_rows), smem_tiles.SmemTiles(width, any_rows)
    q_tiles = smem_tiles.SmemTiles(width, any_rows, whole=True)
    parts = q_tiles.count
    # 64 x 64 blocks of dquery that a warpgroup stores in a step.
    dq_blocks = chunks * q_chunks // COMPUTE_WGS
    if chunks * q_chunks % COMPUTE_WGS or (not columns and dq_blocks != 1) or (columns and q_chunks != 1):
        raise ValueError(f"AttentionBackwardSm90.block_q={block_q} does not fit head_dim={head_dim}")
    how = {"bias_gradient": bias_gradient, "interpret": interpret}
    schedule = Schedule.of(arrays, options, kv_length, block_kv, config, core_count, **how)
    is_persistent = schedule.is_persistent
    arrays = dataclasses.replace(arrays, **schedule.shared(2, head_dim, warpgroups=COMPUTE_WGS))
    has_segments, has_lists = (getattr(arrays, name) is not None for name in ("segments", "lists"))
    has_words = has_lists and arrays.lists.has_all_words
    dense = arrays.dense or bias_sm90.Dense()
    has_bias = dense.has_bias
    natural = has_mod and arrays.mod.may_mask
    # To base 2, in which the biased scores are, and those of another score_mod.
    factor = 1.0 if has_bias or has_mod else (cap or scale) * LOG2E
    may_end = arrays.bounds is not None or kv_length % block_kv != 0
    predicate = may_end or has_segments or has_lists or not schedule.visits_all

    wanted = Handover.barriers(schedule, row_groups * chunks, row_groups * halves * v_tiles.copies(64), COMPUTE_WGS) | {
        "q_ready": (q_stages, halves * q_tiles.copies(block_q) + 1 + has_segments + is_persistent),
        "do_ready": (do_stages, halves * q_tiles.copies(block_q) + 1),
        "q_free": (q_stages, COMPUTE_WGS),
        "do_free": (do_stages, COMPUTE_WGS),
        "ds_ready": (1, COMPUTE_WGS),
        "ds_free": (1, COMPUTE_WGS),
    }
    if not is_persistent or not exchange:  # else ds_free says so, too
        wanted["last_read"] = 1, COMPUTE_WGS
    barriers = Barriers(wanted, merged=is_persistent)

    def body(refs, scratch):
        given, dk_gmem, dv_gmem, dbias_gmem = refs
        q_gmem, do_gmem, lse_gmem, delta_gmem, segments = (
            getattr(given, name) for name in ("query", "dout", "lse", "delta", "segments")
        )
        (
            k_smem, v_smem, q_smem, do_smem, ds_smem, dq_smem, lse_smem, delta_smem, ids_smem,
            barrier_arrays, bias, arrived_smem, dbias_smem, tile_smem, steps_smem,
        ) = scratch  # fmt: skip
        (k_smem, k_copied), (v_smem, v_copied) = k_tiles.views(k_smem), v_tiles.views(v_smem)
        (q_smem, q_copied), (do_smem, do_copied) = q_tiles.views(q_smem), q_tiles.views(do_smem)
        of_name = functools.partial(barriers.of, barrier_arrays)
        q_ready, do_ready, q_free, do_free = map(of_name, ("q_ready", "do_ready", "q_free", "do_free"))
        ds_ready, ds_free, last_read = map(of_name, ("ds_ready", "ds_free", "last_read"))
        k_ready, v_ready, k_free, v_free = map(of_name, ("k_ready", "v_ready", "k_free", "v_free"))
        handover = Handover(k_ready, v_ready, k_free, v_free, tile_smem)
        wg = lax.axis_index("wg")
        cta = lax.axis_index("cta")

        block = functools.partial(schedule.block, given)

        @pl.when(wg == COMPUTE_WGS)
        def _memory():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            queries = Staged(q_gmem, lse_gmem, q_copied, lse_smem, q_ready, q_free, q_stages, steps=steps_smem)
            if has_segments:
                queries = queries._replace(ids=segments.q_ids, ids_smem=ids_smem)
            dout = Staged(do_gmem, delta_gmem, do_copied, delta_smem, do_ready, do_free, do_stages)
            Loads(
                schedule, given, cta, k_tiles, v_tiles, q_tiles, k_copied, v_copied, handover, queries, dout, bias,
                chunks, row_groups, halves, width,
            ).run()  # fmt: skip

        def issue_scores(s_acc, k_stage, row_group, slot):
            for c in range(chunks):
                half, start = divmod(64 * c, width)
                queries = q_tiles.sixty_four(q_smem.at[slot, half], start)
                plgpu.wgmma(s_acc, k_smem.at[k_stage, c, row_group, 0], queries.T)

        def first_scores(s_acc):
            issue_scores(s_acc, 0, 0 if columns else wg, 0)
            return s_acc[...]

        def compute_tile(tile, turn, state):
            """The CTA's tile number `turn`; state: (how many steps came before, the scores of its first one)."""
            first, first_s = state
            q_loop = functools.partial(schedule.q_loop, given, tile)
            here = block(tile)
            steps, place = q_loop(here)
            if is_persistent:
                plgpu.barrier_wait(handover.v_ready.at[schedule.stages_of(turn)[1]])
            else:
                plgpu.barrier_wait(handover.k_ready.at[0])
            my_first_key = here.kv_index * block_kv + (0 if columns else 64 * wg)

            # What would take registers through all steps of a tile.
            def step_count():
                return q_loop(here).steps if has_lists else steps

            def dq_parts(w):
                """(chunk of columns, first row within the block of queries) of this warpgroup's dquery blocks."""
                if columns:
                    return [(w * dq_blocks + i, 0) for i in range(dq_blocks)]
                return [(w, 0)] if q_chunks == 1 else [(0, w)]

            def add(accs, x, smem):
                """accs += x @ smem, a group of products per chunk of columns."""
                for c, acc in enumerate(accs):
                    plgpu.wgmma(acc, x, smem.at[c])

            def walk(*accs):
                dk_accs, dv_accs = accs[:parts], accs[parts:]

                def step(i, carry):
                    """i: number of the step, of a persistent CTA from its first tile on."""
                    s, dbias, _ = carry
                    w = recomputed(wg)
                    row_group, my_half = (recomputed(0), w) if columns else (w, 0)
                    nth = i if is_persistent else first + i
                    k_stage, v_stage = schedule.stages_of(turn)
                    slot = schedule.slot_of(nth, q_stages)
                    do_slot = schedule.slot_of(nth, do_stages) if do_stages > 1 else recomputed(0)
                    read = lambda: Step.read(steps_smem, slot)
                    if is_persistent:
                        i = read().index
                        again = lambda: (read().head, read().q_block, read().is_partial != 0)
                        entry = lambda: read().entry
                        my_keys = lambda: read().kv_block * block_kv + 64 * recomputed(wg)
                    else:
                        # What segments and lists make it depend on is read again, not kept in registers.
                        again = lambda: q_loop(block(recomputed(tile))).place(i)
                        entry = lambda: block(recomputed(tile))[0]
                        my_keys = lambda: my_first_key
                    head, q_block, is_partial = again() if has_lists or is_persistent else place(i)
                    if has_segments and not is_persistent:
                        is_partial = again()[2]
                    q_start = q_block * block_q

                    words = None
                    if has_words:  # before the waits
                        listed = given.lists.walk(recomputed(tile))
                        words = listed.words(head, q_block, 64 * row_group, 64)
                    # Every wait stands before the accumulators: one between zeroing and product costs a fence (C7519).
                    if not ahead:
                        plgpu.barrier_wait(q_ready.at[slot])
                    if ahead or not config.late_do:
                        plgpu.barrier_wait(do_ready.at[do_slot])
                    if has_bias:
                        plgpu.barrier_wait(bias.ready)

                    of_step = Scores(
                        schedule, given, bias, ids_smem.at[slot] if has_segments else None, predicate, may_end, tile, i,
                        64 * row_group, my_keys, entry, head, q_start, is_partial, words,
                    )  # fmt: skip
                    if mask_first:
                        s = of_step.masked(s)

                    def weights(dp_acc, *s_acc):
                        if not ahead and not config.late_do:
                            issue_scores(s_acc[0], k_stage, row_group, slot)
                        for half in range(halves):
                            for c in range(v_tiles.count):
                                dout = do_smem.at[do_slot, half]
                                dout = dout.at[0] if v_tiles.count == 1 else q_tiles.sixty_four(dout, 64 * c)
                                plgpu.wgmma(dp_acc, v_smem.at[v_stage, row_group, half, c], dout.T)
                        if is_persistent:
                            zeros_stay()
                        scores = s if ahead else plgpu.wgmma_accumulator_load(s_acc[0], wait_n=halves * v_tiles.count)
                        if has_mod and not has_slope:
                            scores = of_step.modified(scores).scores()
                        if not mask_first:
                            scores = of_step.masked(scores)
                        if has_slope:
                            live, mod = scores > -jnp.inf, of_step.modified(scores)
                            scores = mod.scores()

                        wide = lambda x: lax.broadcast_in_dim(x, scores.shape, [1])
                        lse = plgpu.load(lse_smem.at[slot], layout=COLUMN, optimized=False)
                        logits = of_step.biased(scores) if has_bias and cap else scores
                        less = logits * factor - wide(lse)
                        p = jnp.exp2(less * LOG2E if natural else less)
                        if has_bias or has_mod:
                            # Of a row that a bias of -1e30 masks, lse is too coarse to give P: keep it finite.
                            p = jnp.minimum(p, 1)
                        if has_slope and predicate:
                            p = jnp.where(live, p, 0)
                        p16 = None
                        if config.early_dv:
                            add(dv_accs, p.astype(dtype), do_smem.at[do_slot, my_half])
                        if cap:
                            # tanh's derivative joins P. A masked score is -inf, whose square would be a NaN.
                            p16, p = p.astype(dtype), p * (1 - jnp.square(jnp.maximum(scores, -1)))
                        if has_slope:
                            p16, p = p.astype(dtype), mod.times_derivative(p, live if predicate else None)
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=parts if config.early_dv else 0)
                        delta = plgpu.load(delta_smem.at[do_slot], layout=COLUMN, optimized=False)
                        ds = p * (dp - wide(delta))
                        summed = None
                        if bias_gradient:  # by thread: what is left to add up, the lanes of a row do at the end
                            parts_of_ds = [ds[:, i : i + PART] for i in range(0, block_q, PART)]
                            summed = functools.reduce(jnp.add, parts_of_ds, dbias)
                        if config.early_dv:
                            return None, ds.astype(dtype), summed
                        return p.astype(dtype) if p16 is None else p16, ds.astype(dtype), summed

                    def weights_late_do(s_acc):
                        issue_scores(s_acc, k_stage, row_group, slot)
                        plgpu.barrier_wait(do_ready.at[do_slot])
                        return pl.run_scoped(lambda dp_acc: weights(dp_acc, s_acc), plgpu.ACC((64, block_q)))

                    if not ahead and config.late_do:
                        p16, ds16, dbias = pl.run_scoped(weights_late_do, plgpu.ACC((64, block_q)))
                    else:
                        p16, ds16, dbias = pl.run_scoped(weights, *[plgpu.ACC((64, block_q))] * (1 if ahead else 2))
                    if not config.early_dv:
                        add(dv_accs, p16, do_smem.at[do_slot, my_half])

                    if exchange:  # the other warpgroup may still read the last step's dS

                        @pl.when(i > 0)
                        def _():
                            plgpu.barrier_wait(ds_free.at[0])

                    if is_persistent:

                        @pl.when(i == 0)
                        def _free_keys():
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            plgpu.barrier_arrive(handover.k_free.at[recomputed(0)])

                    if with_dq:
                        for e in range(q_chunks):
                            ds_smem.at[w, e][...] = ds16[:, 64 * e : 64 * (e + 1)]
                    plgpu.commit_smem()  # behind what was read, too, which the next copies overwrite
                    if has_bias:  # behind that: the bias was read before the copy that the barrier lets go
                        plgpu.barrier_arrive(bias.free)
                    if exchange:
                        plgpu.barrier_arrive(ds_ready.at[0])
                    next_slot, next_k_stage = schedule.slot_of(nth + 1, q_stages), k_stage
                    wait_q = lambda: plgpu.barrier_wait(q_ready.at[next_slot])
                    goes_on: Any = None
                    if ahead:
                        goes_on = read().goes_on != 0 if is_persistent else i + 1 < step_count()
                        pl.when(goes_on)(wait_q)
                    if is_persistent:
                        next_k_stage = jnp.where(goes_on, k_stage, 1 - k_stage)

                        @pl.when(~goes_on)
                        def _():
                            if schedule.v_stages == 1:
                                plgpu.barrier_arrive(handover.v_free.at[recomputed(0)])
                            plgpu.barrier_wait(handover.k_ready.at[next_k_stage])
                            pl.when(handover.tile_smem[next_k_stage] < schedule.scheduler.count)(wait_q)

                    if exchange:
                        plgpu.barrier_wait(ds_ready.at[0])

                    def store_dq(part, value, rows, q_start):
                        chunk, row = part
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        dq_smem.at[w][...] = value
                        plgpu.commit_smem()
                        if is_persistent or (has_lists and cap):  # read again: there are no registers to keep them
                            rows, q_block, _ = again()
                            rows, q_start = dq_head_of(rows), q_block * block_q
                        target = given.dquery.at[entry(), pl.ds(q_start + 64 * row, 64), rows, pl.ds(64 * chunk, 64)]
                        plgpu.copy_smem_to_gmem(dq_smem.at[w], target, reduction_op="add")

                    def next_scores(s_acc):
                        # In the CTA's last step this works on a stale tile, and is dropped.
                        issue_scores(s_acc, next_k_stage, row_group, next_slot)
                        if is_persistent:
                            zeros_stay()
                        plgpu.wgmma_wait(chunks)
                        plgpu.barrier_arrive(q_free.at[slot])
                        return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

                    def gradients(dq_acc):
                        chunk, row = dq_parts(w)[0]
                        for source in [w] if columns else range(COMPUTE_WGS):
                            keys = k_smem.at[k_stage, chunk, row_group if columns else source, 0]
                            plgpu.wgmma(dq_acc, ds_smem.at[source, row].T, keys)
                        add(dk_accs, ds16, q_smem.at[slot, my_half])
                        plgpu.wgmma_wait((1 if columns else COMPUTE_WGS) + parts)
                        plgpu.barrier_arrive(do_free.at[do_slot])
                        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=parts)
                        if exchange:
                            plgpu.barrier_arrive(ds_free.at[0])
                        store_dq((chunk, row), dq, dq_head_of(head), q_start)

                    if with_dq:
                        pl.run_scoped(gradients, plgpu.ACC((64, 64)))
                    else:
                        add(dk_accs, ds16, q_smem.at[slot, my_half])
                        plgpu.wgmma_wait(parts)
                        plgpu.barrier_arrive(do_free.at[do_slot])

                    def more_dq(dq_acc, part):
                        plgpu.wgmma(dq_acc, ds_smem.at[w, part[1]].T, k_smem.at[k_stage, part[0], row_group, 0])
                        store_dq(part, plgpu.wgmma_accumulator_load(dq_acc, wait_n=0), dq_head_of(head), q_start)

                    for part in dq_parts(w)[1:] if with_dq else []:
                        pl.run_scoped(functools.partial(more_dq, part=part), plgpu.ACC((64, 64)))

                    if ahead:
                        s = pl.run_scoped(next_scores, plgpu.ACC((64, block_q)))
                        return s, dbias, goes_on if is_persistent else None
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_free.at[slot])
                    return None, dbias, None

                s = first_s
                if ahead and not is_persistent:
                    s = pl.run_scoped(first_scores, plgpu.ACC((64, block_q)))
                dbias = plgpu.layout_cast(jnp.zeros((64, PART), jnp.float32), WGMMA) if bias_gradient else None
                next_step = lambda carry: (carry[0] + 1, step(*carry))
                nth = None
                if is_persistent:
                    start = first, (s, dbias, jnp.bool_(True))
                    nth, (s, dbias, _) = lax.while_loop(lambda carry: carry[1][2], next_step, start)
                elif has_lists:
                    start = jnp.int32(0), (s, dbias, None)
                    _, (s, dbias, _) = lax.while_loop(lambda carry: carry[0] < step_count(), next_step, start)
                else:
                    s, dbias, _ = lax.fori_loop(0, steps, step, (s, dbias, None))
                return *[[acc[...] for acc in accs] for accs in (dk_accs, dv_accs)], dbias, (nth, s)

            if ahead and not is_persistent:
                plgpu.barrier_wait(q_ready.at[0])
            dk, dv, dbias, state = pl.run_scoped(walk, *[plgpu.ACC((64, q_tiles.width))] * (2 * parts))
            if last_read is not None:
                plgpu.barrier_arrive(last_read.at[0])  # the other warpgroup may still read K, and with "columns" V
            w = recomputed(wg)
            row_group, half = (0, w) if columns else (w, 0)
            my_chunks = [half * (width // 64) + c for c in range(width // 64)]
            if bias_gradient:  # with "columns" both warpgroups have the same
                dbias_smem.at[w][...] = dbias.sum(axis=1)
                plgpu.commit_smem()
                entry, head, of_keys = block(recomputed(tile))
                rows = pl.ds(of_keys * block_kv + 64 * row_group, 64)
                plgpu.copy_smem_to_gmem(dbias_smem.at[w], dbias_gmem.at[entry, head, rows])
            k_stage, v_stage = schedule.stages_of(turn)
            keys = k_smem.at[k_stage], k_copied.at[k_stage]
            values_stay = not is_persistent or schedule.v_stages == 2
            values = (v_smem.at[v_stage], v_copied.at[v_stage]) if values_stay else None
            # With dS each has told the other that it has read K, too.
            all_read = (last_read or ds_free).at[0]
            Store(
                schedule, given, dk_gmem, dv_gmem, k_tiles, v_tiles, keys, values,
                dq_smem.at[w], arrived_smem, all_read, tile, w, columns, row_group, half, my_chunks,
            ).finish(dk, dv)  # fmt: skip
            if is_persistent:
                return handover.tile_smem[(turn + 1) & 1], state

        @pl.when(wg < COMPUTE_WGS)
        def _compute():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            s = None
            if is_persistent:
                plgpu.barrier_wait(handover.k_ready.at[0])
                plgpu.barrier_wait(q_ready.at[0])
                s = pl.run_scoped(first_scores, plgpu.ACC((64, block_q)))
            schedule.for_each(cta, compute_tile, (0, s))
            plgpu.wait_smem_to_gmem(0, wait_read_only=config.leave_early)

    leaves, tree = jax.tree.flatten(arrays)

    def entry(*refs):
        given, results = refs[: len(leaves)], refs[len(leaves) :]
        refs = jax.tree.unflatten(tree, given), *results, *[None] * (3 - len(results))
        pl.run_scoped(
            lambda *scratch: body(refs, scratch),
            k_tiles.scratch(schedule.k_stages, chunks, row_groups, 64, dtype=dtype),
            v_tiles.scratch(schedule.v_stages, row_groups, halves, 64, dtype=dtype),
            q_tiles.scratch(q_stages, halves, block_q, dtype=dtype),
            q_tiles.scratch(do_stages, halves, block_q, dtype=dtype),
            plgpu.SMEM((COMPUTE_WGS, q_chunks, 64, 64), dtype, transforms=SWIZZLED),
            plgpu.SMEM((COMPUTE_WGS, 64, 64), jnp.float32, transforms=SWIZZLED_F32),
            plgpu.SMEM((q_stages, block_q), jnp.float32),
            plgpu.SMEM((do_stages, block_q), jnp.float32),
            plgpu.SMEM((q_stages, block_q), jnp.int32) if has_segments else None,
            barriers.scratch(),
            dense.stage(block_kv, block_q, block_kv, COMPUTE_WGS),
            plgpu.SMEM((COMPUTE_WGS,), jnp.int32) if schedule.split.parts > 1 else None,
            plgpu.SMEM((COMPUTE_WGS, 64), jnp.float32) if bias_gradient else None,
            plgpu.SMEM((schedule.k_stages,), jnp.int32) if is_persistent else None,
            Step.scratch(q_stages) if is_persistent else None,
            collective_axes="wg",
        )

    shape = jax.ShapeDtypeStruct((batch, key.shape[1], schedule.kv_heads, head_dim), dtype)
    rows = pl.cdiv(kv_length, block_kv) * block_kv
    dbias = [jax.ShapeDtypeStruct((batch, schedule.kv_heads, rows), jnp.float32)] if bias_gradient else []
    results = launch(
        entry,
        "attention_backward_sm90",
        out_type=[shape, shape, *dbias],
        ctas=schedule.ctas,
        warpgroups=COMPUTE_WGS + 1,
        semantics=plgpu.LoweringSemantics.Warpgroup,
        interpret=interpret,
    )(*leaves)
    return *results, *[None] * (3 - len(results))
