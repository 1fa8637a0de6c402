"""matmul and gated_matmul in 8 bits: against float64 of the rounded operands, scales, transforms and errors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, gated_matmul, matmul
from jax_kernels.dispatch import on_device
from jax_kernels.quantization import QuantizedArray, dequantize, quantize
from jax_kernels.testing import rms_error
from jax_kernels.testing.low_precision import fp8_matmul as cases
from tests.support.cases import ids, tiers


@pytest.mark.parametrize(
    "name",
    tiers.cases(
        cases.CASES,
        {"odd_tensor", "one_row", "bfloat16_out_row", "transposed_block"}
        | {f"{size}_{scaling}" for size in ("small", "large") for scaling in ("tensor", "row", "block")},
    ),
)
def test_against_float64(name):
    for result, (error, bound) in cases.errors_by(cases.CASES[name], "xla").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(cases.HOPPER))
def test_on_hopper(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    for implementation in ("mosaic_gpu", "xla"):
        for result, (error, bound) in cases.errors_by(cases.HOPPER[name], implementation).items():
            assert error <= bound, (implementation, result)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_gated_on_hopper(scaling):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    for transpose_w in (False, True):
        errors = cases.gated_errors(scaling, transpose_w, "mosaic_gpu", size=128)
        assert max(errors.values()) < 0.1, errors


@pytest.mark.parametrize(
    ("scaling", "transpose_w"), tiers.pairs(["tensor", "row", "block"], [False, True], ("tensor", True))
)
def test_gated(scaling, transpose_w):
    errors = cases.gated_errors(scaling, transpose_w, "xla")
    assert sorted(errors) == ["out", "w_gate", "w_up", "x"]
    assert all(0.01 < error < 0.1 for error in errors.values()), errors


def _normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_quantized_arrays(scaling, transpose_w):
    """Quantized arrays, and their values and scales by name, give the result of the call that quantizes by itself."""
    x, w = _normal(140, 200), _normal(150, 200, seed=1)
    w = w if transpose_w else w.T
    quantized = quantize(x, scaling=scaling), quantize(w, scaling=scaling, axis=-1 if transpose_w else -2)
    options = {"transpose_w": transpose_w, "out_dtype": jnp.float32}
    got = matmul(*quantized, **options)
    values = matmul(
        *(y.values for y in quantized),
        **dict(zip(("x_scale", "w_scale"), (y.scale for y in quantized), strict=True)),
        **options,
    )
    want = matmul(x, w, precision="fp8", scaling=scaling, **options)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(values, want)
    dense = [dequantize(y) for y in quantized]
    right = jnp.dot(dense[0], dense[1].T if transpose_w else dense[1], precision="highest")
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-3)
    of_up = quantize(5 * w[::-1], scaling=scaling, axis=-1 if transpose_w else -2)
    up = jnp.dot(dense[0], dequantize(of_up).T if transpose_w else dequantize(of_up), precision="highest")
    gated = gated_matmul(quantized[0], quantized[1], of_up, **options)
    np.testing.assert_allclose(gated, jax.nn.silu(right) * up, rtol=1e-4, atol=5e-2)
    scales = {"x_scale": quantized[0].scale, "w_gate_scale": quantized[1].scale, "w_up_scale": of_up.scale}
    by_name = gated_matmul(*(y.values for y in (*quantized, of_up)), **scales, **options)
    np.testing.assert_array_equal(by_name, gated)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_weights_quantized_once(scaling, transpose_w):
    """An x of 16 bits is rounded in each call. The results, and the gradients of x, bias and residual, are near or
    equal to the results of a call that rounds w too.
    """
    x, w, bias, residual = _normal(2, 70, 200), _normal(200, 150, seed=1), _normal(150, seed=2), _normal(2, 70, 150)
    w = w.T if transpose_w else w
    known = quantize(w, scaling=scaling, axis=-1 if transpose_w else -2)
    options = {"transpose_w": transpose_w, "activation": "gelu"}

    def loss(x, bias, residual, w, **more):
        out = matmul(x, w, bias=bias, residual=residual, **options, **more)
        return jnp.sin(out.astype(jnp.float32)).sum(), out

    of = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (_, got), gradients = of(x, bias, residual, known)
    (_, want), wanted = of(x, bias, residual, w, precision="fp8", scaling=scaling)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, want)
    for found, right in zip(gradients[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(found, right)
    # With scales of rows w is rounded twice for the gradient of x.
    assert rms_error(gradients[0], wanted[0].astype(jnp.float32)) < (0.04 if scaling == "row" else 1e-6)
    with pytest.raises(NotImplementedError, match="matmul: weights of 8 bits have no gradients"):
        jax.grad(lambda values: loss(x, bias, residual, dataclasses.replace(known, values=values))[0])(known.values)
    tangent = jax.jvp(lambda x: matmul(x, known, **options), (x,), (jnp.ones_like(x),))[1]
    assert jnp.isfinite(tangent.astype(jnp.float32)).all()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_gated_weights_quantized_once(scaling):
    x, gate, up = _normal(140, 200), _normal(200, 150, seed=1), 3 * _normal(200, 150, seed=2)
    known = [quantize(w, scaling=scaling, axis=-2) for w in (gate, up)]
    loss = lambda x, *weights, **more: jnp.sin(gated_matmul(x, *weights, **more).astype(jnp.float32) / 9).sum()
    np.testing.assert_array_equal(gated_matmul(x, *known), gated_matmul(x, gate, up, precision="fp8", scaling=scaling))
    got = jax.grad(loss)(x, *known)
    want = jax.grad(loss)(x, gate, up, precision="fp8", scaling=scaling)
    assert rms_error(got, want.astype(jnp.float32)) < (0.04 if scaling == "row" else 1e-6)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("scales", [(1e-36, 1e-2), (1e35, 1e-20), (2e-38, 1e30), (1e-20, 1e30)])
def test_scales_far_apart(scales, scaling):
    """The scales' product, or the sums times one scale, may be outside of float32's range."""
    values = [(64 * y).astype(jnp.float8_e4m3fn) for y in (_normal(4, 128), _normal(128, 8, seed=1))]
    shapes = [{"tensor": (), "row": (size,), "block": (1, 1)}[scaling] for size in (4, 8)]
    x_scale, w_scale = (jnp.full(shape, scale) for shape, scale in zip(shapes, scales, strict=True))
    of_array = lambda y, scale, axis: QuantizedArray(values=y, scale=scale, scaling=scaling, axis=axis)
    x, w = of_array(values[0], x_scale, -1), of_array(values[1], w_scale, -2)
    right = np.asarray(values[0]).astype(np.float64) @ np.asarray(values[1]).astype(np.float64)
    right = right * np.float64(jnp.float32(scales[0])) * np.float64(jnp.float32(scales[1]))
    for call in (matmul, jax.jit(matmul, static_argnames="out_dtype")):
        got = call(x, w, out_dtype="float32")
        np.testing.assert_allclose(np.float64(got), right, rtol=1e-5, atol=1e-5 * np.abs(right).max())
    got = gated_matmul(
        x, w, of_array(values[1], w_scale * 2, -2), activation="relu", residual=None, out_dtype="float32"
    )
    with np.errstate(over="ignore"):
        want = np.float32(np.maximum(right, 0)) * np.float32(2 * right)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_mixed_formats_default_to_bfloat16():
    x, w = quantize(_normal(8, 16), "e5m2"), quantize(_normal(16, 4), "e4m3")
    out = matmul(x, w, bias=jnp.ones(4), activation="relu")
    assert out.dtype == jnp.bfloat16
    want = jax.nn.relu(dequantize(x) @ dequantize(w) + 1)
    np.testing.assert_allclose(out.astype(jnp.float32), want, rtol=2**-8, atol=1e-5)


def test_values_without_scales():
    x, w = _normal(8, 16).astype(jnp.float8_e4m3fn), _normal(16, 4).astype(jnp.float8_e4m3fn)
    wide = [y.astype(jnp.float32) for y in (x, w)]
    np.testing.assert_allclose(matmul(x, w, out_dtype="float32"), wide[0] @ wide[1], rtol=1e-6)
    rows = jnp.arange(1, 9, dtype=jnp.float32)
    got = matmul(x, w, x_scale=rows, out_dtype="float32")
    np.testing.assert_allclose(got, rows[:, None] * (wide[0] @ wide[1]), rtol=1e-6)
    gate, up = wide[0] @ wide[1], wide[0] @ wide[1][::-1]
    out = gated_matmul(x, w, w[::-1], out_dtype="float32")
    np.testing.assert_allclose(out, jax.nn.silu(gate) * up, rtol=1e-5)
    scales = {"x_scale": 0.5, "w_gate_scale": 2.0, "w_up_scale": jnp.array(7.0)}
    out = gated_matmul(x, w, w[::-1], **scales, out_dtype="float32")
    np.testing.assert_allclose(out, jax.nn.silu(gate) * 3.5 * up, rtol=1e-5)


def test_scales_with_three_axes():
    """The scaling is inferred if a scale's shape fits only rows, or only blocks."""
    by_row = jnp.array([1.0, 10.0, 100.0])[:, None]
    x, w = _normal(2, 3, 512, dtype=jnp.float32) * by_row, _normal(512, 8).astype(jnp.float8_e4m3fn)
    for scaling, rows in (("row", 2), ("block", 2)):
        quantized = quantize(x[:rows] if scaling == "row" else x.reshape(6, 512), scaling=scaling)
        got = matmul(quantized.values.reshape(2, 3, 512), w, x_scale=quantized.scale, out_dtype="float32")
        want = dequantize(quantized).reshape(2, 3, 512) @ w.astype(jnp.float32)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)


def test_delayed_scales():
    """Values beyond the range of a given scale saturate. The scale has no gradient."""
    x, w = _normal(8, 16, dtype=jnp.float32), _normal(16, 4, dtype=jnp.float32)
    dynamic = quantize(x).scale
    call = lambda x_scale: matmul(x, w, precision="fp8", x_scale=x_scale)
    np.testing.assert_array_equal(call(dynamic), matmul(x, w, precision="fp8"))
    narrow = matmul(x, w, precision="fp8", x_scale=1e-3)
    clipped = matmul(jnp.clip(x, -0.448, 0.448), w, precision="fp8")
    np.testing.assert_allclose(narrow, clipped, rtol=0.05, atol=0.05)
    assert np.isfinite(narrow).all()
    assert jax.grad(lambda scale: call(scale).sum())(dynamic) == 0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_non_finite_values_propagate(bad):
    x, w = _normal(8, 16).at[3, 5].set(bad), _normal(16, 4)
    assert np.isnan(matmul(x, w, precision="fp8")).all()
    rows = np.isnan(matmul(x, w, precision="fp8", scaling="row"))
    np.testing.assert_array_equal(rows, np.arange(8)[:, None] == np.full(4, 3))


def test_zeros():
    x, w = jnp.zeros((8, 16)), _normal(16, 4, dtype=jnp.float32)
    out, vjp = jax.vjp(lambda x, w: matmul(x, w, precision="fp8", scaling="block"), x, w)
    assert not out.any()
    assert np.isfinite(vjp(jnp.zeros_like(out))[0]).all()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_vmap(in_axes, scaling):
    arrays = [_normal(3, 4, 4, dtype=jnp.float32, seed=seed) for seed in range(2)]
    given = [x if axis == 0 else x[0] for x, axis in zip(arrays, in_axes, strict=True)]
    both = jax.value_and_grad(
        lambda x, w: matmul(x, w, precision="fp8", scaling=scaling, implementation="xla").sum(), (0, 1)
    )
    got = jax.jit(jax.vmap(both, in_axes))(*given)
    for i in range(3):
        want = both(*(x[i] if axis == 0 else x for x, axis in zip(given, in_axes, strict=True)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


@pytest.mark.triton
def test_plans():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 512), (512, 8192)))
    with on_device("H200"):
        for scaling in ("tensor", "row", "block"):
            plan = explain(matmul, x, w, precision="fp8", scaling=scaling, implementation="mosaic_gpu")
            assert plan.config.forward.block_n == 256
            options = {"precision": "fp8", "scaling": scaling, "implementation": "mosaic_gpu"}
            total = lambda x, w, options=options: matmul(x, w, **options).sum().astype(jnp.float32)
            program = str(jax.make_jaxpr(jax.grad(total, (0, 1)))(x, w))
            assert program.count("wgmma_ref") == (6 if scaling == "block" else 12), "three matmuls, each in two parts"
            assert "f8_e5m2" in program
            assert program.count("name=matmul_both_ways_triton") == 3, "x, w, and the cotangent"
    with on_device("A100"):
        assert explain(matmul, x, w, precision="fp8", implementation="xla").implementation == "xla"


@pytest.mark.triton
@pytest.mark.parametrize(("scaling", "count"), [("tensor", 1), ("row", 0), ("block", 0)])
def test_cotangents_of_a_gated_unit(scaling, count):
    """One kernel makes them with the scale of all values; other scales follow from the cotangents."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 512), (512, 1024)))
    options = {"precision": "fp8", "scaling": scaling, "implementation": "mosaic_gpu"}
    total = lambda x, *w: gated_matmul(x, *w, **options).astype(jnp.float32).sum()
    with on_device("H200"):
        program = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(x, w, w))
    assert program.count("name=matmul_gated_gradients_triton") == count


@pytest.mark.parametrize("options", [{}, {"precision": "fp8"}, {"precision": "fp8", "scaling": "block"}])
def test_shard_map(options):
    """A forgotten psum is refused, also with a GPU's kernels. Nothing runs."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 512), (512, 1024)))
    call = lambda x, w: matmul(x, w, activation="silu", **options)
    sharded = lambda out: jax.shard_map(call, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=out)
    total = lambda x, w: sharded(jax.P("rows"))(x, w).astype(jnp.float32).sum()
    with on_device("H200"):
        assert explain(matmul, x, w, activation="silu", **options).implementation == "mosaic_gpu"
        assert [y.shape for y in jax.eval_shape(jax.grad(total, (0, 1)), x, w)] == [x.shape, w.shape]
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(sharded(jax.P()), x, w)


X, W = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 4), jnp.bfloat16)
X8, W8 = X.astype(jnp.float8_e4m3fn), W.astype(jnp.float8_e4m3fn)
ERRORS = {
    "scaling": (lambda: matmul(X, W, precision="fp8", scaling="column"), ValueError, "scaling: got 'column', want"),
    "no_fp8": (lambda: matmul(X, W, scaling="row"), ValueError, "without precision='fp8'"),
    "scale_alone": (lambda: matmul(X, W, x_scale=1.0), ValueError, "without precision='fp8'"),
    "precision": (lambda: matmul(X8, W8, precision="tf32"), ValueError, "precision: got 'tf32' with float8_e4m3fn"),
    "mixed": (lambda: matmul(X8, W), TypeError, "w: got dtype bfloat16, want x's dtype float8_e4m3fn"),
    "scale_shape": (lambda: matmul(X8, W8, w_scale=jnp.ones(5)), ValueError, "w_scale: got shape (5,), want (4,)"),
    "rows_or_blocks": (
        lambda: matmul(
            jnp.zeros((1, 4, 512), jnp.float8_e4m3fn), jnp.zeros((512, 8), jnp.float8_e4m3fn), x_scale=jnp.ones((1, 4))
        ),
        ValueError,
        "scaling: got None with x_scale (1, 4), a shape of rows and of blocks; want 'row' or 'block'",
    ),
    "scale_dtype": (
        lambda: matmul(X8, W8, x_scale=jnp.ones(len(X8), jnp.bfloat16), scaling="row"),
        TypeError,
        "x_scale: got bfloat16",
    ),
    "negative": (lambda: matmul(X8, W8, x_scale=-1.0), ValueError, "x_scale: got -1.0, want a positive number"),
    "axis": (
        lambda: matmul(quantize(X, scaling="row", axis=-2), W8),
        ValueError,
        "x: got scales of rows along axis -2",
    ),
    "two_scales": (
        lambda: matmul(quantize(X), W8, x_scale=1.0),
        ValueError,
        "x_scale: got one with a QuantizedArray",
    ),
    "two_scalings": (
        lambda: matmul(quantize(X, scaling="row"), quantize(W, scaling="block")),
        ValueError,
        "want one for all",
    ),
    "gradient": (
        lambda: jax.grad(lambda x: matmul(x, W8).astype(jnp.float32).sum())(X8),
        NotImplementedError,
        "matmul: arrays of 8 bits have no gradients",
    ),
    "gradient of a gated unit": (
        lambda: jax.grad(lambda x: gated_matmul(x, W8, W8).astype(jnp.float32).sum())(X8),
        NotImplementedError,
        "gated_matmul: arrays of 8 bits have no gradients",
    ),
    "up": (
        lambda: gated_matmul(quantize(X), quantize(W), quantize(W, scaling="block")),
        ValueError,
        "w_up: got",
    ),
    "up_scale": (
        lambda: gated_matmul(X8, W8, W8, w_up_scale=1.0),
        ValueError,
        "w_up_scale: got shape (), want w_gate_scale's None",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_gpu_without_fp8_matmuls():
    x, w = (jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (X, W))
    with on_device("A100"), pytest.raises(NotImplementedError, match=r"Ada .* Hopper .* Blackwell"):
        explain(matmul, x, w, precision="fp8")


@pytest.mark.parametrize("sizes", [(1000, 64, 448), (1004, 64, 512), (1000, 96, 512)])
def test_hopper_kernel_limits(sizes):
    m, n, k = sizes
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
    with on_device("H200"), pytest.raises(NotImplementedError, match=r"rows in multiples of 8|K in multiples of 128"):
        explain(matmul, x, w, precision="fp8", implementation="mosaic_gpu")


def test_quantized_arrays_are_pytrees():
    x = quantize(_normal(8, 16), scaling="row")
    assert isinstance(jax.jit(lambda y: y)(x), QuantizedArray)
    got = jax.jit(lambda x, w: matmul(x, w, out_dtype="float32"))(x, quantize(W, scaling="row", axis=-2))
    np.testing.assert_allclose(got, dequantize(x) @ W.astype(jnp.float32), rtol=1e-5)
