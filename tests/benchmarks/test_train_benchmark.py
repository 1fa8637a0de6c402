"""benchmarks/train.py on the CPU: contenders, meshes, FLOP counts, and errors."""

import json

import numpy as np
import pytest
import train
from harness.train_cases import TrainCase
from harness.train_curve import losses_of

from jax_kernels import models
from tests.support.processes import forked

SMALL = "--batch 2 --seq-len 16 --layers 2 --width 16 --heads 2 --mlp 32 --vocabulary 64 --dtype float32 --steps 1"


def case(**changes):
    sizes = {"batch": 2, "seq_len": 8, "layers": 3, "width": 4, "heads": 2, "mlp": 5, "vocabulary": 7}
    options = {"name": "products", "mesh": "", "dtype": "float32", "param_dtype": "float32", "steps": 1, "rounds": 1}
    return TrainCase(**(sizes | options | changes))


@pytest.mark.slow
def test_runs_on_a_mesh_after_another_run(tmp_path, run_script, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=2 {forked.QUICK_COMPILES}")
    one, both = tmp_path / "one.json", tmp_path / "both.json"
    for words in (
        ["--contenders", "scan-xla-products", "--output", str(one)],
        ["--contenders", "", "--meshes", "data=2", "--after", str(one), "--output", str(both)],
    ):
        done = run_script("train.py", *SMALL.split(), "--rounds", "1", *words)
        assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads(both.read_text())
    alone, shared = results["rows"]
    assert (alone["contender"], alone["devices"], shared["contender"], shared["devices"]) == (
        "scan-xla-products", 1, "products", 2,
    )  # fmt: skip
    assert (alone["batch"], shared["batch"]) == (2, 4)
    for row in (alone, shared):
        assert row["first_s"] == pytest.approx(sum(row["first_parts_s"].values()))
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 16 / row["median_ms"] * 1e3)
        assert 0 < row["loss"] < 10
        assert row["mfu"] is None
    assert results["environment"]["platform"] == "cpu"


@pytest.mark.slow
def test_curves_of_contenders_are_comparable(tmp_path, run_script):
    """Two names of one program have equal losses; 8 bits have near ones, and learn."""
    words = (
        "--curve 12 --batch 4 --seq-len 32 --layers 1 --width 16 --heads 2 --mlp 32 --vocabulary 256 --dtype float32"
    )
    names = "xla-products,xla-tokens-products,fp8-xla-products,fp8-delayed-xla-products"
    path = tmp_path / "curve.json"
    done = run_script("train.py", *words.split(), "--contenders", names, "--output", str(path), "--limit", "120")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(path.read_text())["rows"]
    losses = {row["contender"]: np.array(row["losses"]) for row in rows}
    want = losses.pop("xla-products")
    assert want.shape == (12,)
    assert want[-1] < want[0] - 0.3
    np.testing.assert_allclose(losses["xla-tokens-products"], want, atol=1e-3)
    for name in ("fp8-xla-products", "fp8-delayed-xla-products"):
        np.testing.assert_allclose(losses[name], want, atol=0.1)
        assert not np.array_equal(losses[name], want)
    assert "held out" in done.stdout
    assert all(0 < row["held_out_loss"] < 6 for row in rows)
    words = f"{words} --seeds 0,1 --contenders xla-products --limit 120 --output {path}"
    done = run_script("train.py", *words.split())
    assert done.returncode == 0, done.stderr + done.stdout
    same, other = json.loads(path.read_text())["rows"]
    assert (same["seed"], other["seed"]) == (0, 1)
    np.testing.assert_allclose(same["losses"], want, atol=1e-3)
    assert abs(other["losses"][0] - want[0]) > 1e-3


def test_curves_have_seeds():
    """Each seed trains each contender, and a ratio compares two losses of one seed."""
    words = "--vocabulary 256 --curve 5 --contenders products,fp8-products"
    found = train.cases(train.arguments([*words.split(), "--seeds", "0,7"]))
    names = ["products", "fp8-products"]
    assert [(case.seed, case.name) for case in found] == [(seed, name) for seed in (0, 7) for name in names]
    assert found[3].label == "fp8-products seed 7"
    losses = {(0, "products"): 2.0, (0, "fp8-products"): 3.0, (7, "products"): 4.0, (7, "fp8-products"): 5.0}
    rows = [
        {"contender": name, "seed": seed, "steps": 1, "losses": [loss], "loss": loss, "held_out_loss": None}
        for (seed, name), loss in losses.items()
    ]
    ratios = list(train.curves(rows).columns[-1].cells)
    assert ratios == ["1.0000", "1.5000", "1.0000", "1.2500"]


def test_seed_of_parameters_and_batches(monkeypatch):
    class Seen(Exception):
        pass

    def batches(*_, seed, **__):
        seeds.append(seed)
        raise Seen

    seeds = []
    monkeypatch.setattr(models, "read_text", lambda files: np.zeros(120, np.uint8))
    monkeypatch.setattr(models, "Trainer", lambda *_, seed, **__: seeds.append(seed))
    monkeypatch.setattr(models, "TokenBatches", batches)
    with pytest.raises(Seen):
        losses_of(case(curve=3, vocabulary=256, seed=7), None)
    assert seeds == [7, 7]


def test_bad_seeds(capsys):
    for words, message in [
        (["--seeds", "1"], "seeds: got '1' without --curve, want --curve"),
        (["--seeds", "1,x", "--curve", "5"], "seeds: got '1,x', want integers of 0 or more with commas between them"),
        (["--seeds", "-1", "--curve", "5"], "seeds: got '-1', want integers of 0 or more"),
    ]:
        with pytest.raises(SystemExit):
            train.arguments([*words, "--vocabulary", "256", "--contenders", "products"])
        assert message in " ".join(capsys.readouterr().err.split())


def test_step_flops_are_counted():
    """6 FLOPs for each weight and token; 12 for each pair that the mask keeps and each column of a head."""
    weights = 3 * (4 * 4 * 4 + 3 * 4 * 5) + 7 * 4
    pairs = 2 * (8 * 9 // 2)
    assert case().flops == 6 * weights * 16 + 12 * 3 * 4 * pairs
    assert case(mesh="data=2,sequence=2").flops == 4 * case().flops
    assert case(mesh="data=2,sequence=2").shape == (8, 8)


def test_bad_contenders_and_meshes():
    for changes, message in [
        ({"name": "some"}, "contenders: got 'some', want one of none, all, attention, products, llama, llama-remat"),
        ({"name": "fast-products"}, "contenders: got 'fast-products'"),
        ({"name": "delayed-products"}, "contenders: got 'delayed-products', want fp8- with row-, block-, delayed-"),
        ({"name": "llama", "curve": 3}, "curve: got 'llama' with a vocabulary of 7, want this library's contenders"),
        ({"mesh": "data"}, "meshes: got 'data', want axes such as data=2,sequence=2"),
        ({"name": "llama", "mesh": "data=2"}, "meshes: got 'data=2' for llama, want none"),
    ]:
        with pytest.raises(ValueError, match=message):
            case(**changes)
    with pytest.raises(SystemExit):
        train.arguments(["--contenders", "some"])
