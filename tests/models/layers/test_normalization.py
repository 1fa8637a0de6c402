"""Flax's norms of this library against nnx's own: results, gradients, parameters, and unsupported calls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import models
from jax_kernels.models.layers.normalization import with_input

MODULES = {"layer_norm": (models.LayerNorm, nnx.LayerNorm), "rms_norm": (models.RMSNorm, nnx.RMSNorm)}
SHAPE = (3, 5, 40)


def both(name, **options):
    """The library's module and nnx's, with the same random parameters."""
    init = {"scale_init": nnx.initializers.normal(1.0)}
    init |= {"bias_init": nnx.initializers.normal(1.0)} if name == "layer_norm" else {}
    return [module(SHAPE[-1], rngs=nnx.Rngs(0), **init | options) for module in MODULES[name]]


def inputs(dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(SHAPE) + 2, dtype)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("float32", {"dtype": jnp.bfloat16}),
        ("bfloat16", {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}),
        ("float32", {"use_scale": False, "epsilon": 1e-3}),
    ],
)
def test_matches_nnx(name, dtype, options):
    x, (mine, theirs) = inputs(dtype), both(name, **options)
    assert jax.tree.structure(nnx.state(mine)) == jax.tree.structure(nnx.state(theirs))
    loss = lambda module, x: jnp.sin(module(x).astype(jnp.float32)).sum()
    got, want = mine(x), theirs(x)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    tolerance = 4 * float(jnp.finfo(got.dtype).eps)
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, want)), rtol=tolerance, atol=tolerance * 4)
    gradients = [nnx.grad(loss, argnums=(0, 1))(module, x) for module in (mine, theirs)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(y, np.float32) for y in (a, b))
        # nnx computes the variance from the mean square, whose rounding counts.
        assert np.linalg.norm(a - b) <= 16 * float(jnp.finfo(got.dtype).eps) * max(1, np.linalg.norm(b)), name


@pytest.mark.parametrize("name", MODULES)
def test_residual(name):
    x, residual, (mine, theirs) = inputs("float32"), inputs("float32", 1), both(name)
    out, total = nnx.jit(lambda module, x, residual: module(x, residual=residual))(mine, x, residual)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_allclose(out, theirs(x + residual), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_scale_offset(name):
    x, options = inputs("float32"), {"bias_init": nnx.initializers.normal(1.0)} if name == "layer_norm" else {}
    mine, theirs = (
        module(SHAPE[-1], scale_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0), **options, **more)
        for module, more in zip(MODULES[name], ({"scale_offset": 1.0}, {}), strict=True)
    )
    theirs.scale[...] = theirs.scale[...] + 1
    np.testing.assert_allclose(mine(x), theirs(x), rtol=1e-5, atol=1e-5)
    out, total = mine(x, residual=x)
    np.testing.assert_allclose(out, theirs(total), rtol=1e-5, atol=1e-5)
    loss = lambda module, x: jnp.sin(module(x)).sum()
    gradients = [nnx.grad(loss, argnums=(0, 1))(module, x) for module in (mine, theirs)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_scale_offset_starts_at_identity(name):
    mine, theirs = (kind(SHAPE[-1], rngs=nnx.Rngs(0), **more)
                    for kind, more in zip(MODULES[name], ({"scale_offset": 1.0}, {}), strict=True))  # fmt: skip
    np.testing.assert_array_equal(mine.scale[...], jnp.zeros(SHAPE[-1]))
    np.testing.assert_allclose(mine(inputs("float32")), theirs(inputs("float32")), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_wide_residual_widens_the_sum(name):
    x, residual = inputs("bfloat16"), jnp.full(SHAPE, 1 + 2**-12, jnp.float32)
    module = MODULES[name][0](SHAPE[-1], param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    out, total = module(x, residual=residual)
    assert out.dtype == total.dtype == jnp.float32
    np.testing.assert_array_equal(total, x + residual)


@pytest.mark.parametrize("name", MODULES)
def test_other_options_run_as_in_nnx(name):
    x, mask = inputs("float32"), np.random.default_rng(2).random(SHAPE) < 0.7
    mine, theirs = both(name)
    np.testing.assert_array_equal(mine(x, mask=mask), theirs(x, mask=mask))
    with pytest.raises(ValueError, match=re.escape("residual: got one with a mask, with axes other than the last")):
        mine(x, mask=mask, residual=x)
    mine, theirs = both(name, reduction_axes=(-2, -1))
    np.testing.assert_array_equal(mine(x), theirs(x))
    mine.scale_offset = 1.0
    with pytest.raises(ValueError, match=re.escape("scale_offset: got 1.0 with a mask or other axes, want 0.0")):
        mine(x)


@pytest.mark.parametrize("name", MODULES)
def test_kernels_run(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    x, (mine, theirs) = inputs("float32"), both(name)
    mine.implementation = "triton"
    program = str(jax.make_jaxpr(lambda x: mine(x))(x))
    assert "norm_forward_triton" in program
    np.testing.assert_allclose(mine(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.triton
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_with_input_adds_the_cotangents_of_x(implementation, monkeypatch):
    """(norm(x), x): the gradients of a residual branch, also of x in another dtype than the norm's."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for options in ({}, {"dtype": jnp.bfloat16}):
        init = {"scale_init": nnx.initializers.normal(1.0)}
        module = models.RMSNorm(SHAPE[-1], rngs=nnx.Rngs(0), implementation=implementation, **init | options)
        x = inputs("float32")

        def loss(module, x, pair):
            normed, same = pair(module, x)
            return (jnp.sin(normed.astype(jnp.float32)) + jnp.cos(3 * same)).sum()

        got, want = (nnx.grad(loss, argnums=(0, 1))(module, x, pair) for pair in (with_input, lambda f, x: (f(x), x)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
