"""The scores of a step in the Hopper backward: bias, softcap, score_mod, masks, and the probabilities.

Scores are transposed: their rows are a warpgroup's 64 keys, their columns the step's queries.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.backward.loop import QStep
from jax_kernels.pallas.attention.sm90.features import mask_bits, score_mod
from jax_kernels.pallas.attention.sm90.features.softcap import softcapped
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.kernel_types import needed
from jax_kernels.pallas.mosaic.layouts import COLUMN, PART, ROW, WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed


def biased(step: QStep, s: jax.Array) -> jax.Array:
    """The scores with the step's bias added, in base 2. s: K Q^T, or with a softcap tanh(score / softcap)."""
    options, bias = step.traits.options, step.kernel.smem.bias
    assert bias is not None
    return bias.added(s, options.softcap or options.scale, step.row, transposed=True)


def modified(step: QStep, s: jax.Array) -> score_mod.Tile:
    """An object (score_mod.Tile) that evaluates the call's score_mod on the step's scores.

    s: K Q^T without the scale, [64 keys, queries]. The call has a score_mod.
    """
    b, mod = step.b_again(), step.kernel.arrays.mod
    assert mod is not None
    numbers = mod.of_head(b, step.head)
    return mod.on(s, numbers, b, step.head, step.q_start, step.first_key(), transposed=True)


def masked(step: QStep, s: jax.Array) -> jax.Array:
    """s after softcap or bias, with -inf for pairs that the mask drops.

    s: K Q^T without the scale, or the new scores of a score_mod whose derivative is 1. With a softcap the result is
    tanh(score / softcap), without the bias, because the softcap's derivative needs it. Otherwise with a bias it is
    score + bias in base 2. With neither, kept pairs are unchanged.
    """
    traits = step.traits
    if traits.options.softcap:
        s = softcapped(s, traits.options.softcap, traits.options.scale)
    elif step.kernel.smem.bias is not None:  # softcap's derivative needs the scores without bias
        s = biased(step, s)
    if step.words is not None:  # full blocks, too: if most blocks are partial, a branch costs a tenth
        return mask_bits.kept(s, step.words, by_word=False)
    if traits.predicate:
        # One loop with a branch, not two loops: values that live across a second loop would spill.
        s = lax.cond(step.is_partial, functools.partial(_under_predicate, step), lambda s: s, s)
    return s


def _under_predicate(step: QStep, s: jax.Array) -> jax.Array:
    """The scores of a partial block, -inf for pairs that limits, segments or block lists drop."""
    kernel = step.kernel
    if kernel.arrays.lists is not None:
        return kernel.arrays.lists.blocks_of(recomputed(step.work.tile)).masked(s, step.index, step.row, by_word=False)
    b, segments = step.b_again(), kernel.arrays.segments
    ids = None
    if segments is not None:
        ids = (
            plgpu.load(segments.kv_ids.at[b, pl.ds(step.first_key(), 64)], layout=ROW, optimized=False),
            plgpu.load(needed(kernel.smem.ids).at[step.slot], layout=COLUMN, optimized=False),
        )
    keep = kernel.schedule.limits(kernel.arrays, b).keep(
        s.shape, step.first_key(), step.q_start, layout=WGMMA, kv_axis=0, may_end=step.traits.may_end, ids=ids
    )
    return jnp.where(keep, s, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """A step's scores [64 keys, queries] in registers, from which P^T is computed, and data for the score_mod's
    derivative.

    s: with a softcap, tanh(score / softcap), to which a bias is not yet added; else with a bias, score + bias in base
    2; with a score_mod, the new scores in base 2, or in natural units if Traits.natural; else K Q^T without the scale.
    Pairs that the mask drops are -inf. s * Traits.factor has the units of lse, except with a softcap and a bias.

    live, mod: None unless there is a score_mod whose derivative is not 1. Dropped pairs of s may then have any value.
    live: bool, the pairs that the mask keeps. mod: evaluates the score_mod on this step's scores.
    """

    s: jax.Array
    live: jax.Array | None = None
    mod: score_mod.Tile | None = None


def final_scores(step: QStep, s: jax.Array) -> Scores:
    """The step's Scores. s: K Q^T from the matmul, without the scale; already the result of `masked` if
    Traits.mask_first.
    """
    traits = step.traits
    if traits.has_mod and not traits.has_slope:
        s = modified(step, s).scores()
    if not traits.mask_first:
        s = masked(step, s)
    if not traits.has_slope:
        return Scores(s=s)
    live, mod = s > -jnp.inf, modified(step, s)
    return Scores(s=mod.scores(), live=live, mod=mod)


def over_keys(x: jax.Array, s: jax.Array) -> jax.Array:
    """Broadcasts a value per query, [queries], to the scores' shape [64 keys, queries]."""
    return lax.broadcast_in_dim(x, s.shape, [1])


def probabilities(step: QStep, scores: Scores) -> jax.Array:
    """P^T = exp(score - lse) of the step: float32 [64 keys, queries]."""
    traits, s = step.traits, scores.s
    lse = plgpu.load(step.kernel.smem.lse.at[step.slot], layout=COLUMN, optimized=False)
    logits = biased(step, s) if traits.has_bias and traits.options.softcap else s
    less = logits * traits.factor - over_keys(lse, s)
    p = jnp.exp2(less * LOG2E if traits.natural else less)
    if traits.has_bias or traits.has_mod:
        # In a row that a bias of -1e30 masks, lse is too coarse for P: keep P finite.
        p = jnp.minimum(p, 1)
    if traits.has_slope and traits.predicate:
        p = jnp.where(needed(scores.live), p, 0)
    return p


def times_slope(step: QStep, p: jax.Array, scores: Scores) -> tuple[jax.Array | None, jax.Array]:
    """(P^T in 16 bits or None, P^T times the derivative of the softcap or the score_mod, float32).

    The first is for the matmul of dvalue. It is None if the second has the same values.
    """
    traits, p16 = step.traits, None
    if traits.options.softcap:
        # A masked score is -inf: P times its square would be a NaN.
        p16, p = p.astype(traits.dtype), p * (1 - jnp.square(jnp.maximum(scores.s, -1)))
    if scores.mod is not None:
        live = scores.live if traits.predicate else None
        p16, p = p.astype(traits.dtype), scores.mod.times_derivative(p, live)
    return p16, p


def bias_gradient_sum(ds: Any, dbias: Any) -> Any:
    """dbias plus 8 partial sums of each row of dS^T: float32 [64, PART], PART = 8.

    ds: dS^T, [64 keys, queries]. dbias: the sums so far, [64, PART]. Column j of the result adds columns j, j + 8,
    j + 16 ... of ds. The 8 partial sums of a row are added up when the loop has ended.
    """
    parts = [ds[:, i : i + PART] for i in range(0, ds.shape[1], PART)]
    return functools.reduce(jnp.add, parts, dbias)
