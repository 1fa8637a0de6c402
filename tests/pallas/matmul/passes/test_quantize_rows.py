"""The kernel that quantizes the rows of a matrix to 8 bits in one pass, against quantize.

As a script it compiles one call: `python tests/pallas/matmul/passes/test_quantize_rows.py COLUMNS DTYPE FORMAT`.
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
    "twice": (2, MOST_HELD * CHUNK + 8),
}


def normal(*shape, dtype=jnp.bfloat16):
    """Normal random values, with a magnitude of its own for each row."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    return (x * 2.0 ** (jnp.arange(shape[0])[:, None] % 7 - 3)).astype(dtype)


def check(x, format, *, interpret, share=1.0):
    """share: the part of the values that must be equal, if a reciprocal may round differently."""
    got = jax.jit(lambda x: quantize_rows(x, FORMATS[format], interpret=interpret))(x)
    want = jax.jit(lambda x: quantize(x, format, scaling="row"))(x)
    assert (got.values.dtype, got.values.shape) == (want.values.dtype, x.shape)
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-6)
    values, wanted = (np.asarray(y.astype(jnp.float32)) for y in (got.values, want.values))
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
    for columns in (40, MOST_HELD * CHUNK + 8):
        x = normal(5, columns).at[3, 20].set(bad).at[1].set(0)
        check(x, "e4m3", interpret=True)
        got = quantize_rows(x, jnp.float8_e4m3fn, interpret=True)
        assert np.isnan(np.asarray(got.values[3], np.float32)).all()
        assert not np.asarray(got.values[1], np.float32).any()
        assert got.scale[1] == 1


def test_extreme_magnitudes():
    """The largest and the least scales stay finite, and so do the values."""
    for largest in (3e38, 1e-37, 1e-42):
        check(normal(3, 40, dtype=jnp.float32).at[1].multiply(largest), "e4m3", interpret=True)


def test_vmap():
    x = jnp.stack([normal(33, 20), 2 * normal(33, 20)])
    got = jax.vmap(lambda x: quantize_rows(x, jnp.float8_e4m3fn, interpret=True))(x)
    for i in range(2):
        want = quantize_rows(x[i], jnp.float8_e4m3fn, interpret=True)
        np.testing.assert_array_equal(got.values[i].astype(jnp.float32), want.values.astype(jnp.float32))
        np.testing.assert_array_equal(got.scale[i], want.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES.values(), (2048, 2560), (100, 14336)])
def test_on_a_gpu(shape):
    if tuple(map(int, jax.devices()[0].compute_capability.split("."))) < (9, 0):
        pytest.skip("needs Hopper, whose conversions round float32 to 8 bits at once")
    for format in FORMATS:
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            check(normal(*shape, dtype=dtype), format, interpret=False, share=0.999)
    check(normal(*shape).at[0, 0].set(jnp.nan), "e5m2", interpret=False, share=0.999)


COMPILED = {
    "bfloat16": (2560, "bfloat16", "e4m3"),
    "narrow": (128, "float16", "e4m3"),
    "held": (16384, "float32", "e5m2"),
    "twice": (28672, "bfloat16", "e4m3"),
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


def main(columns: str, dtype: str, format: str) -> list[str]:
    x = jax.ShapeDtypeStruct((4100, int(columns)), jnp.dtype(dtype))
    with on_device("h200"):
        return compile_case.lower_and_compile("h200", lambda x: quantize_rows(x, FORMATS[format]), x)[1]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
