"""A bias for each key: base 2 for the Hopper forward, and recovered from lse for the backward."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.pallas.attention.sm90.features.bias import LOWEST_OF_KEY, ByKey
from jax_kernels.pallas.attention.softmax import LN2, LOG2E, LOWEST

FLOAT32, BFLOAT16 = float(jnp.finfo(jnp.float32).min), float(jnp.finfo(jnp.bfloat16).min)


def test_finite_values_stay_finite():
    bias = jnp.asarray([FLOAT32, BFLOAT16, -1e30, -1e9, 0.5, -jnp.inf, jnp.inf])[None, None, None]
    by_key = jax.jit(ByKey.of)(bias)
    base2 = np.asarray(by_key.base2[0, 0])
    assert (base2[:2] == np.float32(LOWEST_OF_KEY)).all()
    assert LOWEST_OF_KEY > LOWEST
    np.testing.assert_array_equal(base2[2:], np.asarray(bias[0, 0, 0, 2:]) * np.float32(LOG2E))
    natural = np.asarray(by_key.natural[0, 0])
    np.testing.assert_array_equal(natural[:2], np.float32(BFLOAT16))  # the higher of the two minima
    np.testing.assert_array_equal(natural[2:], base2[2:] * np.float32(LN2))


def test_lse_of_rows_with_only_lowest_keys():
    bias = jnp.asarray([[FLOAT32, FLOAT32], [-1e30, 0.0]])[:, None, None]
    low = np.float32(LOWEST_OF_KEY) * np.float32(LN2)
    lse = jnp.asarray([[low, -jnp.inf, 3.0], [-1e30, -jnp.inf, 3.0]])[:, None]
    got = ByKey.of(bias).in_lse(lse)
    np.testing.assert_array_equal(got[:, 0], np.float32([[FLOAT32, -np.inf, 3], [-1e30, -np.inf, 3]]))
