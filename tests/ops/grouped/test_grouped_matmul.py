"""grouped_matmul against float64: results, gradients, transforms, plans and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_kernels import explain, grouped_gated_matmul, grouped_matmul, quantize
from jax_kernels.dispatch import on_device
from jax_kernels.inputs import group_tiles as group_schedule
from jax_kernels.inputs.group_tiles import group_of_rows, group_offsets, group_tiles
from jax_kernels.testing import grouped_gated_matmul as gated_cases
from jax_kernels.testing import grouped_matmul as cases
from tests.support.cases import ids, tiers


@pytest.mark.parametrize("name", tiers.cases(cases.CASES, ["all_in_one", "past", "primes", "float16", "float32"]))
def test_against_float64(name):
    for result, (error, bound) in cases.errors_by(cases.CASES[name], "xla").items():
        assert error <= bound, result


@pytest.mark.parametrize("name", tiers.cases(gated_cases.CASES, ["past", "primes", "float16", "float32", "wide_out"]))
def test_gated_against_float64(name):
    for result, (error, bound) in cases.errors_by(gated_cases.CASES[name], "xla").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(gated_cases.CASES | gated_cases.LONG))
def test_gated_on_gpu(name):
    for result, (error, bound) in cases.errors_by((gated_cases.CASES | gated_cases.LONG)[name], "xla").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(cases.CASES | cases.LONG))
def test_on_gpu(name):
    for result, (error, bound) in cases.errors_by((cases.CASES | cases.LONG)[name], "xla").items():
        assert error <= bound, result


SIZES = {
    "some_empty": (0, 5, 1, 7, 0, 13),
    "all_rows": (26, 0, 0),
    "no_rows": (0, 0, 0),
    "past_the_end": (5, 100, 3),
    "below_zero": (-3, 4, -1, 2),
}
ROWS = 26


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("block", [1, 4, 8, 64])
def test_each_row_is_in_one_tile(name, block):
    """Also in the right group: the tiles of a group, in order, are the group's rows."""
    sizes = np.maximum(SIZES[name], 0)
    want = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(ROWS, len(sizes))])[:ROWS]
    offsets = group_offsets(jnp.asarray(SIZES[name], jnp.int32), ROWS)
    np.testing.assert_array_equal(group_of_rows(offsets, ROWS), want)
    tiles = [np.asarray(x) for x in group_tiles(offsets, ROWS, block)]
    found = [(row, group) for group, first, end in zip(*tiles, strict=True) for row in range(first, end)]
    assert found == list(enumerate(want))
    assert all(end - first <= block for _, first, end in zip(*tiles, strict=True))


@pytest.mark.parametrize("sizes", [*SIZES.values(), (3, 3, 1, 0, 3, 9)])
def test_largest_first(sizes, monkeypatch):
    """Equal groups keep their order. More groups than MOST_PAIRED are sorted, with the same result."""
    offsets = group_offsets(jnp.asarray(sizes, jnp.int32), ROWS)
    counts = np.diff(offsets)
    want = np.argsort(-counts, kind="stable")
    for most in (group_schedule.MOST_PAIRED, 1):
        monkeypatch.setattr(group_schedule, "MOST_PAIRED", most)
        order, first, end = group_schedule.largest_first(offsets)
        np.testing.assert_array_equal(order, want)
        np.testing.assert_array_equal(first, np.asarray(offsets)[want])
        np.testing.assert_array_equal(end - first, counts[want])


@pytest.mark.parametrize("name", SIZES)
def test_tiles_of_many_groups(name, monkeypatch):
    """More groups than MOST_PAIRED have the same tiles."""
    offsets = group_offsets(jnp.asarray(SIZES[name], jnp.int32), ROWS)
    want = group_tiles(offsets, ROWS, 4)
    monkeypatch.setattr(group_schedule, "MOST_PAIRED", 1)
    np.testing.assert_array_equal(group_offsets(jnp.asarray(SIZES[name], jnp.int32), ROWS), offsets)
    for got, right in zip(group_tiles(offsets, ROWS, 4), want, strict=True):
        np.testing.assert_array_equal(got, right)


def test_sizes_beyond_int32_when_summed():
    offsets = jax.jit(group_offsets, static_argnums=1)(jnp.full(5000, 2**20, jnp.int32), 2**21)
    np.testing.assert_array_equal(offsets[:4], [0, 2**20, 2**21, 2**21])
    assert int(offsets[-1]) == 2**21


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W, GROUP_SIZES = _normal(ROWS, 8), _normal(3, 8, 5, seed=1), jnp.asarray([11, 0, 9], jnp.int32)
BIAS = _normal(3, 5, seed=2)


@pytest.mark.parametrize("sizes", [(11, 0, 9), (26, 0, 0), (0, 0, 3)])
def test_equals_ragged_dot(sizes):
    sizes = jnp.asarray(sizes, jnp.int32)
    exact = lambda x, w: jax.lax.ragged_dot(x, w, sizes, precision="highest")
    got, vjp = jax.vjp(jax.jit(lambda x, w: grouped_matmul(x, w, sizes)), X, W)
    want, right = jax.vjp(exact, X, W)
    for y, z in zip((got, *vjp(got)), (want, *right(want)), strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(5, 100, 3), (-3, 4, 2)])
def test_sizes_out_of_range(sizes):
    """Groups end at the last row, and sizes below 0 count as 0."""
    right = np.minimum(np.cumsum(np.maximum(sizes, 0)), ROWS)
    right = jnp.asarray(np.diff(right, prepend=0), jnp.int32)
    np.testing.assert_array_equal(grouped_matmul(X, W, jnp.asarray(sizes)), grouped_matmul(X, W, right))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "int64", "uint64"])
def test_dtypes_of_group_sizes(dtype):
    sizes = np.asarray([11, 0, 9], dtype)
    np.testing.assert_array_equal(grouped_matmul(X, W, sizes), grouped_matmul(X, W, GROUP_SIZES))
    if dtype in ("int64", "uint64"):
        many = np.asarray([2**32 + 1, 0, 9], dtype)
        with jax.enable_x64(True):
            got = jax.jit(grouped_matmul)(X, W, jnp.asarray(many))
        np.testing.assert_array_equal(got, grouped_matmul(X, W, jnp.asarray([ROWS, 0, 0])))


def test_one_program_for_all_sizes():
    """The sizes are traced. Their values are not read."""
    function = jax.jit(jax.value_and_grad(lambda x, w, sizes: (grouped_matmul(x, w, sizes, bias=BIAS) ** 2).sum()))
    for sizes in ((11, 0, 9), (0, 26, 0), (1, 1, 1)):
        sizes = jnp.asarray(sizes, jnp.int32)
        with jax.transfer_guard("disallow"):
            function(X, W, sizes)
    assert function._cache_size() == 1


def test_nan_stays_in_its_group():
    """The results and the gradients of other groups are finite."""
    x, w = X.at[3].set(jnp.nan), W.at[1].set(jnp.nan)
    out, vjp = jax.vjp(lambda x, w, bias: grouped_matmul(x, w, GROUP_SIZES, bias=bias), x, w, BIAS)
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()
    dx, dw, dbias = vjp(out)
    assert np.isfinite(np.delete(dx, 3, axis=0)).all()
    assert np.isnan(dw[0]).all()
    assert np.isfinite(dw[1:]).all()
    assert np.isnan(dbias[0]).all()
    assert np.isfinite(dbias[1:]).all()


@pytest.mark.parametrize(
    ("axes", "implementation"),
    tiers.some_pairs(
        [(0, None, None, None), (None, 0, None, 0), (0, 0, 0, None)],
        ["triton", "xla"],
        {((0, None, None, None), "xla"), ((0, 0, 0, None), "triton")},
        "axes",
    ),
)
def test_vmap(axes, implementation, monkeypatch):
    """With gradients, over any of the arrays."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    options = {"activation": "tanh", "implementation": implementation, "precision": "tf32"}
    total = lambda x, w, sizes, bias: (grouped_matmul(x, w, sizes, bias=bias, **options) ** 2).sum()
    gradient = jax.value_and_grad(total, (0, 1, 3))
    stacked = [jnp.stack([y, y[::-1]]) for y in (X, W, GROUP_SIZES, BIAS)]
    given = [
        many if axis == 0 else one for many, one, axis in zip(stacked, (X, W, GROUP_SIZES, BIAS), axes, strict=True)
    ]
    got = jax.jit(jax.vmap(gradient, axes))(*given)
    for i in range(2):
        want = gradient(*(y[i] if axis == 0 else y for y, axis in zip(given, axes, strict=True)))
        for y, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(y[i], right, rtol=1e-4, atol=1e-4)


@pytest.mark.triton
def test_vmap_of_no_calls(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    call = lambda x: grouped_matmul(x, W, GROUP_SIZES, implementation="triton", precision="tf32")
    assert jax.vmap(call)(jnp.zeros((0, ROWS, 8))).shape == (0, ROWS, 5)


@pytest.mark.parametrize(
    ("groups", "rows", "depth", "columns"), [(0, 4, 3, 2), (2, 0, 3, 2), (2, 4, 0, 2), (2, 4, 3, 0)]
)
def test_empty(groups, rows, depth, columns):
    x, w, sizes = jnp.ones((rows, depth)), jnp.ones((groups, depth, columns)), jnp.ones(groups, jnp.int32)
    bias = jnp.ones((groups, columns))
    out, vjp = jax.vjp(lambda x, w, bias: grouped_matmul(x, w, sizes, bias=bias, activation="silu"), x, w, bias)
    assert out.shape == (rows, columns)
    assert bool(out.any()) == (groups * rows * columns > 0)
    assert [y.shape for y in vjp(out)] == [x.shape, w.shape, bias.shape]


@pytest.mark.triton
def test_kernels_refuse_other_derivatives(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    call = lambda x: grouped_matmul(x, W, GROUP_SIZES, implementation="triton", precision="tf32").sum()
    with pytest.raises(NotImplementedError, match=r"forward mode \(jax.jvp"):
        jax.jvp(call, (X,), (X,))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda x: (jax.grad(lambda x: call(x) ** 2)(x) ** 2).sum())(X)


@pytest.mark.parametrize("factor", [1e5, 3e-8])
def test_float32_cotangents_with_float16_operands(factor):
    """Float16 cannot represent either factor. Rows past the last group do not set the scale."""
    x, w, sizes = jnp.ones((4, 8), jnp.float16), jnp.full((2, 8, 6), 2, jnp.float16), jnp.asarray([1, 2])
    out, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, out_dtype="float32"), x, w)
    dx, dw = vjp(jnp.full(out.shape, factor, jnp.float32).at[3].set(jnp.inf))
    np.testing.assert_array_equal(dx[:3], jnp.full((3, 8), 12 * factor).astype(jnp.float16))
    assert not dx[3].any()
    rows = jnp.asarray([factor, 2 * factor]).astype(jnp.float16)
    np.testing.assert_array_equal(dw, jnp.broadcast_to(rows[:, None, None], (2, 8, 6)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rounded_operands(precision):
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[precision]
    got, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, GROUP_SIZES, precision=precision), X, W)
    exact = [y.astype(dtype).astype(jnp.float32) for y in (X, W)]
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, grouped_matmul(*exact, GROUP_SIZES), rtol=0, atol=2e-6)
    assert [y.dtype for y in vjp(got)] == [jnp.float32] * 2


def test_inside_shard_map():
    """Each device has rows, and sizes of its groups."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    call = lambda x, w, sizes: grouped_matmul(x, w, sizes, bias=BIAS, activation="silu")
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
    total = lambda function: lambda x, w: (function(x, w, GROUP_SIZES) ** 2).sum()
    both = lambda function: jax.jit(jax.value_and_grad(total(function), (0, 1)))(X, W)
    for got, want in zip(jax.tree.leaves(both(sharded)), jax.tree.leaves(both(call)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.triton
def test_plans():
    x, w, sizes = (
        jax.ShapeDtypeStruct(*of) for of in (((8192, 512), "bfloat16"), ((8, 512, 256), "bfloat16"), ((8,), "int32"))
    )
    for device in ("A100", "RTX 4090", "B200"):
        with on_device(device):
            plan = explain(grouped_matmul, x, w, sizes)
            assert plan.implementation == "triton"
            assert "not measured" in plan.source
            assert "not measured" in plan.why
            program = str(
                jax.make_jaxpr(jax.grad(lambda x, w: grouped_matmul(x, w, jnp.ones(8, jnp.int32)).sum(), (0, 1)))(x, w)
            )
            assert program.count("name=grouped_matmul_triton") == 2  # forward, and the gradient of x
            assert program.count("name=grouped_weight_gradient_triton") == 1
    with on_device("H200"):
        exact = [jax.ShapeDtypeStruct(y.shape, jnp.float32) for y in (x, w)]
        assert explain(grouped_matmul, *exact, sizes).implementation == "xla"
        few = jax.ShapeDtypeStruct((128, 512), jnp.bfloat16)
        plans = [explain(grouped_matmul, y, w, sizes, implementation="triton") for y in (few, x)]
        assert [plan.config.forward.block_m for plan in plans] == [64, 128]
    with on_device("A100"):
        plans = explain(grouped_matmul, x, w, sizes), explain(grouped_gated_matmul, x, w, w, sizes)
        assert [plan.config.forward.block_m for plan in plans] == [128, 64]  # a gated unit of 128 rows spills


NOT_FOR_TRITON = {
    "float32": ({"x": X, "w": W}, "its float32 matmuls use tf32, which needs precision='tf32'"),
    "activation": ({"activation": lambda z: jax.scipy.special.erf(z)}, "it cannot compute erf"),
    "old": ({"device": "V100"}, "it needs compute capability 8.0"),
    "cpu": ({"device": "cpu"}, "it needs an NVIDIA GPU"),
}


@pytest.mark.parametrize("name", NOT_FOR_TRITON)
@pytest.mark.triton
def test_triton_limits(name):
    changed, reason = NOT_FOR_TRITON[name]
    given = {"x": X.astype(jnp.bfloat16), "w": W.astype(jnp.bfloat16), "group_sizes": GROUP_SIZES} | changed
    with on_device(given.pop("device", "A100")), pytest.raises(NotImplementedError, match=re.escape(reason)):
        explain(grouped_matmul, **given, implementation="triton")


WRONG = {
    "x": ({"x": X[None]}, ValueError, "x: got shape (1, 26, 8), want [M, K]"),
    "x_dtype": ({"x": X.astype(jnp.int32)}, TypeError, "x: got dtype int32, want bfloat16, float16, float32"),
    "w": ({"w": W[0]}, ValueError, "w: got shape (8, 5), want [G, K, N] with x's K = 8"),
    "w_transposed": ({"transpose_w": True}, ValueError, "w: got shape (3, 8, 5), want [G, N, K] with x's K = 8"),
    "w_dtype": ({"w": W.astype(jnp.bfloat16)}, TypeError, "w: got dtype bfloat16, want x's dtype float32"),
    "low_bit": ({"w": quantize(W[0], "int8")}, TypeError, "w: got a QuantizedArray in 'int8', want bfloat16, float16"),
    "sizes": ({"group_sizes": GROUP_SIZES[:2]}, ValueError, "group_sizes: got shape (2,), want [G] = (3,)"),
    "sizes_dtype": ({"group_sizes": X[:3, 0]}, TypeError, "group_sizes: got dtype float32, want int32"),
    "sizes_list": ({"group_sizes": [11, 0, 9]}, TypeError, "group_sizes: got list, want an array of integers"),
    "bias": ({"bias": BIAS[0]}, ValueError, "bias: got shape (5,), want [G, N] = (3, 5)"),
    "bias_dtype": ({"bias": BIAS.astype(jnp.float16)}, TypeError, "bias: got dtype float16, want x's dtype float32"),
    "indices": ({"gather_indices": GROUP_SIZES[None]}, ValueError, "gather_indices: got shape (1, 3), want [M]"),
    "indices_dtype": ({"gather_indices": X[:, 0]}, TypeError, "gather_indices: got dtype float32, want int32"),
    "indices_list": ({"gather_indices": [0, 1]}, TypeError, "gather_indices: got list, want an array of integers"),
    "activation": ({"activation": "swish"}, ValueError, "activation: got 'swish', want a function or one"),
    "flag": ({"transpose_w": 1}, TypeError, "transpose_w: got int, want a bool"),
    "out_dtype": ({"out_dtype": "int8"}, TypeError, "out_dtype: got int8, want bfloat16, float16"),
    "precision": (
        {"precision": "int8"},
        ValueError,
        "precision: got 'int8', want 'fp32', 'tf32', 'bf16', 'fp16', 'fp8' or None",
    ),
    "implementation": ({"implementation": "cudnn"}, ValueError, "got 'cudnn' for grouped_matmul, want one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changed, error, text = WRONG[name]
    with pytest.raises(error, match=re.escape(text)):
        grouped_matmul(**({"x": X, "w": W, "group_sizes": GROUP_SIZES} | changed))


WRONG_GATED = {
    "gate": ({"w_gate": W[0], "w_up": W[0]}, ValueError, "w_gate: got shape (8, 5), want [G, K, N] with x's K = 8"),
    "up": (
        {"w_up": W[:, :, :4]},
        ValueError,
        "w_up: got float32[3, 8, 4], want w_gate's dtype and shape: float32[3, 8",
    ),
    "up_dtype": ({"w_up": W.astype(jnp.bfloat16)}, ValueError, "w_up: got bfloat16[3, 8, 5], want w_gate's dtype"),
    "gate_dtype": (
        {name: W.astype(jnp.bfloat16) for name in ("w_gate", "w_up")},
        TypeError,
        "w_gate: got dtype bfloat16, want x's dtype float32",
    ),
    "precision": (
        {"precision": "int8"},
        ValueError,
        "precision: got 'int8', want 'fp32', 'tf32', 'bf16', 'fp16', 'fp8' or None",
    ),
    "low_bit": ({"w_up": quantize(W[0], "int8")}, TypeError, "w_up: got quantized weights, want unquantized"),
    "sizes": ({"group_sizes": GROUP_SIZES[:2]}, ValueError, "group_sizes: got shape (2,), want [G] = (3,)"),
    "activation": ({"activation": "swish"}, ValueError, "activation: got 'swish', want a function or one"),
    "implementation": ({"implementation": "cudnn"}, ValueError, "got 'cudnn' for grouped_gated_matmul, want one of"),
}


@pytest.mark.parametrize("name", WRONG_GATED)
def test_wrong_arguments_of_a_gated_call(name):
    changed, error, text = WRONG_GATED[name]
    with pytest.raises(error, match=re.escape(text)):
        grouped_gated_matmul(**({"x": X, "w_gate": W, "w_up": W, "group_sizes": GROUP_SIZES} | changed))


@pytest.mark.parametrize("activation", [None, "silu", lambda z: z * z])
def test_gated_equals_two_matmuls(activation):
    w_up, how = W[::-1], {"group_sizes": GROUP_SIZES}
    both = lambda x, gate, up: grouped_matmul(x, gate, activation=activation, **how) * grouped_matmul(x, up, **how)
    one = lambda x, gate, up: grouped_gated_matmul(x, gate, up, activation=activation, **how)
    (got, vjp), (want, right) = (jax.vjp(jax.jit(call), X, W, w_up) for call in (one, both))
    for y, z in zip((got, *vjp(want)), (want, *right(want)), strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)


@pytest.mark.triton
def test_gated_under_vmap(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    options = {"implementation": "triton", "precision": "tf32"}
    gradient = jax.grad(lambda x, gate, up: grouped_gated_matmul(x, gate, up, GROUP_SIZES, **options).sum(), (0, 1, 2))
    got = jax.jit(jax.vmap(gradient, (0, None, 0)))(jnp.stack([X, 2 * X]), W, jnp.stack([W, W[::-1]]))
    for i, (x, up) in enumerate([(X, W), (2 * X, W[::-1])]):
        for y, right in zip(got, gradient(x, W, up), strict=True):
            np.testing.assert_allclose(y[i], right, rtol=1e-4, atol=1e-4)


def test_gated_nan_stays_in_its_group():
    out, vjp = jax.vjp(lambda x, w: grouped_gated_matmul(x, w, w[:, ::-1], GROUP_SIZES), X.at[3].set(jnp.nan), W)
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()
    dx, dw = vjp(jnp.where(jnp.isnan(out), 1, out).at[20:].set(jnp.nan))
    assert np.isfinite(np.delete(dx, 3, axis=0)).all()
    assert np.isfinite(dw[1:]).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_dtypes_of_gather_indices(dtype):
    """An index outside of x, also beyond int32, is a row of 0."""
    index = np.arange(26)[::-1].astype(dtype)
    index[1] = 100
    want = np.array(grouped_matmul(X[::-1].at[1].set(0), W, GROUP_SIZES))
    np.testing.assert_array_equal(grouped_matmul(X, W, GROUP_SIZES, gather_indices=index), want)
    if dtype in ("int64", "uint64"):
        index[1] = 2**32 + 3
        np.testing.assert_array_equal(grouped_matmul(X, W, GROUP_SIZES, gather_indices=index), want)
        with jax.enable_x64(True):
            got = grouped_matmul(X, W, GROUP_SIZES, gather_indices=jnp.asarray(index))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 5), (5, 0), (0, 0)])
def test_no_gathered_rows(tokens, rows):
    call = lambda x, w: grouped_matmul(x, w, GROUP_SIZES, gather_indices=jnp.zeros(rows, jnp.int32))
    out, vjp = jax.vjp(call, jnp.ones((tokens, 8)), W)
    assert out.shape == (rows, 5)
    assert [y.shape for y in vjp(out)] == [(tokens, 8), W.shape]
    assert not any(y.any() for y in (out, *vjp(jnp.ones_like(out)))) or tokens


@pytest.mark.triton
def test_plans_of_gathered_rows():
    x, index = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.int32)
    w, sizes = jax.ShapeDtypeStruct((8, 512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)
    with on_device("H200"):
        plan = explain(grouped_matmul, x, w, sizes, gather_indices=index)
        assert plan.implementation == "triton"
        with pytest.raises(NotImplementedError, match="it loads blocks of neighbouring rows, and gathers none"):
            explain(grouped_matmul, x, w, sizes, gather_indices=index, implementation="mosaic_gpu")


def test_tf32_of_16_bits():
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    with pytest.raises(
        ValueError, match="precision: got 'tf32' with bfloat16 inputs, want 'bf16', 'fp16', 'fp8' or None"
    ):
        grouped_matmul(x, w, GROUP_SIZES, precision="tf32")


@pytest.mark.parametrize("sizes", [(3, 0, 4, 3), (0, 0, 0, 0), (2, 0, 1, 0)])
def test_checkify_reports_no_index(sizes):
    """Also in gradients, and with rows past the last group."""
    x, w, sizes = jnp.ones((10, 8)), jnp.ones((4, 8, 5)), jnp.array(sizes, jnp.int32)
    bias, gather = jnp.ones((4, 5)), jnp.arange(10, dtype=jnp.int32) % 3
    calls = {
        "plain": lambda x: grouped_matmul(x, w, sizes, bias=bias),
        "gathered": lambda x: grouped_matmul(x, w, sizes, gather_indices=gather),
        "gated": lambda x: grouped_gated_matmul(x, w, w, sizes),
    }
    for name, call in calls.items():
        gradients = lambda x, call=call: jax.grad(lambda x: call(x).sum())(x)
        for function in (call, gradients, jax.jit(call)):
            error, _ = checkify.checkify(function, errors=checkify.index_checks)(x)
            assert error.get() is None, (name, error.get())


@pytest.mark.parametrize("op", [grouped_matmul, lambda x, w, *rest, **how: grouped_gated_matmul(x, w, w, *rest, **how)])
def test_gradients_of_mapped_bfloat16_weights(op):
    """XLA has no program on a CPU for the transposed bfloat16 matmuls of this vmap."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, ((16, 8), (2, 3, 8, 12)), strict=True))
    sizes = jnp.array([5, 6, 5])
    loss = lambda x, w: (op(x, w, sizes, implementation="xla").astype(jnp.float32) ** 2).sum()
    got = jax.vmap(jax.grad(loss, 1), in_axes=(None, 0))(x, w)
    for of_one, weights in zip(got, w, strict=True):
        np.testing.assert_allclose(
            *(np.float32(y) for y in (of_one, jax.grad(loss, 1)(x, weights))), rtol=0.02, atol=0.1
        )
