"""Flax modules under a caller's strict settings: rank promotion and dtype promotion are errors in the caller's code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels import models

CONFIG = models.TransformerConfig(vocab_size=16, model_dim=32, num_layers=1, num_heads=2)
X = jnp.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)
TOKENS = jnp.zeros((2, 8), jnp.int32)
MODULES = {
    "attention": (lambda rngs: models.MultiHeadAttention(32, num_heads=2, rngs=rngs), X),
    "dynamic": (lambda rngs: models.DynamicMaskAttention(32, num_heads=2, keys_to_keep=4, rngs=rngs), X),
    "gated": (lambda rngs: models.GatedMLP(32, 48, rngs=rngs), X),
    "experts": (lambda rngs: models.MixtureOfExperts(32, 24, 4, 2, balance_bias=True, shared_experts=1, rngs=rngs), X),
    "norm": (lambda rngs: models.RMSNorm(32, rngs=rngs), X),
    "transformer": (lambda rngs: models.Transformer(CONFIG, rngs=rngs), TOKENS),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients(name):
    make, x = MODULES[name]
    module = make(nnx.Rngs(0))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = nnx.grad(lambda module: module(x).astype(jnp.float32).sum())(module)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(found))


SEGMENTS = jnp.zeros((2, 8), jnp.int16)
EXPERTS = models.ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=16)
STEPS = {
    "targets": ({}, (TOKENS, TOKENS)),
    "documents": ({}, (TOKENS, TOKENS, SEGMENTS, jnp.ones((2, 8), jnp.bfloat16))),
    "float16": ({"dtype": "float16"}, (TOKENS, TOKENS)),
    "experts": ({"experts": EXPERTS}, (TOKENS, TOKENS)),
}


@pytest.mark.parametrize("name", STEPS)
def test_training_under_strict_promotion(name):
    changes, batch = STEPS[name]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        trainer = models.Trainer(dataclasses.replace(CONFIG, **changes), optax.adamw(1e-3))
        assert np.isfinite(trainer.train(batch)["loss"])
        assert np.isfinite(trainer.evaluate(batch))


def test_losses_and_documents_under_strict_promotion():
    model = models.Transformer(CONFIG, rngs=nnx.Rngs(0))
    want = model.losses(TOKENS, TOKENS, segment_ids=SEGMENTS, reduction="mean")
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = model.losses(TOKENS, TOKENS, segment_ids=SEGMENTS, reduction="mean")
        total, count = models.next_token_loss(model, (TOKENS, TOKENS, SEGMENTS), jax.random.key(0))
        np.testing.assert_array_equal(models.document_positions(SEGMENTS)[1], np.arange(8))
        np.testing.assert_array_equal(models.within_documents(TOKENS, SEGMENTS), TOKENS)
    assert count == 16
    np.testing.assert_allclose((got, total / count), want, rtol=1e-5)
