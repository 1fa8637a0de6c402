"""layer_norm and rms_norm with an 8-bit output: against quantize, against float64, and as an operand of matmul."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_kernels import explain, layer_norm, matmul, rms_norm
from jax_kernels.dispatch import on_device
from jax_kernels.pallas.normalization.triton.forward import odd_halves
from jax_kernels.quantization import FORMATS, QuantizedArray, dequantize, quantize
from jax_kernels.testing.normalization import CASES, LONG, OPS, Case
from tests.support.cases import ids

IMPLEMENTATIONS = ("triton", "xla")
QUANTIZED = {name: CASES[name] for name in ("plain", "odd", "prime", "one_row", "one_column", "residual", "no_weights")}
QUANTIZED |= {name: CASES[name] for name in ("no_bias", "float32", "rms", "rms_residual", "rms_offset", "wide")}
ON_GPU = QUANTIZED | {name: LONG[name] for name in ("long", "long_drift", "rms_long")}
NAMED = [*((name, "e4m3") for name in QUANTIZED), *((name, "e5m2") for name in ("odd", "residual", "rms", "wide"))]
NAN = float("nan")


def called(case: Case, implementation: str, format: str | None, wide: bool = False):
    """The results of the call. wide: with the same values in float32, and x + residual rounded beforehand."""
    arrays, *_ = case.arrays()
    if wide:
        if case.has_residual:
            arrays["x"] += arrays.pop("residual")
        arrays = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    options = case.statics | {"quantize": format, "implementation": implementation}
    return jax.jit(lambda arrays: OPS[case.op](**arrays, **options))(arrays)


def steps(values) -> np.ndarray:
    """The ranks of 8-bit values among all 8-bit values."""
    bits = np.asarray(values).view(np.uint8).astype(np.int32)
    return np.where(bits < 128, bits, 128 - bits)


def check(case: Case, implementation: str, format: str) -> None:
    got = called(case, implementation, format)
    if case.has_residual:
        got, total = got
        arrays, *_ = case.arrays()
        np.testing.assert_array_equal(np.asarray(total), np.asarray(arrays["x"] + arrays["residual"]))
    assert isinstance(got, QuantizedArray)
    assert (got.scaling, got.axis, got.dtype, got.shape) == ("row", -1, FORMATS[format], case.shape)
    assert (got.scale.dtype, got.scale.shape) == (jnp.float32, case.shape[:-1])
    wide = called(case, implementation, None, wide=True)
    sums = max(1, np.sqrt(case.shape[-1]) / 16)  # float32 sums, in an order that XLA chooses
    want = jax.jit(lambda x: quantize(x, format, scaling="row"))(wide)
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-6 * sums, atol=0)
    apart = np.abs(steps(got.values) - steps(want.values))
    assert apart.max() <= 1  # the reciprocal of a scale may differ in its last bit
    assert (apart > 0).mean() < 1e-3
    # Half a step of the format, against float64. An earlier rounding to x's dtype would add a sixteenth.
    right = case.definition()["out"]
    scale = np.asarray(got.scale, np.float64)[..., None]
    exact = right / scale
    info = jnp.finfo(FORMATS[format])
    step = np.maximum(np.abs(exact), float(info.tiny)) * float(info.eps)
    error = np.abs(np.asarray(got.values).astype(np.float64) - exact)
    assert (error <= step * 0.501 + 2**-19 * max(1, abs(case.centre)) * sums / scale).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("name", "format"),
    [pytest.param(name, format, id=f"{ids.case_id(name, QUANTIZED[name])}-{format}") for name, format in NAMED],
)
def test_equals_quantize(name, implementation, format, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    check(QUANTIZED[name], implementation, format)


@pytest.mark.parametrize("name", ids.named({name: LONG[name] for name in ("long", "rms_long")}))
def test_long_rows(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    check(LONG[name], "triton", "e4m3")


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ids.named(ON_GPU))
def test_on_gpu(name, implementation, format):
    case = ON_GPU[name]
    check(case, implementation, format)
    check(case.of_rows(1000), implementation, format)


def rows_of_every_kind() -> jax.Array:
    x = np.random.default_rng(3).standard_normal((6, 130)).astype(np.float32)
    x[1], x[2, 7], x[3, 129], x[4] = 0, NAN, np.inf, 1e-30
    return jnp.asarray(x)


def check_rows_of_every_kind(implementation: str) -> None:
    """A row of zeros has scale 1. NaN and infinity spoil only their own row."""
    x = rows_of_every_kind()
    got = jax.jit(lambda x: rms_norm(x, quantize="e4m3", implementation=implementation))(x)
    want = jax.jit(lambda x: quantize(rms_norm(x, implementation="xla"), scaling="row"))(x)
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-5, atol=0)
    assert got.scale[1] == 1
    values = np.asarray(got.values).astype(np.float32)
    assert np.isnan(values).all(axis=1).tolist() == [False, False, True, True, False, False]
    assert not np.isnan(values[[0, 1, 4, 5]]).any()
    assert (values[1] == 0).all()
    # Only a bias can make values infinite: infinities of x become NaN.
    far = jnp.zeros(130).at[5].set(jnp.inf)
    got = jax.jit(lambda x: layer_norm(x, None, far, quantize="e5m2", implementation=implementation))(x[:1])
    assert np.isposinf(got.scale).all()
    assert np.isnan(np.asarray(got.values).astype(np.float32)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_rows(implementation, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    check_rows_of_every_kind(implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_rows_on_gpu(implementation):
    check_rows_of_every_kind(implementation)


def check_matmul(implementation: str) -> None:
    """The output replaces quantize of the norm, without a pass between norm and matmul."""
    random = np.random.default_rng(4)
    x = jnp.asarray(random.standard_normal((2, 65, 192)), jnp.bfloat16)
    scale = jnp.asarray(random.standard_normal(192), jnp.float32)
    w = jnp.asarray(random.standard_normal((192, 80)), jnp.bfloat16)
    w_quantized = quantize(w, scaling="row", axis=-2)
    fused = lambda x: matmul(rms_norm(x, scale, quantize="e4m3", implementation=implementation), w_quantized)
    wide = lambda x: rms_norm(x.astype(jnp.float32), scale, implementation=implementation)
    unfused = lambda x: matmul(quantize(wide(x), scaling="row"), w_quantized)
    got, want = (jax.jit(function)(x).astype(jnp.float32) for function in (fused, unfused))
    assert got.shape == (2, 65, 80)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=0.1)
    assert (got == want).mean() > 0.99
    exact = np.asarray(wide(x), np.float64) @ np.asarray(w).astype(np.float64)
    assert np.linalg.norm(got - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_result_as_matmul_operand(implementation, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    check_matmul(implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_result_as_matmul_operand_on_gpu(implementation):
    check_matmul(implementation)


def test_float16_midpoints_round_as_float32():
    """Values near every midpoint of the 8-bit formats, cut to float16 and then rounded, as on Ada."""
    random = np.random.default_rng(5)
    cut = lambda x: (x.view(np.int32) & ~0x1FFF).view(np.float32).astype(np.float16)
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        rounded = lambda x, dtype=dtype: x.astype(dtype).astype(np.float32)
        numbers = np.arange(0, 256, dtype=np.uint8).view(dtype).astype(np.float32)
        numbers = np.sort(numbers[np.isfinite(numbers)])
        middles = (numbers[1:] + numbers[:-1]) / 2
        near = middles[:, None] * (1 + np.float32(2.0) ** -np.arange(8, 24)) ** np.array([[1], [-1]])[:, None]
        some = random.standard_normal(1000).astype(np.float32) * 100
        x = np.concatenate([numbers, middles, near.astype(np.float32).ravel(), some])
        x = x[np.abs(x) > 2.0**-14]  # below, float16 has fewer bits
        odd = np.asarray(odd_halves(jnp.asarray(x)))
        np.testing.assert_array_equal(rounded(cut(odd)), rounded(x))
        assert (rounded(cut(x)) != rounded(x)).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap(implementation, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    random = np.random.default_rng(1)
    x, scale = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((3, 5, 20), (3, 20)))
    norm = lambda x, scale: layer_norm(x, scale, quantize="e5m2", implementation=implementation)
    for axes in ((0, 0), (0, None)):
        given = scale if axes[1] == 0 else scale[0]
        got = jax.jit(jax.vmap(norm, axes))(x, given)
        assert (got.values.shape, got.scale.shape) == ((3, 5, 20), (3, 5))
        for i in range(3):
            want = jax.jit(norm)(x[i], given[i] if axes[1] == 0 else given)
            np.testing.assert_allclose(got.scale[i], want.scale, rtol=1e-6)
            assert np.abs(steps(got.values[i]) - steps(want.values)).max() <= 1


def test_shard_map():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    x, scale = jnp.arange(24.0).reshape(4, 6) % 5, jnp.arange(1.0, 7.0)
    norm = lambda x, scale: rms_norm(x, scale, residual=x, quantize="e4m3")
    run = lambda out: jax.jit(jax.shard_map(norm, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=out))
    got, total = run(jax.P("rows"))(x, scale)
    want, _ = jax.jit(norm)(x, scale)
    np.testing.assert_array_equal(dequantize(got), dequantize(want))
    np.testing.assert_array_equal(total, 2 * x)
    with pytest.raises(ValueError, match="out_specs"):
        run(jax.P())(x, scale)


def test_traced_for_a_gpu_under_shard_map():
    """The kernel's results vary over the same axes as its inputs. Nothing runs."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    norm = lambda x: rms_norm(x, quantize="e4m3", implementation="triton")
    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    with on_device("H200"):
        got = jax.eval_shape(jax.shard_map(norm, mesh=mesh, in_specs=jax.P("rows"), out_specs=jax.P("rows")), x)
    assert (got.values.dtype, got.values.shape, got.scale.shape) == (jnp.float8_e4m3fn, (8, 256), (8,))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("transformed", [
    lambda f, x: jax.grad(lambda x: dequantize(f(x)[0]).sum())(x),
    lambda f, x: jax.grad(lambda x: f(x)[1].sum())(x),  # of the sum, the second result
    lambda f, x: jax.jit(jax.grad(jax.jit(lambda x: matmul(f(x)[0], quantize(x.T, scaling="row", axis=-2)).sum())))(x),
    lambda f, x: jax.jvp(lambda x: f(x)[1], (x,), (x,)),
    lambda f, x: jax.vjp(jax.vmap(f), x[None]),
], ids=["grad", "of_total", "through_matmul", "jvp", "vmap"])  # fmt: skip
def test_has_no_gradient(transformed, implementation, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    norm = lambda x: rms_norm(x, residual=x, quantize="e4m3", implementation=implementation)
    with pytest.raises(NotImplementedError, match="quantize: got 'e4m3' in a call that is differentiated, want None"):
        transformed(norm, jnp.ones((16, 16)))


def test_no_rows():
    got = rms_norm(jnp.zeros((0, 8)), quantize="e4m3")
    assert (got.shape, got.scale.shape, got.dtype) == ((0, 8), (0,), jnp.float8_e4m3fn)


def test_single_row_of_one_axis():
    got = rms_norm(jnp.arange(8.0), quantize="e4m3")
    assert (got.shape, got.scale.shape) == ((8,), ())
    np.testing.assert_allclose(got.scale, 7 / np.sqrt(np.square(np.arange(8)).mean()) / 448, rtol=1e-5)


@pytest.mark.triton
def test_plans():
    x = jax.ShapeDtypeStruct((2, 100, 4096), jnp.bfloat16)
    for device, want in (("H200", "triton"), ("L4", "triton"), ("A100", "xla")):
        with on_device(device):
            plan = explain(rms_norm, x, quantize="e4m3")
        assert plan.implementation == want, device
    reason = "to round to e4m3 it needs compute capability 8.9, and NVIDIA A100"
    assert any(name == "triton" and why.startswith(reason) for name, why in plan.passed_over), plan
    with on_device("H200"), pytest.raises(NotImplementedError, match="it has no quantized output"):
        explain(layer_norm, x, quantize="e5m2", implementation="mosaic_gpu")


@pytest.mark.parametrize("quantize", ["e3m4", "int8", "", True, 8, ["e4m3"], jnp.float8_e4m3fn])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_bad_format(norm, quantize):
    with pytest.raises(ValueError, match=re.escape(f"quantize: got {quantize!r}, want 'e4m3', 'e5m2' or None")):
        norm(jnp.ones((2, 8)), quantize=quantize)
