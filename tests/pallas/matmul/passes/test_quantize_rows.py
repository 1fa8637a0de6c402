"""The kernel that quantizes the rows of a matrix to 8 bits in one pass, against quantize.

As a script it compiles one call:
`python tests/pallas/matmul/passes/test_quantize_rows.py COLUMNS DTYPE FORMAT [COUNT]`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.dispatch import on_device
from jax_kernels.pallas.matmul.passes.quantize_rows import CHUNK, MOST_HELD, quantize_rows
from jax_kernels.quantization import FORMATS, quantize
from tests.support.cases import tiers
from tests.tools import compile_case

pytestmark = pytest.mark.triton

# Blocks of several rows, rows of several chunks, long rows, and rows that a program reads twice.
SHAPES = {
    "one": (1, 1),
    "narrow": (131, 24),
    "chunks": (3, 2 * CHUNK + 40),
    "long": (2, 9 * CHUNK),
    "twice": (2, MOST_HELD + 8),
}


def normal(*shape, dtype=jnp.bfloat16):
    """Normal random values, with a magnitude of its own for each row."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    return (x * 2.0 ** (jnp.arange(shape[0])[:, None] % 7 - 3)).astype(dtype)


def check(x, format, *, interpret, share=1.0):
    """share: the part of the values that must be equal, if a reciprocal may round differently."""
    got = jax.jit(lambda x: quantize_rows(x, dtype=FORMATS[format], interpret=interpret))(x)
    want = jax.jit(lambda x: quantize(x, format, scaling="row"))(x)
    (of_x,) = got.values
    assert (of_x.dtype, of_x.shape) == (want.values.dtype, x.shape)
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-6)
    values, wanted = (np.asarray(y.astype(jnp.float32)) for y in (of_x, want.values))
    np.testing.assert_array_equal(np.isnan(values), np.isnan(wanted))
    assert ((values == wanted) | np.isnan(wanted)).mean() >= share
    np.testing.assert_allclose(values, wanted, rtol=0.25)


@pytest.mark.parametrize("name", SHAPES)
def test_interpreted(name):
    for format, dtype in zip(FORMATS, (jnp.bfloat16, jnp.float32), strict=True):
        check(normal(*SHAPES[name], dtype=dtype), format, interpret=True)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_non_finite_values_and_zeros(bad):
    """They make their row NaN. Zeros have the scale 1."""
    for columns in (40, MOST_HELD + 8):
        x = normal(5, columns).at[3, 20].set(bad).at[1].set(0)
        check(x, "e4m3", interpret=True)
        got = quantize_rows(x, dtype=jnp.float8_e4m3fn, interpret=True)
        assert np.isnan(np.asarray(got.values[0][3], np.float32)).all()
        assert not np.asarray(got.values[0][1], np.float32).any()
        assert got.scale[1] == 1


def test_extreme_magnitudes():
    """The largest and the least scales stay finite, and so do the values."""
    for largest in (3e38, 1e-37, 1e-42):
        check(normal(3, 40, dtype=jnp.float32).at[1].multiply(largest), "e4m3", interpret=True)


def test_vmap():
    x = jnp.stack([normal(33, 20), 2 * normal(33, 20)])
    got = jax.vmap(lambda x: quantize_rows(x, dtype=jnp.float8_e4m3fn, interpret=True))(x)
    for i in range(2):
        want = quantize_rows(x[i], dtype=jnp.float8_e4m3fn, interpret=True)
        np.testing.assert_array_equal(got.values[0][i].astype(jnp.float32), want.values[0].astype(jnp.float32))
        np.testing.assert_array_equal(got.scale[i], want.scale)


def check_pair(columns, *, interpret, share=1.0):
    """Two matrices whose rows share a scale are quantized like their concatenation."""
    x = normal(37, 2 * columns)
    got = jax.jit(lambda *halves: quantize_rows(*halves, dtype=jnp.float8_e5m2, interpret=interpret))(
        *jnp.split(x, 2, axis=1)
    )
    want = jax.jit(lambda x: quantize(x, "e5m2", scaling="row"))(x)
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-6)
    values = np.concatenate([np.asarray(y, np.float32) for y in got.values], axis=1)
    assert (values == np.asarray(want.values, np.float32)).mean() >= share
    np.testing.assert_allclose(values, np.asarray(want.values, np.float32), rtol=0.25)


@pytest.mark.parametrize("columns", [40, CHUNK + 8, MOST_HELD // 2 + 8])
def test_pair(columns):
    check_pair(columns, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES.values(), (2048, 2560), (100, 14336)])
def test_on_a_gpu(shape):
    if tuple(map(int, jax.devices()[0].compute_capability.split("."))) < (9, 0):
        pytest.skip("needs Hopper, whose conversions round float32 to 8 bits at once")
    for format in FORMATS:
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            check(normal(*shape, dtype=dtype), format, interpret=False, share=0.999)
    check(normal(*shape).at[0, 0].set(jnp.nan), "e5m2", interpret=False, share=0.999)
    check_pair(shape[1], interpret=False, share=0.999)


COMPILED = {
    "bfloat16": (2560, "bfloat16", "e4m3"),
    "narrow": (128, "float16", "e4m3"),
    "held": (16384, "float32", "e5m2"),
    "twice": (28672, "bfloat16", "e4m3"),
    "pair": (5120, "bfloat16", "e5m2", 2),
}


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("name", tiers.cases(COMPILED, ["bfloat16"]))
def test_compiled(name):
    """The program is one kernel, which does not spill."""
    printed, _, others = compile_case.compile_script(__file__, *map(str, COMPILED[name]))
    assert json.loads(printed) == ["matmul_quantize_rows_triton"]
    assert list(others) == ["matmul_quantize_rows_triton"]
    figures = others["matmul_quantize_rows_triton"]
    assert figures["spill_stores"] + figures["spill_loads"] == 0, figures


def main(columns: str, dtype: str, format: str, count: str = "1") -> list[str]:
    x = jax.ShapeDtypeStruct((4100, int(columns)), jnp.dtype(dtype))
    with on_device("h200"):
        run = lambda *arrays: quantize_rows(*arrays, dtype=FORMATS[format])
        return compile_case.lower_and_compile("h200", run, *[x] * int(count))[1]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
