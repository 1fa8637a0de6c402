"""Checkpoints that are damaged, or belong to another optimizer: restore says so, and leaves the state unchanged."""

import dataclasses
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_kernels.models import ExpertsConfig, LongNetConfig, Trainer, TransformerConfig, make_mesh
from jax_kernels.models.training import checkpoints
from jax_kernels.models.training.trainer_checks import as_json

CONFIG = TransformerConfig(vocab_size=64, model_dim=16, num_layers=1, num_heads=2, mlp_dim=32)
BATCH = (np.arange(32, dtype=np.int32).reshape(2, 16),) * 2


def trainer(folder, optimizer=None):
    return Trainer(CONFIG, optax.adamw(1e-2) if optimizer is None else optimizer, folder=folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    one = trainer(folder)
    one.fit([BATCH] * 2, 2, save_every=1)
    one.close()
    return folder


def rewritten(change):
    """Damages every data file, since the file of an array differs from run to run."""

    def damage(folder):
        for path in folder.glob("state/**/d/*"):
            path.write_bytes(change(path.read_bytes()))

    return damage


def of_another_step(folder):
    shutil.rmtree(folder / "state")
    shutil.copytree(folder.parent / "1" / "state", folder / "state")


DAMAGES = {
    "other data": of_another_step,
    "flipped": rewritten(lambda data: data[: len(data) // 2] + bytes(255 - x for x in data[len(data) // 2 :])),
    "cut": rewritten(lambda data: data[: len(data) // 2]),
    "missing": lambda folder: [path.unlink() for path in folder.glob("state/**/d/*")],
    "no state": lambda folder: shutil.rmtree(folder / "state"),
    "no metadata": lambda folder: (folder / "state" / "_METADATA").write_bytes(b""),
    "empty run": lambda folder: (folder / "run" / "metadata").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_falls_back_to_an_older_one(saved, tmp_path, damage, capfd):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / "2")
    one = trainer(tmp_path)
    before = one.state
    why = r"\S+( and \d+ more)? differ from the saved arrays" if damage == "other data" else ".+"
    want = (
        rf"folder: the checkpoint of step 2 in {tmp_path} cannot be read \(({why})\); restore\(step=1\) takes an older"
    )
    with pytest.raises(ValueError, match=want):
        one.restore()
    assert "Traceback" not in capfd.readouterr().err
    assert one.step == 0
    assert one.state is before
    one.restore(1)
    assert one.step == 1
    one.close()


def test_checkpoint_without_digests_is_restored(saved, monkeypatch):
    read = checkpoints.read_run
    monkeypatch.setattr(
        checkpoints, "read_run", lambda *given: {k: v for k, v in read(*given).items() if k != "digests"}
    )
    one = trainer(saved)
    one.restore()
    assert one.step == 2


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-2, mu_dtype=jnp.bfloat16), optax.sgd(1e-2)], ids=["dtype", "sgd"])
def test_state_of_another_optimizer_is_refused(saved, optimizer):
    one = trainer(saved, optimizer)
    with pytest.raises(ValueError, match="optimizer: got one whose state differs from the state in the checkpoint of"):
        one.restore()
    assert one.step == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "int8", "bool", "uint32"])
def test_digest_depends_on_bits_and_order(dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.integers(-9, 9, (5, 6, 7)) if dtype != "bool" else random.random((5, 6, 7)) < 0.5).astype(
        dtype
    )
    mesh = make_mesh({"data": 1})
    digest = lambda x: checkpoints.digests({"x": x}, mesh)["x"]
    assert digest(x) == digest(x.copy())
    first, other = x[0, 0, 0], next(y for y in x.ravel() if y != x[0, 0, 0])
    changed = [x.at[0, 0, 0].set(other), x[::-1], x.swapaxes(0, 1), jnp.roll(x, 1)]
    assert len({digest(y) for y in (x, *changed)}) == 1 + len(changed)
    assert first != other


# Another value of every field. The fields of OTHER_MODELS change parameters, or the result of equal parameters.
OTHER_MODELS = {
    "vocab_size": 65, "model_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1, "head_dim": 4, "mlp_dim": 48,
    "rope_theta": 500.0, "norm_eps": 1e-5, "tie_embeddings": False, "param_dtype": "bfloat16", "precision": "fp8",
    "scaling": "row", "experts": ExpertsConfig(num_experts=2), "logit_softcap": 30.0, "qk_norm": True,
    "fp8_scaling": "delayed", "amax_history_length": 4,
}  # fmt: skip
# Another value of every field of ExpertsConfig(num_experts=4, bias_rate=0.1).
OTHER_EXPERTS = {
    "num_experts": 8, "experts_per_token": 1, "mlp_dim": 48, "layers": (0,), "scores": "sigmoid", "renormalize": False,
    "weight_scale": 2.0, "shared_experts": 1, "bias_rate": None,
}  # fmt: skip
OTHER_WAYS_OF_EXPERTS = {"balance_loss": 0.5, "exchange": "all_to_all", "implementation": "xla", "bias_rate": 0.2}
OTHER_LONGNETS = {
    "segment_lengths": (8, 8), "dilation_rates": (2, 2), "heads": "groups", "combine": "mean", "layout": "partition",
    "order": "hilbert", "layer_norm": True, "gamma": 0.5,
}  # fmt: skip
OTHER_WAYS = {
    "dtype": "bfloat16", "remat": True, "scan_layers": True, "implementation": "xla", "mlp_implementation": "xla",
    "projection_implementation": "xla", "sequence_axis": None, "sequence_strategy": "ring",
    "sequence_layout": "striped", "microbatches": 2,
}  # fmt: skip


def longnet():
    return LongNetConfig(**dataclasses.asdict(CONFIG), segment_lengths=(8, 16), dilation_rates=(1, 2))


def test_every_field_of_experts_is_compared_or_free():
    experts = ExpertsConfig(num_experts=4, bias_rate=0.1)
    assert {x.name for x in dataclasses.fields(experts)} == OTHER_EXPERTS.keys() | OTHER_WAYS_OF_EXPERTS.keys()
    one = Trainer(dataclasses.replace(CONFIG, experts=experts), optax.sgd(1e-2))

    def of_checkpoint(name, value):
        fields = as_json(dataclasses.asdict(one.config))
        return as_json(fields | {"experts": fields["experts"] | {name: value}})

    for name, value in OTHER_EXPERTS.items():
        with pytest.raises(
            ValueError, match="config: got a model that differs from the checkpoint's, which has experts="
        ):
            one._check_config(of_checkpoint(name, value))
    for name, value in OTHER_WAYS_OF_EXPERTS.items():
        one._check_config(of_checkpoint(name, value))


def test_every_config_field_is_compared_or_free(saved, tmp_path, monkeypatch):
    """A field may change the model's result without changing a parameter's shape."""
    assert {x.name for x in dataclasses.fields(TransformerConfig)} == OTHER_MODELS.keys() | OTHER_WAYS.keys()
    own = {x.name for x in dataclasses.fields(LongNetConfig)} - {x.name for x in dataclasses.fields(TransformerConfig)}
    assert own == OTHER_LONGNETS.keys()
    of_longnet = Trainer(longnet(), optax.adamw(1e-2), folder=tmp_path)
    of_longnet.save()
    for one, others in ((trainer(saved), OTHER_MODELS), (of_longnet, OTHER_LONGNETS)):
        config, before = one.config, one.state
        for name, value in others.items():
            changed = object.__new__(type(config))  # skips the config's checks, which may reject this value
            changed.__dict__.update(config.__dict__ | {name: value})
            monkeypatch.setattr(one, "config", changed)
            got = getattr(config, name)
            want = list(got) if isinstance(got, tuple) else got
            with pytest.raises(ValueError, match="config: got a model that differs") as caught:
                one.restore()
            assert str(caught.value).endswith(f"which has {name}={want!r}"), name
            assert one.state is before
        monkeypatch.setattr(one, "config", config)
        one.close()
    for name, value in OTHER_WAYS.items():
        one = trainer(saved)
        changed = object.__new__(TransformerConfig)
        changed.__dict__.update(CONFIG.__dict__ | {name: value})
        monkeypatch.setattr(one, "config", changed)
        one.restore(1)
        assert one.step == 1, name
