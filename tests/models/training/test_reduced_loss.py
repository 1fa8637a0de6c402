"""Trainer's loss with a reduction: gradients as by the losses of single tokens, on a smaller program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels.inputs import linear_cross_entropy as loss_inputs
from jax_kernels.models import ExpertsConfig, Trainer, Transformer, TransformerConfig, next_token_loss
from jax_kernels.models.training.packing import within_documents

CONFIG = TransformerConfig(vocab_size=96, model_dim=16, num_layers=1, num_heads=2, mlp_dim=32)
BATCH, LENGTH = 4, 8


def batch_of(items):
    """(tokens, targets, segment_ids, weights), cut to the first items; 5 of the targets do not count."""
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, 96, (2, BATCH, LENGTH)).astype(np.int32)
    targets.flat[:5] = -1
    ids = np.repeat([[0, 1]], LENGTH // 2, axis=1).repeat(BATCH, axis=0).astype(np.int32)
    return (tokens, targets, ids, random.random((BATCH, LENGTH)).astype(np.float32))[:items]


def token_losses(model, batch, key, z_loss=0.0, label_smoothing=0.0):
    """next_token_loss from the logits of all tokens."""
    tokens, targets, ids, weights = (*batch, None, None)[:4]
    targets = targets if ids is None else within_documents(targets, ids)
    weights = jnp.where(targets >= 0, 1.0 if weights is None else weights, 0)
    logits = model(tokens, segment_ids=ids)
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = lse - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1) + z_loss * lse**2
    return (weights * losses).sum(), weights.sum()


CASES = {
    "tokens": ({}, 2, {}, 1),
    "packed": ({"tie_embeddings": False}, 3, {"z_loss": 1e-2}, 2),
    "weights": ({"logit_softcap": 2.0}, 4, {"z_loss": 1e-2, "label_smoothing": 0.1}, 2),
    "float16": ({"dtype": "float16"}, 4, {}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_the_step_on_whole_logits(case, monkeypatch):
    """Over several tiles of tokens. The parameters after a step, and the loss of `evaluate`, too."""
    monkeypatch.setattr(loss_inputs, "LOGITS_BYTES", 4 * 96 * 8)
    changes, items, options, accumulate = CASES[case]
    config = dataclasses.replace(CONFIG, **changes)
    found = []
    for loss in (next_token_loss, token_losses):
        loss = functools.partial(loss, **options) if options else loss
        trainer = Trainer(config, optax.sgd(0.5), loss=loss, accumulate=accumulate)
        before = trainer.evaluate(batch_of(items))
        result = trainer.train(batch_of(items))
        after = [np.asarray(x) for x in jax.tree.leaves(trainer.state["params"])]
        found.append((before, float(result["loss"]), float(result["gradient_norm"]), after))
    rtol, atol = (3e-3, 3e-3) if case == "float16" else (1e-5, 2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), *found)


def test_a_weight_of_zero_and_no_weights():
    """A token of weight 0 is a token without a target, and weights of 1 change nothing, with experts too."""
    experts = ExpertsConfig(num_experts=2, experts_per_token=1, mlp_dim=16)
    model = Transformer(dataclasses.replace(CONFIG, experts=experts), rngs=nnx.Rngs(0))
    tokens, targets, ids, _ = batch_of(4)
    key, ones = jax.random.key(0), np.ones((BATCH, LENGTH), np.float32)
    some = np.where(targets >= 0, ones, 0)
    some[1] = 0
    for weights, same in ((ones, targets), (some, np.where(some > 0, targets, -1))):
        got = next_token_loss(model, (tokens, targets, ids, weights), key)
        want = next_token_loss(model, (tokens, same, ids), key)
        for a, b in zip(got[:3], want[:3], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_program_has_no_full_logits(dtype, monkeypatch):
    monkeypatch.setattr(loss_inputs, "LOGITS_BYTES", 4 * 96 * 8)
    config = dataclasses.replace(CONFIG, dtype=dtype)
    sizes = {}
    for name, loss in {"reduced": next_token_loss, "whole": token_losses}.items():
        trainer = Trainer(config, optax.sgd(0.5), loss=loss)
        with jax.set_mesh(trainer.mesh):
            text = trainer._train.lower(trainer.state, batch_of(2)).compile().as_text()
        whole = {f"[{BATCH},{LENGTH},96]", f"[{BATCH * LENGTH},96]"}
        sizes[name] = sum(text.count(f"f32{shape}") + text.count(f"f16{shape}") for shape in whole)
    assert sizes["reduced"] == 0 < sizes["whole"], sizes


def test_a_reduction_and_its_options_of_a_model():
    model = Transformer(dataclasses.replace(CONFIG, logit_softcap=1.5), rngs=nnx.Rngs(0))
    tokens, targets, _, weights = batch_of(4)
    logits = np.asarray(model(tokens), np.float64)
    assert 0.5 < np.abs(logits).max() < 1.5
    lse = np.log(np.exp(logits).sum(-1))
    losses = lse - np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0] + 0.1 * lse**2
    weights = np.where(targets >= 0, weights, 0)
    for reduction, want in {
        "none": weights * losses, "sum": (weights * losses).sum(), "mean": (weights * losses).sum() / weights.sum(),
    }.items():  # fmt: skip
        got = model.losses(tokens, targets, weights=weights, reduction=reduction, z_loss=0.1)
        np.testing.assert_allclose(got, want, rtol=2e-6)
    with pytest.raises(ValueError, match="reduction: got 'average', want 'none', 'mean' or 'sum'"):
        model.losses(tokens, targets, reduction="average")
    with pytest.raises(ValueError, match="logit_softcap=0 must be positive"):
        dataclasses.replace(CONFIG, logit_softcap=0)


def test_on_explicit_axes_a_sum_is_a_scalar():
    mesh = jax.make_mesh((1,), ("data",))
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    tokens, targets = batch_of(2)
    want = model.losses(tokens, targets, reduction="sum")
    with jax.set_mesh(mesh):
        got = jax.jit(lambda tokens, targets: model.losses(tokens, targets, reduction="sum"))(tokens, targets)
    np.testing.assert_allclose(got, want, rtol=1e-6)
