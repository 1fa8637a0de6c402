"""dquery of attention on Hopper with the same bits on every run; kernel.py gives dkey and dvalue.

A CTA owns a block of queries of one head. Its loop goes over the keys, so that dquery stays in registers, in float32,
and is written once: nothing is added to device memory in order of arrival. Each of two compute warpgroups owns 64
queries; a memory warpgroup loads keys and values. dS is an operand in registers and never leaves them.

A tile of block_q x block_kv takes 6 * block_q * block_kv * head_dim FLOPs. kernel.py then has four matmuls. The scores
and dP are computed twice: seven matmuls instead of five.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.pallas.attention.sm90.backward import scores as scores_sm90
from jax_kernels.pallas.attention.sm90.backward.arrays import Arrays
from jax_kernels.pallas.attention.sm90.backward.dquery_state import (
    BLOCK_Q,
    COMPUTE_WGS,
    DqueryKernel,
    DquerySmem,
    DqueryTraits,
    QueryRows,
)
from jax_kernels.pallas.attention.sm90.backward.dquery_step import KvStep
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90
from jax_kernels.pallas.kernel_types import AccumulatorRef, Index, needed
from jax_kernels.pallas.mosaic.launch import launch, run_warpgroup
from jax_kernels.pallas.mosaic.registers import recomputed

COMPUTE_REGISTERS, MEMORY_REGISTERS = 240, 24  # per thread of a compute and of the memory warpgroup


def query_gradient(
    arrays: Arrays, options: AttentionOptions, kv_length: int, *, config: AttentionBackwardSm90, interpret: bool
) -> jax.Array:
    """dquery in query's shape and dtype, with the same bits on every run.

    arrays: the segments' ranges and the block lists are made for CTAs that own blocks of queries; dquery is ignored;
    the head_dim of all arrays is 64, 128 or 256. lse (in base 2, or natural units under a score_mod that may mask) and
    delta are [B, H, a multiple of 128] float32. kv_length: the unpadded number of keys.
    """
    arrays = dataclasses.replace(arrays, dquery=None)
    traits = DqueryTraits.of(arrays, options, kv_length, config=config)
    leaves, tree = jax.tree.flatten(arrays)

    def entry(*refs):
        *given, dq_gmem = refs
        pl.run_scoped(
            lambda smem: _kernel(DqueryKernel.of(traits, jax.tree.unflatten(tree, given), dq_gmem, smem)),
            DquerySmem.scratch(traits),
            collective_axes="wg",
        )

    return launch(
        entry,
        "attention_backward_dq_sm90",
        out_type=jax.ShapeDtypeStruct(arrays.query.shape, traits.dtype),
        ctas=traits.batch * traits.heads * traits.q_blocks,
        warpgroups=COMPUTE_WGS + 1,
        semantics=plgpu.LoweringSemantics.Warpgroup,
        interpret=interpret,
    )(*leaves)


def _kernel(kernel: DqueryKernel) -> None:
    """Runs the calling warpgroup's part of a CTA: the last warpgroup loads, the others compute."""

    def compute() -> None:
        plgpu.barrier_wait(kernel.smem.q_ready)
        rows = QueryRows.of(kernel)
        if kernel.traits.scores_ahead:
            plgpu.barrier_wait(kernel.smem.k_ready.at[0])
        dq = pl.run_scoped(functools.partial(_kv_loop, rows), plgpu.ACC((64, kernel.traits.head_dim)))
        _store(kernel, dq)

    registers = COMPUTE_REGISTERS, MEMORY_REGISTERS
    run_warpgroup(kernel.wg, COMPUTE_WGS, registers, functools.partial(_load, kernel), compute)


def _load(kernel: DqueryKernel) -> None:
    """Loads the CTA's block of queries with dout, lse and delta, and all blocks of keys and values that it visits."""
    traits, arrays, smem, tile = kernel.traits, kernel.arrays, kernel.smem, kernel.tile
    kv_head = lax.div(tile.head, jnp.int32(traits.group)) if traits.group > 1 else tile.head
    rows = pl.ds(tile.q_start, BLOCK_Q)
    for w in range(COMPUTE_WGS):
        my_rows = pl.ds(tile.q_start + 64 * w, 64)
        plgpu.copy_gmem_to_smem(arrays.query.at[tile.b, my_rows, tile.head], smem.q.at[w], smem.q_ready)
        plgpu.copy_gmem_to_smem(arrays.dout.at[tile.b, my_rows, tile.head], smem.do.at[w], smem.q_ready)
    plgpu.copy_gmem_to_smem(arrays.lse.at[tile.b, tile.head, rows], smem.lse, smem.q_ready)
    plgpu.copy_gmem_to_smem(arrays.delta.at[tile.b, tile.head, rows], smem.delta, smem.q_ready)
    lax.fori_loop(0, kernel.blocks.count, lambda step, _: _load_step(kernel, kv_head, step), None)


def _load_step(kernel: DqueryKernel, kv_head: Index, step: Index) -> None:
    """Loads the keys and values, and the bias, of one step, after the step that used their stages before has freed
    them.
    """
    traits, arrays, smem, tile, blocks = kernel.traits, kernel.arrays, kernel.smem, kernel.tile, kernel.blocks
    block_kv = traits.blocks.block_kv
    rows = pl.ds(blocks.at(step) * block_kv, block_kv)

    def load(gmem, of_end, stage_smem, ready, free, stages):
        slot = lax.rem(step, jnp.int32(stages))

        @pl.when(step >= stages)
        def _wait():
            plgpu.barrier_wait(free.at[slot])

        copy = lambda source: plgpu.copy_gmem_to_smem(source, stage_smem.at[slot], ready.at[slot])
        whole = lambda: copy(gmem.at[tile.b, rows, kv_head])
        if arrays.end is None:
            whole()
        else:
            from_end = lambda: copy(of_end(arrays.end).at[tile.b, :, kv_head])
            arrays.end.load(tile.b, blocks.at(step) * block_kv, block_kv, whole, from_end)

    load(arrays.key, lambda end: end.key, smem.k, smem.k_ready, smem.k_free, traits.blocks.k_stages)
    load(arrays.value, lambda end: end.value, smem.v, smem.v_ready, smem.v_free, traits.blocks.v_stages)
    stage, bias = smem.bias, arrays.bias
    if stage is not None and bias is not None:

        @pl.when(step > 0)
        def _wait_for_bias():
            plgpu.barrier_wait(stage.free)

        kv_start = blocks.at(step) * block_kv
        stage.fill(bias, tile.b, tile.head, tile.q_start, kv_start, kv_start)


def _kv_loop(rows: QueryRows, dq_acc: AccumulatorRef) -> jax.Array:
    """dquery of the warpgroup's 64 queries over all keys, without the scale: float32 [64, head_dim].

    dq_acc: the accumulator in registers that holds dquery.
    """
    traits, smem = rows.kernel.traits, rows.kernel.smem

    def first_scores(s_acc):
        plgpu.wgmma(s_acc, smem.q.at[rows.kernel.wg], smem.k.at[0].T)
        return s_acc[...]

    s = pl.run_scoped(first_scores, plgpu.ACC((64, traits.blocks.block_kv))) if traits.scores_ahead else None
    lax.fori_loop(0, rows.kernel.blocks.count, functools.partial(_mma_step, rows, dq_acc), s)
    return dq_acc[...]


def _mma_step(rows: QueryRows, dq_acc: AccumulatorRef, i: Index, s: jax.Array | None) -> jax.Array | None:
    """Adds the contribution of one block of keys, step i, to the accumulator of dquery.

    s and the result: S = Q K^T of this step and of the next step, if DqueryTraits.scores_ahead; else both are None.
    """
    step = KvStep.of(rows, i)
    traits, smem, blocks = step.traits, step.kernel.smem, step.kernel.blocks
    acc = plgpu.ACC((64, traits.blocks.block_kv))
    # S = Q K^T, P = exp2(S - lse), dP = dO V^T, dS = P (dP - delta)
    accs = [acc] if traits.scores_ahead else [acc, acc]
    ds = pl.run_scoped(functools.partial(_dscores, step, s), *accs)
    next_slot = lax.rem(i + 1, jnp.int32(traits.blocks.k_stages))
    if traits.scores_ahead:

        @pl.when(i + 1 < blocks.count)
        def _wait():
            plgpu.barrier_wait(smem.k_ready.at[next_slot])

    # dQ += dS K
    plgpu.wgmma(dq_acc, ds, smem.k.at[step.slot])

    def next_scores(s_acc):
        # In the last step this uses a stale tile, and the result is dropped.
        plgpu.wgmma(s_acc, smem.q.at[step.wg], smem.k.at[next_slot].T)
        plgpu.wgmma_wait(1)
        plgpu.barrier_arrive(smem.k_free.at[step.slot])
        return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

    if traits.scores_ahead:
        return pl.run_scoped(next_scores, acc)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(smem.k_free.at[step.slot])
    return None


def _dscores(step: KvStep, s: jax.Array | None, dp_acc: AccumulatorRef, s_acc: Any = None) -> jax.Array:
    """dS of one step in 16 bits: [64, block_kv].

    s: S = Q K^T, if DqueryTraits.scores_ahead; otherwise None. s_acc: otherwise the accumulator in which S is computed.
    dp_acc: the accumulator of dP.
    """
    smem = step.kernel.smem
    if s_acc is not None:
        # S = Q K^T
        plgpu.wgmma(s_acc, smem.q.at[step.wg], smem.k.at[step.slot].T)
    # dP = dO V^T
    plgpu.wgmma(dp_acc, smem.do.at[step.wg], smem.v.at[step.v_slot].T)
    # After the issue of dP: with the predicate's branch before it, ptxas serialises the matmuls (C7511).
    if s_acc is not None:
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
    # P = exp2(S - lse), times the derivative of the softcap or the score_mod
    scores = scores_sm90.final_scores(step, needed(s))
    logits = scores_sm90.logits(step, scores)
    if smem.bias is not None:
        plgpu.commit_smem()  # after the reads: the next copy overwrites this memory
        plgpu.barrier_arrive(smem.bias.free)
    p = scores_sm90.probabilities(step, scores, logits, step.rows.lse)
    p = scores_sm90.times_slope(step, p, scores)
    # dS = P (dP - delta)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
    plgpu.barrier_arrive(smem.v_free.at[step.v_slot])
    ds = p * (dp - scores_sm90.along_queries(step, step.rows.delta, dp))
    return ds.astype(step.traits.dtype)


def _store(kernel: DqueryKernel, dq: jax.Array) -> None:
    """Stores the warpgroup's dquery, times the scale, through the shared memory that held its queries."""
    traits, q_smem = kernel.traits, kernel.smem.q
    tile = kernel.tile_again()
    w = recomputed(kernel.wg)
    q_smem.at[w][...] = (dq * traits.options.scale).astype(traits.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[w], kernel.dq_gmem.at[tile.b, pl.ds(tile.q_start + 64 * w, 64), tile.head])
    plgpu.wait_smem_to_gmem(0)
