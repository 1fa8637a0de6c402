"""Weights of 4 and 8 bits: their layout, and the dequantized result of every kind of value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.quantization import QuantizedArray, dequantize, quantize
from jax_kernels.quantization.formats import LowBit, unpack_scale

FORMATS = [
    ("int8", {}),
    ("int8", {"scaling": "row"}),
    ("int4", {}),
    ("int4", {"group_size": 32, "scale_dtype": "bfloat16"}),
    ("int4", {"group_size": 256}),
    ("int4", {"scaling": "row"}),
    ("mxfp8", {}),
    ("mxfp4", {}),
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize(("format", "options"), FORMATS)
@pytest.mark.parametrize("shape", [(300, 5), (2, 64, 3)])
def test_round_trip(format, options, shape):
    random = np.random.default_rng(0)
    w = random.standard_normal(shape) * 10.0 ** random.integers(-10, 10, shape[-1])
    got = jax.jit(lambda w: quantize(w, format, **options))(jnp.asarray(w, jnp.float32))
    assert (got.shape, got.ndim) == (shape, len(shape))
    bits = 4 if format in ("int4", "mxfp4") else 8
    assert got.values.size * got.values.dtype.itemsize * 8 >= bits * w.size
    assert got.values.shape[-2] == shape[-1], "K is last"
    back = np.asarray(dequantize(got), np.float64)
    group = 32 if format.startswith("mx") else options.get("group_size", 128)
    group = shape[-2] if options.get("scaling") == "row" else group
    for start in range(0, shape[-2], group):
        part, found = w[..., start : start + group, :], back[..., start : start + group, :]
        largest = np.abs(part).max(-2, keepdims=True)
        power = 2.0 ** np.floor(np.log2(largest))
        bound = {  # half a step; for MX, values beyond 1.75 or 1.5 times a power of two saturate
            "int8": largest / 127 * 0.51 + (largest / 128 if options.get("scale_dtype") else 0),
            "int4": largest / 7 * 0.51 + (largest / 128 if options.get("scale_dtype") else 0),
            "mxfp8": np.maximum(np.abs(part) * 2.0**-4, power * 2.0**-17) + np.maximum(largest - 1.75 * power, 0),
            "mxfp4": np.maximum(np.abs(part) / 4, power / 16) + np.maximum(largest - 1.5 * power, 0),
        }[format]
        assert (np.abs(found - part) <= bound * (1 + 1e-5)).all()
    again = quantize(dequantize(got), format, **options)
    if format.startswith("mx") or options.get("scale_dtype") is None:
        np.testing.assert_allclose(dequantize(again), back, rtol=2e-6)


def test_axes():
    w = jnp.asarray(np.random.default_rng(0).standard_normal((70, 9)), jnp.float32)
    plain, transposed = quantize(w, "int4"), quantize(w.T, "int4", axis=-1)
    np.testing.assert_array_equal(plain.values, transposed.values)
    np.testing.assert_array_equal(dequantize(plain), dequantize(transposed).T)
    assert transposed.shape == (9, 70)


def test_four_bit_layout():
    """The first half of a unit is in the low bits. int4 is stored as its sum with 8."""
    w = (jnp.arange(128) % 15 - 7.0)[:, None]
    found = np.asarray(quantize(w, "int4").values)[0]
    want = (np.arange(128) % 15 - 7 + 8).astype(np.uint8)
    np.testing.assert_array_equal(found, want[:64] | want[64:] << 4)
    assert [LowBit(format="mxfp4", group=32).unit, LowBit(format="int4", group=128).unit] == [64, 128]
    padded = quantize(jnp.ones((1, 1)), "int4")
    assert padded.values.tolist() == [[0x8F] + [0x88] * 63]


def test_integers_are_symmetric():
    w = jnp.asarray([[-1.0], [1.0], [0.3]])
    for format, top in (("int8", 127), ("int4", 7)):
        values = np.asarray(dequantize(quantize(w, format)) * top)
        np.testing.assert_allclose(values[:2, 0], [-top, top], rtol=1e-6)
    lowest = QuantizedArray(
        values=jnp.full((1, 64), 0x80, jnp.uint8), scale=jnp.ones((1, 1)), scaling="group", axis=-2,
        layout=LowBit(format="int4", group=128), length=128,
    )  # fmt: skip
    assert dequantize(lowest).min() == -8


@pytest.mark.parametrize(("format", "options"), FORMATS)
def test_extremes(format, options):
    """Zeros stay. A NaN or an infinity makes all values with its scale NaN. Tiny and huge values stay finite."""
    w = np.ones((256, 6), np.float32)
    w[:, 0] = 0
    w[3, 1], w[3, 2], w[:, 3], w[:, 4] = np.nan, -np.inf, 1e-40, 3.4e38
    w[0, 5] = 0
    back = np.asarray(dequantize(quantize(jnp.asarray(w), format, **options)))
    assert (back[:, 0] == 0).all()
    assert not np.isfinite(back[:32, 1:3]).any()
    assert np.isnan(back[:32, 1:3]).all()
    assert (np.abs(back[:, 3]) < 2e-38).all()
    assert (back[:, 4] > 1.9e38).all()
    assert np.isfinite(back[:, 4]).all()
    assert back[0, 5] == 0
    np.testing.assert_allclose(back[1:, 5], 1, rtol=5e-3)


@pytest.mark.parametrize(("format", "exponent", "top"), [("mxfp8", 8, 448), ("mxfp4", 2, 6)])
def test_mx_scales(format, exponent, top):
    """OCP's specification: 2 ** (floor(log2(largest)) - the exponent of the format's largest power of two)."""
    largest = jnp.asarray([1.0, 1.999, 2.0, 448.0, 6.0, 7.9, 2.0**-100, 2.0**100])
    got = quantize(jnp.zeros((32, 8)).at[5].set(largest), format)
    want = 2.0 ** (np.floor(np.log2(np.asarray(largest, np.float64))) - exponent)
    np.testing.assert_array_equal(unpack_scale(got.scale)[0], want)
    found = np.asarray(dequantize(got))[5]
    assert (found <= want * top).all()
    np.testing.assert_array_equal(found[5], want[5] * top)  # 7.9 saturates
    codes = jnp.arange(256, dtype=jnp.uint8)
    scales = np.asarray(unpack_scale(codes))
    np.testing.assert_array_equal(scales[1:255], 2.0 ** (np.arange(1, 255) - 127.0))
    assert np.isnan(scales[255])


def test_e2m1_rounds_to_nearest_even():
    x = np.array([0.24, 0.25, 0.26, 0.74, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 6.0, 4.9, 0.0, 3.0, 1.0])
    want = [0, 0, 0.5, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, 4, 0, 3, 1]
    w = jnp.asarray(np.concatenate([x, -x])[:, None])
    np.testing.assert_array_equal(dequantize(quantize(w, "mxfp4"))[:, 0], want + [-y for y in want])


def test_every_code_round_trips():
    codes = jnp.arange(256, dtype=jnp.uint8)[None]
    of = lambda format, scale, values: QuantizedArray(
        values=values, scale=scale, scaling="group", axis=-1, layout=LowBit(format=format, group=32),
        length=values.shape[1] * (2 if values.dtype == jnp.uint8 else 1),
    )  # fmt: skip
    one = jax.lax.bitcast_convert_type(jnp.full((16, 1), 127, jnp.uint8), jnp.float8_e8m0fnu)
    back = np.asarray(dequantize(of("mxfp4", one, codes))).reshape(8, 2, 32)
    signed = np.concatenate([E2M1, -E2M1])
    np.testing.assert_array_equal(back[:, 0].ravel(), signed[np.arange(256) % 16])
    np.testing.assert_array_equal(back[:, 1].ravel(), signed[np.arange(256) // 16])
    values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    back = dequantize(of("mxfp8", one[:8], values))
    np.testing.assert_array_equal(back, values.astype(jnp.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int3"}, "format: got 'int3', want one of 'e4m3', 'e5m2', 'int8'"),
        ({"format": "mxfp4", "scaling": "row"}, "scaling: got 'row' with format 'mxfp4', want 'group'"),
        ({"format": "int4", "scaling": "tensor"}, "scaling: got 'tensor' with format 'int4', want 'group' or 'row'"),
        ({"format": "int4", "group_size": 48}, "group_size: got 48 with format 'int4', want None or one of 32, 64"),
        ({"format": "mxfp8", "group_size": 64}, "group_size: got 64 with format 'mxfp8', want None or one of 32"),
        ({"format": "int8", "scaling": "row", "group_size": 32}, "group_size: got 32 with format 'int8', want None"),
        ({"format": "int8", "scale": 1.0}, "scale: got a value with format 'int8', want None"),
        ({"format": "int8", "scale_dtype": "float16"}, "scale_dtype: got float16 with format 'int8', want float32"),
        ({"format": "mxfp4", "scale_dtype": "float32"}, "scale_dtype: got float32 with format 'mxfp4', want None"),
        ({"format": "e4m3", "group_size": 32}, "group_size, scale_dtype: got a value with format 'e4m3', want None"),
        ({"format": "int4", "axis": 0}, "axis: got 0, want -1 or -2"),
        ({"format": "int4", "x": jnp.ones(3)}, "x: got shape (3,), want two axes or more"),
    ],
)
def test_bad_input(options, message):
    options = {"x": jnp.ones((4, 4))} | options
    with pytest.raises(ValueError) as caught:
        quantize(options.pop("x"), **options)
    assert message in str(caught.value)
