"""Delayed scaling in a Transformer: the histories of its blocks in a step of Trainer, and in calls that record none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels import bridge
from jax_kernels.models import AmaxHistory, LongNetConfig, Trainer, Transformer, TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=32, model_dim=16, num_layers=2, num_heads=2, mlp_dim=32, precision="fp8", fp8_scaling="delayed",
    amax_history_length=3, mlp_implementation="xla", projection_implementation="xla", implementation="xla",
)  # fmt: skip
TOKENS = np.cumsum(np.random.default_rng(0).integers(1, 4, (4, 13)), axis=1, dtype=np.int32) % 32
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


def histories_of(model):
    found = nnx.to_flat_state(nnx.state(model, AmaxHistory))
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in found}


def trained(steps, optimizer=None, **options):
    changes = options.pop("changes", {})
    trainer = Trainer(dataclasses.replace(CONFIG, **changes), optimizer or optax.sgd(1e-2), **options)
    return trainer, [float(trainer.train(BATCH)["loss"]) for _ in range(steps)]


def test_a_step_records_the_largest_magnitudes():
    """The 7 matmuls of a block each record x and the weights. The optimizer has no part in the histories."""
    trainer, _ = trained(0, optax.adamw(1e-2, weight_decay=10.0))
    kernels, seen = [], []
    for _ in range(2):
        layer = trainer.model.layers[1].mlp.down_proj
        kernels.insert(0, float(jnp.abs(layer.kernel[...]).max()))
        trainer.train(BATCH)
        found = histories_of(trainer.model)
        seen.append(found)
    assert len(found) == 2 * 7 * 2
    for name, history in found.items():
        assert history.shape == (3,)
        assert (history[:2] > 0).all(), name
        assert history[2] == 0, name
        assert history[1] == seen[0][name][0], name
    np.testing.assert_allclose(found["layers.1.mlp.down_proj.kernel_history"][:2], kernels, rtol=1e-6)
    names = [f"layers.0.attention.{part}_proj.x_history" for part in "qkv"]
    assert len({found[name].tobytes() for name in names}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"scan_layers": True, "remat": "products"},
        pytest.param({"remat": True}, marks=pytest.mark.slow),
        pytest.param({"scan_layers": True}, marks=pytest.mark.slow),
    ],
)
def test_scan_and_remat_change_no_history(changes):
    (one, losses), (other, of_other) = trained(2), trained(2, changes=changes)
    np.testing.assert_allclose(losses, of_other, rtol=1e-3)
    want = histories_of(one.model)
    for name, history in histories_of(other.model).items():
        np.testing.assert_allclose(history, want[name], rtol=0.05, err_msg=name)


@pytest.mark.slow
def test_parts_of_a_batch_give_the_largest_magnitude():
    (one, _), (other, _) = trained(1), trained(1, accumulate=2)
    want = histories_of(one.model)
    for name, history in histories_of(other.model).items():
        np.testing.assert_allclose(history, want[name], rtol=0.1, err_msg=name)
    exact = "layers.0.attention.q_proj.x_history"  # no matmul comes before it
    np.testing.assert_allclose(histories_of(other.model)[exact], want[exact], rtol=1e-6)


@pytest.mark.slow
def test_only_losses_record():
    """A call, a cache, generate and evaluate leave the histories, and use their scales."""
    trainer, _ = trained(1)
    model, before = trainer.model, histories_of(trainer.model)
    trainer.evaluate(BATCH)
    logits = model(BATCH[0])
    jax.jit(lambda tokens: model(tokens))(BATCH[0])
    cached, _ = model(BATCH[0][:, :4], cache=model.init_cache(4, 8))
    model.generate(BATCH[0][:, :4], 2, temperature=0.0)
    after = histories_of(model)
    assert all(np.array_equal(after[name], x) for name, x in before.items())
    np.testing.assert_allclose(cached, logits[:, :4], atol=0.1)
    model.losses(*BATCH)
    assert all(history[1] == before[name][0] for name, history in histories_of(model).items())
    of_dynamic = Transformer(
        dataclasses.replace(CONFIG, fp8_scaling="dynamic", amax_history_length=None), rngs=nnx.Rngs(0)
    )
    nnx.update(of_dynamic, nnx.state(model, nnx.Param))
    for layer in model.layers:
        layer.mlp.down_proj.x_history[...] = jnp.full(3, 1e-3)  # saturates
    assert np.abs(np.asarray(of_dynamic(BATCH[0])) - np.asarray(model(BATCH[0]))).max() > 0.05


def test_checkpoints_keep_the_histories(tmp_path):
    trainer, _ = trained(2, folder=tmp_path)
    trainer.save()
    other = Trainer(CONFIG, optax.sgd(1e-2), folder=tmp_path, seed=3)
    trainer.close()
    other.restore()
    want = histories_of(trainer.model)
    assert all(np.array_equal(x, want[name]) for name, x in histories_of(other.model).items())
    other.close()


@pytest.mark.slow
def test_older_checkpoints_with_moments_of_histories(tmp_path):
    """An older optimizer's state had moments of the histories: they are dropped."""
    trainer, _ = trained(1, optax.adamw(1e-2), folder=tmp_path)
    assert not jax.tree.leaves(nnx.filter_state(trainer.state["optimizer"][0].mu, AmaxHistory))
    older = optax.adamw(1e-2).init(trainer.state["params"])
    assert jax.tree.leaves(nnx.filter_state(older[0].mu, AmaxHistory))
    moments, trainer.state["optimizer"] = trainer.state["optimizer"], older
    trainer.save()
    trainer.close()
    other = Trainer(CONFIG, optax.adamw(1e-2), folder=tmp_path, seed=3)
    other.restore()
    assert jax.tree.structure(other.state["optimizer"]) == jax.tree.structure(moments)
    want = histories_of(trainer.model)
    assert all(np.array_equal(x, want[name]) for name, x in histories_of(other.model).items())
    other.train(BATCH)
    other.close()


@pytest.mark.slow
def test_a_skipped_step_keeps_the_histories():
    trainer = Trainer(dataclasses.replace(CONFIG, dtype="float16"), optax.sgd(1e-2), loss_scale=2.0**24)
    assert bool(trainer.train(BATCH)["is_skipped"]) == all(not x.any() for x in histories_of(trainer.model).values())


def test_fp8_options_that_do_not_fit():
    for changes, message in [
        ({"fp8_scaling": "late"}, "TransformerConfig.fp8_scaling='late' must be 'dynamic' or 'delayed'"),
        ({"precision": None}, "TransformerConfig.fp8_scaling='delayed' must be 'dynamic' with precision=None"),
        ({"scaling": "row"}, "TransformerConfig.scaling='row' must be 'tensor' or None"),
        ({"fp8_scaling": "dynamic"}, "TransformerConfig.amax_history_length=3 must be None"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match="config: got fp8_scaling='delayed', want 'dynamic'"):
        bridge.nn.Transformer(CONFIG)
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    with (
        jax.set_mesh(jax.make_mesh((1,), ("data",))),
        pytest.raises(NotImplementedError, match="mesh: got Explicit axes with fp8_scaling='delayed'"),
    ):
        model.losses(*BATCH)


@pytest.mark.slow
def test_learns_as_well_as_with_dynamic_scales():
    _, delayed = trained(40, optax.adamw(1e-2))
    _, dynamic = trained(40, optax.adamw(1e-2), changes={"fp8_scaling": "dynamic", "amax_history_length": None})
    assert delayed != dynamic
    assert delayed[-1] < 0.5 * delayed[0]
    assert abs(delayed[-1] - dynamic[-1]) < 0.05 * dynamic[0]


@pytest.mark.slow
def test_a_longnet_records_too():
    fields = dataclasses.asdict(CONFIG) | {"segment_lengths": (8, 16), "dilation_rates": (1, 2)}
    trainer = Trainer(LongNetConfig(**fields), optax.adamw(1e-2))
    trainer.train(BATCH)
    assert all(history[0] > 0 for history in histories_of(trainer.model).values())
