"""One step of the Hopper backward: the matmuls of a block of keys with a block of queries."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward import scores as scores_sm90
from jax_kernels.pallas.attention.sm90.backward.loop import DqBlock, QStep, WorkTile
from jax_kernels.pallas.attention.sm90.backward.state import Kernel
from jax_kernels.pallas.attention.sm90.backward.widths import COMPUTE_WGS
from jax_kernels.pallas.kernel_types import AccumulatorRef, Index, Ref, needed
from jax_kernels.pallas.mosaic.layouts import COLUMN
from jax_kernels.pallas.mosaic.registers import recomputed, zeros_stay

# With Traits.late_dp P has this factor, so that float16 has room for P down to 2e-9 without loss. dvalue's sums have it
# too.
LATE_P_LOG2 = 15
LATE_P = 2.0**LATE_P_LOG2


class Accumulators(NamedTuple):
    """The float32 sums of dkey and dvalue in registers: [64 keys, columns], one array per part of the columns.

    dv: with the factor LATE_P if Traits.late_dp.
    """

    dk: tuple[AccumulatorRef, ...]
    dv: tuple[AccumulatorRef, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Carry:
    """The values that a step passes to the next step.

    scores: S^T of the next step, [64, block_q], if Traits.scores_ahead. dbias: [64, PART], the sum of a bias's gradient
    so far. goes_on: whether the work tile of a persistent CTA has another step. None: not used.
    """

    scores: jax.Array | None
    dbias: jax.Array | None
    goes_on: jax.Array | None


class PAndDS(NamedTuple):
    """P^T and dS^T of a step in 16 bits, [64, block_q], and the sum of dbias so far.

    p: None if its matmul, dV += P^T dO, is already issued.
    """

    p: jax.Array | None
    ds: jax.Array
    dbias: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextStep:
    """The stage of the next step's keys and the slot of its queries.

    goes_on: whether the next step belongs to the same work tile; None if there are no scores of the next step to
    compute.
    """

    k_stage: Index
    slot: Index
    goes_on: jax.Array | None


def mma_step(work: WorkTile, accs: Accumulators, i: Index, carry: Carry) -> Carry:
    """Runs step i: adds the contribution of a block of queries to dkey, dvalue and dquery. Returns the next step's
    Carry.
    """
    step = QStep.of(work, i)
    traits, smem, barriers = step.traits, step.kernel.smem, step.kernel.barriers
    s = scores_sm90.masked(step, needed(carry.scores)) if traits.mask_first else carry.scores
    # S^T = K Q^T, P^T = exp2(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T - delta)
    p, ds, dbias = _p_and_ds_of(step, accs, s, carry.dbias)
    if p is not None:  # otherwise its matmul is already issued, behind dP's
        # dV += P^T dO
        _add_product(accs.dv, p, smem.do.mma.at[step.do_slot, step.half])
    if traits.late_dp:
        _add_late(step, accs, ds)
        return Carry(scores=None, dbias=dbias, goes_on=None)
    _give_ds(step, ds)
    following = _next_step(step)
    if traits.exchanges_ds:
        plgpu.barrier_wait(barriers.ds_ready.at[0])
    # dK += dS^T Q, dQ += dS K
    if traits.has_dquery:
        pl.run_scoped(functools.partial(_add_dk_and_dq, step, accs, ds), plgpu.ACC((64, traits.chunk)))
        for dq_block in step.dq_blocks()[1:]:
            pl.run_scoped(functools.partial(_add_dq, step, dq_block), plgpu.ACC((64, traits.chunk)))
    else:
        _add_dk(step, accs, ds)
    if not traits.scores_ahead:
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.q_free.at[step.slot])
        return Carry(scores=None, dbias=dbias, goes_on=None)
    # S^T of the next step
    s = pl.run_scoped(functools.partial(_next_scores, step, following), plgpu.ACC((64, traits.block_q)))
    return Carry(scores=s, dbias=dbias, goes_on=following.goes_on if traits.is_persistent else None)


def first_scores(kernel: Kernel) -> jax.Array:
    """S^T = K Q^T of the CTA's first step: float32 [64 keys, block_q]."""

    def scores(s_acc):
        issue_scores(kernel, s_acc, 0, 0 if kernel.traits.splits_columns else kernel.wg, 0)
        return s_acc[...]

    return pl.run_scoped(scores, plgpu.ACC((64, kernel.traits.block_q)))


def issue_scores(kernel: Kernel, s_acc: AccumulatorRef, k_stage: Index, key_group: Index, slot: Index) -> None:
    """Issues S^T = K Q^T into the accumulator s_acc, a group of matmuls per chunk of columns.

    k_stage, key_group: the stage of keys, and which 64 keys of it. slot: the stage of queries.
    """
    traits, smem = kernel.traits, kernel.smem
    for c in range(traits.chunks):
        half, start = divmod(traits.chunk * c, traits.width)
        queries = traits.q_tiles.columns(smem.q.mma.at[slot, half], start, traits.chunk)
        plgpu.wgmma(s_acc, smem.k.mma.at[k_stage, c, key_group, 0], queries.T)


def _add_product(accs: tuple[AccumulatorRef, ...], x: jax.Array, smem: Ref) -> None:
    """Issues accs += x @ smem, a group of matmuls per part of the columns."""
    for c, acc in enumerate(accs):
        plgpu.wgmma(acc, x, smem.at[c])


def _p_and_ds_of(step: QStep, accs: Accumulators, s: jax.Array | None, dbias: jax.Array | None) -> PAndDS:
    """(P^T, dS^T, dbias) of a step, including its matmuls K Q^T and V dO^T.

    s: S^T if Traits.scores_ahead, otherwise None. dbias: the sum so far.
    """
    traits, kernel = step.traits, step.kernel
    acc = plgpu.ACC((64, traits.block_q))
    issue = lambda s_acc: issue_scores(kernel, s_acc, step.k_stage, step.key_group, step.slot)
    of_scores = lambda dp_acc, s_acc: _p_and_ds(step, accs, s, dbias, dp_acc, s_acc)
    if traits.scores_ahead:
        return pl.run_scoped(lambda dp_acc: of_scores(dp_acc, None), acc)
    if traits.late_dp:
        step = step.with_early_words()
        p, sloped = pl.run_scoped(functools.partial(_rounded_p, step), acc)
        plgpu.barrier_wait(kernel.barriers.do_ready.at[step.do_slot])
        return pl.run_scoped(functools.partial(_late_ds, step, p, sloped, dbias), acc)

    def issued_first(s_acc):
        issue(s_acc)
        plgpu.barrier_wait(kernel.barriers.do_ready.at[step.do_slot])
        return pl.run_scoped(lambda dp_acc: of_scores(dp_acc, s_acc), acc)

    def issued_together(dp_acc, s_acc):
        issue(s_acc)
        return of_scores(dp_acc, s_acc)

    return pl.run_scoped(issued_first, acc) if traits.waits_late else pl.run_scoped(issued_together, acc, acc)


def _issue_dp(step: QStep, dp_acc: AccumulatorRef) -> None:
    """Issues dP^T = V dO^T into the accumulator dp_acc."""
    traits, smem = step.traits, step.kernel.smem
    for half in range(traits.halves):
        for c in range(traits.v_tiles.count):
            dout = smem.do.mma.at[step.do_slot, half]
            dout = dout.at[0] if traits.v_tiles.count == 1 else traits.do_tiles.columns(dout, 64 * c)
            plgpu.wgmma(dp_acc, smem.v.mma.at[step.v_stage, step.key_group, half, c], dout.T)


def _rounded_p(step: QStep, s_acc: AccumulatorRef) -> tuple[jax.Array, jax.Array]:
    """(P^T, P^T times the slope of softcap or score_mod), [64, block_q], for Traits.late_dp.

    Both have the factor LATE_P and 16 bits: float16, which has three more bits than bfloat16, or bfloat16 if a
    score_mod's slope may be large. It issues S^T = K Q^T into s_acc, and waits for it.
    """
    traits, kernel = step.traits, step.kernel
    issue_scores(kernel, s_acc, step.k_stage, step.key_group, step.slot)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
    # P^T = exp2(S^T - lse)
    scores = scores_sm90.final_scores(step, s)
    lse = plgpu.load(kernel.smem.lse.at[step.slot], layout=COLUMN, optimized=False)
    in_lse = not (traits.has_bias or traits.has_mod)  # P is exp2(scores - lse), without a limit
    lse = lse - LATE_P_LOG2 if in_lse else lse
    p = scores_sm90.probabilities(step, scores, scores_sm90.logits(step, scores), lse)
    p = p if in_lse else p * LATE_P
    # The barriers keep LLVM from rounding later, where P in float32 would spill.
    p16 = lax.optimization_barrier(p.astype(jnp.float16))
    if not (traits.options.softcap or traits.has_slope):
        return p16, p16
    sloped = scores_sm90.times_slope(step, p, scores)
    return p16, lax.optimization_barrier(sloped.astype(jnp.bfloat16 if traits.has_slope else jnp.float16))


def _late_ds(step: QStep, p: jax.Array, sloped: jax.Array, dbias: jax.Array | None, dp_acc: AccumulatorRef) -> PAndDS:
    """PAndDS of a step with Traits.late_dp, including its matmul V dO^T. p, sloped: from _rounded_p."""
    traits = step.traits
    _issue_dp(step, dp_acc)
    # dS^T = P^T (dP^T - delta)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
    delta = plgpu.load(step.kernel.smem.delta.at[step.do_slot], layout=COLUMN, optimized=False) / LATE_P
    ds = sloped.astype(jnp.float32) * (dp * (1 / LATE_P) - scores_sm90.along_queries(step, delta, dp))
    dbias = scores_sm90.bias_gradient_sum(ds, dbias) if traits.bias_gradient else None
    return PAndDS(p.astype(jnp.float32).astype(traits.dtype), ds.astype(traits.dtype), dbias)


def _add_late(step: QStep, accs: Accumulators, ds: jax.Array) -> None:
    """Adds to dkey and dquery in a step with Traits.late_dp, whose matmul dV += P^T dO is issued.

    dS and the sums of dquery are not in registers together: the matmul with dS ends before the matmul of dquery begins.
    """
    traits, barriers = step.traits, step.kernel.barriers
    # dK += dS^T Q
    _add_product(accs.dk, ds, step.kernel.smem.q.mma.at[step.slot, step.half])
    _give_ds(step, ds)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(barriers.q_free.at[step.slot])
    plgpu.barrier_arrive(barriers.do_free.at[step.do_slot])
    if traits.has_dquery:
        plgpu.barrier_wait(barriers.ds_ready.at[0])
        # dQ += dS K
        pl.run_scoped(functools.partial(_add_late_dq, step), plgpu.ACC((64, traits.chunk)))


def _add_late_dq(step: QStep, dq_acc: AccumulatorRef) -> None:
    """Computes the warpgroup's block of dS K from the dS of both warpgroups, and adds it to dquery."""
    dq_block = step.dq_blocks()[0]
    for source in range(COMPUTE_WGS):
        _issue_dq(step, dq_block, dq_acc, source, source)
    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
    plgpu.barrier_arrive(step.kernel.barriers.ds_free.at[0])
    _store_dq(step, dq_block, dq)


def _issue_dq(step: QStep, dq_block: DqBlock, dq_acc: AccumulatorRef, source: Index, key_group: Index) -> None:
    """Issues dq_acc += dS K of 64 keys. source: the warpgroup that has their dS. key_group: which 64 keys."""
    smem = step.kernel.smem
    keys = smem.k.mma.at[step.k_stage, dq_block.chunk, key_group, 0]
    plgpu.wgmma(dq_acc, smem.ds.at[source, dq_block.row].T, keys)


def _p_and_ds(
    step: QStep,
    accs: Accumulators,
    s: jax.Array | None,
    dbias: jax.Array | None,
    dp_acc: AccumulatorRef,
    s_acc: AccumulatorRef | None,
) -> PAndDS:
    """(P^T, dS^T, dbias) of a step, whose S^T = K Q^T is computed or issued.

    s: S^T if Traits.scores_ahead, otherwise None. s_acc: the accumulator of S^T, whose matmuls are issued, otherwise
    None. dp_acc: the accumulator of dP^T. dbias: the sum so far.
    """
    traits, smem, early_dv = step.traits, step.kernel.smem, step.traits.config.early_dv
    _issue_dp(step, dp_acc)
    if traits.is_persistent:
        zeros_stay()
    if s_acc is not None:
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=traits.halves * traits.v_tiles.count)
    # P^T = exp2(S^T - lse)
    scores = scores_sm90.final_scores(step, needed(s), is_masked=traits.mask_first)
    lse = plgpu.load(smem.lse.at[step.slot], layout=COLUMN, optimized=False)
    p = scores_sm90.probabilities(step, scores, scores_sm90.logits(step, scores), lse)
    if early_dv:
        # dV += P^T dO
        _add_product(accs.dv, p.astype(traits.dtype), smem.do.mma.at[step.do_slot, step.half])
    p16 = p.astype(traits.dtype) if traits.options.softcap or traits.has_slope else None  # without the slope
    p = scores_sm90.times_slope(step, p, scores)
    # dS^T = P^T (dP^T - delta)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=traits.parts if early_dv else 0)
    delta = plgpu.load(smem.delta.at[step.do_slot], layout=COLUMN, optimized=False)
    ds = p * (dp - scores_sm90.along_queries(step, delta, scores.s))
    dbias = scores_sm90.bias_gradient_sum(ds, dbias) if traits.bias_gradient else None
    if early_dv:
        return PAndDS(None, ds.astype(traits.dtype), dbias)
    return PAndDS(p.astype(traits.dtype) if p16 is None else p16, ds.astype(traits.dtype), dbias)


def _give_ds(step: QStep, ds: jax.Array) -> None:
    """Stores dS^T in shared memory for the matmul with K, if there is a dquery. Frees the step's bias.

    In the first step of a work tile of a persistent CTA, it also frees the keys' memory of the work tile before. With
    Traits.exchanges_ds it waits until the other warpgroup has read the last step's dS^T.
    """
    traits, smem, barriers = step.traits, step.kernel.smem, step.kernel.barriers
    if traits.exchanges_ds:  # the other warpgroup may still read the last step's dS

        @pl.when(step.index > 0)
        def _wait():
            plgpu.barrier_wait(barriers.ds_free.at[0])

    if traits.is_persistent:

        @pl.when(step.index == 0)
        def _free_keys():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(needed(barriers.k_free).at[recomputed(0)])

    if traits.has_dquery:
        for e in range(traits.q_chunks):
            smem.ds.at[step.wg, e][...] = ds[:, 64 * e : 64 * (e + 1)]
    plgpu.commit_smem()  # also after the reads: the next copies overwrite this memory
    if smem.bias is not None:  # after the commit: the bias was read before the copy that this barrier allows
        plgpu.barrier_arrive(smem.bias.free)
    if traits.exchanges_ds:
        plgpu.barrier_arrive(barriers.ds_ready.at[0])


def _next_step(step: QStep) -> NextStep:
    """The stage and slot of the next step's keys and queries, after waiting for these loads.

    It waits for the keys only if they belong to another work tile, and for the queries only if there is a next step.
    Unless Traits.scores_ahead, it waits for nothing, because the next step does. At the end of a work tile of a
    persistent CTA it also frees the values, if they have one stage.
    """
    kernel, traits, schedule, barriers = step.kernel, step.traits, step.kernel.schedule, step.kernel.barriers
    slot, k_stage = schedule.slot_of(step.nth + 1, traits.config.q_stages), step.k_stage
    wait_q = lambda: plgpu.barrier_wait(barriers.q_ready.at[slot])
    goes_on: Any = None
    if traits.scores_ahead:
        goes_on = step.numbers().goes_on != 0 if traits.is_persistent else step.index + 1 < step.work.steps_again()
        pl.when(goes_on)(wait_q)
    if traits.is_persistent:
        k_stage = jnp.where(goes_on, step.k_stage, 1 - step.k_stage)

        @pl.when(~goes_on)
        def _end_of_tile():
            if schedule.v_stages == 1:
                plgpu.barrier_arrive(needed(barriers.v_free).at[recomputed(0)])
            plgpu.barrier_wait(barriers.k_ready.at[k_stage])
            pl.when(needed(kernel.smem.tile)[k_stage] < schedule.scheduler.count)(wait_q)

    return NextStep(k_stage=k_stage, slot=slot, goes_on=goes_on)


def _add_dk(step: QStep, accs: Accumulators, ds: jax.Array) -> None:
    """Issues dK += dS^T Q, if the kernel has no dquery, and frees the step's dout."""
    _add_product(accs.dk, ds, step.kernel.smem.q.mma.at[step.slot, step.half])
    plgpu.wgmma_wait(step.traits.parts)
    plgpu.barrier_arrive(step.kernel.barriers.do_free.at[step.do_slot])


def _add_dk_and_dq(step: QStep, accs: Accumulators, ds: jax.Array, dq_acc: AccumulatorRef) -> None:
    """Issues dK += dS^T Q, and computes and stores the warpgroup's first block of dS K. Frees the step's dout."""
    traits, smem, barriers = step.traits, step.kernel.smem, step.kernel.barriers
    dq_block = step.dq_blocks()[0]
    sources = [step.wg] if traits.splits_columns else range(COMPUTE_WGS)
    for source in sources:
        _issue_dq(step, dq_block, dq_acc, source, step.key_group if traits.splits_columns else source)
    _add_product(accs.dk, ds, smem.q.mma.at[step.slot, step.half])
    plgpu.wgmma_wait(len(sources) + traits.parts)
    plgpu.barrier_arrive(barriers.do_free.at[step.do_slot])
    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=traits.parts)
    if traits.exchanges_ds:
        plgpu.barrier_arrive(barriers.ds_free.at[0])
    _store_dq(step, dq_block, dq)


def _add_dq(step: QStep, dq_block: DqBlock, dq_acc: AccumulatorRef) -> None:
    """Computes another block of dS K, and adds it to dquery in device memory."""
    _issue_dq(step, dq_block, dq_acc, step.wg, step.key_group)
    _store_dq(step, dq_block, plgpu.wgmma_accumulator_load(dq_acc, wait_n=0))


def _store_dq(step: QStep, dq_block: DqBlock, dq: jax.Array) -> None:
    """Adds a block of dquery, 64 queries x chunk, float32, to the array in device memory, through shared memory."""
    traits, smem = step.traits, step.kernel.smem
    head, q_start = traits.dquery_head(step.head), step.q_start
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.dq.at[step.wg][...] = dq
    plgpu.commit_smem()
    if traits.reads_place_again:
        place = step.place_again()
        head, q_start = traits.dquery_head(place.head), place.q_block * traits.block_q
    b, rows, columns = (
        step.b_again(),
        pl.ds(q_start + 64 * dq_block.row, 64),
        pl.ds(traits.chunk * dq_block.chunk, traits.chunk),
    )
    target = needed(step.kernel.arrays.dquery).at[b, rows, head, columns]
    plgpu.copy_smem_to_gmem(smem.dq.at[step.wg], target, reduction_op="add")


def _next_scores(step: QStep, following: NextStep, s_acc: AccumulatorRef) -> jax.Array:
    """S^T of the next step. In the CTA's last step it is computed from a stale tile, and dropped. Frees the step's
    queries.
    """
    traits, kernel = step.traits, step.kernel
    issue_scores(kernel, s_acc, following.k_stage, step.key_group, following.slot)
    if traits.is_persistent:
        zeros_stay()
    plgpu.wgmma_wait(traits.chunks)
    plgpu.barrier_arrive(kernel.barriers.q_free.at[step.slot])
    return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
