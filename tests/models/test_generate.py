"""Transformer.generate against a forward of the whole sequence for each token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels.models import LongNet, LongNetConfig, Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab_size=50, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48)
DILATED = LongNetConfig(
    vocab_size=50, model_dim=32, num_layers=1, num_heads=4, mlp_dim=48, segment_lengths=(4, 16), dilation_rates=(1, 2),
)  # fmt: skip
LENGTHS, NEW = (7, 3, 5), 6


@pytest.fixture(params=[CONFIG, DILATED], ids=["transformer", "longnet"])
def model(request):
    kind = LongNet if isinstance(request.param, LongNetConfig) else Transformer
    return kind(request.param, rngs=nnx.Rngs(0))


def prompts():
    return np.asarray(jax.random.randint(jax.random.key(1), (len(LENGTHS), max(LENGTHS)), 0, 50))


def step_by_step(model, choose):
    """The tokens chosen by choose(logits [V], number) after each prompt, by full forwards."""
    forward = nnx.jit(lambda model, tokens: model(tokens))
    found = []
    for prompt, length in zip(prompts(), LENGTHS, strict=True):
        tokens = np.zeros((1, max(LENGTHS) + NEW), np.int32)  # causal: later tokens have no effect
        tokens[0, :length] = prompt[:length]
        for i in range(NEW):
            tokens[0, length + i] = choose(np.asarray(forward(model, tokens))[0, length + i - 1], i)
        found.append(tokens[0, length : length + NEW])
    return np.stack(found)


def test_greedy_tokens_for_ragged_prompts(model):
    want = step_by_step(model, lambda logits, i: logits.argmax())
    got = model.generate(prompts(), NEW, temperature=0, lengths=jnp.array(LENGTHS))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, want)
    # The padding has no effect. Sampling with k = 1 gives the most likely tokens.
    other = np.where(np.arange(7) < np.array(LENGTHS)[:, None], prompts(), 1)
    again = model.generate(other, NEW, 0.7, 1, lengths=jnp.array(LENGTHS), key=jax.random.key(3))
    np.testing.assert_array_equal(again, want)


@pytest.mark.parametrize("fields", [{"segment_lengths": (4, 9)}, {"segment_lengths": (4, 12), "layout": "partition"}])
def test_hilbert_order_uses_whole_segments(fields):
    fields |= {"dilation_rates": (2, 3), "order": "hilbert"}
    model = LongNet(dataclasses.replace(DILATED, num_layers=1, **fields), rngs=nnx.Rngs(0))
    forward = nnx.jit(lambda model, tokens: model(tokens))
    tokens = np.zeros((3, 36), np.int32)  # a multiple of all segments
    tokens[:, :7] = prompts()
    for place in range(7, 7 + NEW):
        tokens[:, place] = np.asarray(forward(model, tokens))[:, place - 1].argmax(-1)
    for new in (NEW, NEW + 3):
        np.testing.assert_array_equal(model.generate(prompts(), new, 0)[:, :NEW], tokens[:, 7 : 7 + NEW])
    logits = [model.next_logits(prompts(), jnp.full(3, 7), more)[0][0] for more in (5, 6, 20)]
    for found in logits[1:]:
        np.testing.assert_allclose(found, logits[0], atol=1e-6)
    longer = LongNet(dataclasses.replace(model.config, segment_lengths=(4, 64)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="order: got 'hilbert' with a segment of 64 tokens, longer than the 13"):
        longer.generate(prompts(), NEW, 0)


def test_stops_at_the_end_token(model):
    free = np.asarray(model.generate(prompts(), NEW, temperature=0, lengths=jnp.array(LENGTHS)))
    eos = int(free[0, 2])
    got = np.asarray(model.generate(prompts(), NEW, 0, eos_id=eos, lengths=jnp.array(LENGTHS)))
    for row, want in zip(got, free, strict=True):
        ends = np.flatnonzero(want == eos)
        first = ends[0] if len(ends) else NEW
        np.testing.assert_array_equal(row[:first], want[:first])
        assert (row[first:] == eos).all()
    assert (got[0, 2:] == eos).all()


def test_temperature_and_top_k_sampling():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    prompt = np.tile(prompts()[:1], (4000, 1))
    draw = lambda temperature, key, top_k=None: np.asarray(
        model.generate(prompt, 1, temperature, top_k, key=jax.random.key(key))
    )[:, 0]
    logits = np.asarray(model(prompt[:1]))[0, -1].astype(np.float64)
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    for temperature in (0.5, 2.0):
        found = np.bincount(draw(temperature, 0), minlength=50) / len(prompt)
        np.testing.assert_allclose(found, softmax(logits / temperature), atol=0.03)
    few = draw(1.0, 1, top_k=3)
    assert set(few) == set(np.argsort(logits)[-3:])
    assert (draw(1.0, 2) != draw(1.0, 3)).any()


def test_temperature_may_be_an_array_or_tiny():
    model, key = Transformer(CONFIG, rngs=nnx.Rngs(0)), jax.random.key(0)
    greedy = np.asarray(model.generate(prompts(), NEW, 0))
    tokens = prompts()
    traced = nnx.jit(lambda model, temperature: model.generate(tokens, NEW, temperature, key=key))
    for found in (
        model.generate(prompts(), NEW, jnp.float32(0)),
        model.generate(prompts(), NEW, 1e-46),
        model.generate(prompts(), NEW, 2e-38, key=key),
        traced(model, jnp.float32(0)),
        traced(model, jnp.float32(1e-40)),
    ):
        np.testing.assert_array_equal(found, greedy)
    drawn = model.generate(prompts(), NEW, 0.9, key=key)
    for temperature in (jnp.float32(0.9), jnp.bfloat16(0.8984375)):
        assert model.generate(prompts(), NEW, temperature, key=key).shape == drawn.shape
    np.testing.assert_array_equal(traced(model, jnp.float32(0.9)), drawn)


def test_compiles_once_and_runs_under_jit():
    model, traces = Transformer(CONFIG, rngs=nnx.Rngs(0)), []

    class Counted(Transformer):
        def embed_tokens(self, tokens):
            traces.append(tokens.shape)
            return super().embed_tokens(tokens)

    counted = Counted(CONFIG, rngs=nnx.Rngs(0))
    results = [counted.generate(prompts(), NEW, t, key=jax.random.key(0)) for t in (0.5, 0.5, 0.9)]
    assert traces == [(3, 7), (3, 1)]
    np.testing.assert_array_equal(results[0], results[1])
    inside = nnx.jit(lambda model, tokens: model.generate(tokens, NEW, 0.5, key=jax.random.key(0)))
    np.testing.assert_array_equal(inside(model, prompts()), results[0])


def test_nan_logits_draw_no_token(model):
    draw = nnx.jit(lambda model, tokens, eos_id=None: model.generate(tokens, 3, 0, eos_id=eos_id), static_argnums=2)
    want = np.asarray(model.generate(prompts(), 3, 0))
    tokens = prompts().copy()
    tokens[1, 2], tokens[2, 0] = 50, -3
    got = np.asarray(draw(model, tokens))
    np.testing.assert_array_equal(got[0], want[0])
    assert (got[1:] == -1).all()
    assert (np.asarray(draw(model, tokens, 7))[1] == 7).all()
    # Token ids in the padding do not count.
    lengths = jnp.array(LENGTHS)
    padded = np.where(np.arange(7) < np.array(LENGTHS)[:, None], prompts(), -100)
    want = model.generate(prompts(), 3, 0, lengths=lengths)
    np.testing.assert_array_equal(model.generate(padded, 3, 0, lengths=lengths), want)
    # A single NaN among the logits: argmax would draw it. No prompt has its token.
    unused = int(np.setdiff1d(np.arange(50), prompts())[0])
    model.embed.set_value(model.embed.get_value().at[unused].set(jnp.nan))
    assert (np.asarray(model.generate(prompts(), 3, 0)) == -1).all()
    # Parameters that are NaN also give such logits.
    nnx.update(model, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), nnx.state(model, nnx.Param)))
    assert (np.asarray(model.generate(prompts(), 3, 0)) == -1).all()


def test_bad_arguments_are_named():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    for options, error, message in [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: got 0, want 1 to "),
        ({"max_new_tokens": 2**31}, ValueError, "max_new_tokens: got 2147483648, want 1 to "),
        ({"max_new_tokens": 2.5}, TypeError, r"max_new_tokens: got 2\.5, want an int"),
        ({"top_k": 51}, ValueError, "top_k: got 51, want 1 to 50"),
        ({"temperature": -1}, ValueError, "temperature: got -1, want a finite number of 0 or more"),
        ({"temperature": jnp.float32(-1)}, ValueError, r"temperature: got -1\.0, want a finite number of 0 or more"),
        ({"temperature": jnp.ones(3)}, TypeError, r"temperature: got float32 \(3,\), want one number"),
        ({"temperature": 0.5, "key": None}, ValueError, r"key: got None with temperature=0\.5, want a jax\.random"),
        ({"lengths": [1, 2]}, ValueError, r"lengths: got int64 \(2,\), want integers \[batch\] = \(3,\)"),
        ({"lengths": ["a", "b", "c"]}, ValueError, r"lengths: got <U1 \(3,\), want integers \[batch\] = \(3,\)"),
        (
            {"lengths": [2**32 + 1, 2, 3]},
            ValueError,
            "lengths: got 2 to 4294967297, want 1 to the 7 tokens of a prompt",
        ),
        ({"lengths": [0, 2, 8]}, ValueError, "lengths: got 0 to 8, want 1 to the 7 tokens of a prompt"),
        ({"eos_id": "x"}, TypeError, "eos_id: got 'x', want an int or None"),
        ({"eos_id": 2**40}, ValueError, f"eos_id: got {2**40}, want one of the 50 ids from 0 to 49"),
        ({"eos_id": 50}, ValueError, "eos_id: got 50, want one of the 50 ids"),
        ({"eos_id": -1}, ValueError, "eos_id: got -1, want one of the 50 ids"),
        ({"key": 0}, TypeError, r"key: got 0, want a jax\.random\.key"),
        ({"key": jax.random.split(jax.random.key(0))}, TypeError, "key: got"),
        ({"tokens": np.full((3, 7), 1000)}, ValueError, "tokens: got ids from 1000 to 1000, want 0 to 49"),
        ({"tokens": jnp.full((3, 7), -3)}, ValueError, "tokens: got ids from -3 to -3, want 0 to 49"),
        ({"tokens": np.full((3, 7), 2**32 + 5)}, ValueError, f"tokens: got ids from {2**32 + 5} to"),
        ({"tokens": prompts()[0]}, ValueError, r"tokens: got int32 \(7,\), want integers \[batch, length\]"),
    ]:
        with pytest.raises(error, match=message):
            model.generate(**({"tokens": prompts(), "max_new_tokens": 2, "key": jax.random.key(0)} | options))
