"""validate: a right function passes, a wrong one fails in the right line; also the bridge's for tensors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, validate
from jax_kernels.testing.validation import SIZES, compared

X = jax.random.normal(jax.random.key(0), (64, 32))
W = jax.random.normal(jax.random.key(1), (32, 16))


def plain(query, key, value):
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), value)


def square(x, w):
    return jnp.square(x @ w)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_function_passes(dtype):
    report = validate(flash_attention, plain, "small", dtype=dtype)
    assert report.passed, report
    assert report.truth == "the baseline in float64"
    assert [x.name for x in report.comparisons] == ["output", "gradient [0]", "gradient [1]", "gradient [2]"]
    assert {(x.dtype, x.shape) for x in report.comparisons} == {(dtype, SIZES["small"])}
    assert all(x.baseline_error > 0 for x in report.comparisons)
    assert str(report).startswith("passed; true values: the baseline in float64\n  output")


def test_a_wrong_output_fails():
    report = validate(lambda x, w: square(x, w) * 1.01, square, (X, W), gradients=False)
    (output,) = report.comparisons
    assert not report.passed
    assert output.error == pytest.approx(0.01, rel=0.01)
    assert output.error > output.bound
    assert str(report).startswith("FAILED")
    assert str(report).endswith("FAILED")


def test_a_wrong_gradient_fails():
    @jax.custom_vjp
    def wrong(x, w):
        return square(x, w)

    def backward(residuals, cotangent):
        dx, dw = jax.vjp(square, *residuals)[1](cotangent)
        return dx, dw * 1.01

    wrong.defvjp(lambda x, w: (square(x, w), (x, w)), backward)
    report = validate(wrong, square, (X, W))
    assert [x.name for x in report.comparisons if not x.passed] == ["gradient [1]"]


def test_a_baseline_that_refuses_float64():
    by_xla = functools.partial(flash_attention, implementation="xla")
    report = validate(flash_attention, by_xla, "small")
    assert report.passed
    assert "it refuses float64" in report.truth
    assert {x.baseline_error for x in report.comparisons} == {0.0}


def test_trees_and_integers():
    """Integers have no gradients; outputs in a structure each get a line."""

    def function(inputs, rows):
        return {"sum": inputs["x"].sum(axis=1), "rows": inputs["x"][rows], "count": rows + 1}

    report = validate(function, function, ({"x": X}, jnp.arange(3)))
    assert report.passed
    assert {x.name for x in report.comparisons} == {"output sum", "output rows", "output count", "gradient [0]['x']"}
    wrong = validate(lambda x, rows: function(x, rows) | {"count": rows}, function, ({"x": X}, jnp.arange(3)))
    assert [x.name for x in wrong.comparisons if not x.passed] == ["output count"]


def test_complex_results_and_inputs():
    """The imaginary parts count, in outputs, gradients and cotangents."""
    z = jax.lax.complex(X[0], X[1])
    report = validate(lambda x, z: jnp.fft.fft(x) * z, lambda x, z: jnp.fft.fft(x) * z, (X[2], z))
    assert report.passed, report
    names = {x.name: x.dtype for x in report.comparisons}
    assert names == {"output": "complex64", "gradient [0]": "float32", "gradient [1]": "complex64"}
    assert all(0 < x.baseline_error < x.bound for x in report.comparisons)
    assert not validate(lambda z: z.conj(), lambda z: z, (z,), gradients=False).passed
    stopped = lambda z: jax.lax.complex(z.real, jax.lax.stop_gradient(z.imag))
    wrong = validate(stopped, lambda z: z, (z,))
    assert [x.name for x in wrong.comparisons if not x.passed] == ["gradient [0]"]


def test_large_integers_count_by_their_last_bit():
    true = np.asarray([2**60, 3])
    assert compared(true, true, true, 2.0)[0].passed
    assert not compared(np.asarray([2**60 + 1, 3]), true, true, 2.0)[0].passed


def test_infinities_have_to_be_at_the_same_index():
    true = np.asarray([1.0, -np.inf, np.nan])
    of = lambda *values: compared(np.asarray(values, np.float32), true, true, 2.0)[0].error
    assert of(1.0, -np.inf, np.nan) == 0
    assert of(1.5, -np.inf, np.nan) == pytest.approx(0.5)
    assert of(1.0, np.inf, np.nan) == of(1.0, -np.inf, 2.0) == of(np.nan, -np.inf, np.nan) == np.inf


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"inputs: got 'smal', want arrays, or one of small, .*did you mean 'small'"):
        validate(plain, plain, "smal")
    with pytest.raises(ValueError, match=r"factor: got 0\.5, want 1 or more"):
        validate(square, square, (X, W), factor=0.5)
    with pytest.raises(ValueError, match="candidate: got results"):
        validate(lambda x, w: (square(x, w),), square, (X, W))
    with pytest.raises(ValueError, match=r"candidate: got output of shape \(32, 16\), want \(64, 16\)"):
        validate(lambda x, w: square(x, w)[:32], square, (X, W), gradients=False)


def test_inputs_are_a_sequence():
    with pytest.raises(TypeError, match=r"^inputs: got dict, want a list or tuple of arrays, or the name of a size"):
        validate(jnp.sin, jnp.sin, {"x": jnp.ones(3)})
