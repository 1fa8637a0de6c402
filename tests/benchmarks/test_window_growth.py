"""The benchmark of windows over lengths, run without a GPU."""

import json

import jax.numpy as jnp
import pytest
import window_growth

SMALL = "--lengths 32,64 --window 8 --num-heads 2 --head-dim 16 --implementation xla --timer host --rounds 2"


@pytest.fixture
def run(tmp_path, monkeypatch, without_gpu):
    """run(*words): the exit status of a run over tiny arrays, and its results."""
    monkeypatch.setattr(window_growth, "prepare_process", lambda: None)

    def of(*words):
        out = tmp_path / "growth.json"
        status = window_growth.main([*SMALL.split(), "--seconds", "0.001", "--output", str(out), *words])
        return status, json.loads(out.read_text())

    return of


@pytest.mark.slow
def test_runs_and_writes(run):
    names = ["window-argument", "mask"]
    status, results = run("--contenders", ",".join(names))
    rows = results["rows"]
    assert (status, results["window"], results["bar"]) == (0, 8, 1.1)
    assert [(row["length"], row["mode"], row["contender"]) for row in rows] == [
        (length, mode, name) for length in (32, 64) for mode in window_growth.MODES for name in names
    ]
    first = {(row["mode"], row["contender"]): row for row in rows if row["length"] == 32}
    for row in rows:
        assert 1e-4 < row["error"] < 1e-2
        base = first[row["mode"], row["contender"]]
        # The run holds at least query, key, value and the results, of two bytes for each element.
        assert row["held_bytes"] >= {"fwd": 4, "fwdbwd": 8}[row["mode"]] * row["length"] * 2 * 16 * 2
        assert row["bytes_per_token"] == row["held_bytes"] / row["length"]
        assert row["time_growth"] == pytest.approx(row["median_ms"] / base["median_ms"] * 32 / row["length"])
        assert row["memory_is_linear"] == (row["bytes_per_token"] <= 1.1 * base["bytes_per_token"])


@pytest.mark.parametrize("length", [7, 40])
def test_wrong_tail_fails(length, make_case, monkeypatch):
    """Lengths shorter and longer than a window. A window of another width is wrong."""
    case = make_case("fwdbwd", shape=(1, length, 2, 16, 2))
    inputs = window_growth.input_sets(case)[0]
    args = window_growth.arguments([*SMALL.split()])
    contender, _ = window_growth.build("prepared-mask", case, inputs, args)
    assert contender.status == "ok"
    outputs = contender.call(0)
    for place, x in enumerate(outputs):
        spoiled = [*outputs[:place], x.at[0, -1, 0, 0].set(jnp.nan), *outputs[place + 1 :]]
        assert not window_growth.error(spoiled, inputs, case, 8) <= 1
    args.window = 4
    contender, _ = window_growth.build("mask", case, inputs, args)
    assert contender.status == "ok"
    assert window_growth.error(contender.call(0), inputs, case, 8) > 0.02


def test_without_time_left(run):
    status, results = run("--budget", "0.000001", "--mode", "fwd")
    assert (status, len(results["rows"])) == (1, 6)
    assert {row["status"] for row in results["rows"]} == {"skipped"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mode bwd", "mode: got 'bwd', want some of fwd, fwdbwd"),
        ("--contenders dense", "contenders: got 'dense', want some of window-argument, prepared-mask, mask"),
        ("--lengths 0", "got '0', want positive integers"),
    ],
)
def test_wrong_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit):
        window_growth.arguments(words.split())
    assert message in capsys.readouterr().err
