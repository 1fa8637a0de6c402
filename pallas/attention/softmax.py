"""The online softmax of the Hopper kernels in base 2: scores times scale * log2(e), so that exp2 is one instruction.

With a bias per query, scores are in natural units instead. A bias of finfo.min means to mask: times log2(e) it would be
-inf, and the maximum of a row that it masks whole must be subtracted from the row's scores without rounding.

The running state of a tile is (row_max, row_sum): the maximum of each row, float32 [rows], and partial sums of each
row's P, float32 [rows, 8]. The 8 columns are added up once, at the end: inside the loop no thread waits for another
thread's sum.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
LOG2E = math.log2(math.e)
LN2 = math.log(2)
PARTIAL_COLUMNS = 8
# The maximum of a row that has met no key. It is below any score, even under a bias of -1e30 that means to mask, and
# finite, so that -inf - LOWEST is not NaN.
LOWEST = -3e38
# In natural units: only -inf is a lower score.
LOWEST_NATURAL = float(jnp.finfo(jnp.float32).min)
# Up to this magnitude the rounding of a score or of lse is at most 2**-10 in base 2.
NEAR = 2.0**13


def is_large(lse):
    """Whether each lse, in natural units, is so large (above 2**13) that its rounding matters: bool, in lse's shape.

    Example: a bias of -1e9 masks all keys of a query.
    """
    return jnp.isfinite(lse) & (jnp.abs(lse) > NEAR)


def start(rows: int, *, natural: bool = False):
    """(row_max, row_sum) of `rows` rows that have met no key, in registers.

    row_max: float32 [rows], a finite value that is not above any finite score. row_sum: float32 [rows,
    PARTIAL_COLUMNS], zeros. natural: row_max is for scores in natural units, not in base 2.
    """
    lowest = jnp.full((rows,), LOWEST_NATURAL if natural else LOWEST, jnp.float32)
    row_max = plgpu.layout_cast(lowest, WGMMA.reduce(1))
    return row_max, plgpu.layout_cast(jnp.zeros((rows, PARTIAL_COLUMNS), jnp.float32), WGMMA)


def step(scores, row_max, row_sum, scale, largest: float = 0.0):
    """(P, new row_max, new row_sum, alpha) after a block of scores [rows, keys].

    scores: before the factor `scale`; masked scores are -inf. P = exp2(scores * scale * log2(e) - new row_max),
    float32. row_max: [rows], the maximum so far in base 2. row_sum: [rows, PARTIAL_COLUMNS], partial sums of P so far.
    alpha: [rows], the factor for the caller's earlier sum of P @ value. largest: log2 of the largest P that may occur;
    row_max is lower than the largest score by it.
    """
    factor = scale * LOG2E
    top = scores.max(axis=1) * factor
    new = jnp.maximum(row_max, top - largest if largest else top)
    alpha = jnp.exp2(row_max - new)
    p = jnp.exp2(scores * factor - lax.broadcast_in_dim(new, scores.shape, [0]))
    return p, new, row_sum * lax.broadcast_in_dim(alpha, row_sum.shape, [0]) + _row_sums(p), alpha


def natural_step(scores, row_max, row_sum):
    """(P, new row_max, new row_sum, alpha) after a block of scores [rows, keys] in natural units; row_max is too.

    P = exp(scores - new row_max), float32. Masked scores are -inf. row_sum: [rows, PARTIAL_COLUMNS], partial sums of P.
    alpha: [rows], the factor for the caller's earlier sum of P @ value.
    """
    new = jnp.maximum(row_max, scores.max(axis=1))
    alpha = jnp.exp2((row_max - new) * LOG2E)
    p = jnp.exp2((scores - lax.broadcast_in_dim(new, scores.shape, [0])) * LOG2E)
    return p, new, row_sum * lax.broadcast_in_dim(alpha, row_sum.shape, [0]) + _row_sums(p), alpha


def lazy_step(scores, row_max, row_sum, scale, largest: float, limit: float, any_above):
    """(P, new row_max, new row_sum, alpha, rises), where the maximum is renewed only if P would rise above 2**limit.

    P = exp2(scores * scale * log2(e) - new row_max), float32. scores: [rows, keys], before the factor `scale`; masked
    scores are -inf. row_max: [rows], in base 2. row_sum: [rows, PARTIAL_COLUMNS], partial sums of P. rises: a bool
    scalar, whether the maximum was renewed. Only then is alpha, [rows], the factor for the caller's earlier sum of P @
    value; otherwise alpha has no meaning. largest: log2 of the largest P just after the maximum is renewed.
    any_above(values [rows, PARTIAL_COLUMNS], limits [rows]): whether any value is above its row's limit, one result for
    all threads that branch together.
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
    """(P, new row_sum) under a fixed maximum row_max: no search for the maximum, and no rescaling.

    P = exp2(scores * scale * log2(e) - row_max), float32. row_max: [rows], in base 2. row_sum: [rows, PARTIAL_COLUMNS],
    partial sums of P. Valid if no score, in base 2, is more than `headroom` of P's dtype above row_max.
    """
    p = jnp.exp2(scores * (scale * LOG2E) - lax.broadcast_in_dim(row_max, scores.shape, [0]))
    return p, row_sum + _row_sums(p)


def _row_sums(p):
    """The partial sums of each row of P: [rows, PARTIAL_COLUMNS], added as a tree, so that additions do not wait."""
    return _tree(jnp.add, _parts(p))


def _parts(x):
    """The array's columns in groups of PARTIAL_COLUMNS."""
    return [x[:, i : i + PARTIAL_COLUMNS] for i in range(0, x.shape[1], PARTIAL_COLUMNS)]


def _tree(combine, parts):
    """Combines the parts pairwise until one is left."""
    while len(parts) > 1:
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def headroom(dtype) -> float:
    """The headroom: the largest distance, in base 2, of a row's bound above the maximum of its first block.

    The bound is a value that no score of the row exceeds. Up to this distance, bounded_step may be used for the row's
    other blocks. dtype: of P in the matmul with V. With bfloat16 the row's maximum is raised to the bound, and P
    becomes as small as 2**-headroom, which bfloat16 can hold. With float16 the maximum stays, and P becomes as large as
    2**headroom. P and its sums can hold that, because float16 values are below 2**16.
    """
    return 60.0 if dtype == jnp.bfloat16 else 15.0


def rescaled_to_bound(p, row_max, row_sum, largest):
    """(P, row_max, row_sum) of a row's first block, changed to a maximum that no score of the row exceeds.

    p, row_max, row_sum: of the first block, under its own maximum. largest: an upper bound of the row's scores in base
    2, at most the headroom (`headroom`) of P's dtype above row_max. P is then at most 1, as with a running maximum: a P
    of up to 2**headroom would overflow with values above 2**47, which bfloat16 has. A row's largest P is above
    2**-headroom / 2, so that it does not underflow with values above 1e-19. The maximum rises by a whole number, so
    that a P of 1 becomes a power of two, which bfloat16 holds exactly: if one key has nearly all the weight of a row,
    the rounding of its P would be the largest error.
    """
    distance = jnp.maximum(largest - row_max, 0.0)
    whole = distance.astype(jnp.int32).astype(jnp.float32)
    bound = row_max + jnp.where(whole < distance, whole + 1.0, whole)
    factor = jnp.exp2(row_max - bound)
    wide = lambda x: lax.broadcast_in_dim(factor, x.shape, [0])
    return p * wide(p), bound, row_sum * wide(row_sum)


def largest_scores(longest_queries, longest_keys, scale: float):
    """An upper bound of each head's scores in base 2: float32 [B, H].

    longest_queries, longest_keys: the largest squared norm of a query row [B, H] and of a key row [B, Hkv].
    """
    keys = jnp.repeat(longest_keys, longest_queries.shape[1] // longest_keys.shape[1], axis=1)
    return jnp.sqrt(longest_queries * keys) * (scale * LOG2E * (1 + 1e-4))


def norms(parts):
    """The Euclidean norm of each row of a matrix of 16-bit values: float32 [rows]. parts: arrays of its columns."""
    squares = [jnp.square(part.astype(jnp.float32)).sum(axis=1) for part in parts]
    return jnp.sqrt(_tree(jnp.add, squares))


def with_sink(row_max, row_sum, sink, *, natural: bool = False):
    """(new row_max, new row_sum, factor for the caller's earlier sum of P @ value) after a sink joins the denominator.

    sink: a logit in natural units, per row. row_sum: [rows, PARTIAL_COLUMNS], partial sums of P. natural: row_max is in
    natural units, not in base 2.
    """
    sink = sink if natural else sink * LOG2E
    exp2 = lambda x: jnp.exp2(x * LOG2E if natural else x)
    new = jnp.maximum(row_max, sink)
    alpha = exp2(row_max - new)
    # The final sum adds the columns: each column gets an equal part of the sink.
    wide = lambda x: lax.broadcast_in_dim(x, row_sum.shape, [0])
    return new, row_sum * wide(alpha) + wide(exp2(sink - new) / PARTIAL_COLUMNS), alpha


def finish_exactly(row_max, row_sum, *, natural: bool):
    """(factor for the accumulator, lse, lse_lo), per row, for rows that may have met no key.

    lse: the log-sum-exp in natural log, rounded; it has 24 bits and loses the log of the sums next to a maximum of
    -1e9. lse_lo: the exact log-sum-exp minus lse. A row without a key has factor 0, lse -inf and lse_lo 0. natural:
    row_max is in natural units.
    """
    row_sum = row_sum.sum(axis=1)
    # Round the maximum: a fused multiply-add would keep bits that the backward's scores do not have.
    row_max = row_max if natural else lax.optimization_barrier(row_max * LN2)
    dead = row_sum == 0.0
    safe = jnp.where(dead, 1.0, row_sum)
    log = lax.log(safe)
    lse = row_max + log
    lse_lo = log + (row_max - lse)
    return jnp.where(dead, 0.0, 1.0 / safe), jnp.where(dead, -jnp.inf, lse), jnp.where(dead, 0.0, lse_lo)


def finish(row_max, row_sum, *, may_be_dead: bool):
    """(factor for the accumulator, lse in natural log), per row, at the end of the loop over keys.

    may_be_dead: rows may have met no key; their factor is 0 and their lse -inf.
    """
    row_sum = row_sum.sum(axis=1)
    if not may_be_dead:
        return 1.0 / row_sum, (row_max + lax.log(row_sum) * LOG2E) * LN2
    dead = row_sum == 0.0
    safe = jnp.where(dead, 1.0, row_sum)
    inverse = jnp.where(dead, 0.0, 1.0 / safe)
    return inverse, jnp.where(dead, -jnp.inf, (row_max + lax.log(safe) * LOG2E) * LN2)


def merged(lse, other):
    """(lse over both sets of keys, weight of the first result, weight of the second result), per row.

    lse, other: of two results for the same queries over different keys; -inf: no key.
    """
    top = jnp.maximum(lse, other)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    mine, theirs = (jnp.exp2((x - top) * LOG2E) for x in (lse, other))
    total = mine + theirs
    dead = total == 0.0
    safe = jnp.where(dead, 1.0, total)
    return jnp.where(dead, -jnp.inf, top + lax.log(safe)), mine / safe, theirs / safe
