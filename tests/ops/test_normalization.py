"""layer_norm and rms_norm against float64, forward and gradients, in every implementation."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, layer_norm, rms_norm
from jax_kernels.dispatch import on_device
from jax_kernels.pallas.block_specs import sm80


@dataclasses.dataclass(frozen=True)
class Case:
    """A call. weights: the dtype of scale and bias.

    centre: the mean of x, over a standard deviation of 1. drift: by so much x rises from a row's start to its end.
    """

    shape: tuple[int, ...]
    op: str = "layer_norm"
    dtype: str = "bfloat16"
    weights: str | None = "float32"
    has_bias: bool = True
    has_residual: bool = False
    eps: float = 1e-6
    scale_offset: float = 0.0
    centre: float = 0.5
    drift: float = 0.0

    def arrays(self):
        """x, residual, scale, bias, and the cotangents of both results."""
        random = np.random.default_rng(0)
        normal = lambda shape, dtype, centre=0.0: jnp.asarray(random.standard_normal(shape) + centre, dtype)
        centre = self.centre + np.linspace(0, self.drift, self.shape[-1])
        x, residual = (normal(self.shape, self.dtype, centre) for _ in range(2))
        columns = self.shape[-1:]
        scale = normal(columns, self.weights, 1.0) if self.weights else None
        bias = normal(columns, self.weights) if self.weights and self.has_bias and self.op == "layer_norm" else None
        dout, dtotal = (normal(self.shape, self.dtype) for _ in range(2))
        return {"x": x, "residual": residual if self.has_residual else None, "scale": scale, "bias": bias}, dout, dtotal

    def run(self, implementation=None):
        """The results by name."""
        arrays, dout, dtotal = self.arrays()
        given = {name: x for name, x in arrays.items() if x is not None}
        statics = {"eps": self.eps, "scale_offset": self.scale_offset, "implementation": implementation}
        op = {"layer_norm": layer_norm, "rms_norm": rms_norm}[self.op]

        @jax.jit
        def both(given, cotangents):
            results, vjp = jax.vjp(lambda given: op(**given, **statics), given)
            return results, vjp(cotangents)[0]

        results, gradients = both(given, (dout, dtotal) if self.has_residual else dout)
        out, total = results if self.has_residual else (results, None)
        found = {"out": out} | ({} if total is None else {"total": total})
        return found | {f"d{name}": x for name, x in gradients.items()}

    def definition(self):
        """The same in float64. x + residual is rounded to x's dtype first."""
        arrays, dout, dtotal = self.arrays()
        wide = lambda x: None if x is None else np.asarray(x).astype(np.float64)
        total = arrays["x"] if arrays["residual"] is None else arrays["x"] + arrays["residual"]
        x, scale, bias, dout = (wide(y) for y in (total, arrays["scale"], arrays["bias"], dout))
        centred = x - x.mean(-1, keepdims=True) if self.op == "layer_norm" else x
        inverse = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self.eps)
        normed, weight = centred * inverse, 1.0 if scale is None else scale + self.scale_offset
        g = dout * weight
        dx = g - normed * (g * normed).mean(-1, keepdims=True)
        dx = (dx - g.mean(-1, keepdims=True) if self.op == "layer_norm" else dx) * inverse
        rows = tuple(range(x.ndim - 1))
        found = {"out": normed * weight + (0 if bias is None else bias)}
        if self.has_residual:
            dx = dx + wide(dtotal)
            found |= {"total": x, "dresidual": dx}
        found["dx"] = dx
        if scale is not None:
            found["dscale"] = (dout * normed).sum(rows)
        if bias is not None:
            found["dbias"] = dout.sum(rows)
        return found


CASES = {
    "plain": Case((5, 7, 64)),
    "odd": Case((13, 63)),
    "prime": Case((3, 257), weights="bfloat16"),
    "one_row": Case((129,)),
    "one_column": Case((4, 1), eps=1e-3),
    "residual": Case((9, 200), has_residual=True),
    "no_bias": Case((9, 200), has_bias=False, dtype="float16", weights="float16"),
    "no_weights": Case((9, 200), weights=None, has_residual=True),
    "float32": Case((6, 300), dtype="float32"),
    "far_mean": Case((6, 1000), dtype="float32", centre=1e4),
    "far_mean_bf16": Case((6, 1000), centre=100.0),
    "rms": Case((5, 7, 65), "rms_norm"),
    "rms_residual": Case((21, 128), "rms_norm", has_residual=True, weights="bfloat16"),
    "rms_offset": Case((21, 100), "rms_norm", scale_offset=1.0, eps=1e-5),
    "rms_no_scale": Case((21, 100), "rms_norm", weights=None, dtype="float32"),
    "wide": Case((3, 5000), has_residual=True),
    "rms_wide": Case((3, 5000), "rms_norm"),
}
# Rows that do not fit the registers of a program.
LONG = {
    "long": Case((3, 40_001)),
    "long_far_mean": Case((2, 70_000), dtype="float32", centre=1e4, has_residual=True),
    "long_drift": Case((3, 40_001), drift=8.0),
    "rms_long": Case((3, 70_000), "rms_norm", has_residual=True),
}
IMPLEMENTATIONS = ("triton", "xla")


def check(case, got):
    want = case.definition()
    assert sorted(got) == sorted(want)
    for name, right in want.items():
        x = got[name]
        # Roundings of the result, and of sums in float32 over all that is added, whose terms are of magnitude 1.
        count = np.prod(case.shape[:-1]) if name in ("dscale", "dbias") else 1
        sums = np.sqrt(count) * max(1.0, np.sqrt(case.shape[-1]) / 16)
        exact = 2**-19 * max(1.0, abs(case.centre)) * sums + float(jnp.finfo(x.dtype).eps) * 0.01
        np.testing.assert_allclose(
            np.asarray(x).astype(np.float64), right, rtol=0.51 * float(jnp.finfo(x.dtype).eps) + exact, atol=2 * exact,
            err_msg=name,
        )  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, implementation, monkeypatch):
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    case = CASES[name]
    check(case, case.run(implementation))


@pytest.mark.parametrize("name", LONG)
def test_long_rows(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    check(LONG[name], LONG[name].run("triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_on_gpu(name, implementation):
    case = (CASES | LONG)[name]
    check(case, case.run(implementation))
    many = dataclasses.replace(case, shape=(1000, *case.shape[-1:]))
    check(many, many.run(implementation))


def test_every_row_of_the_block_specs(monkeypatch):
    """Each with the most columns that it serves, and one more block of rows than programs."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for row in sm80.NORM:
        rows = row.backward.block_rows + 1
        case = Case((rows, (row.columns or 20_000) - 1), has_residual=True, dtype="float32")
        check(case, case.run("triton"))


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


def test_shard_map_sums_the_gradient_of_a_shared_scale():
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


def test_plans():
    x = jax.ShapeDtypeStruct((2, 100, 4096), jnp.bfloat16)
    for device, want in (("H200", "triton"), ("A100", "triton"), ("V100", "xla")):
        with on_device(device):
            plan = explain(layer_norm, x)
        assert (plan.op, plan.implementation) == ("layer_norm", want)
    with on_device("H200"):
        assert explain(rms_norm, x).config.forward.chunk == 4096
        huge = jax.ShapeDtypeStruct((1 << 18, 4096), jnp.bfloat16)
        plan = explain(rms_norm, huge)
        assert plan.implementation == "xla"
        assert plan.passed_over == (("triton", "Pallas' Triton does not reach all of an array of 2 to 4 GiB"),)


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
        "is not known for rms_norm; want one of 'triton'",
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
