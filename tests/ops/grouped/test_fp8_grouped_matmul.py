"""grouped_matmul in 8 bits: against float64 of the rounded operands, quantized weights, derivatives and errors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import chunks, dequantize, explain, grouped_gated_matmul, grouped_matmul, quantize, rms_norm
from jax_kernels.dispatch import on_device
from jax_kernels.inputs.grouped_matmul import GroupedOptions
from jax_kernels.ops.matmul.quantized_rows import quantized_together
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.testing.low_precision import fp8_grouped_matmul as cases
from tests.support.cases import ids, tiers


@pytest.mark.parametrize(
    "name", tiers.cases(cases.CASES, ["plain", "past", "primes", "ones", "small", "large", "gated"])
)
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
QUANTIZED, ROWS = quantize(W, scaling="row", axis=-2), quantize(X, scaling="row")


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
    "x": ({"x": ROWS}, TypeError, "w: got dtype float32 with a QuantizedArray x, want a QuantizedArray"),
    "x_scaling": ({"x": quantize(X), "w": QUANTIZED}, ValueError, "x: got a QuantizedArray with scaling='tensor'"),
    "x_shape": ({"x": quantize(W, scaling="row"), "w": QUANTIZED}, ValueError, "x: got shape (3, 64, 40), want [M, K]"),
    "x_bits": ({"x": QUANTIZED.values[0]}, TypeError, "x: got dtype float8_e4m3fn, want bfloat16, float16, float32"),
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


W_UP = _normal(3, 64, 40, seed=4) / 8
GATED = {"x": X, "w_gate": W, "w_up": W_UP, "group_sizes": GROUP_SIZES}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_near_the_float32_gated_unit(dtype):
    arrays = {name: y.astype(dtype) for name, y in GATED.items() if name != "group_sizes"}
    call = lambda arrays, **how: grouped_gated_matmul(**arrays, group_sizes=GROUP_SIZES, **how)
    got, vjp = jax.vjp(jax.jit(lambda arrays: call(arrays, precision="fp8")), arrays)
    want, right = jax.vjp(call, {name: y.astype(jnp.float32) for name, y in arrays.items()})
    assert got.dtype == dtype
    assert 0.01 < _relative(got.astype(jnp.float32), want) < 0.08
    dout = _normal(26, 40, seed=3)
    gradients, wanted = vjp(dout.astype(dtype))[0], right(dout)[0]
    errors = {name: _relative(y.astype(jnp.float32), wanted[name]) for name, y in gradients.items()}
    assert {name: y.dtype for name, y in gradients.items()} == {name: jnp.dtype(dtype) for name in arrays}
    assert 0.01 < errors["x"] < 0.1
    assert 0.01 < max(errors["w_gate"], errors["w_up"]) < 0.06


@pytest.mark.parametrize("transpose_w", [False, True])
def test_quantized_weights_of_a_gated_unit(transpose_w):
    """They give the result and the gradient of x of the call that quantizes by itself."""
    weights = [w.mT if transpose_w else w for w in (W, W_UP)]
    quantized = [quantize(w, scaling="row", axis=-1 if transpose_w else -2) for w in weights]

    def both(x, gate, up, precision):
        how = {"transpose_w": transpose_w, "precision": precision}
        out, vjp = jax.vjp(lambda x: grouped_gated_matmul(x, gate, up, GROUP_SIZES, **how), x)
        return out, *vjp(jnp.cos(out))

    got = jax.jit(lambda *given: both(*given, None))(X, *quantized)
    want = jax.jit(lambda *given: both(*given, "fp8"))(X, *map(dequantize, quantized))
    for y, right in zip(got, want, strict=True):
        assert _relative(y, right) < 1e-3
    exact = jax.vjp(lambda x: grouped_gated_matmul(x, *weights, GROUP_SIZES, transpose_w=transpose_w), X)[1]
    assert _relative(got[1], exact(jnp.cos(got[0]))[0]) < 0.12


def test_quantized_weights_have_no_gradients():
    """The gradient of x exists, in both modes. A gradient of the weights, or of their scales, raises."""
    call = lambda x, w: (grouped_matmul(x, w, GROUP_SIZES, activation="silu") ** 2).sum()
    got, want = jax.grad(call)(X, QUANTIZED), jax.grad(call)(X, dequantize(QUANTIZED))
    assert 0.01 < _relative(got, want) < 0.1
    moved, right = (jax.jvp(lambda x, w=w: call(x, w), (X,), (X + 1,))[1] for w in (QUANTIZED, dequantize(QUANTIZED)))
    np.testing.assert_allclose(moved, right, rtol=0.1)
    text = "grouped_matmul: weights of 8 bits have no gradients"
    for part in ("values", "scale"):
        of = lambda y, part=part: call(X, dataclasses.replace(QUANTIZED, **{part: y}))
        with pytest.raises(NotImplementedError, match=text):
            jax.grad(of)(getattr(QUANTIZED, part))
    gated = lambda x, w: grouped_gated_matmul(x, w, QUANTIZED, GROUP_SIZES).sum()
    of_gate = jax.grad(lambda scale: gated(X, dataclasses.replace(QUANTIZED, scale=scale)))
    with pytest.raises(NotImplementedError, match="grouped_gated_matmul: weights of 8 bits have no gradients"):
        of_gate(QUANTIZED.scale)


@pytest.mark.parametrize("gathers", [False, True])
def test_quantized_rows(gathers):
    """They give the result of the call that quantizes x, in bfloat16 by default, and the gradient of the bias."""
    bias = _normal(3, 40, seed=2)
    how = {"gather_indices": jnp.arange(25, -1, -1)} if gathers else {}
    call = lambda x, bias, **given: grouped_matmul(
        x, QUANTIZED, GROUP_SIZES, bias=bias, activation="silu", **how, **given
    )
    got, vjp = jax.vjp(lambda bias: call(ROWS, bias, out_dtype="float32"), bias)
    want, right = jax.vjp(lambda bias: call(X, bias), bias)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vjp(got)[0], right(got)[0], rtol=1e-4, atol=1e-4)
    assert call(ROWS, bias.astype(jnp.float16)).dtype == jnp.bfloat16
    gated = grouped_gated_matmul(ROWS, QUANTIZED, QUANTIZED, GROUP_SIZES, out_dtype="float32", **how)
    want = grouped_gated_matmul(X, QUANTIZED, QUANTIZED, GROUP_SIZES, **how)
    np.testing.assert_allclose(gated, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="grouped_matmul: rows of 8 bits have no gradients"):
        jax.grad(lambda scale: call(dataclasses.replace(ROWS, scale=scale), bias, out_dtype="float32").sum())(
            ROWS.scale
        )


def test_rows_of_two_arrays_share_scales():
    """As the cotangents of a gated unit: quantized as one array, side by side."""
    first, second = (jnp.asarray(np.random.default_rng(seed).standard_normal((3, 5)), jnp.float32) for seed in range(2))
    call = PlannedCall("xla", None, GroupedOptions(out_dtype="float32"), False)
    found = quantized_together(call, [first, 8 * second])
    want = quantize(jnp.concatenate([first, 8 * second], -1), scaling="row")
    np.testing.assert_array_equal(jnp.concatenate([x.values for x in found], -1).astype(jnp.float32), want.values)
    assert [x.values.shape for x in found] == [(3, 5), (3, 5)]
    for x in found:
        np.testing.assert_array_equal(x.scale, want.scale)


def test_rows_of_a_norm():
    """The result of a norm that quantizes is an x."""
    rows = rms_norm(X, quantize="e4m3")
    want = grouped_matmul(dequantize(rows), QUANTIZED, GROUP_SIZES, out_dtype="float32")
    got = grouped_matmul(rows, QUANTIZED, GROUP_SIZES, out_dtype="float32")
    assert _relative(got, want) < 1e-3


def test_plan_of_quantized_rows():
    """The Hopper kernel takes them as they are."""
    x, w = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16), jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16)
    given = [jax.eval_shape(lambda y: quantize(y, scaling="row"), y) for y in (x, w)]
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    with on_device("H200"):
        assert explain(grouped_matmul, *given, sizes, transpose_w=True).implementation == "mosaic_gpu"
        program = str(jax.make_jaxpr(lambda *given: grouped_matmul(*given, transpose_w=True))(*given, sizes))
    assert "grouped_matmul_sm90" in program
    assert "quantize_rows" not in program


@pytest.mark.triton
@pytest.mark.parametrize(
    ("implementation", "devices", "want"), [("mosaic_gpu", 1, 2), ("mosaic_gpu", 2, 0), ("xla", 1, 0)]
)
def test_launches_that_quantize(implementation, devices, want, monkeypatch):
    """The kernel quantizes x and w if the call runs by kernels, and XLA cannot shard the arrays over devices."""
    monkeypatch.setattr(jax, "device_count", lambda *_: devices)
    x, w = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16), jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16)
    options = {"transpose_w": True, "precision": "fp8", "implementation": implementation}
    with on_device("H200"):
        call = lambda x, w, sizes: grouped_matmul(x, w, sizes, **options)
        program = str(jax.make_jaxpr(call)(x, w, jax.ShapeDtypeStruct((8,), jnp.int32)))
    assert program.count("name=matmul_quantize_rows_triton") == want


def test_chunks_of_rows():
    """Each chunk multiplies by the scales of its own rows, forward and in the gradient of x."""
    x = X * 2.0 ** (jnp.arange(len(X)) % 7)[:, None]
    calls = {
        "matmul": lambda x: (grouped_matmul(x, W, GROUP_SIZES, precision="fp8") ** 2).sum(),
        "gated": lambda x: (grouped_gated_matmul(x, W, W_UP, GROUP_SIZES, precision="fp8") ** 2).sum(),
    }
    for call in calls.values():
        function = jax.jit(jax.value_and_grad(call))
        want = function(x)
        jax.clear_caches()
        with chunks.forced(5) as split:
            got = jax.jit(jax.value_and_grad(call))(x)
        assert max(split) == 5
        for y, right in zip(got, want, strict=True):
            np.testing.assert_allclose(y, right, rtol=1e-4, atol=1e-3)


OTHER_AXIS, INT8 = quantize(W, scaling="row"), quantize(W, "int8")
WRONG_GATED = {
    "one": ({"w_up": QUANTIZED}, TypeError, "w_up: got quantized weights, want unquantized weights, as w_gate"),
    "other": ({"w_gate": QUANTIZED}, TypeError, "w_up: got unquantized weights, want quantized weights, as w_gate"),
    "axis": ({"w_gate": OTHER_AXIS, "w_up": QUANTIZED}, ValueError, "w_gate: got a QuantizedArray with scaling='row'"),
    "up_axis": ({"w_gate": QUANTIZED, "w_up": OTHER_AXIS}, ValueError, "w_up: got a QuantizedArray with scaling='row'"),
    "low_bit": ({"w_gate": INT8, "w_up": INT8}, TypeError, "w_gate: got a QuantizedArray in 'int8', want"),
    "format": (
        {"w_gate": QUANTIZED, "w_up": quantize(W, "e5m2", scaling="row", axis=-2)},
        ValueError,
        "w_up: got float8_e5m2[3, 64, 40], want w_gate's dtype and shape: float8_e4m3fn[3, 64, 40]",
    ),
    "implementation": ({"implementation": "triton", "precision": "fp8"}, NotImplementedError, "no 8-bit matmuls"),
}


@pytest.mark.parametrize("name", WRONG_GATED)
def test_wrong_arguments_of_a_gated_unit(name):
    changed, error, text = WRONG_GATED[name]
    with on_device("H200"), pytest.raises(error, match=re.escape(text)):
        grouped_gated_matmul(**(GATED | changed))


def test_gpu_without_fp8_matmuls():
    given = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (X, W, GROUP_SIZES)]
    with on_device("A100"), pytest.raises(NotImplementedError, match=r"Ada .* Hopper .* Blackwell"):
        explain(grouped_matmul, *given, precision="fp8")
    with on_device("A100"):
        assert explain(grouped_matmul, *given, precision="fp8", implementation="xla").implementation == "xla"
