"""linear_cross_entropy by the code in its docstring, in plain jnp, and small arrays to compare them with."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import dequantize, linear_cross_entropy, quantize

TOKENS, DEPTH, VOCABULARY = (3, 7), 16, 37


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W, WEIGHTS = normal(*TOKENS, DEPTH), normal(DEPTH, VOCABULARY, seed=1), jnp.abs(normal(*TOKENS, seed=2))
# Two tokens do not count.
TARGETS = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, TOKENS), jnp.int32).at[1:, 0].set([-1, -100])
OPTIONS = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}


def of_logits(logits, targets, weights, reduction, softcap=None, label_smoothing=0.0, z_loss=0.0):
    """The losses [...] of logits [..., V], times the weights [...], or with a reduction their sum or mean."""
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    losses = lse - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1) + z_loss * lse**2
    weights = jnp.where(targets >= 0, weights, 0)
    losses = weights * losses
    return losses if reduction == "none" else losses.sum() / (weights.sum() if reduction == "mean" else 1)


def product(x, w):
    return jnp.matmul(x, w, precision="highest")


@jax.custom_jvp
def rounded_product(x, w):
    """x @ w of values that are rounded to e4m3 by rows of x and columns of w, with the derivatives of x @ w."""
    of_x, of_w = quantize(x, scaling="row", axis=-1), quantize(w.T, scaling="row", axis=-1)
    return product(dequantize(of_x, jnp.float32), dequantize(of_w, jnp.float32).T)


@rounded_product.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return rounded_product(x, w), product(dx, w) + product(x, dw)


def plain(x, w, weights, reduction, precision=None):
    logits = product(x, w) if precision is None else rounded_product(x, w)
    return of_logits(logits, TARGETS, weights, reduction, **OPTIONS)


def ours(reduction, precision=None):
    """A function (x, w, weights): linear_cross_entropy with OPTIONS."""
    options = OPTIONS | {"reduction": reduction, "precision": precision}
    return lambda x, w, weights: linear_cross_entropy(x, w, TARGETS, weights=weights, **options)


def close(got, want, **tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, **({"rtol": 1e-4, "atol": 1e-5} | tolerance))
