"""matmul with weights of few bits against float64 of the dequantised weights: results, gradients, plans and errors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, gated_matmul, matmul
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.quantization import dequantize, quantize

KINDS = {
    "int8": {"format": "int8"},
    "int8_row": {"format": "int8", "scaling": "row"},
    "int4": {"format": "int4", "scale_dtype": "bfloat16"},
    "int4_32": {"format": "int4", "group_size": 32},
    "int4_256": {"format": "int4", "group_size": 256},
    "mxfp8": {"format": "mxfp8"},
    "mxfp4": {"format": "mxfp4"},
}
# (M, K, N), and the options of the call.
CASES = {
    "plain": ((3, 300, 50), {}),
    "wide_out": ((20, 512, 40), {"out_dtype": "float32", "bias": "float32", "activation": "gelu"}),
    "residual": ((2, 100, 33), {"dtype": "float16", "activation": "silu", "has_residual": True}),
    "transposed": ((5, 257, 16), {"transpose_w": True, "bias": "bfloat16"}),
    "tf32": ((4, 160, 24), {"dtype": "float32", "precision": "tf32"}),
    "gated": ((9, 192, 40), {"is_gated": True, "activation": "silu", "has_residual": True}),
}
LARGE = {
    "few": ((16, 4096, 2048), {"bias": "float32", "activation": "gelu"}),
    "one": ((1, 1111, 1001), {}),
    "many": ((200, 1024, 512), {"dtype": "float16"}),
    "gated": ((33, 2048, 1024), {"is_gated": True, "activation": "silu"}),
}


def _errors(kind, case, implementation):
    """The largest error of each result, and its bound."""
    (m, k, n), given = case
    given = dict(given)
    dtype, bias, is_gated = given.pop("dtype", "bfloat16"), given.pop("bias", None), given.pop("is_gated", False)
    random = np.random.default_rng(0)
    normal = lambda *shape, dtype=dtype: jnp.asarray(random.standard_normal(shape), dtype)
    transposed = given.get("transpose_w", False)
    shape, axis = ((n, k), -1) if transposed else ((k, n), -2)
    weights = [quantize(normal(*shape, dtype="float32") / k**0.5, axis=axis, **kind) for _ in range(1 + is_gated)]
    arrays = {"x": normal(m, k)} | ({"bias": normal(n, dtype=bias)} if bias else {})
    out_dtype = given.get("out_dtype", dtype)
    if given.pop("has_residual", False):
        arrays["residual"] = normal(m, n, dtype=out_dtype)
    dout = normal(m, n, dtype=out_dtype)
    op = gated_matmul if is_gated else matmul

    @jax.jit
    def run(arrays, weights):
        def call(found):
            rest = {key: y for key, y in found.items() if key != "x"}
            return op(found["x"], *weights, **rest, **given, implementation=implementation)

        out, vjp = jax.vjp(call, arrays)
        return {"out": out} | {f"d{name}": y for name, y in vjp(dout)[0].items()}

    got = run(arrays, weights)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = {name: jnp.asarray(np.asarray(y).astype(np.float64)) for name, y in arrays.items()}
        exact = [jnp.asarray(np.asarray(dequantize(w)).astype(np.float64)) for w in weights]
        activation = ACTIVATIONS.get(given.get("activation"), lambda z: z)

        def definition(a):
            z, *up = (a["x"] @ (w.T if transposed else w) for w in exact)
            out = activation(z + a.get("bias", 0))
            return (out * up[0] if up else out) + a.get("residual", 0)

        out, vjp = jax.vjp(definition, wide)
        gradients = vjp(jnp.asarray(np.asarray(dout).astype(np.float64)))[0]
        want = {name: np.asarray(y) for name, y in ({"out": out} | {f"d{x}": y for x, y in gradients.items()}).items()}
    eps = 2**-10 if given.get("precision") == "tf32" else float(jnp.finfo(dtype).eps)

    def bound(name):
        """One rounding of the kernel's result; of others, those of weights, of cotangents and of preactivations."""
        is_exact = name == "out" and implementation == "triton" and dtype != "float32"
        factor = 0.6 * float(jnp.finfo(got[name].dtype).eps) if is_exact else 6 * eps
        return (factor + 1e-5) * max(1.0, np.abs(want[name]).max())

    error = lambda name: float(np.abs(np.asarray(got[name]).astype(np.float64) - want[name]).max())
    return {name: (error(name), bound(name)) for name in want}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_formats(kind, implementation, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for result, (error, bound) in _errors(KINDS[kind], CASES["plain"], implementation).items():
        assert error <= bound, result


@pytest.mark.parametrize("kind", ["int4", "mxfp8"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_calls(kind, name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for implementation in ("triton", "xla"):
        for result, (error, bound) in _errors(KINDS[kind], CASES[name], implementation).items():
            assert error <= bound, (implementation, result)


@pytest.mark.parametrize("name", ["wide_out", "gated"])
def test_split(name, monkeypatch):
    """Several programs share a work tile."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with on_device(dataclasses.replace(device_info("a100"), core_count=4)):
        for result, (error, bound) in _errors(KINDS["int4_32"], CASES[name], "triton").items():
            assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*CASES, *(f"large_{name}" for name in LARGE)])
def test_on_gpu(kind, name):
    cases = CASES | {f"large_{name}": case for name, case in LARGE.items()}
    for result, (error, bound) in _errors(KINDS[kind], cases[name], "triton").items():
        assert error <= bound, result


X, W = jnp.ones((2, 256), jnp.bfloat16), jnp.ones((256, 4))


def test_plans():
    quantized = quantize(jnp.ones((256, 4)), "int4")
    with on_device("H200"):
        for call in ((matmul, X, quantized), (gated_matmul, X, quantized, quantized)):
            assert explain(*call).implementation == "xla"
            assert explain(*call, implementation="triton").config.forward.block_m == 16
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


def test_gradients_of_weights_are_refused():
    quantized = quantize(W, "int4")
    with pytest.raises(NotImplementedError, match="w_scale of weights of few bits has no gradient"):
        jax.grad(lambda w: matmul(X, w).sum().astype(jnp.float32), allow_int=True)(quantized)
    with pytest.raises(NotImplementedError, match="w of weights of few bits has no gradient"):
        jax.grad(lambda w: matmul(X, w).sum().astype(jnp.float32))(quantize(W, "mxfp8"))
    assert jax.grad(lambda x: matmul(x, quantized).sum().astype(jnp.float32))(X).shape == X.shape


BAD = {
    "axis": (lambda: matmul(X, quantize(W.T, "int4", axis=-1)), "w: got weights quantized along axis -1, want axis -2"),
    "depth": (lambda: matmul(X[:, :255], quantize(W, "int4")), "w: got shape (256, 4), want [K, N] with x's K = 255"),
    "stacked": (lambda: matmul(X, quantize(W[None], "int4")), "w: got shape (1, 256, 4), want [K, N]"),
    "scale": (lambda: matmul(X, quantize(W, "int4"), w_scale=1.0), "got one with weights of few bits"),
    "precision": (lambda: matmul(X, quantize(W, "int4"), precision="fp8"), "precision: got 'fp8' with weights of few"),
    "gated": (lambda: gated_matmul(X, quantize(W, "int4"), quantize(W, "int8")), "w_up: got (LowBit(format='int8'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_what_the_kernels_do_not_serve():
    quantized = quantize(W, "int4")
    for implementation, x, reason in (
        ("mosaic_gpu", X, "it has no products with weights of few bits"),
        ("triton", X.astype(jnp.float32), "which precision='tf32' asks for"),
    ):
        with on_device("H200"), pytest.raises(NotImplementedError, match=reason):
            explain(matmul, x, quantized, implementation=implementation)
