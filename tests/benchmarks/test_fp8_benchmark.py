"""The benchmark of the fp8 forward, run without a GPU."""

import json

import fp8
import jax.numpy as jnp
import pytest


@pytest.fixture
def rows(tmp_path, monkeypatch, without_gpu):
    """rows(): the exit status of a run, and its rows."""
    monkeypatch.setattr(fp8, "prepare_process", lambda: None)

    def run():
        out = tmp_path / "fp8.json"
        status = fp8.main(f"--shapes 1,64,2,32 --timer host --rounds 2 --seconds 0.01 --output {out}".split())
        return status, json.loads(out.read_text())["rows"]

    return run


def test_runs_and_writes(rows):
    status, (full, causal) = rows()
    assert status == 0
    assert not full["causal"]
    assert causal["causal"]
    for row in (full, causal):
        assert 0.01 < row["error"] < 0.1  # e4m3 has 3 mantissa bits
        assert [len(contender["times_ms"]) for contender in row["contenders"]] == [2, 2]
        assert row["speed_ratio"] > 0
    flops = [row["contenders"][0]["tflops"] * row["contenders"][0]["ms"] for row in (full, causal)]
    assert flops[0] == pytest.approx(2 * flops[1]) == pytest.approx(4 * 64**2 * 2 * 32 / 1e9)


@pytest.mark.parametrize(
    ("name", "statuses"), [("flash_attention_fp8", ["ok", "wrong"]), ("flash_attention", ["wrong", "ok"])]
)
def test_nan_is_wrong(name, statuses, rows, monkeypatch):
    attend = getattr(fp8, name)
    monkeypatch.setattr(fp8, name, lambda *arrays, **options: attend(*arrays, **options) * jnp.nan)
    monkeypatch.setattr(fp8, "explain", lambda *_, **__: "")
    status, found = rows()
    assert status == 1
    for row in found:
        assert row["error"] is None
        assert [contender["status"] for contender in row["contenders"]] == statuses
        assert "speed_ratio" not in row


def test_failure_sets_the_exit_status(rows, monkeypatch):
    def broken(*arrays, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fp8, "flash_attention_fp8", broken)
    monkeypatch.setattr(fp8, "explain", lambda *_, **__: "")
    status, found = rows()
    assert status == 1
    assert {row["contenders"][1]["reason"] for row in found} == {"RuntimeError: no such kernel"}


def test_wrong_arguments_are_named(capsys):
    with pytest.raises(SystemExit):
        fp8.main(["--shapes", "1,64,2,32;1,64,2"])
    assert "shape: got '1,64,2', want batch,seq,heads,head_dim" in capsys.readouterr().err
