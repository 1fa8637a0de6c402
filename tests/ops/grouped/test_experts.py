"""The gated MLPs of experts against the composition of the public ops, and their rematerialisation."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import grouped_gated_matmul, grouped_matmul
from jax_kernels.ops.grouped.experts import Combination, gated_experts
from jax_kernels.testing import grouped_gated_matmul as cases
from tests.support.cases import tiers

SIZES = jnp.asarray([5, 0, 17, 1], jnp.int32)
ROWS, DEPTH, HIDDEN = 26, 24, 40


def _normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / shape[-2] ** 0.5, dtype)


def _arrays(dtype=jnp.float32):
    up = _normal(4, DEPTH, HIDDEN, seed=2, dtype=dtype)
    weights = _normal(4, DEPTH, HIDDEN, seed=1, dtype=dtype), up, _normal(4, HIDDEN, DEPTH, seed=3, dtype=dtype)
    return _normal(ROWS, DEPTH, dtype=dtype) * DEPTH**0.5, *weights


def _composed(x, gate, up, down, *, activation):
    hidden = grouped_gated_matmul(x, gate, up, SIZES, activation, implementation="xla")
    return grouped_matmul(hidden, down, SIZES, implementation="xla")


@pytest.mark.parametrize(
    ("implementation", "activation"), [("xla", "gelu"), ("xla", lambda z: z * jnp.tanh(z)), ("triton", "silu")]
)
def test_equals_two_ops(implementation, activation, monkeypatch):
    """Rows past the last group give 0, and their cotangents have no influence."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    dtype = jnp.bfloat16 if implementation == "triton" else jnp.float32
    arrays, dout = _arrays(dtype), _normal(ROWS, DEPTH, seed=4, dtype=dtype).at[23:].set(jnp.nan)
    call = functools.partial(gated_experts, group_sizes=SIZES, activation=activation, implementation=implementation)
    got, vjp = jax.vjp(jax.jit(call), *arrays)
    exact = [x.astype(jnp.float32) for x in arrays]
    want, right = jax.vjp(functools.partial(_composed, activation=activation), *exact)
    tolerance = 3e-2 if dtype == jnp.bfloat16 else 1e-5
    for y, z in zip((got, *vjp(dout)), (want, *right(dout.astype(jnp.float32))), strict=True):
        np.testing.assert_allclose(y.astype(jnp.float32), z, rtol=tolerance, atol=tolerance)
    assert not got[23:].any()


# Two pairs of each of 14 tokens. The last four rows, past the groups, have no pair, and four pairs have no row.
TOKENS, EACH = 14, 2
PAIRS = np.random.default_rng(9).permutation(TOKENS * EACH).astype(np.int32)
ORDER, INVERSE = PAIRS[:ROWS], np.argsort(PAIRS).astype(np.int32)


def _weighted_plainly(x, gate, up, down, weights, **options):
    rows = gated_experts(x, gate, up, down, SIZES, **options).astype(jnp.float32)
    of_pairs = rows.at[INVERSE].get(mode="fill", fill_value=0)
    return (weights[..., None] * of_pairs.reshape(TOKENS, EACH, -1)).sum(1)


def _weighted(x, gate, up, down, weights, has_count=False, **options):
    count = SIZES.sum(dtype=jnp.int32) if has_count else None
    combination = Combination(weights, jnp.asarray(ORDER), jnp.asarray(INVERSE), count)
    return gated_experts(x, gate, up, down, SIZES, combination=combination, **options)


@pytest.mark.parametrize(
    ("implementation", "dtype", "has_count"),
    [
        ("xla", "float32", False),
        ("xla", "float16", True),
        ("triton", "bfloat16", False),
        ("triton", "bfloat16", True),
        ("triton", "float16", True),
    ],
)
def test_weighted_sums_of_rows(implementation, dtype, has_count, monkeypatch):
    """Results and all gradients against the sums of gated_experts' rows in float32.

    With a count, passes end there, and the rows of x's gradient after it may have any values.
    """
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    arrays = (*_arrays(jnp.dtype(dtype)), _normal(TOKENS, EACH, seed=5))
    exact = [y.astype(jnp.float32) for y in arrays]
    want, right = jax.vjp(functools.partial(_weighted_plainly, implementation="xla"), *exact)
    call = functools.partial(_weighted, implementation=implementation, has_count=has_count)
    got, vjp = jax.vjp(jax.jit(call), *arrays)
    assert got.dtype == jnp.float32
    dout = _normal(*want.shape, seed=6)
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    dx, *gradients = vjp(dout)
    dx = dx.at[int(SIZES.sum()) :].set(0) if has_count else dx
    for y, z in zip((got, dx, *gradients), (want, *right(dout)), strict=True):
        np.testing.assert_allclose(y.astype(jnp.float32), z, rtol=tolerance, atol=tolerance * float(jnp.abs(z).max()))


def test_weighted_sums_in_forward_mode():
    arrays = (*_arrays(jnp.float32), _normal(TOKENS, EACH, seed=5))
    tangents = tuple(_normal(*y.shape, seed=7) for y in arrays)
    found = [
        jax.jvp(functools.partial(f, implementation="xla"), arrays, tangents) for f in (_weighted, _weighted_plainly)
    ]
    for y, z in zip(*found, strict=True):
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)


def test_weighted_sums_keep_no_result_of_the_last_matmul():
    """The backward keeps fewer values than the sums of gated_experts' rows, by the pairs' rows."""
    arrays = (*_arrays(jnp.float32), _normal(TOKENS, EACH, seed=5))
    kept = lambda f: sum(y.size for y in jax.tree.leaves(jax.vjp(f, *arrays)[1]))
    assert kept(_weighted) - ORDER.size <= kept(_weighted_plainly) - TOKENS * EACH * DEPTH


def test_an_activation_that_is_infinite_at_zero():
    """A pair whose row is past the last group has a finite gradient of its weight."""
    arrays = (*_arrays(jnp.float32), _normal(TOKENS, EACH, seed=5))
    call = functools.partial(_weighted, activation=lambda z: jnp.log(jnp.abs(z)), implementation="xla")
    assert jnp.isfinite(jax.grad(lambda weights: call(*arrays[:4], weights).sum())(arrays[4])).all()


@pytest.mark.triton
def test_launches_under_rematerialization(monkeypatch):
    """With the named results saved, the backward runs no matmul of the forward again."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    call = functools.partial(gated_experts, group_sizes=SIZES, implementation="triton")
    policy = jax.checkpoint_policies.save_only_these_names("mlp_gate", "mlp_up")
    loss = lambda *arrays: jax.checkpoint(call, policy=policy)(*arrays).astype(jnp.float32).sum()
    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(*_arrays(jnp.bfloat16))
    # In the forward, and in the backward for the cotangents of hidden and x; and for the gradients of the weights.
    assert _launches(program.jaxpr) == ["grouped_matmul_triton"] * 4 + ["grouped_weight_gradient_triton"] * 3


def _launches(jaxpr):
    """The names of the launches, sorted."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(equation.params["name"])
            continue
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += _launches(inner)
    return sorted(found)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("name", tiers.cases(cases.HOPPER, list(cases.HOPPER)))
def test_on_gpu(name, implementation):
    """Against float32 arithmetic on the same rounded arrays."""
    case = cases.HOPPER[name]
    if reason := cases.why_not(case, implementation):
        pytest.skip(reason)
    arrays, _ = case.arrays()
    swap = (lambda w: w.swapaxes(1, 2)) if case.transpose_w else (lambda w: w)
    x, gate, up = arrays["x"], swap(arrays["w_gate"]), swap(arrays["w_up"])
    down, sizes = gate.swapaxes(1, 2), arrays["group_sizes"]
    call = functools.partial(gated_experts, group_sizes=sizes, activation=case.activation)
    got, vjp = jax.vjp(functools.partial(call, implementation=implementation), x, gate, up, down)
    exact = [y.astype(jnp.float32) for y in (x, gate, up, down)]
    want, right = jax.vjp(functools.partial(call, implementation="xla"), *exact)
    for y, z in zip((got, *vjp(got)), (want, *right(got.astype(jnp.float32))), strict=True):
        scale = max(1.0, float(jnp.abs(z).max()))
        np.testing.assert_allclose(y.astype(jnp.float32), z, rtol=0, atol=3e-2 * scale)
