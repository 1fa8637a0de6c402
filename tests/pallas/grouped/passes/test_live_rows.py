"""The passes over the rows of all groups, which leave the rows past the last group as they are.

As a script it compiles both passes for a GPU: `python tests/pallas/grouped/passes/test_live_rows.py GPU`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.pallas.grouped.passes.live_rows import copy_live_rows, map_live_rows
from tests.support.interpreters.strict_triton import strict
from tests.tools import compile_case

pytestmark = pytest.mark.triton

# Blocks that end at the last row, inside a block, before the first row; columns of one chunk, and past one.
COUNTS = [(8, 8), (9, 7), (11, 3), (5, 0), (1, 1)]


def normal(*shape, seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("columns", [24, 1100])
@pytest.mark.parametrize(("rows", "count"), COUNTS)
def test_copies(rows, count, columns):
    x = normal(6, columns)
    index = jnp.asarray(np.random.default_rng(0).integers(0, 6, rows), jnp.int32)
    with strict():
        got = copy_live_rows(x, index, jnp.array([count], jnp.int32), interpret=True)
    np.testing.assert_array_equal(got[:count], x[index][:count])
    assert got.shape == (rows, columns)
    if count == 0:
        assert np.isnan(np.asarray(got, np.float32)).all()  # never written


def of_block(x, y, factor):
    return x * factor, jnp.tanh(y.astype(jnp.float32)), x.astype(jnp.float32) * y


@pytest.mark.parametrize("columns", [24, 300])
@pytest.mark.parametrize(("rows", "count"), COUNTS)
def test_maps(rows, count, columns):
    x, y, factors = normal(rows, columns), normal(rows, columns, seed=1), normal(rows, seed=2, dtype=jnp.float32)
    dtypes = [jnp.bfloat16, jnp.float32]
    with strict():
        count_of = jnp.array([count], jnp.int32)
        got = map_live_rows(of_block, [x, y], factors, count_of, dtypes, interpret=True)
    *wanted, summands = of_block(x, y, factors[:, None])
    for found, want, tolerance in zip(got, (*wanted, summands.sum(1)), (1e-2, 1e-5, 1e-5), strict=True):
        want = want.astype(found.dtype).astype(jnp.float32)
        np.testing.assert_allclose(found.astype(jnp.float32)[:count], want[:count], rtol=tolerance, atol=tolerance)
    assert [found.shape for found in got] == [(rows, columns), (rows, columns), (rows,)]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("gpu", ["h200", pytest.param("a100", marks=pytest.mark.slow)])
def test_compiled(gpu):
    """No spills, with every activation's gradient."""
    _, _, triton = compile_case.compile_script(__file__, gpu)
    assert sorted(name.rstrip("_0123456789") for name in triton) == [
        "grouped_copy_rows_triton",
        *["grouped_map_rows_triton"] * len(ACTIVATIONS),
    ]
    assert not any(figures["spill_stores"] for figures in triton.values())


def compile_passes(gpu: str) -> None:
    rows, columns = 4096, 1280
    of_shape = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    index, count = of_shape(rows, dtype="int32"), of_shape(1, dtype="int32")

    def run(x, index, count, factors):
        copied = copy_live_rows(x, index, count)
        results = [copied]
        for activation in ACTIVATIONS.values():

            def gradients(z, dz, factor, activation=activation):
                value, vjp = jax.vjp(activation, z.astype(jnp.float32))
                return vjp(dz.astype(jnp.float32) * factor)[0], value * dz.astype(jnp.float32)

            results.append(map_live_rows(gradients, [copied, x], factors, count, [x.dtype]))
        return results

    x, factors = of_shape(rows, columns), of_shape(rows, dtype="float32")
    compile_case.lower_and_compile(gpu, run, x, index, count, factors)


if __name__ == "__main__":
    compile_passes(sys.argv[1])
