"""matmul against float64: results, gradients, epilogues, transforms and errors."""

import dataclasses
import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, gated_matmul, grouped_matmul, matmul, mlp, quantize
from jax_kernels.dispatch import on_device
from jax_kernels.ops import planned_op
from jax_kernels.ops.activations import ACTIVATIONS, derivative_of
from jax_kernels.ops.attention import vjp
from jax_kernels.ops.matmul import gradients
from jax_kernels.testing import matmul as matmul_cases
from tests.support.cases import ids


@pytest.mark.parametrize("name", ids.named(matmul_cases.CASES))
def test_against_float64(name):
    for result, (error, bound) in matmul_cases.errors_by(matmul_cases.CASES[name], "xla").items():
        assert error <= bound, result


@pytest.mark.parametrize("name", ids.named(matmul_cases.TRITON))
def test_triton_against_float64(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for result, (error, bound) in matmul_cases.errors_by(matmul_cases.TRITON[name], "triton").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(matmul_cases.TRITON | matmul_cases.GPU))
def test_triton_on_gpu(name):
    cases = matmul_cases.TRITON | matmul_cases.GPU
    for result, (error, bound) in matmul_cases.errors_by(cases[name], "triton").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ids.named(matmul_cases.HOPPER), *ACTIVATIONS])
def test_on_hopper(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    large = {x: matmul_cases.Case((4096, 1024), 512, bias="float32", activation=x) for x in ACTIVATIONS}
    for result, (error, bound) in matmul_cases.errors_by((matmul_cases.HOPPER | large)[name], "mosaic_gpu").items():
        assert error <= bound, result


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_plans_with_rounded_operands(precision):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 1000, 512), (512, 1024)))
    with on_device("H200"):
        assert explain(matmul, x, w, precision=precision).implementation == "mosaic_gpu"
        assert explain(gated_matmul, x, w, w, precision=precision).op == "gated_matmul"
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        assert explain(matmul, x, w, precision="fp8", scaling="row", x_scale=scale).op == "matmul"


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_activation_in_lower_precision(implementation, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    options = {"implementation": implementation, "precision": "tf32"}
    x, w = (jnp.asarray(np.random.default_rng(i).standard_normal((8, 8)), jnp.float32) for i in range(2))
    narrow = lambda z: jnp.tanh(z.astype(jnp.bfloat16))
    for call in (matmul, lambda x, w, **rest: gated_matmul(x, w, w, **rest)):
        got = jax.grad(lambda x, w, call=call: call(x, w, activation=narrow, **options).sum(), (0, 1))(x, w)
        want = jax.grad(lambda x, w, call=call: call(x, w, activation="tanh", **options).sum(), (0, 1))(x, w)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05)


def test_functions_are_not_kept_alive():
    """Neither functions nor their closed-over arrays are kept when no longer used."""
    x, kept = jnp.ones((8, 8)), []
    for i in range(3):
        table = jnp.full((4, 4), float(i))
        activation = lambda z, table=table: z * table[0, 0]
        kept.append(weakref.ref(activation))
        jax.grad(lambda x, activation=activation: matmul(x, x, activation=activation).sum())(x)
    del activation, table
    jax.clear_caches()
    gc.collect()
    assert [of_one() for of_one in kept] == [None] * 3
    for of_calls in (gradients._batched, planned_op.batched, vjp._batched, vjp._batched_together, derivative_of):
        assert of_calls.cache_info().maxsize is not None, "the cache of kernel calls is bounded"


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_function_as_activation(implementation, monkeypatch):
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    options = {"implementation": implementation, "precision": "tf32"}
    x, w = (jnp.asarray(np.random.default_rng(i).standard_normal((8, 8)), jnp.float32) for i in range(2))
    swish = lambda z: z * jax.nn.sigmoid(1.7 * z)
    got, vjp = jax.vjp(lambda x: matmul(x, w, activation=swish, **options), x)
    want, right = jax.vjp(lambda x: swish(jnp.dot(x, w, precision="highest")), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(vjp(got)[0], right(got)[0], rtol=1e-5, atol=1e-5)


def test_activations_at_extremes():
    """NaN stays NaN. Derivatives are finite in the flat parts of the functions; relu's derivative at 0 is 0."""
    for name, activation in ACTIVATIONS.items():
        assert np.isnan(activation(jnp.float32(jnp.nan))), name
        slopes = jax.vmap(jax.grad(activation))(jnp.asarray([-1e4, -100.0, 100.0, 1e4]))
        assert np.isfinite(slopes).all(), name
    assert jax.grad(ACTIVATIONS["relu"])(0.0) == 0


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_vmap(in_axes, implementation, monkeypatch):
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    random = np.random.default_rng(1)
    arrays = [jnp.asarray(random.standard_normal((3, 4, 4)), jnp.float32) for _ in range(2)]
    given = [x if axis == 0 else x[0] for x, axis in zip(arrays, in_axes, strict=True)]
    options = {"activation": "tanh", "implementation": implementation, "precision": "tf32"}
    both = jax.value_and_grad(lambda x, w: matmul(x, w, **options).sum(), (0, 1))
    got = jax.jit(jax.vmap(both, in_axes))(*given)
    for i in range(3):
        want = both(*(x[i] if axis == 0 else x for x, axis in zip(given, in_axes, strict=True)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_empty():
    for x, w in (((0, 8), (8, 4)), ((3, 0), (0, 4)), ((3, 8), (8, 0))):
        out, vjp = jax.vjp(matmul, jnp.zeros(x), jnp.zeros(w))
        assert out.shape == (x[0], w[1])
        assert [y.shape for y in vjp(out)] == [x, w]


@pytest.mark.triton
def test_plans():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 1000, 512), (512, 1024)))
    with on_device("H200"):
        assert explain(matmul, x, w).implementation == "mosaic_gpu"
        few, narrow = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 512), (512, 512)))
        assert explain(matmul, few, w).implementation == "triton"
        assert explain(matmul, x, narrow).implementation == "xla", "too few tiles"
        plan = explain(matmul, x, w, implementation="mosaic_gpu", activation="silu")
        assert plan.config.forward.block_n == 256
        program = str(jax.make_jaxpr(lambda x, w: matmul(x, w, implementation="mosaic_gpu"))(x, w))
        assert "wgmma" in program
        assert explain(gated_matmul, x, w, w).op == "gated_matmul"
        gated = jax.make_jaxpr(lambda x, w: gated_matmul(x, w, w, implementation="mosaic_gpu"))(x, w)
        assert "matmul_sm90" in str(gated)
        assert "dot_general" not in str(gated)
    with on_device("A100"):
        assert explain(matmul, x, w).implementation == "xla"
        program = str(jax.make_jaxpr(lambda x, w: gated_matmul(x, w, w, implementation="triton"))(x, w))
        assert "matmul_triton" in program
        assert "dot_general" in program  # in the kernel
        blocks = lambda op, *given: explain(op, *given, implementation="triton").config.forward
        assert (blocks(matmul, x, w).block_n, blocks(gated_matmul, x, w, w).block_m) == (256, 256)
        odd, few = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 1001), (1, 512)))
        assert (blocks(matmul, x, odd).block_n, blocks(matmul, few, w).block_m) == (128, 64)


@dataclasses.dataclass
class Scaled:
    """A function without a hash."""

    by: float = 2.0

    def __call__(self, z):
        return z * self.by


X, W = jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros((8, 4), jnp.bfloat16)
BAD = {
    "dtype": (
        lambda: matmul(np.zeros((2, 8)), W),
        TypeError,
        "x: got dtype float64, want bfloat16, float16, float32, float8_e4m3fn or float8_e5m2",
    ),
    "other_dtype": (
        lambda: matmul(X, W.astype(jnp.float32)),
        TypeError,
        "w: got dtype float32, want x's dtype bfloat16",
    ),
    "depth": (lambda: matmul(X, W[:7]), ValueError, "w: got shape (7, 4), want [K, N] with x's K = 8"),
    "depth_t": (lambda: matmul(X, W, transpose_w=True), ValueError, "w: got shape (8, 4), want [N, K] with x's K = 8"),
    "axes": (
        lambda: matmul(X, W[None]),
        ValueError,
        "x, w: got shapes (2, 8) and (1, 8, 4), want [..., K] and two axes",
    ),
    "flag": (lambda: matmul(X, W, transpose_w=1), TypeError, "transpose_w: got int, want a bool"),
    "bias": (lambda: matmul(X, W, bias=jnp.zeros(3)), ValueError, "bias: got shape (3,), want [N] = (4,)"),
    "bias_dtype": (
        lambda: matmul(X, W, bias=jnp.zeros(4, jnp.float16)),
        TypeError,
        "bias: got dtype float16, want x's dtype bfloat16, or float32",
    ),
    "residual": (
        lambda: matmul(X, W, residual=jnp.zeros((2, 4))),
        TypeError,
        "residual: got dtype float32, want out_dtype bfloat16",
    ),
    "residual_shape": (
        lambda: matmul(X, W, residual=jnp.zeros((4,), jnp.bfloat16)),
        ValueError,
        "residual: got shape (4,), want [..., N] = (2, 4)",
    ),
    "activation": (
        lambda: matmul(X, W, activation="swish"),
        ValueError,
        "activation: got 'swish', want a function or one",
    ),
    "activation_type": (lambda: matmul(X, W, activation=3), TypeError, "activation: got int, want a name"),
    "out_dtype": (lambda: matmul(X, W, out_dtype="int8"), TypeError, "out_dtype: got int8, want bfloat16, float16"),
    "precision": (lambda: matmul(X, W, precision="tf32"), ValueError, "it is for float32"),
    "precision_name": (lambda: matmul(X, W, precision="fp9"), ValueError, "precision: got 'fp9', want 'fp32'"),
    "precision_of_8_bits": (
        lambda: matmul(X.astype("float8_e4m3fn"), W.astype("float8_e4m3fn"), precision="bf16"),
        ValueError,
        "precision: got 'bf16' with x of dtype float8_e4m3fn, want 'fp8' or None",
    ),
    "sum_as_activation": (
        lambda: matmul(X, W, activation=jnp.sum),
        ValueError,
        "activation: got a function that returns [((), 'float32')] for float32 [2, 3]",
    ),
    "softmax_as_activation": (
        lambda: matmul(X, W, activation=jax.nn.softmax),
        ValueError,
        "activation: got a function with reduce_max, reduce_sum, want an elementwise function",
    ),
    "row_as_activation": (lambda: matmul(X, W, activation=lambda z: z[0]), ValueError, "returns [((3,), 'float32')]"),
    "largest_as_activation": (
        lambda: matmul(X, W, activation=jax.jit(lambda z: z / z.max(axis=0))),
        ValueError,
        "activation: got a function with reduce_max, want an elementwise function",
    ),
    "broken_activation": (
        lambda: matmul(X, W, activation=lambda z: 1 / 0),
        TypeError,
        "activation: it raised ZeroDivisionError",
    ),
    "activation_without_hash": (
        lambda: matmul(X, W, activation=Scaled()),
        TypeError,
        "activation: got Scaled, which has no hash, want a function with one",
    ),
    "precision_list": (lambda: matmul(X, W, precision=["fp8"]), TypeError, "precision: got list, want a name or None"),
    "scaling_list": (lambda: matmul(X, W, scaling=["row"]), TypeError, "scaling: got list, want a name or None"),
    "traced_activation": (
        lambda: jax.grad(lambda a: matmul(X, W, activation=lambda z: a * z).sum())(0.1),
        ValueError,
        "activation: got a function that closes over a traced array",
    ),
    "gate": (lambda: gated_matmul(X, W[:-1], W[:-1]), ValueError, "w_gate: got shape"),
    "gated": (
        lambda: gated_matmul(X, W, W[:, :3]),
        ValueError,
        "w_up: got bfloat16[8, 3], want w_gate's dtype, shape and scaling",
    ),
    "name": (lambda: matmul(X, W, implementation="cudnn"), ValueError, "got 'cudnn' for matmul, want one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


REASONS = {
    "activation": ({"activation": lambda z: jnp.floor(z)}, "it cannot compute floor in its activation"),
    "jitted": ({"activation": jax.jit(lambda z: z * NUMBER)}, "its activation closes over arrays"),
    "columns": ({"w": (512, 1000)}, "it needs rows in multiples of 8 and columns in multiples of 64 in x, w and out"),
    "rows": ({"x": (1001, 512)}, "it needs rows in multiples of 8 and columns in multiples of 64 in x, w and out"),
    "dtype": ({"dtype": "float32"}, "its wgmma instructions take bfloat16, float16 and 8 bits here, not float32"),
}


@pytest.mark.parametrize("name", REASONS)
def test_hopper_kernel_limits(name):
    given, reason = REASONS[name]
    given = {"x": (1000, 512), "w": (512, 1024), "dtype": "bfloat16"} | given
    x, w = (jax.ShapeDtypeStruct(given.pop(key), given["dtype"]) for key in ("x", "w"))
    del given["dtype"]
    with on_device("H200"), pytest.raises(NotImplementedError, match=re.escape(reason)):
        explain(matmul, x, w, implementation="mosaic_gpu", **given)


NOT_FOR_TRITON = {
    "float32": ({"dtype": "float32"}, "its float32 matmuls use tf32, which needs precision='tf32'"),
    "empty": ({"x": (0, 512)}, "a size is 0"),
    "arrays": ({"activation": lambda z: z * TABLE[0]}, "its activation closes over arrays"),
    "arrays_of_a_jitted_function": ({"activation": jax.jit(lambda z: z * NUMBER)}, "its activation closes over arrays"),
    "erf": ({"activation": lambda z: jax.scipy.special.erf(z)}, "it cannot compute erf, which its activation uses"),
    "old": ({"device": "V100"}, "it needs compute capability 8.0"),
}
TABLE, NUMBER = jnp.arange(1.0, 9.0), jnp.float32(2)


@pytest.mark.parametrize("name", NOT_FOR_TRITON)
def test_triton_limits(name):
    given, reason = NOT_FOR_TRITON[name]
    given = {"x": (1000, 512), "w": (512, 1024), "dtype": "bfloat16", "device": "A100"} | given
    x, w = (jax.ShapeDtypeStruct(given.pop(key), given["dtype"]) for key in ("x", "w"))
    del given["dtype"]
    with on_device(given.pop("device")), pytest.raises(NotImplementedError, match=re.escape(reason)):
        explain(matmul, x, w, implementation="triton", **given)


def test_launches_of_2_to_4_gib_arrays():
    """Kernels reach every element of arrays of 2 and 4 bytes: large and small calls have the same launches."""
    call = functools.partial(matmul, implementation="triton")
    w = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)

    def launches(rows):
        x = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16)
        total = lambda x, w: call(x, w).astype(jnp.float32).sum()
        programs = (jax.make_jaxpr(call)(x, w), jax.make_jaxpr(jax.grad(total, (0, 1)))(x, w))
        return [str(program).count("name=matmul_triton") for program in programs]

    with on_device("A100"):
        assert launches(3 << 20) == launches(5000) == [1, 2]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_matmuls_with_rounded_operands(precision):
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[precision]
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(5, 16), (16, 8)]))
    exact = lambda y: np.asarray(y.astype(dtype), np.float64)
    out, vjp = jax.vjp(lambda x, w: matmul(x, w, precision=precision), x, w)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact(x) @ exact(w), rtol=0, atol=2e-6)
    dx, dw = vjp(jnp.ones_like(out))
    assert dx.dtype == dw.dtype == jnp.float32
    np.testing.assert_allclose(dx, np.ones(out.shape) @ exact(w).T, rtol=1e-2, atol=1e-2)
    of_both = gated_matmul(x, w, w, precision=precision)
    np.testing.assert_allclose(of_both, jax.nn.silu(out) * out, rtol=1e-5, atol=1e-5)
    assert matmul(x, w, precision=precision, out_dtype=dtype).dtype == dtype


@pytest.mark.parametrize("factor", [1e5, 3e-8])
def test_float32_cotangents_with_float16_operands(factor):
    """Float16 cannot represent either factor."""
    x, w = jnp.ones((4, 8), jnp.float16), jnp.full((8, 6), 2, jnp.float16)
    for call in (matmul, lambda x, w, **rest: gated_matmul(x, w, w, activation=lambda z: z, **rest)):
        out, vjp = jax.vjp(lambda x, w, call=call: call(x, w, out_dtype="float32"), x, w)
        got = vjp(jnp.full(out.shape, factor))
        with jax.default_matmul_precision("highest"):
            exact = lambda x, w, call=call: call(x.astype(jnp.float32), w.astype(jnp.float32))
            want = jax.vjp(exact, x, w)[1](jnp.full(out.shape, factor))
        for g, r in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, r)
    grad = jax.grad(lambda bias: (matmul(x, w, bias=bias, out_dtype="float32") * 1.003).sum())(jnp.zeros(6))
    np.testing.assert_allclose(grad, 4 * 1.003, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "tanh"])
def test_float16_sums_beyond_its_range(activation, implementation, monkeypatch):
    """x @ w is -160,000: out is 0 or -1, and its derivative is 0."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    x, w = jnp.full((16, 16), 100, jnp.float16), jnp.full((16, 16), -100, jnp.float16)
    options = {"activation": activation, "implementation": implementation}
    small = w * 1e-4
    calls = {
        "matmul": lambda x: matmul(x, w, **options),
        "gated_matmul": lambda x: gated_matmul(x, w, small, **options),
        "mlp": lambda x: mlp(x, small, small, w_gate=w, **options),
    }
    for name, call in calls.items():
        gradient = jax.grad(lambda x, call=call: call(x).astype(jnp.float32).sum())(x)
        assert jnp.isfinite(gradient).all(), name
    wide = {
        "gated_matmul": lambda x: gated_matmul(x, small * 1e-4, w, **options),
        "mlp": lambda x: mlp(x, w, small * 1e-4, w_gate=small * 1e-4, **options),
    }
    for name, call in wide.items():  # up is -160,000, and gate is about 0
        gradient = jax.grad(lambda x, call=call: call(x).astype(jnp.float32).sum())(x)
        assert jnp.isfinite(gradient).all(), name


@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bias_in_the_dtype_of_x(dtype, precision):
    """The bias may have x's dtype, whatever dtype a precision rounds x to. Its gradient has the bias's dtype."""
    x, w, bias = jnp.ones((2, 32), dtype), jnp.ones((32, 4), dtype) / 32, jnp.array([-1, 0.25, 0.5, 2]).astype(dtype)
    quantized = quantize(jnp.ones((32, 4)) / 32, "int8", group_size=32)
    calls = {
        "matmul": lambda bias: matmul(x, w, bias=bias, precision=precision),
        "grouped": lambda bias: grouped_matmul(x, w[None], jnp.array([2]), bias=bias[None], precision=precision),
        "low_bit": lambda bias: matmul(x, quantized, bias=bias, precision=precision),
    }
    for name, call in calls.items():
        out, vjp = jax.vjp(call, bias)
        assert out.dtype == dtype, name
        np.testing.assert_allclose(
            out.astype(float), 1 + bias[None].astype(float).repeat(2, 0), atol=0.01, err_msg=name
        )
        (gradient,) = vjp(jnp.ones_like(out))
        assert gradient.dtype == dtype, name
        np.testing.assert_array_equal(gradient.astype(float), 2.0)
    other = jnp.zeros(4, {"bfloat16": "float16", "float16": "bfloat16", "float32": "float16"}[dtype])
    want = f"bias: got dtype {other.dtype}, want x's dtype {dtype}" + ("" if dtype == "float32" else ", or float32")
    for call in calls.values() if precision is None else ():
        with pytest.raises(TypeError, match=f"{want}$"):
            call(other)


def test_a_transpose_after_a_float32_result():
    """XLA has no program on a CPU for a bfloat16 matmul with a float32 result and a transpose."""
    x, w = (jax.random.normal(jax.random.key(i), (32, 32), jnp.bfloat16) for i in range(2))
    got = jax.jit(lambda x, w: matmul(x, w, out_dtype=jnp.float32, implementation="xla").T)(x, w)
    np.testing.assert_allclose(got, (np.float64(x) @ np.float64(w)).T, rtol=1e-4, atol=1e-4)


def test_gradients_of_mapped_bfloat16_weights():
    x, w = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((16, 8), (2, 8, 12))))
    loss = lambda x, w: (matmul(x, w).astype(jnp.float32) ** 2).sum()
    got = jax.vmap(jax.grad(loss, 1), in_axes=(None, 0))(x, w)
    for of_one, weights in zip(got, w, strict=True):
        np.testing.assert_allclose(
            *(np.float32(y) for y in (of_one, jax.grad(loss, 1)(x, weights))), rtol=0.02, atol=0.1
        )
