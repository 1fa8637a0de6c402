"""layer_norm and rms_norm against float64, forward and gradients, in every implementation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, layer_norm, rms_norm
from jax_kernels.dispatch import on_device
from jax_kernels.ops import unsupported
from jax_kernels.pallas.block_specs.sm80 import SM80
from jax_kernels.testing.normalization import CASES, HOPPER, LONG, Case, errors_by
from tests.support.cases import ids, tiers

IMPLEMENTATIONS = ("triton", "xla")


def check(case, implementation=None):
    for name, (error, bound) in errors_by(case, implementation).items():
        assert error <= bound, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ids.named(CASES))
def test_against_float64(name, implementation, monkeypatch):
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    case = CASES[name]
    check(case, implementation)


@pytest.mark.parametrize("name", tiers.cases(LONG, {"long_far_mean", "rms_long"}))
def test_long_rows(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    check(LONG[name], "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ids.named(CASES | LONG))
def test_on_gpu(name, implementation):
    case = (CASES | LONG)[name]
    check(case, implementation)
    check(case.of_rows(1000), implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(HOPPER))
def test_hopper_on_gpu(name):
    check(HOPPER[name], "mosaic_gpu")
    check(HOPPER[name].of_rows(1000), "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [1024, 4096, 8192, 16384])
def test_hopper_serves_every_block_spec_row_on_gpu(columns, op):
    """The slots of the pipelines are reused many times."""
    check(Case((4099, columns), op, has_residual=op == "rms_norm", weights="bfloat16"), "mosaic_gpu")


def test_every_block_spec_row(monkeypatch):
    """Each row with its largest number of columns, and with one more block of rows than programs."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for row in SM80.norm:
        rows = row.backward.block_rows + 1
        case = Case((rows, (row.columns or 20_000) - 1), has_residual=True, dtype="float32")
        check(case, "triton")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap(implementation, monkeypatch):
    """Mapped rows, and a scale for each call."""
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    random = np.random.default_rng(1)
    x, scale = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((3, 5, 20), (3, 20)))
    loss = lambda x, scale: jnp.sin(layer_norm(x, scale, implementation=implementation)).sum()
    both = jax.value_and_grad(loss, (0, 1))
    for in_axes, of_call in (((0, 0), lambda i: (x[i], scale[i])), ((0, None), lambda i: (x[i], scale[0]))):
        got = jax.jit(jax.vmap(both, in_axes))(x, scale if in_axes[1] == 0 else scale[0])
        for i in range(3):
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(both(*of_call(i))), strict=True):
                np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_no_rows():
    x = jnp.zeros((0, 8))
    out, vjp = jax.vjp(lambda x, scale: layer_norm(x, scale), x, jnp.ones(8))
    assert out.shape == (0, 8)
    assert [y.shape for y in vjp(out)] == [(0, 8), (8,)]


def test_shard_map_sums_the_shared_scale_gradient():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    x, scale = jnp.arange(24.0).reshape(4, 6) % 5, jnp.arange(1.0, 7.0)
    sharded = jax.shard_map(
        rms_norm, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=jax.P("rows")
    )  # fmt: skip
    gradients = lambda op: jax.jit(jax.grad(lambda *given: jnp.sin(op(*given)).sum(), (0, 1)))(x, scale)
    for got, want in zip(gradients(sharded), gradients(rms_norm), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="out_specs"):  # a forgotten sum
        jax.jit(jax.shard_map(rms_norm, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=jax.P()))(x, scale)


@pytest.mark.triton
def test_plans():
    x = jax.ShapeDtypeStruct((2, 100, 4096), jnp.bfloat16)
    for device, want in (("H200", "mosaic_gpu"), ("A100", "triton"), ("V100", "xla")):
        with on_device(device):
            plan = explain(layer_norm, x)
        assert (plan.op, plan.implementation) == ("layer_norm", want)
    with on_device("H200"):
        assert explain(rms_norm, x, implementation="triton").config.forward.chunk == 4096
        short, odd = (jax.ShapeDtypeStruct((100, columns), jnp.bfloat16) for columns in (768, 4100))
        assert [explain(rms_norm, x).implementation for x in (short, odd)] == ["triton", "triton"]
        for dtype in (jnp.bfloat16, jnp.float32):  # 3 and 6 GiB
            huge = jax.ShapeDtypeStruct((3 << 17, 4100), dtype)
            assert explain(rms_norm, huge).implementation == "triton"
        plan = explain(rms_norm, jax.ShapeDtypeStruct((3 << 18, 4100), jnp.bfloat16), quantize="e4m3")
        assert plan.implementation == "xla"
        assert ("triton", unsupported.OUT_OF_REACH) in plan.passed_over


X = jnp.zeros((2, 8), jnp.bfloat16)
BAD = {
    "dtype": (lambda: layer_norm(np.zeros((2, 8), np.int32)), TypeError, "x: got dtype int32, want bfloat16, float16"),
    "scalar": (lambda: rms_norm(jnp.zeros(())), ValueError, "x: got shape (), want [..., N] with N above 0"),
    "no_columns": (lambda: rms_norm(jnp.zeros((3, 0))), ValueError, "x: got shape (3, 0), want [..., N]"),
    "list": (lambda: layer_norm([1.0]), TypeError, "x: got builtins.list, want a jax.Array"),
    "scale_shape": (lambda: layer_norm(X, jnp.ones(7)), ValueError, "scale: got shape (7,), want [N] = (8,)"),
    "scale_dtype": (
        lambda: layer_norm(X, jnp.ones(8, jnp.float16)),
        TypeError,
        "scale: got dtype float16, want x's dtype bfloat16, or float32",
    ),
    "bias": (lambda: layer_norm(X, None, 1.0), TypeError, "bias: got float, want an array"),
    "residual": (
        lambda: layer_norm(X, residual=jnp.zeros((2, 8))),
        ValueError,
        "residual: got float32[2, 8], want x's dtype and shape bfloat16[2, 8]",
    ),
    "eps": (lambda: rms_norm(X, eps=-1.0), ValueError, "eps: got -1.0, want a number of 0 or more"),
    "eps_type": (lambda: rms_norm(X, eps="1"), TypeError, "eps: got str, want a number that is known when tracing"),
    "offset": (lambda: rms_norm(X, scale_offset=1.0), ValueError, "scale_offset: got 1.0 with scale=None, want 0.0"),
    "name": (
        lambda: rms_norm(X, implementation="cudnn"),
        ValueError,
        " for rms_norm, want one of 'triton'",
    ),
    "no_gpu": (lambda: rms_norm(X, implementation="triton"), NotImplementedError, "it needs an NVIDIA GPU"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, no_interpret):
    call, error, message = BAD[name]
    if name == "no_gpu" and jax.default_backend() == "gpu":
        pytest.skip("a GPU serves it")
    with pytest.raises(error, match=re.escape(message)):
        call()
