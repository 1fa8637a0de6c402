"""A Transformer trained in 8 bits learns as well as in bfloat16."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels.models import Transformer, TransformerConfig
from tests.support import jaxprs

STEPS, BATCH, LENGTH, TOKENS = 200, 16, 16, 16
CONFIG = TransformerConfig(
    vocab_size=TOKENS, model_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="bfloat16", implementation="xla"
)


@functools.cache
def batches():
    """Sequences [STEPS + 8, BATCH, LENGTH + 1] in which a token depends at random on the last but one.

    The entropy of this dependence is the least loss. Without its blocks, a model would not learn to look back.
    """
    random = np.random.default_rng(0)
    chances = random.dirichlet(np.full(TOKENS, 0.1), TOKENS).cumsum(-1)
    tokens = random.integers(0, TOKENS, (STEPS + 8, BATCH, 2))
    while tokens.shape[-1] <= LENGTH:
        draws = random.random((*tokens.shape[:2], 1))
        drawn = (draws > chances[tokens[..., -2]]).sum(-1, keepdims=True).clip(0, TOKENS - 1)
        tokens = np.concatenate([tokens, drawn], -1)
    return tokens.astype(np.int32)


def loss_after_training(precision):
    """(the mean loss of held-out batches, the loss before training)."""
    config = TransformerConfig(**vars(CONFIG) | {"precision": precision})
    graphdef, params = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))

    def loss(params, windows):
        logits = nnx.merge(graphdef, params)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    def step(state, windows):
        params, optimizer_state = state
        nats, gradients = jax.value_and_grad(loss)(params, windows)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), nats

    @jax.jit
    def train(params, seen, held_out):
        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), seen)
        return jax.lax.map(lambda windows: loss(params, windows), held_out).mean(), losses[0]

    return [float(x) for x in train(params, batches()[:STEPS], batches()[STEPS:])]


@pytest.mark.slow
def test_learns_as_well_as_bfloat16():
    want, first = loss_after_training(None)
    got, _ = loss_after_training("fp8")
    assert want < 0.6 * first
    assert got != want
    assert abs(got - want) < 0.02 * want


def test_the_policy_products_computes_nothing_twice():
    """The backward has as many matmuls and norms as without rematerialisation, but for attention's two by XLA."""
    by_xla = dict.fromkeys(("mlp_implementation", "projection_implementation"), "xla")

    def operations(remat):
        config = TransformerConfig(**vars(CONFIG) | {"precision": "fp8", "remat": remat} | by_xla)
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
        tokens = jax.ShapeDtypeStruct((2, LENGTH), np.int32)
        loss = lambda params, tokens: nnx.merge(graphdef, params).losses(tokens, tokens, reduction="mean")
        program = jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr
        return {name: jaxprs.count(name, program) for name in ("dot_general", "rsqrt")}

    kept = operations(False)
    assert operations("products") == kept | {"dot_general": kept["dot_general"] + 2}
    assert operations(True)["dot_general"] > kept["dot_general"] + 2
