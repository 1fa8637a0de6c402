"""The benchmark of the fp8 forward, as it runs without a GPU."""

import json

import fp8
import jax.numpy as jnp
import pytest


@pytest.fixture
def rows(tmp_path, monkeypatch, without_gpu):
    """rows(): those that a run writes."""
    monkeypatch.setattr(fp8, "prepare_process", lambda: None)

    def run():
        out = tmp_path / "fp8.json"
        fp8.main(f"--shapes 1,64,2,32 --timer host --rounds 2 --seconds 0.01 --output {out}".split())
        return json.loads(out.read_text())["rows"]

    return run


def test_runs_and_writes(rows):
    full, causal = rows()
    assert not full["causal"]
    assert causal["causal"]
    for row in (full, causal):
        assert 0.01 < row["error"] < 0.1  # e4m3 has 3 bits behind the point
        assert [len(contender["times_ms"]) for contender in row["contenders"]] == [2, 2]
        assert row["speed_ratio"] > 0
    flops = [row["contenders"][0]["tflops"] * row["contenders"][0]["ms"] for row in (full, causal)]
    assert flops[0] == pytest.approx(2 * flops[1]) == pytest.approx(4 * 64**2 * 2 * 32 / 1e9)


def test_nan_is_wrong(rows, monkeypatch):
    attend = fp8.flash_attention_fp8
    monkeypatch.setattr(fp8, "flash_attention_fp8", lambda *arrays, **options: attend(*arrays, **options) * jnp.nan)
    monkeypatch.setattr(fp8, "explain", lambda *_, **__: "")
    for row in rows():
        assert row["error"] is None
        assert [contender["status"] for contender in row["contenders"]] == ["ok", "wrong"]
        assert "speed_ratio" not in row
