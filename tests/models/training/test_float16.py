"""Training in float16: the loss scale, skipped steps, checkpoints, and meshes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_kernels.models import LongNetConfig, Trainer, TransformerConfig, next_token_loss
from jax_kernels.models.training import loss_scale
from tests.support.processes import cpu_devices

CONFIG = TransformerConfig(vocab_size=64, model_dim=16, num_layers=1, num_heads=2, mlp_dim=32, dtype="float16")
LONGNET = LongNetConfig(
    vocab_size=64, model_dim=16, num_layers=1, num_heads=2, mlp_dim=32, segment_lengths=(8, 16), dilation_rates=(1, 2),
    dtype="float16",
)  # fmt: skip
TOKENS = np.cumsum(np.random.default_rng(0).integers(1, 4, (4, 17)), axis=1, dtype=np.int32) % 64
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


def trainer(config=CONFIG, **options):
    return Trainer(config, optax.adamw(1e-2), **options)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("config", [CONFIG, LONGNET], ids=["Transformer", "LongNet"])
def test_float16_trains_as_float32(config):
    """Losses and gradient norms are near float32's, and the parameters stay float32."""
    half, single = trainer(config), trainer(dataclasses.replace(config, dtype="float32"))
    for _ in range(4):
        got, want = half.train(BATCH), single.train(BATCH)
        np.testing.assert_allclose(float(got["loss"]), float(want["loss"]), rtol=5e-3)
        np.testing.assert_allclose(float(got["gradient_norm"]), float(want["gradient_norm"]), rtol=2e-2)
        assert not got["is_skipped"]
        assert set(want) == {"loss", "gradient_norm"}
    assert {x.dtype for x in leaves(half.state["params"])} == {np.dtype(np.float32)}
    assert float(half.state["loss_scale"]["scale"]) == 2.0**16
    assert int(half.state["loss_scale"]["finite_steps"]) == 4


def test_the_scale_keeps_small_gradients():
    """A loss with a tiny weight has gradients below float16's smallest value, which only the scale keeps."""

    def small(model, batch, key):
        total, count = next_token_loss(model, batch, key)
        return 1e-7 * total, count

    norms = {}
    for scale in (None, 2.0**-20):
        found = trainer(loss=small, loss_scale=scale).train(BATCH)
        norms[scale] = float(found["gradient_norm"])
    want = 1e-7 * float(trainer(dataclasses.replace(CONFIG, dtype="float32")).train(BATCH)["gradient_norm"])
    np.testing.assert_allclose(norms[None], want, rtol=0.05)
    assert norms[2.0**-20] < 0.9 * want


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_skips_the_step_and_halves_the_scale(accumulate):
    """Parameters and moments keep their bits until the scale fits; the steps and the keys go on."""
    one = trainer(loss_scale=2.0**24, accumulate=accumulate)
    before, scales, skipped = leaves((one.state["params"], one.state["optimizer"])), [], []
    for _ in range(12):
        found = one.train(BATCH)
        scales.append(float(found["loss_scale"]))
        skipped.append(bool(found["is_skipped"]))
        assert np.isfinite(float(found["loss"]))
        after = leaves((one.state["params"], one.state["optimizer"]))
        is_same = all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
        assert is_same == skipped[-1]
        assert np.isfinite(float(found["gradient_norm"])) == (not skipped[-1])
        before = after
    assert skipped[0]
    assert not skipped[-1]
    assert scales == [2.0 ** (24 - sum(skipped[:step])) for step in range(12)]
    assert one.step == int(one.state["step"]) == 12


def test_the_scale_doubles_after_many_finite_steps():
    state, finite, infinite = loss_scale.first_state(4.0), jnp.bool(True), jnp.bool(False)
    for _ in range(loss_scale.GROWTH_STEPS - 1):
        state = {"scale": state["scale"], "finite_steps": state["finite_steps"] + 1}
    assert loss_scale.next_state(state, finite) == {"scale": 8.0, "finite_steps": 0}
    assert loss_scale.next_state(state, infinite) == {"scale": 2.0, "finite_steps": 0}
    assert loss_scale.next_state(loss_scale.first_state(4.0), finite) == {"scale": 4.0, "finite_steps": 1}
    for first, steps, is_finite in ((loss_scale.SMALLEST, 0, infinite), (loss_scale.LARGEST, 1999, finite)):
        state = {"scale": jnp.float32(first), "finite_steps": jnp.int32(steps)}
        assert loss_scale.next_state(state, is_finite)["scale"] == first


def test_a_gradient_that_no_scale_helps_raises(tmp_path):
    def broken(model, batch, key):
        total, count = next_token_loss(model, batch, key)
        return total * jnp.inf, count

    one = trainer(loss=broken, loss_scale=2.0**-22, folder=tmp_path)
    with pytest.raises(
        FloatingPointError, match=r"step 3: got a gradient that is not finite at the smallest loss scale"
    ):
        one.fit([BATCH] * 3, 3, save_every=3)
    assert one.latest is None
    one.close()


@pytest.mark.slow
def test_checkpoints_keep_the_scale(tmp_path):
    """A run that continues has the scale, and the same losses; other dtypes read the checkpoint, too."""
    one = trainer(folder=tmp_path, loss_scale=2.0**24)
    one.fit([BATCH] * 3, 3, save_every=3)
    kept = leaves(one.state["loss_scale"])
    assert float(one.state["loss_scale"]["scale"]) < 2.0**24
    want = [float(one.train(BATCH)["loss"]) for _ in range(2)]
    one.close()

    again = trainer(folder=tmp_path)
    again.restore()
    assert leaves(again.state["loss_scale"]) == kept
    assert [float(again.train(BATCH)["loss"]) for _ in range(2)] == want
    again.close()

    single = trainer(dataclasses.replace(CONFIG, dtype="float32"), folder=tmp_path)
    single.restore()
    assert "loss_scale" not in single.state
    single.train(BATCH)
    single.fit([BATCH] * 5, 5, save_every=5)
    single.close()

    last = trainer(folder=tmp_path, loss_scale=128.0)
    last.restore(5)
    assert float(last.state["loss_scale"]["scale"]) == 128.0
    assert not last.train(BATCH)["is_skipped"]
    last.close()


def test_loss_scale_is_checked():
    single = dataclasses.replace(CONFIG, dtype="float32")
    with pytest.raises(ValueError, match=r"loss_scale: got 8.0 with dtype float32, want None"):
        trainer(single, loss_scale=8.0)
    for scale in (0, -1.0, float("nan"), 2.0**25):
        with pytest.raises(ValueError, match=f"loss_scale: got {scale}, want a number above"):
            trainer(loss_scale=scale)
    for scale in ("8", True):
        with pytest.raises(TypeError, match=f"loss_scale: got {scale!r}, want a number or None"):
            trainer(loss_scale=scale)


SHARDED = """
import json
import numpy as np, optax
from jax_kernels.models import Trainer, make_mesh, shard_batch
from tests.models.training.test_float16 import BATCH, CONFIG

found = {}
for axes in ({"data": 1}, {"data": 2, "sequence": 2}, {"fsdp": 2, "tensor": 2}):
    mesh = make_mesh(axes)
    trainer = Trainer(CONFIG, optax.adamw(1e-2), mesh=mesh, loss_scale=2.0**24)
    steps = [trainer.train(shard_batch(BATCH, mesh)) for _ in range(12)]
    found[str(axes)] = [[float(x["loss"]), float(x["loss_scale"]), bool(x["is_skipped"])] for x in steps]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_meshes_skip_the_same_steps(tmp_path):
    """On 2 x 2 devices an overflow in one shard skips the step on all devices; the losses are one device's."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    one, *others = json.loads(cpu_devices.lines_of(str(script), devices=4)[-1]).values()
    assert any(skipped for _, _, skipped in one)
    assert not one[-1][2]
    for found in others:
        # Other roundings may overflow one step earlier or later, near the largest scale that fits.
        np.testing.assert_allclose(found[-1][1], one[-1][1], rtol=0.6)
        np.testing.assert_allclose(found[0][0], one[0][0], rtol=2e-3)
        assert found[0][2]
        assert not found[-1][2]
