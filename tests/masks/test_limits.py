"""How many keys count, of all that says so in a call: what stands past them may be no number."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.attention_inputs import AttentionInputs
from jax_kernels.masks.limits import key_lengths

STRIPES = masks.from_function(lambda b, h, q, k: k % 3 > 0)


def _inputs(mask, kv_lengths):
    x = jnp.zeros((2, 50, 1, 8))
    return AttentionInputs(x, x, x, mask=mask, kv_lengths=None if kv_lengths is None else jnp.asarray(kv_lengths))


@pytest.mark.parametrize(
    ("mask", "kv_lengths", "want"),
    [
        (None, [30, 70], [30, 50]),
        (None, [-3, 0], [0, 0]),
        (masks.prefix(20) & STRIPES, None, [20, 20]),
        (masks.prefix(jnp.asarray([20, 60])) & STRIPES & masks.prefix(40), [30, 35], [20, 35]),
        (masks.prefix(20), [10, 30], [10, 20]),
        (STRIPES & masks.causal(), [10, 30], [10, 30]),
    ],
)
def test_key_lengths(mask, kv_lengths, want):
    np.testing.assert_array_equal(key_lengths(_inputs(mask, kv_lengths)), want)


@pytest.mark.parametrize(
    "mask", [None, STRIPES, masks.prefix(20) | STRIPES, ~masks.prefix(20), jnp.ones((1, 1, 1, 50), bool)]
)
def test_nothing_says_how_many(mask):
    assert key_lengths(_inputs(mask, None)) is None
