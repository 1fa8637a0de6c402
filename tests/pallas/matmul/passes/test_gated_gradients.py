"""The kernels that differentiate a gated unit, and that take a magnitude from a history, against float64."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.inputs.matmul import MatmulOptions
from jax_kernels.ops.activations import ACTIVATIONS, derivative_of
from jax_kernels.pallas.matmul.passes.delayed_largest import CHUNK, delayed_largest
from jax_kernels.pallas.matmul.passes.gated_gradients import gated_gradients
from tests.support.interpreters.strict_triton import strict

pytestmark = pytest.mark.triton


def normal(*shape, seed=0, dtype="bfloat16"):
    return jnp.asarray(3 * np.random.default_rng(seed).standard_normal(shape), dtype)


IN_A_KERNEL = [pytest.param(True, id="interpreted"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("interpret", IN_A_KERNEL)
@pytest.mark.parametrize(("shape", "name"), [((3, 5, 200), "silu"), ((64, 64), "gelu"), ((2049,), "relu")])
def test_against_float64(shape, name, interpret):
    activation = ACTIVATIONS[name]
    options = MatmulOptions(out_dtype="bfloat16", activation=activation, derivative=derivative_of(activation))
    g, z, up = (normal(*shape, seed=seed) for seed in range(3))
    with strict() if interpret else contextlib.nullcontext():  # an access past the end gives NaN
        got = gated_gradients(g, z, up, options, interpret=interpret)
    with jax.enable_x64(True):
        of_g, of_z, of_up = (jnp.asarray(np.asarray(x, np.float64)) for x in (g, z, up))
        _, pull = jax.vjp(lambda z, up: activation(z) * up, of_z, of_up)
        wanted = [np.asarray(x) for x in pull(of_g)]
    for found, largest, want in zip((got.z, got.up), (got.largest_z, got.largest_up), wanted, strict=True):
        assert (found.shape, found.dtype) == (g.shape, g.dtype)
        np.testing.assert_allclose(np.asarray(found, np.float64), want, rtol=0.01, atol=1e-5)
        np.testing.assert_allclose(float(largest), np.abs(want).max(), rtol=1e-5)
    bad = gated_gradients(g.at[(0,) * g.ndim].set(jnp.nan), z, up, options, interpret=interpret)
    assert np.isnan([float(bad.largest_z), float(bad.largest_up)]).all()


@pytest.mark.parametrize("interpret", IN_A_KERNEL)
@pytest.mark.parametrize("shape", [(7,), (3, CHUNK - 1)])
def test_delayed_largest(shape, interpret):
    x = normal(*shape).at[(0,) * len(shape)].set(jnp.inf)
    x = x.at[(-1,) * len(shape)].set(jnp.nan)
    run = jax.jit(lambda history, x: delayed_largest(history, x, interpret=interpret))
    own = np.abs(np.asarray(x, np.float32))
    with strict() if interpret else contextlib.nullcontext():
        assert float(run(jnp.zeros(3), x)) == own[np.isfinite(own)].max()
        assert float(run(jnp.array([0.0, 0.5, 0.25], jnp.float32), x)) == 0.5
        assert float(run(jnp.zeros(3), jnp.zeros(shape, jnp.bfloat16))) == 0.0
