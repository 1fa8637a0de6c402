"""The online softmax in base 2: scores times scale * log2(e), so that exp2 is one instruction.

With a bias for each query it is in natural units: a bias of finfo.min, which means to mask, times log2(e) would be
-inf, and the maximum of a row that it masks whole has to come off its scores without a rounding.

The running state of a tile is (row_max, row_sum): the maximum of each row, and partial sums of each row, eight
columns wide. The columns are added up once, at the end: inside the loop no thread waits for another's sum.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
LOG2E = math.log2(math.e)
LN2 = math.log(2)
PARTIAL_COLUMNS = 8
# The maximum of a row that has met no key: below any score, also under a bias of -1e30 that means to mask, and finite,
# so that -inf - LOWEST is no NaN.
LOWEST = -3e38
# In natural units: no score but -inf is below it.
LOWEST_NATURAL = float(jnp.finfo(jnp.float32).min)
# Up to this size a score, or an lse, is rounded by 2**-10 at most in base 2.
NEAR = 2.0**13


def is_far(lse):
    """Which rows have an lse so large that its rounding counts, as where a bias of -1e9 masks all their keys."""
    return jnp.isfinite(lse) & (jnp.abs(lse) > NEAR)


def start(rows: int, *, natural: bool = False):
    """(the maximum so far, the sums so far) of rows that have met no key."""
    lowest = jnp.full((rows,), LOWEST_NATURAL if natural else LOWEST, jnp.float32)
    row_max = plgpu.layout_cast(lowest, WGMMA.reduce(1))
    return row_max, plgpu.layout_cast(jnp.zeros((rows, PARTIAL_COLUMNS), jnp.float32), WGMMA)


def step(scores, row_max, row_sum, scale, largest: float = 0.0):
    """(P = exp2 of the scores, the new maximum, the new sums, the factor for what was accumulated so far).

    Masked scores are -inf. largest: log2 of the largest P, by which the maximum is counted lower.
    """
    factor = scale * LOG2E
    top = scores.max(axis=1) * factor
    new = jnp.maximum(row_max, top - largest if largest else top)
    alpha = jnp.exp2(row_max - new)
    p = jnp.exp2(scores * factor - lax.broadcast_in_dim(new, scores.shape, [0]))
    return p, new, row_sum * lax.broadcast_in_dim(alpha, row_sum.shape, [0]) + _row_sums(p), alpha


def natural_step(scores, row_max, row_sum):
    """The same as step, of scores and a maximum in natural units."""
    new = jnp.maximum(row_max, scores.max(axis=1))
    alpha = jnp.exp2((row_max - new) * LOG2E)
    p = jnp.exp2((scores - lax.broadcast_in_dim(new, scores.shape, [0])) * LOG2E)
    return p, new, row_sum * lax.broadcast_in_dim(alpha, row_sum.shape, [0]) + _row_sums(p), alpha


def lazy_step(scores, row_max, row_sum, scale, largest: float, limit: float, any_above):
    """The result of step, and whether to rescale by it: P may rise to 2**limit without a new maximum.

    any_above(numbers [rows, PARTIAL_COLUMNS], limits [rows]): whether any is, for all that branch together.
    """
    factor = scale * LOG2E
    tops = _tree(jnp.maximum, _parts(scores)) * factor
    rises = any_above(tops, row_max + limit)

    def rescale(row_max, row_sum):
        new = jnp.maximum(row_max, tops.max(axis=1) - largest)
        alpha = jnp.exp2(row_max - new)
        return new, row_sum * lax.broadcast_in_dim(alpha, row_sum.shape, [0]), alpha

    row_max, row_sum, alpha = lax.cond(
        rises, rescale, lambda row_max, row_sum: (row_max, row_sum, row_max), row_max, row_sum
    )
    p = jnp.exp2(scores * factor - lax.broadcast_in_dim(row_max, scores.shape, [0]))
    return p, row_max, row_sum + _row_sums(p), alpha, rises


def bounded_step(scores, row_max, row_sum, scale: float):
    """(P, the new sums) by a maximum that stays: nothing to look for, and nothing to rescale. See room()."""
    p = jnp.exp2(scores * (scale * LOG2E) - lax.broadcast_in_dim(row_max, scores.shape, [0]))
    return p, row_sum + _row_sums(p)


def _row_sums(p):
    """The rows of P summed up to PARTIAL_COLUMNS, as a tree: additions do not wait for one another."""
    return _tree(jnp.add, _parts(p))


def _parts(x):
    return [x[:, i : i + PARTIAL_COLUMNS] for i in range(0, x.shape[1], PARTIAL_COLUMNS)]


def _tree(combine, parts):
    while len(parts) > 1:
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def room(dtype) -> float:
    """How far, in base 2, scores may rise above the maximum of a row's first block for bounded_step to serve the rest.

    bfloat16 has the exponents for a maximum as far above the scores: see lifted(). float16 has not: exp2(score -
    maximum) is at most 2**room there, which P and its sums can hold, as its values are below 2**16.
    """
    return 60.0 if dtype == jnp.bfloat16 else 15.0


def lifted(p, row_max, row_sum, largest):
    """(P, the maximum, the sums) of a row's first block, by a maximum that no score exceeds, where room() serves.

    P is at most 1 then, as by a running maximum: up to 2**room it would overflow with values above 2**47, which
    bfloat16 has. The largest of a row is above 2**-room / 2: it does not underflow with values above 1e-19. Lifted by a
    whole number, a P of 1 becomes a power of two, which bfloat16 holds without an error: where one key has nearly all
    the weight of a row, no other error is as large.
    """
    distance = jnp.maximum(largest - row_max, 0.0)
    whole = distance.astype(jnp.int32).astype(jnp.float32)
    bound = row_max + jnp.where(whole < distance, whole + 1.0, whole)
    factor = jnp.exp2(row_max - bound)
    wide = lambda x: lax.broadcast_in_dim(factor, x.shape, [0])
    return p * wide(p), bound, row_sum * wide(row_sum)


def largest_scores(longest_queries, longest_keys, scale: float):
    """[B, H] float32: what no score of a head, in base 2, exceeds. Of squared lengths of rows [B, H] and [B, Hkv]."""
    keys = jnp.repeat(longest_keys, longest_queries.shape[1] // longest_keys.shape[1], axis=1)
    return jnp.sqrt(longest_queries * keys) * (scale * LOG2E * (1 + 1e-4))


def norms(parts):
    """The norms of rows of 16-bit numbers, given in one or more arrays of columns: float32, one a row."""
    squares = [jnp.square(part.astype(jnp.float32)).sum(axis=1) for part in parts]
    return jnp.sqrt(_tree(jnp.add, squares))


def with_sink(row_max, row_sum, sink, *, natural: bool = False):
    """(the new maximum, the new sums, the factor for the accumulator) once a logit joins the denominator."""
    sink = sink if natural else sink * LOG2E
    exp2 = lambda x: jnp.exp2(x * LOG2E if natural else x)
    new = jnp.maximum(row_max, sink)
    alpha = exp2(row_max - new)
    # The sums are added up over their columns: each gets its part.
    wide = lambda x: lax.broadcast_in_dim(x, row_sum.shape, [0])
    return new, row_sum * wide(alpha) + wide(exp2(sink - new) / PARTIAL_COLUMNS), alpha


def finish_exactly(row_max, row_sum, *, natural: bool):
    """The result of finish for rows that may be dead, and what lse lacks of the exact log-sum-exp.

    Beside a maximum of -1e9 the log of the sums is lost in lse, which has 24 bits.
    """
    row_sum = row_sum.sum(axis=1)
    # Rounded: a fused multiply-add would keep what the backward's scores do not have.
    row_max = row_max if natural else lax.optimization_barrier(row_max * LN2)
    dead = row_sum == 0.0
    safe = jnp.where(dead, 1.0, row_sum)
    log = lax.log(safe)
    lse = row_max + log
    excess = log + (row_max - lse)
    return jnp.where(dead, 0.0, 1.0 / safe), jnp.where(dead, -jnp.inf, lse), jnp.where(dead, 0.0, excess)


def finish(row_max, row_sum, *, may_be_dead: bool):
    """(what to multiply the accumulator by, the log-sum-exp in natural log), per row.

    may_be_dead: rows may have met no key at all.
    """
    row_sum = row_sum.sum(axis=1)
    if not may_be_dead:
        return 1.0 / row_sum, (row_max + lax.log(row_sum) * LOG2E) * LN2
    dead = row_sum == 0.0
    safe = jnp.where(dead, 1.0, row_sum)
    inverse = jnp.where(dead, 0.0, 1.0 / safe)
    return inverse, jnp.where(dead, -jnp.inf, (row_max + lax.log(safe) * LOG2E) * LN2)


def merged(lse, other):
    """(the log-sum-exp over the keys of both, the weight of the one, that of the other), per row. -inf: no key."""
    top = jnp.maximum(lse, other)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    mine, theirs = (jnp.exp2((x - top) * LOG2E) for x in (lse, other))
    total = mine + theirs
    dead = total == 0.0
    safe = jnp.where(dead, 1.0, total)
    return jnp.where(dead, -jnp.inf, top + lax.log(safe)), mine / safe, theirs / safe
