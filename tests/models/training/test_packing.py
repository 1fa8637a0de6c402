"""Packed documents equal the same documents one by one, in attention, models, losses, and batches."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels.models import (
    DynamicMaskAttention,
    LongNet,
    LongNetConfig,
    MultiHeadAttention,
    TokenBatches,
    Trainer,
    Transformer,
    TransformerConfig,
    document_positions,
    document_starts,
    next_token_loss,
    read_documents,
    within_documents,
)
from jax_kernels.models.training.packing import packed, run_ids

SHAPE = {"vocab_size": 50, "model_dim": 16, "num_layers": 1, "num_heads": 4, "mlp_dim": 32}
LENGTHS = (6, 1, 6)  # lengths of a row's documents, before two tokens of padding
IDS = np.repeat([3, 0, 7, -1], [*LENGTHS, 2])[None]
SPANS = [slice(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS))]


def row():
    return jnp.asarray(np.random.default_rng(0).integers(0, 50, (1, len(IDS[0]))))


def test_packed_documents_match_separate_documents():
    """Logits, the mean loss and its gradients. Positions restart in each document, so the results are close."""
    model = Transformer(TransformerConfig(**SHAPE, remat="attention"), rngs=nnx.Rngs(0))
    logits = nnx.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))(model, row(), IDS)
    alone = nnx.jit(lambda model, tokens: model(tokens))
    for span in SPANS:
        np.testing.assert_allclose(logits[:, span], alone(model, row()[:, span]), atol=2e-6)

    @nnx.jit
    def packed(model):
        total, count = next_token_loss(model, (row(), jnp.roll(row(), -1, 1), jnp.asarray(IDS)), jax.random.key(0))
        return total / count

    @nnx.jit
    def separate(model):
        losses = [model.losses(row()[:, s][:, :-1], row()[:, s][:, 1:]) for s in SPANS if s.stop - s.start > 1]
        return sum(x.sum() for x in losses) / sum(x.size for x in losses)

    for got, want in zip(*(jax.tree.leaves(nnx.value_and_grad(f)(model)) for f in (packed, separate)), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("kind", [Transformer, LongNet])
def test_an_id_that_comes_back_is_another_document(kind):
    pattern = {} if kind is Transformer else {"segment_lengths": (4, 16), "dilation_rates": (1, 2)}
    model = kind(kind.config_type(**SHAPE, **pattern), rngs=nnx.Rngs(0))
    again = np.where(IDS == 7, 3, IDS)  # the last document has the first one's id
    call = nnx.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))
    got, want = call(model, row(), again), call(model, row(), IDS)
    np.testing.assert_array_equal(got[again >= 0], want[again >= 0])


def test_ids_of_runs():
    """Padding keeps an id below 0, which marks it for the embedding and the losses."""
    given = jnp.asarray([[3, 3, -1, -1, 3, -7], [5, 5, 4, 4, 5, 5]])
    np.testing.assert_array_equal(run_ids(given), [[0, 0, -1, -1, 2, -1], [0, 0, 1, 1, 2, 2]])


def test_given_positions_are_used():
    """Rotary embedding depends on differences: a common shift changes nothing, a shift of some tokens does."""
    attention = MultiHeadAttention(16, 4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    call = nnx.jit(lambda attention, x, positions: attention(x, positions=positions))
    want = call(attention, x, None)
    np.testing.assert_allclose(call(attention, x, jnp.arange(8) + 5), want, atol=1e-5)
    uneven = call(attention, x, positions=jnp.stack([jnp.arange(8), jnp.arange(8) * 2]))
    np.testing.assert_allclose(uneven[0], want[0], atol=1e-6)
    assert np.abs(uneven[1] - want[1]).max() > 1e-3


def test_dynamic_masks_rank_within_a_document():
    attention = DynamicMaskAttention(16, 4, keys_to_keep=3, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, IDS.shape[1], 16))
    call = nnx.jit(lambda attention, x, **documents: attention(x, **documents))
    out = call(attention, x, segment_ids=jnp.asarray(IDS), positions=document_positions(jnp.asarray(IDS)))
    for span in SPANS:
        np.testing.assert_allclose(out[:, span], call(attention, x[:, span]), atol=2e-6)


def test_longnet_sees_one_document():
    """LongNet's pattern follows positions in the row: only a document in whole segments equals its separate run."""
    config = LongNetConfig(**SHAPE, segment_lengths=(4, 8), dilation_rates=(1, 2))
    model = LongNet(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 50, (1, 16)))
    call = nnx.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))
    out = call(model, tokens, jnp.repeat(jnp.arange(2), 8)[None])
    for span in (slice(8), slice(8, 16)):
        np.testing.assert_allclose(out[:, span], call(model, tokens[:, span], None), atol=2e-6)


def test_ids_are_not_wrapped():
    """2**32 + 5 is not 5, nor 2**31 padding."""
    for ids in (np.full((1, 4), 2**32 + 5), np.full((1, 4), 2**31, np.uint32), [[2**40] * 4]):
        with pytest.raises(ValueError, match="segment_ids: got values up to"):
            packed(ids, np.zeros((1, 4)))
    assert packed([[5, 5, 6, 6]], np.zeros((1, 4))).segment_ids.dtype == jnp.int32


def test_batch_of_padding_has_no_gradient():
    trainer = Trainer(TransformerConfig(**SHAPE), optax.sgd(0.1), accumulate=2)
    before = [np.asarray(x) for x in jax.tree.leaves(trainer.state["params"])]
    tokens = jnp.zeros((2, 6), jnp.int32)
    batch = tokens, tokens, jnp.full_like(tokens, -1)
    assert trainer.evaluate(batch) == 0
    assert trainer.train(batch) == {"loss": 0, "gradient_norm": 0}
    for x, y in zip(before, jax.tree.leaves(trainer.state["params"]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_document_boundaries():
    ids = jnp.asarray([[4, 4, 2, 2, 2, 4, -1, -1]])
    np.testing.assert_array_equal(document_positions(ids), [[0, 1, 0, 1, 2, 0, 0, 1]])
    np.testing.assert_array_equal(within_documents(jnp.arange(10, 18)[None], ids), [[10, -1, 12, 13, -1, -1, -1, -1]])
    whole, local = (packed(ids, ids, is_whole=is_whole) for is_whole in (True, False))
    np.testing.assert_array_equal(whole.positions, document_positions(ids))
    assert local.positions is None
    text = np.frombuffer(b"one\ntwo\n\nthree\n", np.uint8)
    np.testing.assert_array_equal(document_starts(text, ord("\n")), [0, 4, 8, 9])


def test_digest_covers_all_tokens():
    """It reads 2**24 tokens at a time."""
    tokens = np.zeros((3 << 24) + 5, np.uint8)
    digests = [TokenBatches(tokens, 16, 3).sha256]
    for place in (0, (1 << 24) + 1, (2 << 24) + 1, len(tokens) - 1):
        tokens[place] = 1
        digests.append(TokenBatches(tokens, 16, 3).sha256)
    assert len(set(digests)) == 5
    assert digests[-1] == hashlib.sha256(tokens).hexdigest()


def test_document_batches(tmp_path):
    texts = [bytes(range(10 * i, 10 * i + size)) for i, size in enumerate((7, 3, 30, 10))]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text)
    tokens, starts = read_documents(tmp_path)
    np.testing.assert_array_equal(starts, [0, 7, 10, 40])
    assert tokens.tobytes() == b"".join(texts)
    batches = TokenBatches(tokens, 16, 3, documents=starts)
    assert batches.sha256 != TokenBatches(tokens, 16, 3).sha256
    found = {tuple(map(tuple, np.asarray(window))) for window in np.stack(batches[0], 1)}
    rows = set()
    for start in (0, 16, 32):
        of = np.repeat(np.arange(4), [7, 3, 30, 10])[start : start + 17]
        targets = np.where(of[1:] == of[:-1], tokens.astype(int)[start + 1 : start + 17], -1)
        rows.add((tuple(tokens[start : start + 16]), tuple(targets), tuple(of[:-1] - of[0])))
    assert found == rows

    # Tokens of other documents have no effect on a document's losses.
    trainer = Trainer(TransformerConfig(**SHAPE), optax.sgd(0.1))
    before = trainer.evaluate(batches[0])
    assert np.isfinite(before)
    tokens, targets, ids = (np.array(x) for x in batches[0])
    last = ids == ids.max(1, keepdims=True)
    alone = lambda tokens: trainer.evaluate((tokens, np.where(last, targets, -1), ids))
    np.testing.assert_allclose(alone(tokens), alone(np.where(last, tokens, 49)), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda model: model(row(), segment_ids=IDS[:, :3]), ValueError, r"segment_ids: got shape \(1, 3\), want"),
        (lambda model: model(row(), segment_ids=IDS * 1.0), TypeError, "segment_ids: got dtype float.*, want integers"),
        (lambda model: model(row(), segment_ids=IDS, cache=model.init_cache(1, 32)), ValueError, "segment_ids: got an"),
        (
            lambda model: model.layers[0].attention(jnp.zeros((1, 4, 16)), positions=jnp.zeros((2, 4), int)),
            ValueError,
            r"positions: got shape \(2, 4\), want \[length\] or \[batch, length\] = \(1, 4\)",
        ),
        (
            lambda model: model.layers[0].attention(jnp.zeros((1, 4, 16)), positions=jnp.zeros(4)),
            TypeError,
            "positions: got dtype float32, want integers",
        ),
        (
            lambda _: TokenBatches(np.arange(99), 16, 1, documents=np.array([0, 99])),
            ValueError,
            "documents: got .*, want",
        ),
        (lambda _: TokenBatches(np.arange(99), 16, 1, documents=np.array([1, 5])), ValueError, "documents: got .*want"),
        (lambda _: TokenBatches(np.arange(99), 16, 1, documents=np.zeros(1)), ValueError, "documents: got float64"),
    ],
)
def test_bad_input_is_named(call, error, told):
    with pytest.raises(error, match=told):
        call(Transformer(TransformerConfig(**SHAPE), rngs=nnx.Rngs(0)))
