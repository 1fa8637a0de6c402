"""A step of the Hopper backward for a deterministic dquery: its scores, whose rows are queries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward.dquery_state import Kernel, Rows, Traits
from jax_kernels.pallas.attention.sm90.features import score_mod
from jax_kernels.pallas.attention.sm90.features.softcap import softcapped
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.kernel_types import Index, needed
from jax_kernels.pallas.mosaic.layouts import ROW, WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvStep:
    """One step of the kv loop of a warpgroup, which visits one block of keys.

    wg: index of the warpgroup. index: number of the step. slot, v_slot: the stages of shared memory that hold its keys
    and its values.
    """

    rows: Rows
    wg: Index
    index: Index
    slot: Index
    v_slot: Index

    @classmethod
    def of(cls, rows: Rows, i: Index) -> "KvStep":
        """Step number `i`, after waiting for its loads."""
        traits, smem = rows.kernel.traits, rows.kernel.smem
        blocks = traits.blocks
        wg = recomputed(rows.kernel.wg)
        slot = lax.rem(i, jnp.int32(blocks.k_stages))
        v_slot = lax.rem(i, jnp.int32(blocks.v_stages)) if blocks.v_stages > 1 else recomputed(0)
        # All waits come before the accumulators: a wait between zeroing and matmul costs a fence (C7519).
        if not traits.scores_ahead:
            plgpu.barrier_wait(smem.k_ready.at[slot])
        plgpu.barrier_wait(smem.v_ready.at[v_slot])
        if smem.bias is not None:
            plgpu.barrier_wait(smem.bias.ready)
        return cls(rows=rows, wg=wg, index=i, slot=slot, v_slot=v_slot)

    @property
    def kernel(self) -> Kernel:
        return self.rows.kernel

    @property
    def traits(self) -> Traits:
        return self.rows.kernel.traits

    def kv_start(self) -> Index:
        """The index of the step's first key."""
        return self.kernel.blocks.at(self.index) * self.traits.blocks.block_kv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """A step's scores [64 queries, keys] in registers, from which P is computed, and data for the score_mod's
    derivative.

    s: with a softcap, tanh(score / softcap), to which a bias is not yet added; else with a bias, score + bias in base
    2; with a score_mod, the new scores in base 2, or in natural units if Traits.natural; else Q K^T without the scale.
    Pairs that the mask drops are -inf. s * Traits.factor has the units of lse, except with a softcap and a bias.

    live, mod: None unless there is a score_mod whose derivative is not 1. Dropped pairs of s may then have any value.
    live: bool, the pairs that the mask keeps. mod: evaluates the score_mod on this step's scores.
    """

    s: jax.Array
    live: jax.Array | None = None
    mod: score_mod.Tile | None = None


def final_scores(step: KvStep, s: jax.Array) -> Scores:
    """The step's Scores. s: Q K^T from the matmul, without the scale, float32 [64, block_kv]."""
    traits = step.traits
    if traits.has_mod and not traits.has_slope:
        s = _modified(step, s).scores()
    s = _masked(step, s)
    if not traits.has_slope:
        return Scores(s=s)
    live, mod = s > -jnp.inf, _modified(step, s)
    return Scores(s=mod.scores(), live=live, mod=mod)


def over_queries(x: Index, s: jax.Array) -> jax.Array:
    """Broadcasts a value per query, [64], to the scores' shape [64, block_kv]."""
    return lax.broadcast_in_dim(x, s.shape, [0])


def probabilities(step: KvStep, scores: Scores) -> jax.Array:
    """P = exp(score - lse), times the derivative of the softcap or the score_mod: float32 [64, block_kv].

    It also frees the memory of the step's bias.
    """
    traits, s, bias = step.traits, scores.s, step.kernel.smem.bias
    cap = traits.options.softcap
    logits = _biased(step, s) if traits.has_bias and cap else s
    if bias is not None:
        plgpu.commit_smem()  # after the reads: the next copy overwrites this memory
        plgpu.barrier_arrive(bias.free)
    less = logits * traits.factor - over_queries(step.rows.lse, s)
    p = jnp.exp2(less * LOG2E if traits.natural else less)
    if traits.has_bias or traits.has_mod:
        # In a row that a bias of -1e30 masks, lse is too coarse for P: keep P finite.
        p = jnp.minimum(p, 1)
    if scores.mod is not None:
        p = jnp.where(needed(scores.live), p, 0) if traits.predicate else p
        p = scores.mod.times_derivative(p, scores.live if traits.predicate else None)
    if cap:
        # A masked score is -inf: P times its square would be a NaN.
        p = p * (1 - jnp.square(jnp.maximum(s, -1)))
    return p


def _modified(step: KvStep, s: jax.Array) -> score_mod.Tile:
    """An object (score_mod.Tile) that evaluates the call's score_mod on the step's scores.

    s: Q K^T without the scale, [64 queries, keys]. The call has a score_mod.
    """
    rows, tile, mod = step.rows, step.kernel.tile, step.kernel.arrays.mod
    assert mod is not None
    return mod.on(s, rows.mod_numbers, tile.b, tile.head, rows.q_start, step.kv_start())


def _biased(step: KvStep, s: jax.Array) -> jax.Array:
    """The scores with the step's bias added, in base 2. s: Q K^T, or with a softcap tanh(score / softcap)."""
    options, bias = step.traits.options, step.kernel.smem.bias
    assert bias is not None
    return bias.added(s, options.softcap or options.scale, 64 * step.wg, transposed=False)


def _masked(step: KvStep, s: jax.Array) -> jax.Array:
    """s after softcap or bias, with -inf for pairs that the mask drops.

    s: Q K^T without the scale, or the new scores of a score_mod whose derivative is 1. With a softcap the result is
    tanh(score / softcap), without the bias, because the softcap's derivative needs it. Otherwise with a bias it is
    score + bias in base 2. With neither, kept pairs are unchanged.
    """
    options = step.traits.options
    if options.softcap:
        s = softcapped(s, options.softcap, options.scale)
    elif step.traits.has_bias:  # softcap's derivative needs the scores without bias
        s = _biased(step, s)
    if not step.traits.predicate:
        return s
    is_partial = step.kernel.blocks.is_partial(step.index)
    return lax.cond(is_partial, functools.partial(_under_predicate, step), lambda s: s, s)


def _under_predicate(step: KvStep, s: jax.Array) -> jax.Array:
    """The scores of a partial block, -inf for pairs that limits, segments or block lists drop."""
    traits, kernel, rows = step.traits, step.kernel, step.rows
    if kernel.arrays.lists is not None:
        listed = kernel.arrays.lists.blocks_of(recomputed(kernel.cta))
        return listed.masked(s, step.index, 64 * step.wg, by_word=False)
    limits, segments, ids = kernel.limits, kernel.arrays.segments, None
    assert limits is not None
    kv_start = step.kv_start()
    if segments is not None:
        ids = segments.load(kernel.tile.b, rows.q_start, 64, kv_start, traits.blocks.block_kv)
    if traits.options.window is not None:
        keep = limits.keep(s.shape, kv_start, rows.q_start, layout=WGMMA, kv_axis=1, may_end=traits.may_end, ids=ids)
        return jnp.where(keep, s, -jnp.inf)
    # Not limits.keep: one comparison with a value per row takes fewer registers.
    count = limits.kv_length - kv_start
    if traits.options.is_causal:
        of_rows = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=ROW)
        count = over_queries(limits.key_limit(rows.q_start + of_rows) - kv_start, s)
    keep = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA) < count
    if ids is not None:
        keep &= over_queries(ids[0], s) == lax.broadcast_in_dim(ids[1], s.shape, [1])
    return jnp.where(keep, s, -jnp.inf)
