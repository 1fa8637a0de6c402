"""The benchmark of the fp8 forward, as it runs without a GPU."""

import json

import pytest


def test_runs_and_writes(tmp_path, run_script):
    out = tmp_path / "fp8.json"
    words = ["--shapes", "1,64,2,32", "--timer", "host", "--rounds", "2", "--seconds", "0.01", "--output", str(out)]
    done = run_script("fp8.py", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    full, causal = json.loads(out.read_text())["rows"]
    assert not full["causal"]
    assert causal["causal"]
    for row in (full, causal):
        assert 0.01 < row["error"] < 0.1  # e4m3 has 3 bits behind the point
        assert [len(contender["times_ms"]) for contender in row["contenders"]] == [2, 2]
        assert row["speed_ratio"] > 0
    flops = [row["contenders"][0]["tflops"] * row["contenders"][0]["ms"] for row in (full, causal)]
    assert flops[0] == pytest.approx(2 * flops[1])
