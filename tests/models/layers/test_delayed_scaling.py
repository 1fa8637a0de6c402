"""Delayed scaling of 8-bit matmuls in Flax: the history, its scales, and training with it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels import gated_matmul, matmul
from jax_kernels.models import AmaxHistory, GatedMLP, Linear
from jax_kernels.models.layers.linear import shared_projections
from jax_kernels.ops.matmul.implementations import IMPLEMENTATIONS

SIZES = jnp.array([1, 2, 4, 7, 11])[:, None, None]
XS = SIZES * jnp.asarray(np.random.default_rng(0).standard_normal((5, 6, 24)), jnp.float32)
TOP = 448


def linear(**options):
    options = {"precision": "fp8", "fp8_scaling": "delayed", "amax_history_length": 3} | options
    return Linear(24, 40, rngs=nnx.Rngs(0), **options)


def largest(x):
    return float(jnp.abs(x).max())


def test_history_and_scales():
    module, amax = linear(), [largest(x) for x in XS]
    assert amax == sorted(amax)  # so that an earlier call's scale saturates
    kernel, bias, seen = module.kernel[...], module.bias[...], []
    of_kernel = largest(kernel)
    step = nnx.jit(lambda module, x: module(x))
    for x, newest in zip(XS, amax, strict=True):
        scale = max(seen[-3:], default=newest) / TOP
        want = matmul(x, kernel, bias=bias, precision="fp8", x_scale=scale, w_scale=of_kernel / TOP)
        np.testing.assert_allclose(step(module, x), want, rtol=1e-5, atol=1e-5)
        seen.append(newest)
        history = [*reversed(seen), 0, 0, 0][:3]
        np.testing.assert_array_equal(module.x_history[...], np.float32(history))
    np.testing.assert_array_equal(module.kernel_history[...], np.float32([of_kernel] * 3))
    # The second call saturated, so delayed and dynamic scales differ.
    first, second = linear(), linear(fp8_scaling="dynamic", amax_history_length=None)
    first(XS[0])
    assert np.abs(first(XS[4]) - second(XS[4])).max() > 1


def test_first_call_matches_dynamic_scaling():
    delayed, dynamic = linear(), linear(fp8_scaling="dynamic", amax_history_length=None)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)  # two programs: a last bit may differ
    close(delayed(1000 * XS[0]), dynamic(1000 * XS[0]))
    empty = linear()
    assert not np.asarray(empty(jnp.zeros((2, 24)))).any()
    assert not np.asarray(empty.x_history[...]).any()
    close(empty(XS[1]), dynamic(XS[1]))  # zeros leave no scale


def test_non_finite_values_skip_the_history():
    module = linear()
    out = module(XS[0].at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf))
    assert np.isnan(out[:2]).all()
    want = largest(jnp.where(jnp.arange(24) == 0, 0, XS[0][0])), largest(XS[0][2:])
    assert np.isfinite(module.x_history[...]).all()
    assert module.x_history[...][0] >= max(want)
    assert np.isfinite(module(XS[0])).all()


def test_gated_mlp():
    mlp = GatedMLP(24, 40, precision="fp8", fp8_scaling="delayed", amax_history_length=2, rngs=nnx.Rngs(0))
    gate, up, down = (x.kernel[...] for x in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    past = None
    for x in XS[:3]:
        weights = {"w_gate_scale": largest(gate) / TOP, "w_up_scale": largest(up) / TOP}
        x_scale = largest(x if past is None else past) / TOP
        hidden = gated_matmul(x, gate, up, precision="fp8", x_scale=x_scale, **weights)
        scale = largest(hidden) / TOP if past is None else float(mlp.down_proj.x_history[...].max()) / TOP
        want = matmul(hidden, down, residual=x, precision="fp8", x_scale=scale, w_scale=largest(down) / TOP)
        np.testing.assert_allclose(mlp(x, residual=x), want, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(mlp.down_proj.x_history[...][0], largest(hidden), rtol=1e-6)
        past = x
    np.testing.assert_array_equal(mlp.gate_proj.x_history[...], np.float32([largest(XS[2]), largest(XS[1])]))
    np.testing.assert_array_equal(mlp.up_proj.x_history[...], mlp.gate_proj.x_history[...])


def test_gradients_and_remat():
    """Gradients equal the gradients with given scales. A rematerialised forward counts once in the history."""
    module, again = linear(), linear()
    for x in (module, again):
        x(XS[0])
    loss = lambda module, x: jnp.sin(module(x)).sum()
    remat = nnx.remat(lambda module, x: module(x))
    got = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(module, XS[1])
    recomputed = nnx.value_and_grad(lambda module, x: jnp.sin(remat(module, x)).sum(), argnums=(0, 1))(again, XS[1])
    scales = {"x_scale": largest(XS[0]) / TOP, "w_scale": largest(module.kernel[...]) / TOP}
    plain = lambda w, x: jnp.sin(matmul(x, w, bias=module.bias[...], precision="fp8", **scales)).sum()
    value, (dw, dx) = jax.value_and_grad(plain, (0, 1))(module.kernel[...], XS[1])
    for found, (of_module, of_x) in (got, recomputed):
        np.testing.assert_allclose(found, value, rtol=1e-5)
        assert isinstance(of_module["kernel"], nnx.Param)
        assert len(jax.tree.leaves(of_module)) == 2  # the kernel and the bias
        for a, b in ((of_module["kernel"][...], dw), (of_x, dx)):
            assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)  # a last bit may change an 8-bit value
    for x in (module, again):
        np.testing.assert_array_equal(x.x_history[...], np.float32([largest(XS[1]), largest(XS[0]), 0]))


def test_parameters_match_dynamic_scaling():
    delayed, dynamic = linear(), linear(fp8_scaling="dynamic", amax_history_length=None)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(delayed, nnx.Param), nnx.state(dynamic, nnx.Param))
    assert not jax.tree.leaves(nnx.state(dynamic, AmaxHistory))
    histories = nnx.state(linear(amax_history_length=None), AmaxHistory)
    assert [x.shape for x in jax.tree.leaves(histories)] == [(16,), (16,)]


def test_bad_options_are_named():
    for options, error, message in [
        ({"fp8_scaling": "late"}, ValueError, "fp8_scaling='late' must be 'dynamic' or 'delayed'"),
        ({"precision": None}, ValueError, "fp8_scaling='delayed' must be 'dynamic' with precision=None"),
        ({"scaling": "row"}, ValueError, "scaling='row' must be 'tensor' or None with fp8_scaling='delayed'"),
        ({"amax_history_length": 0}, ValueError, "amax_history_length=0 must be positive"),
        ({"amax_history_length": 1.5}, TypeError, "amax_history_length=1.5 must be an int"),
        ({"fp8_scaling": "dynamic"}, ValueError, "amax_history_length=3 must be None with fp8_scaling='dynamic'"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            linear(**options)
    with pytest.raises(ValueError, match=re.escape("scaling='block' must be 'tensor' or None")):
        GatedMLP(24, 40, precision="fp8", scaling="block", fp8_scaling="delayed", rngs=nnx.Rngs(0))


TOKENS, STEPS, BATCH = 16, 200, 64


class Small(nnx.Module):
    """The logits of a token from the two tokens before it."""

    def __init__(self, **options):
        options = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)} | options
        self.embed = nnx.Param(0.5 * jax.random.normal(jax.random.key(0), (TOKENS, 16)))
        self.first = Linear(32, 64, activation="silu", **options)
        self.mlp = GatedMLP(64, 64, **options)
        self.head = nnx.Linear(64, TOKENS, rngs=nnx.Rngs(1))

    def __call__(self, pairs):
        x = self.first(self.embed[pairs].reshape(len(pairs), 32))
        return self.head(self.mlp(x, residual=x).astype(jnp.float32))


@functools.cache
def batches():
    """Pairs of tokens, and a third token that depends on both at random: [STEPS + 8, BATCH, 3]."""
    random = np.random.default_rng(0)
    chances = random.dirichlet(np.full(TOKENS, 0.1), (TOKENS, TOKENS)).cumsum(-1)
    pairs = random.integers(0, TOKENS, (STEPS + 8, BATCH, 2))
    drawn = (random.random((STEPS + 8, BATCH, 1)) > chances[pairs[..., 0], pairs[..., 1]]).sum(-1, keepdims=True)
    return np.concatenate([pairs, drawn.clip(0, TOKENS - 1)], -1).astype(np.int32)


def losses_of(**options):
    """(the mean loss of held-out batches, the first loss, the model's histories)."""
    graphdef, params, rest = nnx.split(Small(**options), nnx.Param, ...)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))

    def loss(params, rest, batch):
        model = nnx.merge(graphdef, params, rest, copy=True)
        logits = model(batch[:, :2])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 2]).mean()
        return nats, nnx.split(model, nnx.Param, ...)[2]

    def step(state, batch):
        params, rest, moments = state
        (nats, rest), gradients = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), rest, moments), nats

    @jax.jit
    def train(params, rest, seen, held_out):
        (params, rest, _), nats = jax.lax.scan(step, (params, rest, optimizer.init(params)), seen)
        return jax.lax.map(lambda batch: loss(params, rest, batch)[0], held_out).mean(), nats[0], rest

    got, first, rest = train(params, rest, batches()[:STEPS], batches()[STEPS:])
    return float(got), float(first), rest


def test_learns_as_well_as_bfloat16():
    want, first, _ = losses_of()
    got, _, histories = losses_of(precision="fp8", fp8_scaling="delayed")
    assert want < 0.7 * first
    assert got != want
    assert abs(got - want) < 0.02 * want
    leaves = [np.asarray(x) for x in jax.tree.leaves(histories)]
    assert len(leaves) == 8
    assert all((x > 0).all() for x in leaves)


@pytest.mark.slow
@pytest.mark.triton
def test_kernels_record_the_same_histories(monkeypatch):
    """The kernels that round an array find its magnitude: histories and results of a GatedMLP and of projections."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_gpu", dataclasses.replace(IMPLEMENTATIONS["xla"], name="mosaic_gpu"))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 128, 128)), jnp.bfloat16)
    found = []
    for implementation in ("mosaic_gpu", "xla"):
        options = {"precision": "fp8", "fp8_scaling": "delayed", "amax_history_length": 2, "dtype": jnp.bfloat16}
        options |= {"implementation": implementation, "rngs": nnx.Rngs(0)}
        mlp, q, k = GatedMLP(128, 128, **options), *(Linear(128, 128, use_bias=False, **options) for _ in range(2))

        def loss(modules, x):
            mlp, q, k = modules
            one, two = shared_projections((q, k), x)
            return jnp.sin(mlp(one * two, residual=x).astype(jnp.float32)).sum()

        modules = nnx.List([mlp, q, k])
        steps = [nnx.value_and_grad(loss)(modules, x) for _ in range(2)]
        found.append(([value for value, _ in steps], steps[-1][1], nnx.state(modules, AmaxHistory)))
    (values, gradients, histories), (of_plain, plain, wanted) = found
    np.testing.assert_allclose(values, of_plain, rtol=0.02)
    for a, b in zip(jax.tree.leaves(histories), jax.tree.leaves(wanted), strict=True):
        assert (a > 0).all()
        np.testing.assert_allclose(a, b, rtol=0.02)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True):
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)
