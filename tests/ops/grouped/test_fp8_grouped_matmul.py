"""grouped_matmul in 8 bits: against float64 of the rounded operands, quantized weights, derivatives and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, grouped_matmul, quantize
from jax_kernels.dispatch import on_device
from jax_kernels.testing.low_precision import fp8_grouped_matmul as cases
from tests.support.cases import ids, tiers


@pytest.mark.parametrize("name", tiers.cases(cases.CASES, ["plain", "past", "primes", "ones", "small", "large"]))
def test_against_float64(name):
    for result, (error, bound) in cases.errors_by(cases.CASES[name], "xla").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(cases.CASES | cases.GPU))
def test_on_gpu(name):
    for result, (error, bound) in cases.errors_by((cases.CASES | cases.GPU)[name], "xla").items():
        assert error <= bound, result


def _normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


X, W, GROUP_SIZES = _normal(26, 64), _normal(3, 64, 40, seed=1) / 8, jnp.asarray([11, 0, 9], jnp.int32)
QUANTIZED = quantize(W, scaling="row", axis=-2)


def _relative(got, want):
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_near_the_float32_matmul(dtype):
    """With an activation, forward and gradients: rounding to 8 bits shows, and is small."""
    x, w, bias = (y.astype(dtype) for y in (X, W, _normal(3, 40, seed=2)))
    call = lambda x, w, bias, **how: grouped_matmul(x, w, GROUP_SIZES, bias=bias, activation="silu", **how)
    got, vjp = jax.vjp(jax.jit(lambda *given: call(*given, precision="fp8")), x, w, bias)
    want, right = jax.vjp(call, *(y.astype(jnp.float32) for y in (x, w, bias)))
    assert got.dtype == dtype
    assert 0.01 < _relative(got.astype(jnp.float32), want) < 0.06
    dout = _normal(26, 40, seed=3)
    errors = [_relative(y.astype(jnp.float32), z) for y, z in zip(vjp(dout.astype(dtype)), right(dout), strict=True)]
    assert [y.dtype for y in vjp(dout.astype(dtype))] == [x.dtype] * 3
    assert 0.01 < errors[0] < 0.1
    assert max(errors[1:]) < 0.03


@pytest.mark.parametrize("transpose_w", [False, True])
def test_quantized_weights(transpose_w):
    """They give the result of the call that quantizes by itself, without precision and with it."""
    w = W.mT if transpose_w else W
    quantized = quantize(w, scaling="row", axis=-1 if transpose_w else -2)
    want = grouped_matmul(X, w, GROUP_SIZES, transpose_w=transpose_w, precision="fp8")
    for precision in (None, "fp8"):
        got = jax.jit(
            lambda x, w, how=precision: grouped_matmul(x, w, GROUP_SIZES, transpose_w=transpose_w, precision=how)
        )(X, quantized)
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_derivatives():
    """Forward mode, second derivatives and the gradients of a vmap, by "xla"."""
    call = lambda x, w: grouped_matmul(x, w, GROUP_SIZES, activation="silu", precision="fp8")
    exact = lambda x, w: grouped_matmul(x, w, GROUP_SIZES, activation="silu")
    moved = [jax.jvp(f, (X, W), (W[0].T[:26], W))[1] for f in (call, exact)]
    assert _relative(*moved) < 0.06
    second = [
        jax.grad(lambda x, f=f: (jax.grad(lambda x: (f(x, W) ** 2).sum())(x) ** 2).sum())(X) for f in (call, exact)
    ]
    assert _relative(*second) < 0.2
    gradient = jax.grad(lambda x, w: (call(x, w) ** 2).sum(), (0, 1))
    got = jax.vmap(gradient, (0, None))(jnp.stack([X, 2 * X]), W)
    for i, x in enumerate([X, 2 * X]):
        for y, right in zip(got, gradient(x, W), strict=True):
            np.testing.assert_allclose(y[i], right, rtol=1e-4, atol=1e-4)


def test_nan_stays_in_its_row():
    out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, GROUP_SIZES, precision="fp8"), X.at[3].set(jnp.nan), W)
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()
    dx, dw = vjp(jnp.ones_like(out).at[20:].set(jnp.nan))
    assert np.isfinite(dx).all()
    assert np.isnan(dw[0]).all()
    assert np.isfinite(dw[1:]).all()


@pytest.mark.parametrize(
    ("groups", "rows", "depth", "columns"), [(0, 4, 3, 2), (2, 0, 3, 2), (2, 4, 0, 2), (2, 4, 3, 0)]
)
def test_empty(groups, rows, depth, columns):
    x, w, sizes = jnp.ones((rows, depth)), jnp.ones((groups, depth, columns)), jnp.ones(groups, jnp.int32)
    out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, precision="fp8"), x, w)
    assert out.shape == (rows, columns)
    assert bool(out.any()) == (groups * rows * depth * columns > 0)
    assert [y.shape for y in vjp(out)] == [x.shape, w.shape]


WRONG = {
    "x": ({"x": quantize(X, scaling="row")}, TypeError, "x: got a QuantizedArray, want bfloat16, float16 or float32"),
    "x_bits": ({"x": QUANTIZED.values[0]}, TypeError, "x: got dtype float8_e4m3fn, want bfloat16, float16 or float32"),
    "w_bits": ({"w": QUANTIZED.values}, TypeError, "w: got dtype float8_e4m3fn, want x's dtype float32"),
    "scaling": ({"w": quantize(W)}, ValueError, "got a QuantizedArray with scaling='tensor', axis=-1, want"),
    "axis": ({"w": quantize(W, scaling="row")}, ValueError, "axis=-1, want scaling='row' and axis=-2, the summed axis"),
    "shape": ({"w": quantize(W[0], scaling="row", axis=-2)}, ValueError, "w: got shape (64, 40), want [G, K, N]"),
    "precision": ({"w": QUANTIZED, "precision": "bf16"}, ValueError, "got 'bf16' with w of dtype float8_e4m3fn"),
    "implementation": ({"implementation": "triton"}, NotImplementedError, "it has no 8-bit matmuls"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changed, error, text = WRONG[name]
    with on_device("H200"), pytest.raises(error, match=re.escape(text)):
        grouped_matmul(**({"x": X, "w": W, "group_sizes": GROUP_SIZES, "precision": "fp8"} | changed))


def test_quantized_weights_have_no_gradients():
    with pytest.raises(NotImplementedError, match="weights of 8 bits have no gradients"):
        jax.grad(lambda x: grouped_matmul(x, QUANTIZED, GROUP_SIZES).sum())(X)


def test_gpu_without_fp8_matmuls():
    given = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (X, W, GROUP_SIZES)]
    with on_device("A100"), pytest.raises(NotImplementedError, match=r"Ada .* Hopper .* Blackwell"):
        explain(grouped_matmul, *given, precision="fp8")
    with on_device("A100"):
        assert explain(grouped_matmul, *given, precision="fp8", implementation="xla").implementation == "xla"
