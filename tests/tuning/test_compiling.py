"""jax_kernels.tuning.compiling: programs in their order, with the errors of the ones that do not compile."""

import threading

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.tuning.compiling import compiled
from jax_kernels.tuning.timers import Program


def program(function, x=None):
    jitted = jax.jit(function)
    lower = None if x is None else lambda: (jitted.lower(x), (x,))
    return Program(implementation="xla", config=None, direction="forward", call=lambda: jitted(x), lower=lower)


def test_order_and_errors():
    def refused(x):
        raise ValueError("x: got 2 values, want 3")

    x = jnp.arange(2.0)
    other = program(lambda _: 7)
    found = compiled([program(lambda x: x + 1, x), program(refused, x), other, program(lambda x: x * 5, x)])
    np.testing.assert_array_equal(found[0].call(), x + 1)
    assert isinstance(found[1], ValueError)
    assert found[2] is other
    np.testing.assert_array_equal(found[3].call(), x * 5)


def test_settings_of_the_calling_thread():
    """Lowering sees a jax context of the caller; tracing runs once, in the caller's thread."""
    threads = []

    def double(x):
        threads.append(threading.current_thread())
        return x * np.float64(2)

    with jax.enable_x64(True):
        (found,) = compiled([program(double, jnp.arange(3, dtype=jnp.float64))])
        assert found.call().dtype == jnp.float64
        found.call()
    assert threads == [threading.main_thread()]
