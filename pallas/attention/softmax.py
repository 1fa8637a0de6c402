"""The online softmax in base 2: scores times scale * log2(e), so that exp2 is one instruction.

The running state of a tile is (highest, total): the maximum of each row, and partial sums of each row, eight
columns wide. The columns are added up once, at the end: inside the loop no thread waits for another's sum.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
LN2 = math.log(2)
PARTIAL_COLUMNS = 8
# The maximum of a row that has met no key: below any score, and finite, so that -inf - LOWEST is no NaN.
LOWEST = -1e30


def start(rows: int):
    highest = plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    total = plgpu.layout_cast(jnp.zeros((rows, PARTIAL_COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
    return highest, total


def step(scores, state, scale: float):
    """(exp2 of the scores, the new state, the factor for what was accumulated so far). Masked scores are -inf."""
    highest, total = state
    factor = scale * LOG2E
    new = jnp.maximum(highest, scores.max(axis=1) * factor)
    alpha = jnp.exp2(highest - new)
    p = jnp.exp2(scores * factor - lax.broadcast_in_dim(new, scores.shape, [0]))
    parts = [p[:, i : i + PARTIAL_COLUMNS] for i in range(0, p.shape[1], PARTIAL_COLUMNS)]
    while len(parts) > 1:  # a tree, not a chain: additions do not wait for one another
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    total = total * lax.broadcast_in_dim(alpha, total.shape, [0]) + parts[0]
    return p, (new, total), alpha


def finish(state, *, may_be_dead: bool):
    """(what to multiply the accumulator by, the log-sum-exp in natural log), per row.

    may_be_dead: rows may have met no key at all.
    """
    highest, total = state
    total = total.sum(axis=1)
    if not may_be_dead:
        return 1.0 / total, (highest + lax.log(total) * LOG2E) * LN2
    dead = total == 0.0
    safe = jnp.where(dead, 1.0, total)
    inverse = jnp.where(dead, 0.0, 1.0 / safe)
    return inverse, jnp.where(dead, -jnp.inf, (highest + lax.log(safe) * LOG2E) * LN2)
