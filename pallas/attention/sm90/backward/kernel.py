"""The kernel of the attention backward on Hopper: dquery, dkey and dvalue in one pass, five matmuls per tile.

A CTA owns a block of keys of one kv head. Its loop goes over the queries of every head of the group, so that dkey and
dvalue stay in registers, in float32, from the first query to the last. The scores are computed transposed: P^T and
dS^T are then operands in registers. dS goes through shared memory once, transposed for dquery. The tensor memory
accelerator adds dquery to a float32 array in device memory, in the order of arrival.

There are two compute warpgroups (widths.py). Up to 320 columns of key and value together each warpgroup owns 64 of 128
keys. Above 320, the float32 sums of 64 keys fill the registers of two warpgroups: each warpgroup owns half of the
columns of the same 64 keys. Both warpgroups compute the scores, which takes seven matmuls instead of five.

A tile of block_q x block_kv takes 10 * block_q * block_kv * head_dim FLOPs (14 if columns are split), and
block_q * head_dim float32 additions to device memory, which the L2 cache absorbs.
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
from jax_kernels.pallas.attention.sm90.backward.arrays import Arrays
from jax_kernels.pallas.attention.sm90.backward.load import load_tiles
from jax_kernels.pallas.attention.sm90.backward.loop import WorkTile, first_key
from jax_kernels.pallas.attention.sm90.backward.state import Kernel, KernelBarriers, Results, Smem
from jax_kernels.pallas.attention.sm90.backward.step import LATE_P, Accumulators, Carry, first_scores, mma_step
from jax_kernels.pallas.attention.sm90.backward.store import epilogue
from jax_kernels.pallas.attention.sm90.backward.traits import Traits
from jax_kernels.pallas.attention.sm90.backward.widths import COMPUTE_WGS
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90
from jax_kernels.pallas.kernel_types import Index, needed
from jax_kernels.pallas.mosaic.launch import launch, run_warpgroup
from jax_kernels.pallas.mosaic.layouts import PART, WGMMA

COMPUTE_REGISTERS, MEMORY_REGISTERS = 240, 24  # per thread of a compute and of the memory warpgroup


def key_gradients(
    arrays: Arrays[jax.Array],
    options: AttentionOptions,
    kv_length: int,
    *,
    bias_gradient: bool,
    config: AttentionBackwardSm90,
    core_count: int,
    interpret: bool,
) -> Results[jax.Array]:
    """dkey, dvalue and dbias, with key's and value's dtype (float32 if options.float32_gradients); also adds to dquery.

    If arrays.dquery is not None, the kernel adds the gradient of query, divided by the scale, to this float32 ref. The
    ref has all heads of query, or only the heads that the call uses.

    bias_gradient: whether to compute dbias, the gradient of a bias per key; otherwise dbias is None. dbias: float32 [B,
    Hkv, a multiple of the block of keys], summed over the queries of a key head's query heads. With a softcap,
    bias_gradient must be False: dbias would have the softcap's derivative as a factor, which is wrong.

    arrays: padded to the head_dims of Widths. lse (in base 2, or natural units under a score_mod that may mask) and
    delta are [B, H, a multiple of block_q] float32. kv_length: the unpadded number of keys. With
    options.float32_gradients, dkey and dvalue may have up to 7 more rows than key.
    """
    traits = Traits.of(
        arrays,
        options,
        kv_length,
        bias_gradient=bias_gradient,
        config=config,
        core_count=core_count,
        interpret=interpret,
    )
    schedule, widths = traits.schedule, traits.widths
    widest = max(widths.key, widths.value)
    arrays = dataclasses.replace(arrays, **schedule.shared(2, widest, warpgroups=COMPUTE_WGS))
    barriers = KernelBarriers.wanted(traits)
    leaves, tree = jax.tree.flatten(arrays)

    def results_of(arrays):
        # In float32 dkey and dvalue are halves of one array.
        return Results(*(arrays[:1] if options.float32_gradients else ()), *arrays)

    def entry(*refs):
        given, results = jax.tree.unflatten(tree, refs[: len(leaves)]), results_of(refs[len(leaves) :])
        pl.run_scoped(
            lambda scratch: _kernel(Kernel.of(traits, barriers, given, results, scratch)),
            Smem.scratch(traits, barriers),
            collective_axes="wg",
        )

    batch, keys = arrays.key.shape[:2]
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=traits.dtype)
    shapes = [shape((batch, keys, schedule.kv_heads, columns)) for columns in (widths.key, widths.value)]
    if options.float32_gradients:
        # They are stored through a tile of dquery, whose rows are whole swizzle atoms.
        rows = pl.cdiv(keys, 8) * 8
        shapes = [shape((2 * batch, rows, schedule.kv_heads, widest), dtype=jnp.float32)]
    rows = pl.cdiv(kv_length, traits.block_kv) * traits.block_kv
    dbias = [jax.ShapeDtypeStruct((batch, schedule.kv_heads, rows), jnp.float32)] if bias_gradient else []
    results = launch(
        entry,
        "attention_backward_sm90",
        out_type=[*shapes, *dbias],
        ctas=schedule.ctas,
        warpgroups=COMPUTE_WGS + 1,
        semantics=plgpu.LoweringSemantics.Warpgroup,
        interpret=interpret,
    )(*leaves)
    found = results_of(results)
    if options.float32_gradients:
        return found._replace(dkey=found.dkey[:batch], dvalue=found.dvalue[batch:])  # the caller cuts the columns
    return found


def _kernel(kernel: Kernel) -> None:
    """Runs the calling warpgroup's part of a CTA: the last warpgroup loads, the others compute."""

    def compute() -> None:
        scores = None
        if kernel.traits.is_persistent:
            plgpu.barrier_wait(kernel.barriers.k_ready.at[0])
            plgpu.barrier_wait(kernel.barriers.q_ready.at[0])
            scores = first_scores(kernel)
        kernel.schedule.for_each(kernel.cta, functools.partial(_compute_tile, kernel), (0, scores))
        plgpu.wait_smem_to_gmem(0, wait_read_only=kernel.traits.config.exit_after_smem_read)

    registers = COMPUTE_REGISTERS, MEMORY_REGISTERS
    run_warpgroup(kernel.wg, COMPUTE_WGS, registers, functools.partial(load_tiles, kernel), compute)


def _compute_tile(
    kernel: Kernel, tile: Index, turn: Index, state: tuple[Index, jax.Array | None]
) -> tuple[Index, tuple[Index, jax.Array | None]] | None:
    """Computes and stores the gradients of work tile number `tile`, the `turn`-th of the CTA.

    state: (number of steps in the CTA's earlier work tiles, S^T of the first step or None). A persistent CTA returns
    (the next work tile, the next state); any other returns None.
    """
    traits, barriers = kernel.traits, kernel.barriers
    first, scores = state
    block = kernel.block(tile)
    q_loop = kernel.q_loop(tile, block)
    if traits.is_persistent:
        plgpu.barrier_wait(needed(barriers.v_ready).at[kernel.schedule.stages_of(turn).v])
    else:
        plgpu.barrier_wait(barriers.k_ready.at[0])
    work = WorkTile(
        kernel=kernel,
        tile=tile,
        turn=turn,
        first=first,
        block=block,
        q_loop=q_loop,
        first_key=first_key(kernel, block, kernel.wg),
    )
    if traits.scores_ahead and not traits.is_persistent:
        plgpu.barrier_wait(barriers.q_ready.at[0])
    accs = [plgpu.ACC((64, tiles.width)) for tiles in (traits.q_tiles, traits.do_tiles) for _ in range(traits.parts)]
    dk, dv, steps, carry = pl.run_scoped(
        lambda *accs: _q_loop(work, Accumulators(accs[: traits.parts], accs[traits.parts :]), scores), *accs
    )
    epilogue(work, dk, dv, carry.dbias)
    return (needed(kernel.smem.tile)[(turn + 1) & 1], (steps, carry.scores)) if traits.is_persistent else None


def _q_loop(work: WorkTile, accs: Accumulators, scores: jax.Array | None) -> tuple[list[Any], list[Any], Any, Carry]:
    """Runs the loop over the queries of a work tile: (dkey without the scale, dvalue, steps, the last step's Carry).

    dkey, dvalue: lists of float32 arrays [64, columns], one per part of the columns. steps: the number of steps so far
    of a persistent CTA, otherwise None. scores: S^T of the first step in a persistent CTA, otherwise None.
    """
    kernel, traits = work.kernel, work.kernel.traits
    if traits.scores_ahead and not traits.is_persistent:
        scores = first_scores(kernel)
    dbias = plgpu.layout_cast(jnp.zeros((64, PART), jnp.float32), WGMMA) if traits.bias_gradient else None
    step = functools.partial(mma_step, work, accs)
    next_step = lambda state: (state[0] + 1, step(*state))
    steps = None
    if traits.is_persistent:
        start = work.first, Carry(scores=scores, dbias=dbias, goes_on=jnp.bool_(True))
        steps, carry = lax.while_loop(lambda state: state[1].goes_on, next_step, start)
    else:
        carry = Carry(scores=scores, dbias=dbias, goes_on=None)
        if traits.recomputes:
            more = lambda state: state[0] < work.steps_again()
            _, carry = lax.while_loop(more, next_step, (jnp.int32(0), carry))
        else:
            carry = lax.fori_loop(0, work.q_loop.steps, step, carry)
    dk, dv = [acc[...] for acc in accs.dk], [acc[...] for acc in accs.dv]
    dv = [part * (1 / LATE_P) for part in dv] if traits.late_dp else dv
    return dk, dv, steps, carry
