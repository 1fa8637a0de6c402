"""mlp against float64: results, gradients, transforms and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, mlp
from jax_kernels.dispatch import on_device
from jax_kernels.ops.activations import ACTIVATIONS, derivative_of
from jax_kernels.testing import mlp as cases
from tests.support.cases import ids


@pytest.mark.parametrize("name", ids.named(cases.CASES))
def test_against_float64(name):
    for result, (error, bound) in cases.errors_by(cases.CASES[name], "xla").items():
        assert error <= bound, result


@pytest.mark.parametrize("name", ids.named(cases.TRITON))
def test_triton_against_float64(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for result, (error, bound) in cases.errors_by(cases.TRITON[name], "triton").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(cases.TRITON | cases.GPU))
def test_triton_on_gpu(name):
    for result, (error, bound) in cases.errors_by((cases.TRITON | cases.GPU)[name], "triton").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ids.named(cases.HOPPER | cases.GPU), *ACTIVATIONS])
def test_on_hopper(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    large = {x: cases.Case((1024, 512), 1536, 768, has_biases=True, activation=x) for x in ACTIVATIONS}
    for result, (error, bound) in cases.errors_by((cases.HOPPER | cases.GPU | large)[name], "mosaic_gpu").items():
        assert error <= bound, result


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


ARRAYS = {"x": _normal(3, 8), "w_up": _normal(8, 12, seed=1), "w_down": _normal(12, 5, seed=2)}
GATE = _normal(8, 12, seed=3)


@pytest.mark.parametrize("w_gate", [None, GATE])
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_vmap(implementation, w_gate, monkeypatch):
    """Over x only, whose axis joins the rows, and over a weight; with gradients."""
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    options = {"implementation": implementation, "precision": "tf32", "w_gate": w_gate}
    total = lambda x, w_up: (mlp(x, w_up, ARRAYS["w_down"], **options) ** 2).sum()
    gradient = jax.grad(total, (0, 1))
    xs, ups = _normal(2, 3, 8, seed=4), _normal(2, 8, 12, seed=5)
    for axes, given in (((0, None), (xs, ARRAYS["w_up"])), ((0, 0), (xs, ups))):
        got = jax.vmap(gradient, axes)(*given)
        for i in range(2):
            want = gradient(*(y[i] if axis == 0 else y for y, axis in zip(given, axes, strict=True)))
            for y, right in zip(got, want, strict=True):
                np.testing.assert_allclose(y[i], right, rtol=1e-4, atol=1e-4)


def test_hidden_is_not_stored():
    """Between forward and backward a gated unit keeps both matmuls' results, and neither hidden nor its cotangent."""
    x, w = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 512), jnp.bfloat16)
    down = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    saved = jax.eval_shape(lambda *given: jax.vjp(lambda x, u, g, d: mlp(x, u, d, w_gate=g), *given)[1], x, w, w, down)
    assert sum(leaf.shape == (64, 512) for leaf in jax.tree.leaves(saved)) == 2


def test_explain():
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 4096), (4096, 14336), (14336, 4096))]
    with on_device("H200"):
        assert (explain(mlp, *given).op, explain(mlp, *given).implementation) == ("mlp", "mosaic_gpu")
        assert explain(mlp, *given, w_gate=given[1]).config.forward is not None
    with on_device("A100"):
        assert explain(mlp, *given, implementation="triton").implementation == "triton"


WRONG = {
    "precision": ({"precision": "fp8"}, ValueError, "precision: got 'fp8', want 'fp32', 'tf32' or None"),
    "w_up": ({"w_up": _normal(7, 12)}, ValueError, "w_up: got shape (7, 12), want (8, 12) with x's K = 8"),
    "w_down": ({"w_down": _normal(5, 12)}, ValueError, "w_down: got shape (5, 12), want (12, 12) with w_up's H = 12"),
    "w_gate": ({"w_gate": _normal(8, 11)}, ValueError, "w_gate: got shape (8, 11), want (8, 12)"),
    "dtype": ({"w_down": ARRAYS["w_down"].astype(jnp.bfloat16)}, TypeError, "w_down: got dtype bfloat16"),
    "bias_up": ({"w_gate": GATE, "bias_up": _normal(12)}, ValueError, "bias_up: got an array with w_gate"),
    "bias_shape": ({"bias_up": _normal(5)}, ValueError, "bias_up: got shape (5,), want [N] = (12,)"),
    "bias_down": ({"bias_down": _normal(12)}, ValueError, "bias_down: got shape (12,), want [N] = (5,)"),
    "residual": ({"residual": _normal(3, 8)}, ValueError, "residual: got shape (3, 8)"),
    "activation": ({"activation": "swoosh"}, ValueError, "activation: got 'swoosh'"),
    "x": ({"x": jnp.float32(1)}, ValueError, "x: got shape ()"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changed, error, text = WRONG[name]
    with pytest.raises(error, match=re.escape(text)):
        mlp(**(ARRAYS | changed))


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
def test_derivatives(name):
    """Compared with central differences, in float32."""
    activation = ACTIVATIONS[name] if name else lambda x: x
    x = jnp.linspace(-6.0, 6.0, 97)
    want = (activation(x + 1e-2) - activation(x - 1e-2)) / 2e-2
    got = derivative_of(ACTIVATIONS[name] if name else None)(x)
    np.testing.assert_allclose(got[x != 0], want[x != 0], atol=2e-4)


def test_function_as_activation():
    """The derivative of a function without a name comes from jax.vjp."""
    swish = lambda z: z * jax.nn.sigmoid(1.7 * z)
    got = jax.grad(lambda x: mlp(**(ARRAYS | {"x": x}), activation=swish).sum())(ARRAYS["x"])
    want = jax.grad(lambda x: (swish(x @ ARRAYS["w_up"]) @ ARRAYS["w_down"]).sum())(ARRAYS["x"])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
