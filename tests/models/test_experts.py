"""A Transformer with experts: parameters, decoding, rematerialisation, training, checkpoints, its config."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels.models import (
    ExpertsConfig,
    GatedMLP,
    MixtureOfExperts,
    QuantizedGatedMLP,
    QuantizedMixtureOfExperts,
    Trainer,
    Transformer,
    TransformerConfig,
    flat_parameters,
    quantize_weights,
)
from jax_kernels.testing import rms_error
from tests.support.oracles.experts import dense_experts

EXPERTS = ExpertsConfig(num_experts=4, experts_per_token=2, mlp_dim=24, balance_loss=0.02)
CONFIG = TransformerConfig(vocab_size=32, model_dim=16, num_layers=2, num_heads=2, mlp_dim=40, experts=EXPERTS)
BATCH, LENGTH = 2, 9
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (BATCH, LENGTH)), jnp.int32)


def config_of(experts=None, **changes):
    return dataclasses.replace(CONFIG, experts=dataclasses.replace(EXPERTS, **experts or {}), **changes)


def model(experts=None, **changes):
    return Transformer(config_of(experts, **changes), rngs=nnx.Rngs(0))


def by_hand(transformer, tokens):
    """(logits, balance losses) from the modules of the model, but with every expert on every token."""
    x, losses = transformer.embed[...][tokens], []
    for layer in transformer.layers:
        normed, x = layer.mlp_norm(layer.attention(layer.attention_norm(x)), residual=x)
        if isinstance(layer.mlp, GatedMLP):
            x = layer.mlp(normed, residual=x)
            continue
        p = {".".join(map(str, path)): y[...] for path, y in nnx.to_flat_state(nnx.state(layer.mlp, nnx.Param))}
        out, loss = dense_experts(layer.mlp, p, normed.reshape(-1, normed.shape[-1]))
        x, losses = x + out.reshape(x.shape), [*losses, loss]
    return transformer.final_norm(x) @ transformer.embed[...].T, losses


@pytest.mark.parametrize("changes", [{}, {"layers": [1]}, {"shared_experts": 1, "scores": "sigmoid", "bias_rate": 0.1}])
def test_matches_every_expert_on_every_token(changes):
    transformer = model(changes)
    want, balance = by_hand(transformer, TOKENS)
    np.testing.assert_allclose(nnx.jit(lambda m: m(TOKENS))(transformer), want, atol=5e-6)
    losses, routing = transformer.losses_and_routing(TOKENS, TOKENS)
    np.testing.assert_array_equal(losses, transformer.losses(TOKENS, TOKENS))
    np.testing.assert_allclose(routing.balance_loss, balance, rtol=1e-5)
    assert routing.load.sum(-1).tolist() == [2 * BATCH * LENGTH] * len(balance)


def test_parameters_by_name_and_their_number():
    transformer = model({"layers": (1,), "shared_experts": 2, "bias_rate": 1e-3})
    got = {name: x.shape for name, x in flat_parameters(transformer).items() if ".mlp." in name}
    dense, experts = "layers.0.mlp.", "layers.1.mlp."
    assert got == {
        f"{dense}gate_proj.kernel": (16, 40),
        f"{dense}up_proj.kernel": (16, 40),
        f"{dense}down_proj.kernel": (40, 16),
        f"{experts}router": (16, 4),
        f"{experts}expert_bias": (4,),
        f"{experts}gate_proj": (4, 16, 24),
        f"{experts}up_proj": (4, 16, 24),
        f"{experts}down_proj": (4, 24, 16),
        f"{experts}shared.gate_proj.kernel": (16, 48),
        f"{experts}shared.up_proj.kernel": (16, 48),
        f"{experts}shared.down_proj.kernel": (48, 16),
    }
    count = sum(x.size for x in jax.tree.leaves(nnx.state(transformer, nnx.Param)))
    attention, norms, embed = 2 * 4 * 16 * 16, 5 * 16, 32 * 16
    assert count == attention + norms + embed + 3 * 16 * 40 + 16 * 4 + (4 + 2) * 3 * 16 * 24
    assert model().config.expert_layers == (0, 1)
    assert dataclasses.replace(CONFIG, experts=None).expert_layers == ()


def test_decoding_equals_the_full_forward():
    transformer = model({"shared_experts": 1})
    step = nnx.jit(lambda transformer, tokens, cache: transformer(tokens, cache=cache))
    cache, outs = transformer.init_cache(BATCH, 16), []
    for chunk in (TOKENS[:, :6], TOKENS[:, 6:7], TOKENS[:, 7:8], TOKENS[:, 8:]):
        out, cache = step(transformer, chunk, cache)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), transformer(TOKENS), atol=5e-6)


@pytest.mark.slow
def test_generate_takes_the_likeliest_tokens():
    transformer = model({"layers": (0,)})
    drawn = transformer.generate(TOKENS, 3, temperature=0.0)
    tokens = TOKENS
    for _ in range(3):
        tokens = jnp.concatenate([tokens, transformer(tokens)[:, -1:].argmax(-1).astype(jnp.int32)], axis=1)
    np.testing.assert_array_equal(drawn, tokens[:, LENGTH:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"scan_layers": True, "remat": "products"}, {"remat": True}, {"remat": "attention"}],
)
def test_scan_and_remat_change_no_gradient(changes):
    def loss(transformer):
        losses, routing = transformer.losses_and_routing(TOKENS, TOKENS[:, ::-1])
        return losses.mean() + routing.balance_loss.sum(), routing.load

    of = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    got, want = (of(model({"shared_experts": 1}, **options)) for options in (changes, {}))
    np.testing.assert_array_equal(got[0][1], want[0][1])
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-6), (got[0][0], got[1]), (want[0][0], want[1]))


def test_scanned_router_is_not_rounded():
    """Blocks in a loop choose the same experts as blocks one after the other, in bfloat16."""
    loads = [
        nnx.jit(lambda m: m.losses_and_routing(TOKENS, TOKENS)[1].probability)(
            model(dtype="bfloat16", scan_layers=scan)
        )
        for scan in (True, False)
    ]
    np.testing.assert_allclose(*loads, rtol=1e-5)


def trained(experts=None, steps=1, *, config=None, **options):
    trainer = Trainer(config or config_of(experts), options.pop("optimizer", optax.sgd(0.1)), **options)
    return trainer, [trainer.train((TOKENS, jnp.roll(TOKENS, -1, axis=1))) for _ in range(steps)]


def test_trainer_adds_the_balance_loss():
    trainer, _ = trained(steps=0)
    batch = (TOKENS, jnp.roll(TOKENS, -1, axis=1))
    losses, routing = trainer.model.losses_and_routing(*batch)
    balance = 0.02 * float(routing.balance_loss.sum())
    np.testing.assert_allclose(trainer.evaluate(batch), float(losses.mean()), rtol=1e-5)
    found = trainer.train(batch)
    np.testing.assert_allclose(found["balance_loss"], balance, rtol=1e-5)
    np.testing.assert_allclose(found["loss"], float(losses.mean()) + balance, rtol=1e-5)
    np.testing.assert_allclose(found["largest_load"], float(routing.largest_load.max()), rtol=1e-6)
    assert {"balance_loss", "largest_load"}.isdisjoint(trained(config=dataclasses.replace(CONFIG, experts=None))[1][0])


@pytest.mark.slow
def test_trainer_reaches_the_router_by_the_balance_loss():
    """The updates of the routers with a balance loss differ from the updates without."""
    routers = [
        np.asarray(trained({"balance_loss": factor})[0].model.layers[0].mlp.router[...]) for factor in (0.0, 1.0)
    ]
    assert np.abs(routers[0] - routers[1]).max() > 1e-5


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_moves_the_bias(accumulate):
    """By the sign of the whole batch's load alone: an optimizer with weight decay has no part in it."""
    options = {"optimizer": optax.adamw(1e-3, weight_decay=10.0), "accumulate": accumulate}
    trainer, _ = trained({"bias_rate": 0.25, "balance_loss": 0.0}, steps=0, **options)
    for layer in trainer.state["params"]["layers"].values():
        layer["mlp"]["expert_bias"] = layer["mlp"]["expert_bias"].replace(jnp.array([0.125, 0.0, -0.5, 0.0]))
    before = trainer.model
    _, routing = before.losses_and_routing(TOKENS, TOKENS)
    load = np.asarray(routing.load)
    found = trainer.train((TOKENS, jnp.roll(TOKENS, -1, axis=1)))
    assert float(found["balance_loss"]) == 0
    for layer, of_layer in zip(trainer.model.layers, load, strict=True):
        want = np.array([0.125, 0, -0.5, 0]) + 0.25 * np.sign(of_layer.mean() - of_layer)
        np.testing.assert_allclose(layer.mlp.expert_bias[...], want, atol=1e-6)


@pytest.mark.slow
def test_a_skipped_step_keeps_the_bias():
    trainer, found = trained(config=config_of({"bias_rate": 0.25}, dtype="float16"), loss_scale=2.0**24)
    assert bool(found[0]["is_skipped"])
    assert not np.asarray(trainer.model.layers[0].mlp.expert_bias[...]).any()


@pytest.mark.slow
def test_a_loss_without_a_routing_keeps_the_bias():
    loss = lambda model, batch, key: (model.losses(*batch).sum(), batch[1].size)
    trainer, found = trained({"bias_rate": 0.25}, loss=loss, optimizer=optax.adamw(1e-2))
    assert found[0].keys() == {"loss", "gradient_norm"}
    assert not np.asarray(trainer.model.layers[0].mlp.expert_bias[...]).any()


def test_training_learns_and_a_checkpoint_restores_it(tmp_path):
    options = {"optimizer": optax.adam(1e-2), "folder": tmp_path}
    trainer, found = trained({"bias_rate": 0.01, "shared_experts": 1, "layers": (1,)}, steps=12, **options)
    assert float(found[-1]["loss"]) < 0.7 * float(found[0]["loss"])
    trainer.save()
    trainer.close()
    other, _ = trained({"bias_rate": 0.01, "shared_experts": 1, "layers": (1,)}, steps=0, **options)
    other.restore()
    other.close()
    kept, want = (flat_parameters(t.model) for t in (other, trainer))
    assert np.asarray(want["layers.1.mlp.expert_bias"]).any()
    for name, x in want.items():
        np.testing.assert_array_equal(kept[name], x)
    different, _ = trained({"bias_rate": 0.01, "layers": (1,)}, steps=0, **options)
    with pytest.raises(ValueError, match="config: got a model that differs from the checkpoint's, which has experts="):
        different.restore()
    different.close()


@pytest.mark.slow
def test_low_bit_weights_of_a_model():
    """The shared experts too; the model's calls, decoding with a cache, and scanned blocks."""
    transformer = model({"shared_experts": 1})
    forward = nnx.jit(lambda model, tokens, cache=None: model(tokens, cache=cache))
    want = forward(transformer, TOKENS)
    quantize_weights(transformer, "int8")
    assert isinstance(transformer.layers[0].mlp, QuantizedMixtureOfExperts)
    assert isinstance(transformer.layers[0].mlp.shared, QuantizedGatedMLP)
    got = forward(transformer, TOKENS)
    assert 0 < rms_error(np.asarray(got), np.asarray(want)) < 0.05
    logits, cache = forward(transformer, TOKENS[:1, :-1], transformer.init_cache(1, 16))
    last, _ = forward(transformer, TOKENS[:1, -1:], cache)
    np.testing.assert_allclose(jnp.concatenate([logits, last], axis=1), got[:1], atol=1e-5)
    scanned = quantize_weights(model({"shared_experts": 1}, scan_layers=True), "int8")
    np.testing.assert_allclose(forward(scanned, TOKENS), got, atol=1e-5)
    with pytest.raises(ValueError, match="model: got no Linear or GatedMLP outside skip"):
        quantize_weights(transformer, "int4")


def test_a_model_of_8_bits():
    """Blocks with experts and blocks without run in 8 bits, with the parameters of a model without."""
    plain, low = model({"layers": [1]}), model({"layers": [1]}, precision="fp8", scaling="row")
    assert low.layers[1].mlp.precision == "fp8"
    assert rms_error(low(TOKENS), plain(TOKENS)) < 0.2  # a token may choose another expert
    assert rms_error(low(TOKENS), plain(TOKENS)) > 1e-3
    with pytest.raises(ValueError, match=r"precision: got 'fp8' with low-bit weights, want None"):
        quantize_weights(low, "int8")


def test_config_round_trip():
    config = config_of({"layers": [1], "bias_rate": 1e-3, "scores": "sigmoid"})
    assert config.experts.layers == (1,)
    for fields in (dataclasses.asdict(config), json.loads(json.dumps(dataclasses.asdict(config)))):
        assert TransformerConfig(**fields) == config
    assert hash(config) == hash(TransformerConfig(**dataclasses.asdict(config)))
    without = dataclasses.replace(CONFIG, experts=None)
    assert TransformerConfig(**dataclasses.asdict(without)) == without


ERRORS = {
    "layers": (lambda: config_of({"layers": (2,)}), ValueError, r"layers=\(2,\) must be below num_layers=2"),
    "no layers": (lambda: config_of({"layers": ()}), TypeError, r"layers=\(\) must be a tuple"),
    "scan": (lambda: config_of({"layers": (0,)}, scan_layers=True), ValueError, "must be all blocks with scan_layers"),
    "precision": (lambda: config_of(precision="fp4"), ValueError, "precision='fp4' must be 'fp8' or None"),
    "each": (lambda: config_of({"experts_per_token": 5}), ValueError, "experts_per_token: got 5, want 1 to 4"),
    "rate": (lambda: config_of({"bias_rate": -1.0}), ValueError, "ExpertsConfig.bias_rate=-1.0 must be positive"),
    "balance": (lambda: config_of({"balance_loss": "a"}), TypeError, "balance_loss='a' must be a number"),
    "exchange": (lambda: config_of({"exchange": "ring"}), ValueError, "exchange='ring' must be 'gather' or 'all_to_"),
    "kind": (lambda: dataclasses.replace(CONFIG, experts=4), TypeError, "experts: got int, want an ExpertsConfig"),
    "field": (lambda: dataclasses.replace(CONFIG, experts={"experts": 4}), TypeError, "experts"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_fields_are_named(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()


def test_fields_reach_the_module():
    fields = {"scores": "sigmoid", "renormalize": False, "weight_scale": 2.0, "implementation": "xla", "bias_rate": 0.1}
    mlp = model(fields).layers[0].mlp
    assert isinstance(mlp, MixtureOfExperts)
    assert (mlp.scores, mlp.renormalize, mlp.weight_scale, mlp.implementation) == ("sigmoid", False, 2.0, "xla")
    assert mlp.expert_bias is not None
    assert model().layers[0].mlp.expert_bias is None
