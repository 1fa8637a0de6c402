"""Token ids of Transformer and LongNet: errors for known values, NaN for traced values, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels.models import (
    LongNet,
    LongNetConfig,
    Trainer,
    Transformer,
    TransformerConfig,
    make_mesh,
    shard_batch,
)

SIZES = {"vocab_size": 50, "model_dim": 16, "num_layers": 1, "num_heads": 2, "mlp_dim": 16}
MODELS = {
    "transformer": Transformer(TransformerConfig(**SIZES), rngs=nnx.Rngs(0)),
    "longnet": LongNet(LongNetConfig(**SIZES, segment_lengths=(4,), dilation_rates=(1,)), rngs=nnx.Rngs(0)),
}
GOOD = np.array([[1, 2, 3, 4], [5, 6, 49, 0]])


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


def with_id(value, dtype=np.int64):
    tokens = GOOD.astype(dtype)
    tokens[1, 2] = value
    return tokens


CALLS = {
    "call": lambda model, tokens: model(tokens),
    "embed": lambda model, tokens: model.embed_tokens(tokens),
    "losses": lambda model, tokens: model.losses(tokens, np.zeros(np.shape(tokens), int)),
    "generate": lambda model, tokens: model.generate(tokens, 1, 0),
    "cache": lambda model, tokens: model(tokens, cache=model.init_cache(2, 8)),
}


@pytest.mark.parametrize("call", CALLS)
def test_concrete_ids_out_of_range_are_named(call):
    model = MODELS["transformer"]
    for bad, got in [(-1, "-1 to 6"), (50, "0 to 50"), (2**32 + 3, f"0 to {2**32 + 3}")]:
        with pytest.raises(ValueError, match=f"tokens: got ids from {got}, want 0 to 49"):
            CALLS[call](model, with_id(bad))
    with pytest.raises(ValueError, match="tokens: got ids from 0 to 255, want 0 to 49"):
        CALLS[call](model, jnp.asarray(with_id(255, np.uint8)))
    for bad in (np.zeros(4, np.int32), np.zeros((1, 2, 3), np.int32), np.zeros((2, 4))):
        with pytest.raises(ValueError, match=r"tokens: got \w+ \(.+\), want integers \[batch, length\]"):
            CALLS[call](model, bad)


def test_traced_ids_out_of_range_give_nan(model):
    forward = nnx.jit(lambda model, tokens: (model(tokens), model.losses(tokens, jnp.asarray(GOOD))))
    want = [np.asarray(x)[0] for x in forward(model, GOOD)]
    assert np.isfinite(np.concatenate([x.ravel() for x in want])).all()
    for bad in (with_id(-1), with_id(50), with_id(200, np.uint8), with_id(2**31, np.uint32)):
        for found, kept in zip(forward(model, bad), want, strict=True):
            np.testing.assert_array_equal(found[0], kept)  # of another row
            assert np.isnan(found[1, 2:]).all()


def gradients(model, tokens, targets, segment_ids=None):
    graphdef, state = nnx.split(model)

    @jax.jit
    @jax.value_and_grad
    def loss(state, tokens, targets):
        return nnx.merge(graphdef, state).losses(tokens, targets, segment_ids=segment_ids).sum()

    return loss(state, tokens, targets)


@pytest.mark.parametrize("is_packed", [False, True], ids=["targets", "segment_ids"])
def test_padding_of_minus_one_is_ignored(model, is_packed):
    """Losses and gradients of rows that end in padding equal the losses and gradients of the rows without it."""
    pad = lambda x: np.pad(x, ((0, 0), (0, 4)), constant_values=-1)
    tokens, targets, ids = pad(GOOD), pad(np.roll(GOOD, -1, 1)), pad(np.zeros_like(GOOD))
    want = gradients(model, GOOD, np.roll(GOOD, -1, 1))
    got = gradients(model, tokens, targets, ids if is_packed else None)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    given = {"segment_ids": ids} if is_packed else {}
    losses = model.losses(tokens, targets, **given)  # known values, too
    np.testing.assert_array_equal(losses[:, 4:], 0)
    np.testing.assert_allclose(losses.sum(), want[0], rtol=1e-5)
    if is_packed:
        np.testing.assert_allclose(model(tokens, segment_ids=ids)[:, :4], model(GOOD), atol=1e-5)
    with pytest.raises(
        ValueError, match="tokens: got ids from -1 to 49, want 0 to 49; padding has segment_ids below 0"
    ):
        model.losses(tokens, np.abs(targets))


def test_bad_targets_and_embeddings_are_named(model):
    with pytest.raises(
        ValueError, match="targets: got ids up to 50, want 0 to 49, or below 0 for tokens that do not count"
    ):
        model.losses(GOOD, with_id(50))
    with pytest.raises(TypeError, match="targets: got dtype float64, want integers"):
        model.losses(GOOD, GOOD * 1.0)
    with pytest.raises(ValueError, match=r"embeddings: got float32 \(4, 16\), want floats \[batch, length, 16\]"):
        model(embeddings=np.zeros((4, 16), np.float32))


def test_explicit_axes_check_too():
    model, mesh = MODELS["transformer"], jax.make_mesh((1,), ("data",))
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="tokens: got ids from -1 to 6, want 0 to 49"):
            model(with_id(-1))
        losses = model.losses(with_id(-1), with_id(-1))
    with jax.set_mesh(make_mesh({"data": 1})):
        np.testing.assert_allclose(losses, model.losses(with_id(-1), with_id(-1)), atol=1e-6)


def wide_batches():
    """(name, batch): NumPy's 64-bit integers whose lower halves are other ids, in batches with JAX arrays."""
    tokens, targets = GOOD, np.roll(GOOD, -1, 1)
    far = tokens + 2**32
    yield "tokens", (far, jnp.asarray(targets))
    yield "targets", (jnp.asarray(tokens), targets + 2**32)
    yield "unsigned", (far.astype(np.uint64), jnp.asarray(targets))


@pytest.mark.parametrize(("name", "batch"), list(wide_batches()), ids=lambda x: x if isinstance(x, str) else "")
def test_a_trainer_wraps_no_wide_ids(name, batch):
    """Without known values of all arrays they give NaN, as traced ids outside the vocabulary do."""
    trainer = Trainer(MODELS["transformer"].config, optax.sgd(0.0))
    assert np.isnan(trainer.train(batch)["loss"])
    assert np.isnan(trainer.evaluate(batch))


@pytest.mark.parametrize("deal", [False, True])
def test_a_trainer_wraps_no_wide_segment_ids(deal):
    trainer = Trainer(MODELS["transformer"].config, optax.sgd(0.0), deal_documents=deal)
    ids = np.array([[0, 0, 1, 1], [0, -1, -1, -1]])
    batch = lambda ids: (GOOD, np.roll(GOOD, -1, 1), ids)
    want = trainer.train(batch(ids.astype(np.int32)))["loss"]
    assert float(trainer.train(batch(ids))["loss"]) == float(want)
    for wide in (ids * 2**33, ids.astype(np.uint64)):
        for call in (trainer.train, trainer.evaluate):
            with pytest.raises(ValueError, match=r"batch: got segment_ids from \S+ to \d+, want int32"):
                call(batch(wide))
        mixed = (jnp.asarray(GOOD), *batch(wide)[1:])
        with pytest.raises(ValueError, match=r"batch: got segment_ids from \S+ to \d+, want int32"):
            trainer.train(mixed)


def test_a_batch_is_not_narrowed_on_a_mesh():
    mesh = make_mesh({"data": 1})
    assert shard_batch((GOOD,), mesh)[0].dtype == jnp.int32
    with pytest.raises(ValueError, match="batch: got int64 from 4294967296 to 4294967345, want integers of"):
        shard_batch({"tokens": GOOD + 2**32}, mesh)
