"""quantize_fp8: what comes back, for every number that float32 has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import quantize_fp8
from jax_kernels.quantization import dequantize, quantize


@pytest.mark.parametrize(("axis", "shape"), [(None, ()), (0, (5, 7)), (-1, (3, 5)), ((0, 2), (5,)), ((1, -3), (7,))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_comes_back(axis, shape, dtype):
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
    # The division rounds too, in float32.
    bound = np.maximum(np.abs(x) * 2.0**-4, largest * 2.0**-18) * (1 + 1e-5)
    assert (np.abs(values * scales - x) <= bound).all()


def test_zeros_subnormal_and_not_finite_numbers():
    x = jnp.array([[0.0, 0.0], [1e-40, 0.0], [1.0, jnp.nan], [jnp.inf, 1.0], [3.4e38, -3.4e38]])
    values, scales = quantize_fp8(x, axis=1)
    values = values.astype(jnp.float32)
    assert scales[0] == 1
    assert (scales[:2] > 0).all()
    np.testing.assert_array_equal(values[:2], 0)
    assert np.isnan(values[2:4]).all()
    np.testing.assert_array_equal(values[4], [448, -448])


@pytest.mark.parametrize("axis", [1, (0, 2)])
def test_axes_of_numpy(axis):
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


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_a_nan_among_many_numbers(scaling):
    """XLA's maximum of many numbers drops a NaN on CPUs."""
    x = jax.random.normal(jax.random.key(0), (300, 700)).at[3, 200].set(jnp.nan)
    found = quantize(x, scaling=scaling)
    alone = {"tensor": slice(None), "row": 3, "block": (slice(0, 128), slice(128, 256))}[scaling]
    expected = np.zeros(x.shape, bool)
    expected[alone] = True
    np.testing.assert_array_equal(np.isnan(found.values.astype(jnp.float32)), expected)
    assert np.isnan(quantize_fp8(x)[1])
    assert np.isnan(quantize_fp8(x, axis=1)[1][3])
    assert np.isnan(quantize(x.T, "int8").scale.astype(jnp.float32)).sum() == 1


def test_the_scale_has_a_derivative():
    near = lambda x: dequantize(quantize(x)).sum()
    x = jax.random.normal(jax.random.key(0), (8, 8))
    largest = jnp.unravel_index(jnp.abs(x).argmax(), x.shape)
    moved = x.at[largest].multiply(1.01)
    assert jnp.isfinite(jax.grad(near)(x)).all()
    assert jax.grad(near)(moved)[largest] != 0
