"""quantize_fp8: its dequantized result, for every value of float32."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import matmul, quantize_fp8
from jax_kernels.quantization import dequantize, formats, quantize


@pytest.mark.parametrize(("axis", "shape"), [(None, ()), (0, (5, 7)), (-1, (3, 5)), ((0, 2), (5,)), ((1, -3), (7,))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(axis, shape, dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((3, 5, 7)) * 10.0 ** random.integers(-30, 30, (3, 5, 7)), dtype)
    values, scales = jax.jit(quantize_fp8, static_argnums=1)(x, axis)
    assert (values.dtype, values.shape) == (jnp.float8_e4m3fn, x.shape)
    assert (scales.dtype, scales.shape) == (jnp.float32, shape)
    x, values, scales = (np.asarray(y).astype(np.float64) for y in (x, values, scales))
    axes = (0, 1, 2) if axis is None else axis
    scales = np.expand_dims(scales, axes)
    largest = np.abs(x).max(axes, keepdims=True)
    np.testing.assert_allclose(scales, largest / 448, rtol=1e-6)
    np.testing.assert_array_equal(np.abs(values).max(axes), 448)
    # The division in float32 rounds, too.
    bound = np.maximum(np.abs(x) * 2.0**-4, largest * 2.0**-18) * (1 + 1e-5)
    assert (np.abs(values * scales - x) <= bound).all()


def test_zeros_subnormals_and_non_finite_values():
    x = jnp.array([[0.0, 0.0], [1e-40, 0.0], [1.0, jnp.nan], [jnp.inf, 1.0], [3.4e38, -3.4e38]])
    values, scales = quantize_fp8(x, axis=1)
    values = values.astype(jnp.float32)
    assert scales[0] == 1
    assert (scales[:2] > 0).all()
    np.testing.assert_array_equal(values[:2], 0)
    assert np.isnan(values[2:4]).all()
    np.testing.assert_array_equal(values[4], [448, -448])


@pytest.mark.parametrize("axis", [1, (0, 2)])
def test_numpy_axes(axis):
    x = jnp.arange(24.0).reshape(2, 3, 4)
    of_numpy = np.int64(axis) if isinstance(axis, int) else tuple(map(np.int64, axis))
    for got, want in zip(quantize_fp8(x, of_numpy), quantize_fp8(x, axis), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    ("x", "axis", "error", "message"),
    [
        (jnp.ones(3, int), None, TypeError, "x: got int32, want a float array"),
        ([1.0], None, TypeError, "x: got list, want a float array"),
        (jnp.ones((2, 3)), 1.0, TypeError, "axis: got 1.0, want an int or a sequence of ints"),
        (jnp.ones((2, 3)), ("a",), TypeError, "axis: got ('a',), want an int or a sequence of ints"),
        (jnp.ones((2, 3)), 2, ValueError, "axis: got 2, want different axes of an array of shape (2, 3)"),
        (jnp.ones((2, 3)), (0, -2), ValueError, "axis: got (0, -2), want different axes"),
    ],
)
def test_bad_input(x, axis, error, message):
    with pytest.raises(error) as caught:
        quantize_fp8(x, axis)
    assert message in str(caught.value)


def test_bad_arguments():
    x = jnp.ones((256, 8))
    wrong = {
        "format: got ['e4m3'], want one of": (ValueError, lambda: quantize(x, ["e4m3"])),
        "group_size: got 128.0 with format 'int4', want None or one of": (
            ValueError,
            lambda: quantize(x, "int4", group_size=128.0),
        ),
        "x: got": (TypeError, lambda: quantize(quantize(x))),
        "dtype: got int8, want a float dtype": (
            TypeError,
            lambda: dequantize(quantize(x), jnp.int8),
        ),
        "dtype: got bool, want a float dtype": (TypeError, lambda: dequantize(quantize(x, "int4"), "bool")),
    }
    for message, (error, call) in wrong.items():
        with pytest.raises(error, match=re.escape(message)):
            call()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_nan_among_many_values(scaling):
    """XLA's maximum of many values drops a NaN on CPUs."""
    x = jax.random.normal(jax.random.key(0), (300, 700)).at[3, 200].set(jnp.nan)
    found = quantize(x, scaling=scaling)
    alone = {"tensor": slice(None), "row": 3, "block": (slice(0, 128), slice(128, 256))}[scaling]
    expected = np.zeros(x.shape, bool)
    expected[alone] = True
    np.testing.assert_array_equal(np.isnan(found.values.astype(jnp.float32)), expected)
    assert np.isnan(quantize_fp8(x)[1])
    assert np.isnan(quantize_fp8(x, axis=1)[1][3])
    assert np.isnan(quantize(x.T, "int8").scale.astype(jnp.float32)).sum() == 1


def test_scale_has_a_derivative_values_have_none():
    x = jax.random.normal(jax.random.key(0), (8, 8))
    found = quantize(x)
    of_scale = lambda scale: dequantize(dataclasses.replace(found, scale=scale)).sum()
    want = float(found.values.astype(jnp.float32).sum())
    assert jax.grad(of_scale)(found.scale) == pytest.approx(want, rel=1e-6)
    with pytest.raises(NotImplementedError, match="dequantize: 8-bit values have no gradients"):
        jax.grad(lambda values: dequantize(dataclasses.replace(found, values=values)).sum())(found.values)


@pytest.mark.parametrize(("format", "top"), [("e4m3", 448), ("e5m2", 57344)])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_values_beyond_a_given_scale_saturate(format, top, scaling):
    x = jnp.linspace(-9, 9, 32).reshape(4, 8) * top
    scale = {"tensor": jnp.float32(2), "row": jnp.full(4, 2.0), "block": jnp.full((1, 1), 2.0)}[scaling]
    found = jax.jit(lambda x: quantize(x, format, scaling=scaling, scale=scale))(x)
    values = np.asarray(found.values).astype(np.float64)
    beyond = np.abs(x) > 2 * top
    np.testing.assert_array_equal(values[beyond], top * np.sign(x)[beyond])
    assert beyond.sum() > 20
    np.testing.assert_allclose(values[~beyond], np.asarray(x)[~beyond] / 2, rtol=2.0**-3)


@pytest.mark.parametrize(("format", "largest", "top"), [("mxfp8", 500.0, 448), ("mxfp4", 7.5, 6)])
def test_values_beyond_a_power_of_two_scale_saturate(format, largest, top):
    x = jnp.full((64, 2), 0.5 * largest).at[1].set(largest).at[2].set(-largest).at[33].set(-largest)
    found = np.asarray(dequantize(quantize(x, format)))
    np.testing.assert_array_equal(found[[1, 2, 33]], np.full((3, 2), top) * np.array([[1], [-1], [-1]]))


@pytest.mark.parametrize(("format", "top"), [("int8", 127), ("int4", 7)])
def test_integers_beyond_a_rounded_scale_saturate(format, top):
    """The scale, rounded to bfloat16, may be less than the largest value over the format's largest."""
    sizes = np.linspace(1, 2, 200, dtype=np.float32)
    x = jnp.stack([sizes, -sizes, sizes / 3])
    found = quantize(x, format, scaling="row", scale_dtype="bfloat16")
    scale = np.asarray(found.scale.astype(jnp.float32), np.float64)
    assert (sizes / scale > top + 0.2 * (top == 127)).sum() > 10
    values = np.asarray(dequantize(found), np.float64) / scale
    want = np.clip(np.round(np.asarray(x, np.float64) / scale), -top, top)
    assert np.abs(values - want).max() < 1e-3


@pytest.mark.parametrize("format", ["e4m3", "int4"])
def test_rounding_has_no_derivative(format):
    x = jax.random.normal(jax.random.key(0), (8, 32))
    back = lambda x: dequantize(quantize(x, format))
    for function in (back, jax.jit(back), lambda x: quantize_fp8(x)[1]):
        with pytest.raises(NotImplementedError, match="quantize: rounding to few bits has no derivative"):
            jax.grad(lambda x, function=function: function(x).sum())(x)

    def through(x):  # as the message advises
        y = jax.lax.stop_gradient(x)
        return (3 * (x + (back(y) - y))).sum()

    np.testing.assert_array_equal(jax.grad(through)(x), jnp.full(x.shape, 3.0))
    np.testing.assert_allclose(through(x), 3 * back(x).sum(), rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (2, 130, 0)])
def test_empty_arrays(shape):
    """Values and scales have the shapes that the arguments imply. Scales of no values are 1."""
    calls = [{"scaling": "tensor"}, {"format": "e5m2", "scaling": "row"}, {"scaling": "row", "axis": -2}]
    calls += [{"scaling": "block"}, *({"format": format, "axis": -1} for format in formats.FORMATS)]
    calls += [{"format": "mxfp4"}, {"format": "int8", "scaling": "row"}, {"format": "int4", "scaling": "row"}]

    @jax.jit
    def run(x):
        found = [quantize(x, **call) for call in calls]
        return found, [dequantize(y, jnp.float16) for y in found]

    for call, found, back in zip(calls, *run(jnp.zeros(shape, jnp.bfloat16)), strict=True):
        assert found.shape == shape, call
        np.testing.assert_array_equal(found.scale.astype(jnp.float32), np.ones(found.scale.shape))
        if found.layout is not None:
            depth, columns = shape[found.axis], shape[-3 - found.axis]
            assert found.values.shape == (*shape[:-2], columns, found.layout.bytes_of(depth)), call
            assert found.scale.shape == (*shape[:-2], *found.layout.scale_shape(depth, columns)), call
        assert (back.shape, back.dtype) == (shape, jnp.float16), call


def test_empty_arrays_by_axis():
    x = jnp.zeros((0, 3))
    for axis, want in ((None, ()), (0, (3,)), (1, (0,)), ((0, 1), ())):
        values, scales = quantize_fp8(x, axis)
        assert (values.shape, scales.shape) == ((0, 3), want)
        np.testing.assert_array_equal(scales, np.ones(want))


def test_matmul_with_empty_weights():
    """The sum over no values is 0, and a result with no columns is empty."""
    for format in ("int8", "mxfp4"):
        product = lambda w, format=format: lambda x: matmul(x, quantize(w, format))
        out, vjp = jax.vjp(product(jnp.zeros((0, 5))), jnp.ones((3, 0), jnp.bfloat16))
        np.testing.assert_array_equal(out.astype(jnp.float32), np.zeros((3, 5)))
        assert vjp(out)[0].shape == (3, 0)
        out, vjp = jax.vjp(product(jnp.zeros((4, 0))), jnp.ones((3, 4), jnp.bfloat16))
        assert out.shape == (3, 0)
        np.testing.assert_array_equal(vjp(out)[0].astype(jnp.float32), np.zeros((3, 4)))
