"""The Linear of Flax against nnx's own, with its epilogue."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import models

X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 24)), jnp.float32)


def both(**options):
    """The library's module and nnx's, with the same parameters."""
    init = {"bias_init": nnx.initializers.normal(1.0), "rngs": nnx.Rngs(0)}
    return [module(24, 40, **init | {"rngs": nnx.Rngs(0)} | options) for module in (models.Linear, nnx.Linear)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias": False},
        {"dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16},
        {"precision": "highest"},
        {"preferred_element_type": jnp.float32, "dtype": jnp.bfloat16},
    ],
    ids=lambda options: "_".join(options) or "plain",
)
def test_is_that_of_nnx(options):
    mine, theirs = both(**options)
    assert jax.tree.structure(nnx.state(mine)) == jax.tree.structure(nnx.state(theirs))
    got, want = mine(X), theirs(X)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    tolerance = 8 * float(jnp.finfo(options.get("dtype", jnp.float32)).eps)
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, want)), rtol=tolerance, atol=tolerance * 4)
    loss = lambda module, x: jnp.sin(module(x).astype(jnp.float32)).sum()
    gradients = [nnx.grad(loss, argnums=(0, 1))(module, X) for module in (mine, theirs)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(y, np.float32) for y in (a, b))
        assert np.linalg.norm(a - b) <= tolerance * 4 * np.linalg.norm(b)


def test_activation_and_residual():
    mine, theirs = both()
    mine.activation = "silu"
    residual = jnp.ones((3, 5, 40))
    got = nnx.jit(lambda module, x, residual: module(x, residual=residual))(mine, X, residual)
    np.testing.assert_allclose(got, nnx.silu(theirs(X)) + 1, rtol=1e-5, atol=1e-5)


def test_what_runs_as_in_nnx_takes_no_epilogue():
    mine = models.Linear(24, 40, activation="silu", precision="highest", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape("activation, residual: got one with an option of nnx's")):
        mine(X)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_gated_mlp(dtype):
    module = models.GatedMLP(24, 40, dtype=dtype, rngs=nnx.Rngs(0))
    residual = jnp.ones(X.shape)
    got = nnx.jit(lambda module, x: module(x, residual=residual))(module, X)
    gate, up, down = (y.kernel[...] for y in (module.gate_proj, module.up_proj, module.down_proj))
    want = (nnx.silu(X @ gate) * (X @ up)) @ down + 1
    assert got.dtype == (dtype or jnp.float32)
    tolerance = 8 * float(jnp.finfo(got.dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=tolerance, atol=tolerance * 4)
