"""Trainer: exact resumption after a kill, other meshes, accumulation; TokenBatches: an order by seed and step."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_kernels.models import (
    LongNetConfig,
    TokenBatches,
    Trainer,
    TransformerConfig,
    make_mesh,
    next_token_loss,
    read_text,
)
from tests.support.processes import forked

CONFIG = TransformerConfig(vocab_size=64, model_dim=16, num_layers=1, num_heads=2, mlp_dim=32)
RUNS = Path(__file__).parent / "trainer_runs.py"
STEPS = 6


def start(*words):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {forked.QUICK_COMPILES}",
    }
    command = [sys.executable, str(RUNS), *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process, code=0):
    out, err = process.communicate(timeout=150)
    assert process.returncode == code, err[-3000:]
    return json.loads(out.splitlines()[-1]) if out else None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_run_resumes_exactly(tmp_path):
    """A run that is killed while it writes a checkpoint resumes as if it had not stopped."""
    mesh = "data=2,sequence=2"
    whole, killed = start(tmp_path / "whole", mesh, STEPS), start(tmp_path / "killed", mesh, STEPS, "kill")
    want = end(whole)
    assert end(killed, -signal.SIGKILL) is None
    names = sorted(path.name for path in (tmp_path / "killed").iterdir() if not path.name.startswith("."))
    assert names == ["2", "4.orbax-checkpoint-tmp"]
    got = end(start(tmp_path / "killed", mesh, STEPS, "elsewhere"))
    assert got["begun"] == 2
    assert got["losses"] == want["losses"][2:]
    # The checkpoint of step 4, written by 4 devices, on 2 devices and on 1.
    for devices, found in got["elsewhere"].items():
        assert found["devices"] == [int(devices)]
        np.testing.assert_allclose(found["losses"], want["losses"][4:], rtol=1e-5)


def batches(**options):
    random = np.random.default_rng(0)
    return TokenBatches(random.integers(0, 64, 500), 16, 4, **options)


def test_kernels_compile_once_during_the_first_step(monkeypatch):
    """Kernels compile during the first step, and no program is lowered twice."""
    lowered, traced, waits = [], [], []

    def compile_kernels(program, device, wait):
        lowered.append(program)
        waits.append(wait)

    monkeypatch.setattr("jax_kernels.models.training.trainer.compile_kernels", compile_kernels)

    def loss(model, batch, key):
        traced.append(batch)
        return losses_of(model, batch, key)

    losses_of = Trainer(CONFIG, optax.sgd(0.1)).loss
    trainer = Trainer(CONFIG, optax.sgd(0.1), loss=loss)
    for batch, _ in zip(batches(), range(3), strict=False):
        trainer.train(batch)
    assert len(lowered) == 1
    assert waits == [False]
    assert lowered[0].compile() is not None
    assert len(traced) == 1


def test_accumulation_matches_one_batch():
    """Parts of a batch with different numbers of counted targets give the whole batch's mean."""
    runs = []
    for options in ({"accumulate": 1}, {"accumulate": 2}):
        trainer = Trainer(CONFIG, optax.adamw(1e-2), **options)
        tokens, targets = batches()[0]
        targets = targets.at[1, :12].set(-1)
        runs.append([trainer.train((tokens, targets)) for _ in range(4)])
        assert trainer.step == int(trainer.state["step"]) == 4
    for one, two in zip(*runs, strict=True):
        np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-5)
        np.testing.assert_allclose(one["gradient_norm"], two["gradient_norm"], rtol=1e-4)
    assert float(runs[0][-1]["loss"]) < 0.9 * float(runs[0][0]["loss"])
    losses = trainer.model.losses(tokens, targets)
    np.testing.assert_allclose(trainer.evaluate((tokens, targets)), float(losses.sum()) / 52, rtol=1e-5)


def test_weighted_mean_is_scale_free():
    """A loss whose weights sum to less than one target also has the gradient of the weighted mean."""

    def weighted(model, batch, key):
        total, count = next_token_loss(model, batch, key)
        return 1e-3 * total, 1e-3 * count

    found = []
    for loss in (next_token_loss, weighted):
        trainer = Trainer(CONFIG, optax.sgd(0.1), loss=loss)
        found.append((trainer.evaluate(batches()[0]), *trainer.train(batches()[0]).values()))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.slow
def test_mixed_precision_keeps_parameters_and_moments_in_float32():
    longnet = LongNetConfig(
        vocab_size=64, model_dim=16, num_layers=1, num_heads=2, mlp_dim=32, segment_lengths=(8,), dilation_rates=(1,),
    )  # fmt: skip
    for config in (CONFIG, longnet):
        trainer = Trainer(dataclasses.replace(config, dtype="bfloat16", remat=True), optax.adamw(1e-2))
        losses = [float(trainer.train(batches()[step])["loss"]) for step in range(2)]
        assert np.isfinite(losses).all()
        kinds = {x.dtype for x in jax.tree.leaves((trainer.state["params"], trainer.state["optimizer"]))}
        assert kinds == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


def test_loss_keys_depend_on_seed_and_step():
    def keys(seed):
        seen = lambda model, batch, key: (jax.random.uniform(key) + 0 * model.embed[...].sum(), jnp.int32(1))
        trainer = Trainer(CONFIG, optax.sgd(0.0), seed=seed, loss=seen)
        return [float(trainer.train(batches()[0])["loss"]) for _ in range(3)]

    assert keys(0) == keys(0)
    assert len({*keys(0), *keys(1)}) == 6


def test_run_resumes_from_an_earlier_step(tmp_path):
    """A run resumes from an earlier step in another folder, or after later checkpoints were removed."""

    def trainer():
        return Trainer(CONFIG, optax.sgd(0.1), folder=tmp_path)

    def folders():
        return sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())

    first = trainer()
    first.fit(batches(), 4, save_every=2)
    first.save()  # it is there
    with pytest.raises(ValueError, match="folder: got a checkpoint of step 4 with a state of step 4"):
        first.save({"other": 1})
    first.model.embed[...] *= 2  # the state's own array
    with pytest.raises(ValueError, match="folder: got a checkpoint of step 4 with a state of step 4"):
        first.save()
    first.close()
    again = trainer()
    again.restore(2)
    message = r"folder: got a checkpoint of step 4 with a state of step 2, want another folder, or restore"
    with pytest.raises(ValueError, match=message):
        again.fit(batches(), 3, save_every=1)
    assert again.step == 2
    again.fit(batches(), 3)
    with pytest.raises(ValueError, match="folder: got a checkpoint of step 4 with a state of step 3"):
        again.save()
    assert folders() == [2, 4]
    again = trainer()
    again.restore(2, remove_later=True)
    assert folders() == [2]
    again.fit(batches(), 3, save_every=1)
    assert folders() == [2, 3]
    assert again.latest == 3


def test_bad_arguments_and_checkpoints_are_named(tmp_path):
    trainer = Trainer(CONFIG, optax.sgd(0.1), folder=tmp_path)
    with pytest.raises(FileNotFoundError, match=f"folder: got {tmp_path} with no checkpoint, want one that save wrote"):
        trainer.restore()
    trainer.save({"text": "a"})
    with pytest.raises(FileNotFoundError, match=r"with no checkpoint of step 3, .+; it has steps 0$"):
        trainer.restore(3)
    with pytest.raises(TypeError, match="step: got '0', want an int, or None for the newest"):
        trainer.restore("0")
    other = Trainer(dataclasses.replace(CONFIG, mlp_dim=48, remat=True), optax.sgd(0.1), folder=tmp_path)
    with pytest.raises(
        ValueError, match="config: got a model that differs from the checkpoint's, which has mlp_dim=32"
    ):
        other.restore()
    with pytest.raises(ValueError, match="optimizer: got one whose state differs from the state in the checkpoint"):
        Trainer(CONFIG, optax.adam(0.1), folder=tmp_path).restore()
    shutil.copytree(tmp_path, tmp_path / "cut", ignore=lambda folder, names: {"run", "cut"} & set(names))
    with pytest.raises(ValueError, match="folder: got a checkpoint of step 0 without its `run`, want one"):
        Trainer(CONFIG, optax.sgd(0.1), folder=tmp_path / "cut").restore()
    again = Trainer(dataclasses.replace(CONFIG, remat=True), optax.sgd(0.1), folder=tmp_path, seed=5)
    assert again.restore() == {"text": "a"}
    np.testing.assert_array_equal(again.model.embed[...], trainer.model.embed[...])
    for x in (trainer, other, again):
        x.close()
    with pytest.raises(ValueError, match="folder: got None, want a folder for checkpoints"):
        Trainer(CONFIG, optax.sgd(0.1)).save()
    for save_every in (0, -1):
        with pytest.raises(ValueError, match=f"save_every={save_every} must be positive"):
            trainer.fit(batches(), 1, save_every=save_every)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(ValueError, match=f"folder: got {folder}, want a folder: {tmp_path / 'file'} is a file"):
            Trainer(CONFIG, optax.sgd(0.1), folder=folder)
    with pytest.raises(ValueError, match="accumulate=0 must be positive"):
        Trainer(CONFIG, optax.sgd(0.1), accumulate=0)
    with pytest.raises(ValueError, match="config: got param_dtype float16, want float32 or bfloat16"):
        Trainer(dataclasses.replace(CONFIG, param_dtype="float16"), optax.sgd(0.1))
    with pytest.raises(ValueError, match="batch: got 4 rows, want a multiple of accumulate=3"):
        Trainer(CONFIG, optax.sgd(0.1), accumulate=3).train(batches()[0])


ARGUMENTS = {
    "config": (
        {"config": {"vocab_size": 4}},
        TypeError,
        "config: got dict, want a TransformerConfig or a LongNetConfig",
    ),
    "optimizer": ({"optimizer": "adam"}, TypeError, "optimizer: got 'adam', want one of optax, such as optax.adamw"),
    "mesh": ({"mesh": {"data": 1}}, TypeError, "mesh: got dict, want a jax.sharding.Mesh, as make_mesh gives it"),
    "rules": ({"rules": "default"}, TypeError, "rules: got str, want ShardingRules or None"),
    "folder": ({"folder": 3}, TypeError, "folder: got int, want a path or None"),
    "loss": ({"loss": "nll"}, TypeError, r"loss: got 'nll', want a function of \(model, batch, key\)"),
    "seed": ({"seed": 2**32}, ValueError, "seed: got 4294967296, want 0 to 4294967295"),
    "negative seed": ({"seed": -1}, ValueError, "seed: got -1, want 0 to 4294967295"),
    "seed's type": ({"seed": 1.5}, TypeError, r"seed: got 1\.5, want an int"),
    "keep": ({"keep": "2"}, TypeError, "keep='2' must be an int"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_wrong_type_are_named(case):
    changed, error, message = ARGUMENTS[case]
    with pytest.raises(error, match=message):
        Trainer(**{"config": CONFIG, "optimizer": optax.sgd(0.1)} | changed)


def test_largest_seed_is_accepted():
    assert Trainer(CONFIG, optax.sgd(0.1), seed=2**32 - 1).step == 0


def test_wrong_batches_are_named():
    trainer, good = Trainer(CONFIG, optax.sgd(0.1)), np.zeros((2, 4), np.int32)
    pairs = "want .tokens, targets., with segment_ids, or with segment_ids and weights, arrays .batch, length."
    one = np.ones((2, 4), np.float32)
    for call, error, message in [
        (lambda: trainer.fit([1, 2, 3], 2), TypeError, rf"batches\[0\]: got int, {pairs}"),
        (lambda: trainer.fit([(good,)], 1), TypeError, rf"batches\[0\]: got 1 items, {pairs}"),
        (
            lambda: trainer.fit([(good, good)], 3),
            ValueError,
            "batches: got 1 of them, want one for each of the 3 steps",
        ),
        (lambda: trainer.fit(iter([]), 1), TypeError, "batches: got list_iterator, want TokenBatches, a list, or"),
        (lambda: trainer.fit(batches(), 1.5), TypeError, r"steps: got 1\.5, want an int: the total number of steps"),
        (lambda: trainer.fit(batches(), -1), ValueError, "steps: got -1, want 0 or more"),
        (lambda: trainer.fit(batches(), 1, on_step=3), TypeError, "on_step: got 3, want a function of .step, found."),
        (lambda: trainer.fit(batches(), 1, save_every=1), ValueError, "folder: got None, want a folder for check"),
        (lambda: trainer.train(good), TypeError, f"batch: got ndarray, {pairs}"),
        (
            lambda: trainer.train((good, good * 1.0)),
            TypeError,
            r"batch: got float64 \(2, 4\) for item 1, targets, want",
        ),
        (lambda: trainer.train((good, good, None)), TypeError, "batch: got NoneType for item 2, segment_ids, want int"),
        (
            lambda: trainer.train((good, good, good, good)),
            TypeError,
            "batch: got int32 .* for item 3, weights, want fl",
        ),
        (lambda: trainer.train((good, good, None, -one)), ValueError, "batch: got weights below 0 or not finite"),
        (lambda: trainer.train((good, [[1]])), TypeError, "batch: got list for item 1, targets, want"),
        (lambda: trainer.train((good, good[:1])), ValueError, r"batch: got targets of shape \(1, 4\), want tokens'"),
        (lambda: trainer.train((good + 64, good)), ValueError, "tokens: got ids from 64 to 64, want 0 to 63"),
        (lambda: trainer.evaluate((good, good + 64)), ValueError, "targets: got ids up to 64, want 0 to 63"),
        (lambda: trainer.lock_folder(), ValueError, "folder: got None, want a folder for checkpoints"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert trainer.step == 0


def test_batches_depend_only_on_seed_and_step():
    one, other = batches(), batches(mesh=make_mesh({"data": 1}))
    assert one.windows == 31
    for step in (0, 3, 40):
        for x, y in zip(one[step], other[step], strict=True):
            np.testing.assert_array_equal(x, y)
    tokens, targets = one[5]
    assert (tokens.shape, tokens.dtype) == ((4, 16), jnp.int32)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    # An epoch has every window once.
    epoch = np.concatenate([np.asarray(one[step][0]) for step in range(31)])
    windows = {tuple(x) for x in one.tokens[: 31 * 16].reshape(31, 16).tolist()}
    assert all({tuple(x) for x in part.tolist()} == windows for part in (epoch[:31], epoch[31:62]))
    assert (np.asarray(batches(seed=1)[0][0]) != np.asarray(one[0][0])).any()
    assert one.sha256 == batches(seed=4).sha256


def test_reads_files_and_folders(tmp_path):
    for name, text in (("b.txt", "two"), ("a/c.txt", "one"), (".hidden", "no"), ("empty", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_text(tmp_path).tobytes() == b"onetwo"
    assert isinstance(read_text(tmp_path / "b.txt"), np.memmap)
    assert read_text([tmp_path / "b.txt", tmp_path / "a"]).tobytes() == b"twoone"
    with pytest.raises(FileNotFoundError, match="is neither a file nor a folder"):
        read_text(tmp_path / "none")
    with pytest.raises(ValueError, match="paths: got no bytes of text"):
        read_text(tmp_path / "empty")
    for bad, message in [
        ({"seq_len": 0}, "seq_len: got 0, want 1 or more"),
        ({"seq_len": 500}, "tokens: got 500, want at least 501 for seq_len=500"),
        ({"tokens": np.zeros(5)}, r"tokens: got float64 \(5,\), want integers \[n\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            TokenBatches(**({"tokens": np.zeros(500, np.int32), "seq_len": 16, "batch_size": 4} | bad))
    for bad, message in [
        ({"tokens": [1, 2, 3] * 9}, r"tokens: got list, want an array of integers \[n\]"),
        ({"seq_len": 4.0}, r"seq_len: got 4\.0, want an int"),
        ({"batch_size": True}, "batch_size: got True, want an int"),
        ({"seed": "a"}, "seed: got 'a', want an int"),
    ]:
        with pytest.raises(TypeError, match=message):
            TokenBatches(**({"tokens": np.zeros(500, np.int32), "seq_len": 16, "batch_size": 4} | bad))
    for tokens in (np.full(100, 2**32 + 5), np.full(100, 3 * 10**9, np.uint32)):
        with pytest.raises(ValueError, match=f"tokens: got ids from {tokens[0]} to {tokens[0]}, want int32"):
            TokenBatches(tokens, 4, 2)[0]
    np.testing.assert_array_equal(TokenBatches(np.full(100, 2**31 - 1, np.uint32), 4, 2)[0][0], 2**31 - 1)
