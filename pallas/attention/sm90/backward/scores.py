"""The scores of a step in the two Hopper backward kernels: bias, softcap, score_mod, masks, and the probabilities.

kernel.py visits blocks of queries (QStep). Its scores are transposed: their rows are a warpgroup's 64 keys, their
columns the step's queries. deterministic.py visits blocks of keys (KvStep): rows are a warpgroup's 64 queries, columns
the step's keys. In a QStep, S, P and dS below mean S^T, P^T and dS^T.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.pallas.attention.sm90.backward.dquery_step import KvStep
from jax_kernels.pallas.attention.sm90.backward.loop import QStep
from jax_kernels.pallas.attention.sm90.features import mask_bits, score_mod
from jax_kernels.pallas.attention.sm90.features.softcap import softcapped
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.kernel_types import needed
from jax_kernels.pallas.mosaic.layouts import PART

type Step = QStep | KvStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """A step's scores in registers, from which P is computed, and data for the score_mod's derivative.

    s: with a softcap, tanh(score / softcap), to which a bias is not yet added; else with a bias, score + bias in base
    2; with a score_mod, the new scores in base 2, or in natural units if Traits.natural; else S without the scale.
    Pairs that the mask drops are -inf.

    live, mod: None unless there is a score_mod whose derivative is not 1. Dropped pairs of s may then have any value.
    live: bool, the pairs that the mask keeps. mod: evaluates the score_mod on this step's scores.
    """

    s: jax.Array
    live: jax.Array | None = None
    mod: score_mod.Tile | None = None


def masked(step: Step, s: jax.Array) -> jax.Array:
    """s after softcap or bias, with -inf for pairs that the mask drops.

    s: S without the scale, or the new scores of a score_mod whose derivative is 1. With a softcap the result is
    tanh(score / softcap), without the bias, because the softcap's derivative needs it. Otherwise with a bias it is
    score + bias in base 2. With neither, kept pairs are unchanged.
    """
    traits = step.traits
    if traits.options.softcap:
        s = softcapped(s, traits.options.softcap, traits.options.scale)
    elif traits.has_bias:  # softcap's derivative needs the scores without bias
        s = _biased(step, s)
    if step.words is not None:  # full blocks, too: if most blocks are partial, a branch costs a tenth
        # Without the barrier LLVM multiplies before the select, and then subtracts: one instruction more for each pair.
        return lax.optimization_barrier(mask_bits.kept(s, step.words, by_word=False))
    if traits.predicate:
        # One loop with a branch, not two loops: values that live across a second loop would spill.
        s = lax.cond(step.is_partial, lambda s: step.drop_pairs(s), lambda s: s, s)
    return s


def final_scores(step: Step, s: jax.Array, *, is_masked: bool = False) -> Scores:
    """The step's Scores. s: S from the matmul, without the scale, float32; if is_masked, the result of `masked`."""
    traits = step.traits
    if traits.has_mod and not traits.has_slope:
        s = step.score_mod_tile(s).scores()
    if not is_masked:
        s = masked(step, s)
    if not traits.has_slope:
        return Scores(s=s)
    live, mod = s > -jnp.inf, step.score_mod_tile(s)
    return Scores(s=mod.scores(), live=live, mod=mod)


def logits(step: Step, scores: Scores) -> jax.Array:
    """scores.s, plus the step's bias if the call has a softcap and a bias. This is the last read of the bias."""
    return _biased(step, scores.s) if step.traits.has_bias and step.traits.options.softcap else scores.s


def probabilities(step: Step, scores: Scores, x: jax.Array, lse: jax.Array) -> jax.Array:
    """P = exp(score - lse) of the step, float32. x: the result of `logits`. lse: of the step's queries, [queries]."""
    traits, options = step.traits, step.traits.options
    # With a bias or a score_mod, x already has the units of lse.
    factor = 1.0 if traits.has_bias or traits.has_mod else (options.softcap or options.scale) * LOG2E
    less = x * factor - along_queries(step, lse, scores.s)
    p = jnp.exp2(less * LOG2E if traits.natural else less)
    if traits.has_bias or traits.has_mod:
        # In a row that a bias of -1e30 masks, lse is too coarse for P: keep P finite.
        p = jnp.minimum(p, 1)
    if traits.has_slope and traits.predicate:
        p = jnp.where(needed(scores.live), p, 0)
    return p


def times_slope(step: Step, p: jax.Array, scores: Scores) -> jax.Array:
    """P times the derivative of the softcap or the score_mod, float32; P itself without both."""
    if step.traits.options.softcap:
        # A masked score is -inf: P times its square would be a NaN.
        return p * (1 - jnp.square(jnp.maximum(scores.s, -1)))
    if scores.mod is not None:
        return scores.mod.times_derivative(p, scores.live if step.traits.predicate else None)
    return p


def along_queries(step: Step, x: jax.Array, s: jax.Array) -> jax.Array:
    """Broadcasts a value per query, [queries], to the shape of the scores s."""
    return lax.broadcast_in_dim(x, s.shape, [1 if step.transposed else 0])


def bias_gradient_sum(ds: Any, dbias: Any) -> Any:
    """dbias plus 8 partial sums of each row of dS^T: float32 [64, PART], PART = 8.

    ds: dS^T, [64 keys, queries]. dbias: the sums so far, [64, PART]. Column j of the result adds columns j, j + 8,
    j + 16 ... of ds. The 8 partial sums of a row are added up when the loop has ended.
    """
    parts = [ds[:, i : i + PART] for i in range(0, ds.shape[1], PART)]
    return functools.reduce(jnp.add, parts, dbias)


def _biased(step: Step, s: jax.Array) -> jax.Array:
    """The scores with the step's bias added, in base 2. s: S, or with a softcap tanh(score / softcap)."""
    options, bias = step.traits.options, needed(step.kernel.smem.bias)
    return bias.added(s, options.softcap or options.scale, step.row, transposed=step.transposed)
