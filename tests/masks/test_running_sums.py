"""Running sums equal NumPy's at every length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.masks.block_arithmetic import RUN, running_sums


@pytest.mark.parametrize("length", [1, RUN, RUN + 1, 3 * RUN, RUN * RUN + 5])
def test_running_sums(length):
    x = np.random.default_rng(0).random((2, 3, length)) < 0.5
    want = np.cumsum(x, axis=-1)
    for sums in (running_sums, jax.jit(running_sums), jax.vmap(running_sums)):
        got = sums(jnp.asarray(x))
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(running_sums(jnp.asarray(want)), np.cumsum(want, axis=-1))
