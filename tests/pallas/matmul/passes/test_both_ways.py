"""The kernel that quantizes an operand and its transpose to 8 bits, against quantize of each."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.dispatch import on_device
from jax_kernels.pallas.matmul.passes.quantize_with_transpose import both_ways, joined_both_ways, reciprocal
from jax_kernels.quantization import FORMATS, quantize
from tests.support.cases import tiers
from tests.tools import compile_case

pytestmark = pytest.mark.triton

SHAPES = [(1, 1), (63, 65), (128, 256), (300, 131), (1, 1000)]
SCALINGS = "tensor", "row", "block"
QUICK = [((63, 65), "row"), ((300, 131), "tensor"), ((300, 131), "block"), ((1, 1000), "row"), ((1, 1), "block")]


def largest(x):
    return float(jnp.abs(x).max())


def normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype) * 3


def found_and_wanted(x, format, scaling, *, scale=None, interpret):
    """(the kernel's results, quantize's of x, quantize's of its transpose). scale: None for computed scales."""
    plain, transposed = (quantize(y, format, scaling=scaling, scale=scale) for y in (x, x.T))
    factors = None if scaling == "block" else tuple(reciprocal(y.scale).reshape(-1) for y in (plain, transposed))
    run = jax.jit(lambda x, factors: both_ways(x, factors, FORMATS[format], interpret=interpret))
    return run(x, factors), plain, transposed


def check(x, format, scaling, *, interpret, share=1.0, scale=None):
    """share: the part of the values that must be equal, if a reciprocal may round differently."""
    got, plain, transposed = found_and_wanted(x, format, scaling, scale=scale, interpret=interpret)
    for values, want in ((got.values, plain.values), (got.transposed, transposed.values)):
        assert (values.dtype, values.shape) == (want.dtype, want.shape)
        values, want = (np.asarray(y.astype(jnp.float32)) for y in (values, want))
        np.testing.assert_array_equal(np.isnan(values), np.isnan(want))
        assert ((values == want) | np.isnan(want)).mean() >= share
        np.testing.assert_allclose(values, want, rtol=0.25)
    if scaling == "block":
        np.testing.assert_allclose(got.scale, plain.scale, rtol=1e-6)


@pytest.mark.parametrize(("shape", "scaling"), tiers.some_pairs(SHAPES, SCALINGS, QUICK))
def test_interpreted(shape, scaling):
    for format, dtype in zip(FORMATS, (jnp.bfloat16, jnp.float32), strict=True):
        check(normal(*shape, dtype=dtype), format, scaling, interpret=True)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_non_finite_values(scaling, bad):
    x = normal(130, 260).at[3, 200].set(bad)
    check(x, "e4m3", scaling, interpret=True)
    if scaling == "tensor":
        check(x, "e4m3", scaling, scale=jnp.float32(0.01), interpret=True)


def test_given_scales_and_zeros():
    x = normal(130, 260)
    check(x, "e4m3", "tensor", scale=jnp.float32(1e-3), interpret=True)
    for scaling in SCALINGS:
        check(jnp.zeros((65, 3)), "e4m3", scaling, interpret=True)


def test_largest_finite_magnitude():
    for factors in (None, (jnp.ones(1), jnp.ones(1))):
        for shape in ((130, 260), (256, 128)):
            x = normal(*shape)
            bad = x.at[0, 0].set(jnp.inf).at[1, 1].set(jnp.nan)
            run = lambda x, factors=factors: both_ways(x, factors, jnp.float8_e4m3fn, measures=True, interpret=True)
            assert float(run(x).largest) == float(jnp.abs(x).max())
            assert float(run(bad).largest) == float(jnp.abs(jnp.where(jnp.isfinite(bad), bad, 0)).max())


@pytest.mark.parametrize(
    "interpret", [pytest.param(True, id="interpreted"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
)
def test_joined(interpret):
    """Matrices side by side: the bits and magnitudes of both_ways of each."""
    xs = [normal(130, width, seed=width) for width in (256, 128, 384)]
    factors = [jnp.full(1, factor, jnp.float32) for factor in (1.0, 30.0, 1000.0)]
    options = {"measures": True, "interpret": interpret}
    got = joined_both_ways(xs, factors, jnp.float8_e5m2, **options)
    want = [both_ways(x, (of, of), jnp.float8_e5m2, **options) for x, of in zip(xs, factors, strict=True)]
    assert [float(x) for x in got.largest] == [float(one.largest) for one in want] == [largest(x) for x in xs]
    values = jnp.concatenate([one.values for one in want], axis=1)
    for a, b in ((got.values, values), *zip(got.transposed, [one.transposed for one in want], strict=True)):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


def test_vmap():
    x = jnp.stack([normal(33, 20, seed=seed) for seed in range(3)])
    got = jax.vmap(lambda x: both_ways(x, None, jnp.float8_e4m3fn, interpret=True))(x)
    for i in range(3):
        want = both_ways(x[i], None, jnp.float8_e4m3fn, interpret=True)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a[i].astype(jnp.float32), b.astype(jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [*SHAPES, (2048, 4096)])
def test_on_a_gpu(shape, scaling):
    if tuple(map(int, jax.devices()[0].compute_capability.split("."))) < (9, 0):
        pytest.skip("needs Hopper, whose conversions round float32 to 8 bits at once")
    for format in FORMATS:
        check(normal(*shape), format, scaling, interpret=False, share=0.999)
    bad = normal(*shape).at[0, 0].set(jnp.nan)
    check(bad, "e5m2", scaling, interpret=False, share=0.999)
    check(bad.at[0, 0].set(jnp.inf), "e4m3", scaling, interpret=False, share=0.999)


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_compile(scaling):
    printed, _, others = compile_case.compile_script(__file__, scaling)
    assert json.loads(printed) == ["matmul_both_ways_triton"]
    figures = others["matmul_both_ways_triton"]
    assert figures["spill_stores"] + figures["spill_loads"] == 0, figures


def main(scaling: str) -> list[str]:
    x = jax.ShapeDtypeStruct((4096, 4104), jnp.bfloat16)
    sizes = {"tensor": (1, 1), "row": x.shape}.get(scaling)
    factors = None if sizes is None else tuple(jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes)

    with on_device("h200"):
        run = lambda x, factors: both_ways(x, factors, jnp.float8_e4m3fn)
        return compile_case.lower_and_compile("h200", run, x, factors)[1]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
