"""The values that a score_mod reads beforehand, and the scores computed from them, against the score_mod itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.score_mod.tile_reads import split
from jax_kernels.score_mod.trace import trace

B, H, T, S = 2, 3, 11, 17
RANDOM = np.random.default_rng(0)
TABLE = jnp.asarray(RANDOM.standard_normal((H, T + S - 1)), jnp.float32)
LINE = TABLE[0]
SHIFT = jnp.asarray([3, -2, 5], jnp.int32)
KEEP = jnp.asarray(RANDOM.random(T + S) < 0.7)
far = jax.jit(lambda x, y: jnp.clip(x - y, -4, 3))

# The term added to the score, and the axes along which each of its operands varies.
OF_DIFFERENCES = {
    "plain": (lambda b, h, q, k: TABLE[h, q - k + S - 1], ["hd"]),
    "other_way": (lambda b, h, q, k: TABLE[h, k - q + T - 1], ["hd"]),
    "added_first": (lambda b, h, q, k: LINE[(q + S - 1) - k], ["d"]),
    "by_parts": (lambda b, h, q, k: LINE[q + (4 - k)] + LINE[-(k + 1 - q) + 9], ["d"]),
    "of_head": (lambda b, h, q, k: LINE[SHIFT[h] + q + S - k], ["hd"]),
    "of_entry": (lambda b, h, q, k: TABLE[b, jnp.abs(q - k)] * SHIFT[h], ["bhd"]),
    "within_jit": (lambda b, h, q, k: LINE[far(q, k) + far(k, q) * 2 + 9], ["d"]),
    "cancelled": (lambda b, h, q, k: LINE[(q + k) - 2 * k + S - 1], ["d"]),
    "scaled": (lambda b, h, q, k: LINE[2 * (q - k) // 2 + S - 1], ["d"]),
    "negative": (lambda b, h, q, k: LINE[q - k], ["d"]),
    "vectors": (lambda b, h, q, k: LINE[jnp.stack([q - k, k - q]) + S - 1].sum(), ["d"]),
    "compared": (lambda b, h, q, k: LINE[jnp.where(q + 1 > k, 3, 0) + jnp.abs(q - k) // 4], ["d"]),
    "taken": (lambda b, h, q, k: jnp.take(LINE, q - k, mode="fill", fill_value=0.5), ["d"]),
    "function": (lambda b, h, q, k: jnp.exp(-jnp.square(q - k) * LINE[h]), ["hd"]),
    "custom": (lambda b, h, q, k: jax.nn.silu((q - k) / 4.0), ["d"]),
    "kept": (lambda b, h, q, k: jnp.where(KEEP[q - k + S - 1], 0.0, -9.0), ["d"]),
    "beside_others": (lambda b, h, q, k: TABLE[h, q - k + S - 1] + LINE[q] * LINE[k + h], ["hd", "q", "hk"]),
    # Cheap functions are computed for each pair.
    "alibi": (lambda b, h, q, k: -jnp.abs(q - k) * LINE[h], ["h"]),
    "window": (lambda b, h, q, k: jnp.where((q - k < 5) & (k <= q), LINE[h], -9.0), ["h"]),
}
NOT = {
    "sum": lambda b, h, q, k: LINE[q + k],
    "twice": lambda b, h, q, k: LINE[2 * q - k],
    "largest": lambda b, h, q, k: LINE[jnp.maximum(q, k)],
    "blocks": lambda b, h, q, k: LINE[q // 4 - k // 4 + S - 1],
    "floats": lambda b, h, q, k: LINE[(q * 1.0 - k * 1.0).astype(jnp.int32) + S - 1],
    "factor_of_head": lambda b, h, q, k: LINE[q * SHIFT[h] - k * SHIFT[h]],
    "shifts": lambda b, h, q, k: LINE[(q + SHIFT[q % 3]) - k],
    "narrow": lambda b, h, q, k: LINE[q.astype(jnp.int8) - k.astype(jnp.int8)],
    # The sums on both sides may wrap around, while the sum with the difference does not.
    "compared_with_arrays": lambda b, h, q, k: LINE[jnp.where(q + SHIFT[h] > k, 1, 0)],
    "compared_with_large": lambda b, h, q, k: LINE[jnp.where(q + (2**31 - 4) > k, 1, 0)],
}


def added(bias):
    return trace(lambda score, b, h, q, k: score + bias(b, h, q, k))


@pytest.mark.parametrize("name", OF_DIFFERENCES)
def test_parts_sum_to_the_score_mod(name):
    bias, axes = OF_DIFFERENCES[name]
    mod, scores = added(bias), jnp.asarray(RANDOM.standard_normal((B, H, T, S)), jnp.float32)
    parts = split(mod, mosaic=True)
    assert sorted("".join(sorted(of_read, key="bhqkd".index)) for _, of_read in parts.reads) == sorted(axes)
    b, h, q, k = np.ix_(*map(np.arange, scores.shape))
    of_pairs = []
    for x, (_, of_read) in zip(parts.operands(mod.arrays, scores.shape), parts.reads, strict=True):
        if "d" in of_read:
            assert x.shape == (B if "b" in of_read else 1, H if "h" in of_read else 1, T + S - 1)
            x = x[b if "b" in of_read else 0, h if "h" in of_read else 0, q - k + S - 1]
        of_pairs.append(jnp.broadcast_to(x, scores.shape))
    got = [
        [parts(scores[b, h], b, h, *tile_indices(), [x[b, h] for x in of_pairs]) for h in range(H)] for b in range(B)
    ]
    np.testing.assert_allclose(jnp.asarray(got), mod(scores, jnp.arange(T)), rtol=1e-6, atol=1e-6)


def tile_indices():
    return tuple(jnp.asarray(x) for x in np.broadcast_arrays(*np.ix_(np.arange(T), np.arange(S))))


@pytest.mark.parametrize("name", NOT)
def test_other_reads_are_refused(name):
    with pytest.raises(NotImplementedError, match="it takes look-ups by query, by key or by their difference, not by "):
        split(added(NOT[name]), mosaic=True)


@pytest.mark.parametrize("name", ["plain", "within_jit", "taken"])
def test_triton_has_no_relative_reads(name):
    with pytest.raises(NotImplementedError, match="it takes look-ups by query or by key, not by both or by the score"):
        split(added(OF_DIFFERENCES[name][0]))


def test_jitted_function_arrays_belong_to_the_mod():
    plain = lambda score, b, h, q, k: score * 0.5 + LINE[q - k + S - 1]
    twice = jax.jit(lambda *given: jax.jit(plain)(*given))
    want, got = trace(plain), trace(twice)
    assert [x.shape for x in got.arrays] == [x.shape for x in want.arrays] == [LINE.shape]
    assert [str(x.primitive) for x in got.program.eqns if str(x.primitive) == "jit"] == []
    scores, q_idx = jnp.ones((B, H, T, S)), jnp.arange(T)
    np.testing.assert_array_equal(got(scores, q_idx), want(scores, q_idx))
    assert len(split(got, mosaic=True).reads) == 1
