"""8-bit matmuls that share x, and scales from histories: the interpreted kernels against plain 8-bit matmuls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import gated_matmul, matmul
from jax_kernels.ops.matmul import fp8_shared
from jax_kernels.ops.matmul.implementations import IMPLEMENTATIONS

pytestmark = pytest.mark.triton

ROWS, DEPTH, WIDTHS = 128, 128, (128, 256)


def normal(*shape, seed=0, size=1.0):
    return jnp.asarray(size * np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


@pytest.fixture
def interpreted(monkeypatch):
    """Calls by mosaic_gpu, whose Triton passes are interpreted. XLA computes the matmuls of the rounded operands."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    plain = dataclasses.replace(IMPLEMENTATIONS["xla"], name="mosaic_gpu")
    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_gpu", plain)


def distance(got, want):
    """The relative distance of two arrays."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def gradients(run, *arrays):
    """(the results of `run`, the gradients of their weighted sum)."""

    def total(*arrays):
        outs = run(*arrays)
        weights = [normal(*out.shape, seed=7 + i).astype(jnp.float32) for i, out in enumerate(outs)]
        return sum((out.astype(jnp.float32) * y).sum() for out, y in zip(outs, weights, strict=True)), outs

    (_, outs), found = jax.value_and_grad(total, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)
    return outs, found


def check_gradients(found, plain, exact, *arrays):
    """The errors of gradients are at most 5 % larger than the errors of plain 8-bit matmuls, and at most 9 %.

    Roundings differ, because cotangents side by side have other scales.
    """
    _, wanted = gradients(exact, *(x.astype(jnp.float32) for x in arrays))
    for got, of_plain, want in zip(found, plain, wanted, strict=True):
        assert got.dtype == of_plain.dtype
        assert distance(got, want) < min(0.09, 1.05 * distance(of_plain, want) + 1e-3)


def arrays():
    """x, and weights whose magnitudes are far apart: joined cotangents still keep their precision."""
    small, large = WIDTHS
    return normal(2, ROWS // 2, DEPTH), normal(DEPTH, small, seed=1, size=1e-3), normal(DEPTH, large, seed=2, size=2.0)


def test_shared(interpreted):
    given = arrays()
    run = lambda x, *weights: fp8_shared.shared_matmuls(x, weights, implementation="mosaic_gpu")
    outs, found = gradients(run, *given)
    plain = lambda x, *ws: tuple(matmul(x, w, precision="fp8", implementation="xla") for w in ws)
    want_outs, wanted = gradients(plain, *given)
    for got, want in zip(outs, want_outs, strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    check_gradients(found, wanted, lambda x, *ws: tuple(x @ w for w in ws), *given)
    assert str(jax.make_jaxpr(run)(*given)).count("matmul_joined") == 0  # only under differentiation


def test_products_of_scales_that_underflow(interpreted):
    """Cotangents of 1e-30 and weights of 1e-12: the gradients of the weights are far from 0, and x's is 0."""
    x, *weights = arrays()
    weights = [normal(*w.shape, seed=i, size=1e-12) for i, w in enumerate(weights)]
    run = lambda *ws: fp8_shared.shared_matmuls(x, ws, implementation="mosaic_gpu")
    outs, vjp = jax.vjp(run, *weights)
    douts = [normal(*out.shape, seed=3 + i, size=1e-30) for i, out in enumerate(outs)]
    for got, dout in zip(vjp(tuple(douts)), douts, strict=True):
        exact = x.reshape(-1, DEPTH).astype(jnp.float32).T @ dout.reshape(-1, dout.shape[-1]).astype(jnp.float32)
        assert distance(got, exact) < 0.09


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_shared_with_scales(interpreted, implementation):
    """Each of the weights has its own scale. All scales differ from the arrays' own."""
    x, *weights = arrays()
    scales = {"x_scale": 0.05, "w_scales": [1e-4, 0.1]}
    outs = fp8_shared.shared_matmuls(x, weights, **scales, implementation=implementation)
    given = {"precision": "fp8", "x_scale": scales["x_scale"], "implementation": "xla"}
    for got, w, scale in zip(outs, weights, scales["w_scales"], strict=True):
        want, own = (matmul(x, w, w_scale=w_scale, **given) for w_scale in (scale, None))
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
        assert distance(got, own) > 1e-3


@pytest.mark.parametrize("is_empty", [True, False])
def test_delayed(interpreted, is_empty):
    """With an empty history the scale is the array's own. The new magnitudes are exact."""
    x, *weights = arrays()
    own = [float(jnp.abs(y).max()) for y in (x, *weights)]
    histories = [jnp.zeros(3) if is_empty else jnp.array([0.1 * size, 1.5 * size, 0.0], jnp.float32) for size in own]
    options = {"x_history": histories[0], "w_histories": histories[1:], "implementation": "mosaic_gpu"}
    scales = [float(history.max() or size) / 448 for history, size in zip(histories, own, strict=True)]

    def run(x, *weights):
        found = fp8_shared.delayed_matmuls(x, weights, records=True, **options)
        return *found.outs, *found.largest

    given = {"precision": "fp8", "x_scale": scales[0], "implementation": "xla"}
    plain = lambda x, *ws: tuple(matmul(x, w, w_scale=s, **given) for w, s in zip(ws, scales[1:], strict=True))
    outs, found = gradients(lambda *y: run(*y)[:2], x, *weights)
    want_outs, wanted = gradients(plain, x, *weights)
    for got, want in zip(outs, want_outs, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=0.01, atol=0.01)
    check_gradients(found, wanted, lambda x, *ws: tuple(x @ w for w in ws), x, *weights)
    largest = jax.jit(lambda *y: jax.vjp(run, *y)[0])(x, *weights)[2:]
    for magnitudes in (largest, run(x, *weights)[2:]):  # with and without a derivative
        np.testing.assert_array_equal(magnitudes, np.float32(own))


def test_delayed_gated(interpreted):
    x, gate, _ = arrays()
    gate, up = gate * 500, normal(DEPTH, WIDTHS[0], seed=5, size=0.1)
    own = [float(jnp.abs(y).max()) for y in (x, gate, up)]
    histories = [jnp.array([1.5 * size], jnp.float32) for size in own]
    scales = dict(zip(("x_scale", "w_gate_scale", "w_up_scale"), (1.5 * size / 448 for size in own), strict=True))

    def run(x, gate, up):
        options = {"x_history": histories[0], "w_histories": histories[1:], "implementation": "mosaic_gpu"}
        found = fp8_shared.delayed_matmul(x, gate, up, activation="silu", records=True, **options)
        return found.outs

    outs, found = gradients(run, x, gate, up)
    given = {"precision": "fp8", "implementation": "xla", **scales}
    want_outs, wanted = gradients(lambda x, gate, up: (gated_matmul(x, gate, up, "silu", **given),), x, gate, up)
    assert distance(outs[0], want_outs[0]) < 1e-2
    check_gradients(found, wanted, lambda x, gate, up: (jax.nn.silu(x @ gate) * (x @ up),), x, gate, up)


def test_calls_without_a_kernel():
    x, *weights = arrays()
    options = {"x_history": jnp.zeros(2), "w_histories": [jnp.zeros(2)] * 2, "implementation": "xla"}
    assert fp8_shared.delayed_matmuls(x, weights, records=True, **options) is None
