"""The largest result that a score_mod's graph implies, against the actual results."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention.sm90.features.score_mod import mod_of
from jax_kernels.pallas.attention.sm90.forward import launch as forward_sm90
from jax_kernels.score_mod.trace import trace
from tests.support.cases import score_mods as score_mod_cases

BATCH, HEADS, LENGTH, LARGEST = 2, 4, 24, 3.0
LOG2E = math.log2(math.e)


def choice(score, b, h, q, k, slopes):
    return jnp.where(k % 3 == 0, jnp.minimum(score, 2.0), -(jnp.maximum(q - k, 3) * slopes[h]) / 4 - jnp.abs(score))


def gate(score, b, h, q, k, slopes):
    return 5 * jax.nn.sigmoid(score) - jnp.sign(score) * slopes[h]


def near(score, b, h, q, k, slopes):
    return score + jnp.minimum(jnp.abs(k - q), 5) * slopes[h]


def after(score, b, h, q, k, table):
    """The result is large for later keys."""
    return score + jnp.where(q < k, 100.0, table[h, q - k])


MODS = score_mod_cases.MODS | {"choice": choice, "gate": gate, "near": near, "after": after}
# No bound follows for sums with an array that has an axis of keys, for a key's index, and for powers.
UNKNOWN = {"lowest_of_key", "of_key", "of_query", "packed", "many", "singular", "over"}
CAUSAL_ONLY = {"alibi", "alibi_of_heads", "choice", "near"}


def arrays_of(mod):
    random = np.random.default_rng(1)
    sizes = {"slopes": (HEADS,), "temperature": (HEADS,), "columns": (BATCH, LENGTH), "rows": (BATCH, LENGTH)}
    sizes |= {
        "padding": (BATCH, LENGTH),
        "table": (HEADS, 81),
        "embedding": (32, HEADS),
        "diagonals": (BATCH, 2 * LENGTH),
    }
    names = mod.__code__.co_varnames[5 : mod.__code__.co_argcount]
    return {name: jnp.asarray(random.standard_normal(sizes[name]), jnp.float32) for name in names}


def mod_and_inputs(mod):
    arrays = arrays_of(mod)
    x = jnp.zeros((BATCH, LENGTH, HEADS, 64), jnp.bfloat16)
    inputs = AttentionInputs(x, x, x)._replace(score_mod=trace(lambda *indices: mod(*indices, **arrays)))
    return mod_of(inputs, AttentionOptions(scale=0.5, is_causal=True), 64, 64), arrays


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_bound_is_not_exceeded(name, is_causal):
    mod, arrays = mod_and_inputs(MODS[name])
    sizes = jnp.full((BATCH, HEADS), LARGEST)
    highest = mod.highest(sizes, LENGTH, no_later_keys=is_causal)
    if name in UNKNOWN or (name in CAUSAL_ONLY and not is_causal):
        assert highest is None
        return
    scores = jax.random.uniform(jax.random.key(0), (50, BATCH, HEADS, LENGTH, LENGTH), minval=-LARGEST, maxval=LARGEST)
    indices = [jnp.asarray(x) for x in np.ix_(*map(np.arange, scores.shape[1:]))]
    results = MODS[name](scores, *indices, **arrays)
    if is_causal:
        results = jnp.where(indices[3] <= indices[2], results, -jnp.inf)
    most = results.max(axis=(0, 3, 4))
    highest = jnp.broadcast_to(highest, most.shape)
    assert (most <= highest + 1e-5).all()
    assert (highest - most < 2).all(), "it is loose"


def test_softcap_bounds_without_scores():
    mod, _ = mod_and_inputs(score_mod_cases.softcap)
    assert mod.highest(None, LENGTH, no_later_keys=False) == pytest.approx(20)
    assert mod_and_inputs(score_mod_cases.alibi)[0].highest(None, LENGTH, no_later_keys=True) is None


@pytest.mark.parametrize("length", [1.0, 3.0, 10.0])
def test_heads_with_small_scores_are_separated(length):
    """Scores reach length^2 / 8 for head 0, a fourth of this for head 1. The polynomial serves 0.75 of the cap."""
    query = jnp.zeros((1, 8, 2, 64), jnp.bfloat16).at[0, :, 0, 0].set(length).at[0, :, 1, 0].set(length / 4)
    key = jnp.zeros((1, 8, 1, 64), jnp.bfloat16).at[..., 0].set(length)
    options = AttentionOptions(scale=1 / 8, softcap=3.0)
    largest, small = forward_sm90._bounds(query, key, None, options, no_later_keys=False, interpret=True)
    scores = np.asarray([[length**2 / 8, length**2 / 32]])
    assert small.tolist() == (scores <= 0.75 * 3.0).astype(int).tolist()
    np.testing.assert_allclose(largest, np.minimum(scores, 3.0) * LOG2E, rtol=2e-4)


def test_large_softcap_serves_small_scores():
    mod, _ = mod_and_inputs(lambda score, b, h, q, k: 50.0 * jnp.tanh(score / 50.0))
    assert mod.highest(None, LENGTH, no_later_keys=False) == pytest.approx(50)
    query = jnp.ones((BATCH, 8, HEADS, 64), jnp.bfloat16)
    options = AttentionOptions(scale=1 / 8)
    largest, small = forward_sm90._bounds(query, query, mod, options, no_later_keys=False, interpret=True)
    np.testing.assert_allclose(largest, np.full((BATCH, HEADS), 50 * math.tanh(8 / 50) * LOG2E), rtol=2e-4)
    assert small.all()
