"""linear_cross_entropy with precision="fp8": its rounding, loops, plans and errors.

test_linear_cross_entropy.py has its derivatives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, linear_cross_entropy
from tests.support.oracles import plain_loss
from tests.support.oracles.plain_loss import DEPTH, TARGETS, TOKENS, VOCABULARY, WEIGHTS, W, X, close, ours


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_rounding_is_seen_and_small(reduction):
    """The losses differ from exact losses, by less than the error of e4m3."""
    got, want = (np.asarray(ours(reduction, precision)(X, W, WEIGHTS)) for precision in ("fp8", None))
    assert not np.allclose(got, want, rtol=1e-5, atol=0)
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05)


def test_scales_of_tokens_and_entries():
    """Each token and each entry of the vocabulary has a scale of its own: powers of two change nothing."""
    of_tokens, of_entries = 2.0 ** jnp.arange(-10, 11).reshape(TOKENS), 2.0 ** (jnp.arange(VOCABULARY) % 40 - 20)
    x, w = X * of_tokens[..., None], W * of_entries
    got = linear_cross_entropy(x, w, TARGETS, precision="fp8")
    logits = plain_loss.rounded_product(X, W) * of_tokens[..., None] * of_entries
    close(got, plain_loss.of_logits(logits, TARGETS, jnp.ones(TOKENS), "none"), rtol=1e-4)


def test_extreme_scales_do_not_underflow():
    """The product of the scales would be 0 in float32."""
    x, w = jnp.full((2, DEPTH), 1e-30), jnp.full((DEPTH, VOCABULARY), 1e-30).at[:, 0].set(1e32)
    got = linear_cross_entropy(x, w, jnp.zeros(2, jnp.int32), precision="fp8")
    want = jax.nn.logsumexp(jnp.zeros(VOCABULARY).at[0].set(DEPTH * 100.0)) - DEPTH * 100.0
    np.testing.assert_allclose(got, np.full(2, want), atol=1.0)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_in_a_loop(reduction):
    """First derivatives are right; second derivatives, whose rule JAX would drop, raise."""
    stacked = jnp.stack([W, W[:, ::-1]])
    loss = lambda x, w: ours(reduction, "fp8")(x, w, WEIGHTS).sum()
    scan = lambda x: jax.lax.scan(lambda total, w: (total + loss(x, w), None), 0.0, stacked)[0]
    each = lambda x: sum(loss(x, w) for w in stacked)
    close(jax.value_and_grad(scan)(X), jax.value_and_grad(each)(X))
    close(jax.jvp(scan, (X,), (X,)), jax.jvp(each, (X,), (X,)))
    over_x = lambda xs: jax.lax.scan(lambda total, x: (total + loss(x, W), None), 0.0, xs)[0]
    match = r"precision: got 'fp8' in a second derivative of jax\.lax\.scan"
    for gradient, x in ((jax.grad(scan), X), (jax.grad(over_x), jnp.stack([X, X[::-1]]))):
        with pytest.raises(NotImplementedError, match=match):
            jax.jvp(gradient, (x,), (x,))
        with pytest.raises(NotImplementedError, match=match):
            jax.vjp(gradient, x)


def test_vmap(small_tiles):
    stacked = [jnp.stack([y, y[::-1]]) for y in (X, W)]
    gradient = jax.value_and_grad(lambda x, w: ours("mean", "fp8")(x, w, WEIGHTS), (0, 1))
    got = jax.vmap(gradient)(*stacked)
    for i in range(2):
        close(jax.tree.map(lambda y, i=i: y[i], got), gradient(*(y[i] for y in stacked)))


def test_w_is_rounded_once():
    """Outside of the loop over tiles of tokens, with gradients."""
    x, w = jnp.ones((4096, 8)), jnp.ones((8, 1 << 16))
    loss = lambda x, w: linear_cross_entropy(x, w, jnp.zeros(4096, jnp.int32), reduction="mean", precision="fp8")
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w).jaxpr
    (scan,) = [y for y in _equations(program) if y.primitive.name == "scan"]
    inside = [y.outvars[0].aval for y in _equations(scan.params["jaxpr"].jaxpr)]
    assert not [y for y in inside if y.dtype == jnp.float8_e4m3fn and y.shape == (1 << 16, 8)]


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_the_first_implementation(device):
    x, w = jnp.ones((4, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    plan = explain(linear_cross_entropy, x, w, jnp.zeros(4, jnp.int32), precision="fp8", device=device)
    assert plan.implementation == {"h200": "mosaic_gpu", "a100": "xla"}[device]
    why = {"h200": "not measured: xla multiplies", "a100": "no other implementation serves this on NVIDIA A100"}
    assert why[device] in plan.why


@pytest.mark.parametrize(("precision", "error"), [("fp16", ValueError), ("FP8", ValueError), (8, TypeError)])
def test_errors(precision, error):
    with pytest.raises(error, match=r"^precision: got "):
        linear_cross_entropy(X, W, TARGETS, precision=precision)


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_features(reduction, precision):
    """x [N, 0]: all logits are 0."""
    loss = lambda x, w: linear_cross_entropy(x, w, TARGETS, reduction=reduction, precision=precision).sum()
    value, gradients = jax.value_and_grad(loss, (0, 1))(jnp.ones((*TOKENS, 0)), jnp.ones((0, VOCABULARY)))
    count = 1 if reduction == "mean" else (TARGETS >= 0).sum()
    np.testing.assert_allclose(value, count * np.log(VOCABULARY), rtol=1e-5)
    assert [y.shape for y in gradients] == [(*TOKENS, 0), (0, VOCABULARY)]
