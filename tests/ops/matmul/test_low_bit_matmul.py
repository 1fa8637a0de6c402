"""matmul with low-bit weights against float64 of the dequantised weights: results, gradients, plans and errors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, gated_matmul, matmul
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.quantization import quantize
from jax_kernels.testing.low_precision import low_bit_matmul as cases
from tests.support.cases import ids, tiers


@pytest.mark.parametrize("kind", tiers.cases(cases.KINDS, {"int8", "int4", "mxfp4"}))
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_formats(kind, implementation, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for result, (error, bound) in cases.errors(cases.KINDS[kind], cases.CASES["plain"], implementation).items():
        assert error <= bound, result


CALLS = [name for name in cases.CASES if name != "plain"]
QUICK_CALLS = {("int4", "gated"), ("mxfp8", "transposed")}


@pytest.mark.parametrize(("kind", "name"), tiers.some_pairs(["int4", "mxfp8"], CALLS, QUICK_CALLS))
def test_calls(kind, name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for implementation in ("triton", "xla"):
        for result, (error, bound) in cases.errors(cases.KINDS[kind], cases.CASES[name], implementation).items():
            assert error <= bound, (implementation, result)


@pytest.mark.parametrize("name", tiers.cases({name: cases.CASES[name] for name in ("wide_out", "gated")}, {"gated"}))
def test_split(name, monkeypatch):
    """Several programs work on one tile."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with on_device(dataclasses.replace(device_info("a100"), core_count=4)):
        for result, (error, bound) in cases.errors(cases.KINDS["int4_32"], cases.CASES[name], "triton").items():
            assert error <= bound, result


ON_GPU = cases.CASES | {f"large_{name}": case for name, case in cases.LARGE.items()}
ON_HOPPER = cases.HOPPER | {f"large_{kind}": (kind, ((16, 4096, 8192), {"bias": "float32"})) for kind in cases.KINDS}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("name", ids.named(ON_GPU))
def test_on_gpu(kind, name):
    for result, (error, bound) in cases.errors(cases.KINDS[kind], ON_GPU[name], "triton").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(ON_HOPPER))
def test_on_hopper(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    for result, (error, bound) in cases.errors_by(ON_HOPPER[name], "mosaic_gpu").items():
        assert error <= bound, result


X, W = jnp.ones((2, 256), jnp.bfloat16), jnp.ones((256, 4))


@pytest.mark.triton
def test_plans():
    quantized, wide = quantize(jnp.ones((256, 4)), "int4"), quantize(jnp.ones((256, 256)), "int4")
    with on_device("H200"):
        for call in ((matmul, X, quantized), (gated_matmul, X, quantized, quantized)):
            assert explain(*call).implementation == "triton"
            assert explain(*call).config.forward.block_m == 16
        for call in ((matmul, X, wide), (gated_matmul, X, wide, wide)):
            assert explain(*call).implementation == "mosaic_gpu"
        for rows, want in ((64, 2), (32, 4)):
            assert explain(matmul, jnp.ones((rows, 256), jnp.bfloat16), wide).config.forward.compute_wgs == want
        assert explain(matmul, jnp.ones((65, 256), jnp.bfloat16), wide).implementation == "xla"
    with on_device("A100"):
        assert explain(matmul, X, wide).implementation == "triton"
    assert explain(matmul, X, quantized).implementation == "xla"


def test_vmap(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    w = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64, 8)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 64)), jnp.bfloat16)
    call = lambda x, w: matmul(x, w, implementation="triton")
    stacked = quantize(w, "int8")
    for axes in ((0, 0), (0, None)):
        of = lambda i, axes=axes: quantize(w[i if axes[1] == 0 else 0], "int8")
        got = jax.vmap(call, axes)(x, stacked if axes[1] == 0 else of(0))
        for i in range(2):
            np.testing.assert_array_equal(got[i], call(x[i], of(i)))


def test_weight_gradients_are_refused():
    quantized = quantize(W, "int4")
    with pytest.raises(NotImplementedError, match="w_scale of low-bit weights has no gradient"):
        jax.grad(lambda w: matmul(X, w).sum().astype(jnp.float32), allow_int=True)(quantized)
    with pytest.raises(NotImplementedError, match="w of low-bit weights has no gradient"):
        jax.grad(lambda w: matmul(X, w).sum().astype(jnp.float32))(quantize(W, "mxfp8"))
    assert jax.grad(lambda x: matmul(x, quantized).sum().astype(jnp.float32))(X).shape == X.shape


BAD = {
    "axis": (lambda: matmul(X, quantize(W.T, "int4", axis=-1)), "w: got weights quantized along axis -1, want axis -2"),
    "depth": (lambda: matmul(X[:, :255], quantize(W, "int4")), "w: got shape (256, 4), want [K, N] with x's K = 255"),
    "stacked": (lambda: matmul(X, quantize(W[None], "int4")), "w: got shape (1, 256, 4), want [K, N]"),
    "scale": (lambda: matmul(X, quantize(W, "int4"), w_scale=1.0), "got one with low-bit weights"),
    "precision": (lambda: matmul(X, quantize(W, "int4"), precision="fp8"), "precision: got 'fp8' with low-bit weights"),
    "gated": (lambda: gated_matmul(X, quantize(W, "int4"), quantize(W, "int8")), "w_up: got (LowBit(format='int8'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.triton
def test_kernel_limits():
    quantized = quantize(W, "int4")
    for implementation, x, reason in (
        ("mosaic_gpu", X, "with low-bit weights it needs N in multiples of 64"),
        ("mosaic_gpu", jnp.ones((65, 256), jnp.bfloat16), "it takes 1 to 64 rows of x"),
        ("triton", X.astype(jnp.float32), "which needs precision='tf32'"),
    ):
        with on_device("H200"), pytest.raises(NotImplementedError, match=reason):
            explain(matmul, x, quantized, implementation=implementation)


def test_untraced_shard_map():
    """JAX has no custom_vjp with symbolic zeros in an untraced shard_map."""
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    w = quantize(W, "int8")
    multiply = lambda x: matmul(x, w)
    rows = jax.P("data")
    shared = jax.shard_map(multiply, mesh=mesh, in_specs=rows, out_specs=rows)
    np.testing.assert_array_equal(shared(X), multiply(X))
    loss = lambda product: jax.grad(lambda x: jnp.sin(product(x).astype(jnp.float32)).sum())(X)
    np.testing.assert_array_equal(loss(shared), loss(multiply))
