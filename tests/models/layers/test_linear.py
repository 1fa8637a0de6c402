"""Flax's Linear of this library against nnx's own, with its epilogue."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import gated_matmul, matmul, models

X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 24)), jnp.float32)


def linear(module=models.Linear, **options):
    return module(24, 40, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0), **options)


def both(**options):
    """The library's module and nnx's, with the same parameters."""
    return [linear(module, **options) for module in (models.Linear, nnx.Linear)]


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
def test_matches_nnx(options):
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


def test_nnx_options_exclude_an_epilogue():
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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_bf16_and_fp16_precision(precision):
    module, mlp = (kind(24, 40, precision=precision, rngs=nnx.Rngs(0)) for kind in (models.Linear, models.GatedMLP))
    for got, plain in ((module(X), X @ module.kernel[...]), (mlp(X), models.GatedMLP(24, 40, rngs=nnx.Rngs(0))(X))):
        assert got.dtype == jnp.float32
        assert 0 < distance(got, plain) < 0.02


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_wide_residual(dtype):
    """A wide residual counts with its full precision, if the module has no dtype."""
    x, residual = X.astype(jnp.bfloat16), jnp.full((*X.shape[:-1], 24), 1 + 2**-12)
    options = {"dtype": dtype, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    for module in (models.Linear(24, 24, use_bias=False, **options), models.GatedMLP(24, 40, **options)):
        for kernel in jax.tree.leaves(nnx.state(module)):
            assert kernel.dtype == jnp.bfloat16
        nnx.update(module, jax.tree.map(jnp.zeros_like, nnx.state(module)))
        got = module(x, residual=residual)
        want = residual if dtype is None else jnp.ones_like(residual, jnp.bfloat16)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_bad_options():
    rngs = {"rngs": nnx.Rngs(0)}
    with pytest.raises(ValueError, match=re.escape("use_bias: got True, want False: a GatedMLP has no biases")):
        models.GatedMLP(8, 16, use_bias=True, **rngs)
    for name, option in (("dot_general", jnp.dot), ("preferred_element_type", jnp.float32)):
        with pytest.raises(ValueError, match=f"{name}: got one, want None"):
            models.GatedMLP(8, 16, **{name: option}, **rngs)
    with pytest.raises(ValueError, match="precision: got 'highest', want 'fp32'"):
        models.GatedMLP(8, 16, precision="highest", **rngs)
    for module in (models.Linear, models.GatedMLP):
        with pytest.raises(ValueError, match="activation: got 'gelo', want a function or one of"):
            module(8, 16, activation="gelo", **rngs)
    with pytest.raises(TypeError, match=re.escape("residual: got builtins.list, want a jax.Array")):
        models.Linear(8, 4, **rngs)(jnp.ones((2, 8)), residual=[[0.0] * 4] * 2)


EIGHT_BITS = [(None, None), ("row", jnp.bfloat16), pytest.param("block", jnp.float16, marks=pytest.mark.slow)]


def distance(got, want):
    got, want = (np.asarray(y, np.float64) for y in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize(("scaling", "dtype"), EIGHT_BITS)
def test_fp8_matmul(scaling, dtype):
    mine, theirs = linear(dtype=dtype, precision="fp8", scaling=scaling), linear(nnx.Linear, dtype=dtype)
    assert jax.tree.structure(nnx.state(mine)) == jax.tree.structure(nnx.state(theirs))
    mine.activation, residual = "silu", jnp.ones((3, 5, 40), dtype)
    number, kernel, bias = dtype or jnp.float32, mine.kernel[...], mine.bias[...]
    loss = lambda module, x: jnp.sin(module(x, residual=residual).astype(jnp.float32)).sum()
    got, gradients = mine(X, residual=residual), nnx.grad(loss, argnums=(0, 1))(mine, X)
    assert got.dtype == number
    x, kernel = X.astype(number), kernel.astype(number)
    want = matmul(
        x, kernel, bias=bias, activation="silu", residual=residual.astype(number), precision="fp8", scaling=scaling
    )
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    plain = lambda module, x: jnp.sin((nnx.silu(module(x)) + residual).astype(jnp.float32)).sum()
    assert 0 < distance(got, nnx.silu(theirs(X)) + residual) < 0.05
    for a, b in zip(*map(jax.tree.leaves, (gradients, nnx.grad(plain, argnums=(0, 1))(theirs, X))), strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) < 0.15


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_fp8_gradients_under_jit(scaling):
    module = linear(precision="fp8", scaling=scaling)
    gradient = nnx.grad(lambda module, x: (module(x) ** 2).sum(), argnums=(0, 1))
    for a, b in zip(*map(jax.tree.leaves, (gradient(module, X), nnx.jit(gradient)(module, X))), strict=True):
        assert distance(a, b) < 0.02  # a last bit may change an 8-bit value


@pytest.mark.parametrize(("scaling", "dtype"), EIGHT_BITS)
def test_fp8_gated_mlp(scaling, dtype):
    module = models.GatedMLP(24, 40, dtype=dtype, precision="fp8", scaling=scaling, rngs=nnx.Rngs(0))
    residual = jnp.ones(X.shape, dtype)
    got = module(X, residual=residual)
    projections = (module.gate_proj, module.up_proj, module.down_proj)
    x, gate, up, down = (y.astype(got.dtype) for y in (X, *(projection.kernel[...] for projection in projections)))
    options = {"precision": "fp8", "scaling": scaling}
    want = matmul(gated_matmul(x, gate, up, **options), down, residual=residual.astype(got.dtype), **options)
    assert got.dtype == (dtype or jnp.float32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    plain = models.GatedMLP(24, 40, dtype=dtype, rngs=nnx.Rngs(0))
    assert 0 < distance(got, plain(X, residual=residual)) < 0.1


def test_fp8_bad_options():
    with pytest.raises(ValueError, match=re.escape("scaling='row' must be None with precision=None: it is for 'fp8'")):
        linear(scaling="row")
    with pytest.raises(ValueError, match=re.escape("scaling='row' must be None with precision='highest'")):
        models.GatedMLP(24, 40, scaling="row", precision="highest", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape("scaling='rows' must be 'tensor', 'row', 'block' or None")):
        linear(scaling="rows", precision="fp8")
    with pytest.raises(ValueError, match=re.escape("precision: got 'fp8' with an option of nnx's (dot_general")):
        linear(precision="fp8", preferred_element_type=jnp.float32)(X)
    for module in (models.Linear, models.GatedMLP):
        with pytest.raises(TypeError, match="dtype: got float8_e4m3fn for the computation, want 16 or 32 bits"):
            module(24, 40, precision="fp8", dtype=jnp.float8_e4m3fn, rngs=nnx.Rngs(0))(X)
