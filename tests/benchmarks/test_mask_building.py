"""The benchmark of building masks, run without a GPU."""

import json

import jax.numpy as jnp
import mask_building
import numpy as np
import pytest

SMALL = (
    "--seq-len 256 --num-heads 4 --kv-heads 2 --head-dim 16 --keep 64 --dense-len 300 --lists-len 500"
    " --function-len 700 --implementation xla --timer host --rounds 2 --seconds 0.001"
)


@pytest.fixture
def run(tmp_path, monkeypatch, without_gpu):
    """run(*words): the exit status of a run over small arrays, and its rows."""
    monkeypatch.setattr(mask_building, "prepare_process", lambda: None)

    def of(*words):
        out = tmp_path / "building.json"
        status = mask_building.main([*SMALL.split(), "--output", str(out), *words])
        return status, json.loads(out.read_text())["rows"]

    return of


@pytest.mark.slow
def test_runs_and_writes(run, monkeypatch):
    monkeypatch.setattr(mask_building, "LISTS", ("block", "function"))
    builders = ("top_k, causal", "top_k of each query", "top_k_blocks, causal")
    monkeypatch.setattr(mask_building, "BUILDERS", builders)
    status, rows = run()
    assert [(row["table"], row["mask"], row["part"]) for row in rows] == [
        *(("builders", mask, part) for mask in builders for part in ("build", "attention", "together")),
        *(("dense", "dense", part) for part in ("copy", "status")),
        *(("lists", mask, part) for mask, part in (("block", "lists"), ("block", "prepare"), ("function", "lists"))),
    ]
    assert (status, {row["status"] for row in rows}) == (0, {"ok"})
    medians = {(row["mask"], row["part"]): np.median(row["times_ms"]) for row in rows}
    for row in rows:
        median = medians[row["mask"], row["part"]]
        assert row["median_ms"] == median
        if row["table"] == "builders":
            assert row["share"] == pytest.approx(median / medians[row["mask"], "attention"])
            assert row["part"] == "build" or 1e-4 < row["error"] < 1e-2
        if row["table"] == "dense":
            moved = 4 * 300**2 * {"copy": 2, "status": 1}[row["part"]]
            assert row["gigabytes_per_second"] == pytest.approx(moved / median / 1e6)
            assert row["meets_bar"] == (row["of_copy"] >= 0.7)


@pytest.mark.parametrize("name", mask_building.LISTS)
def test_lists_are_checked_against_another_form(name, monkeypatch):
    args = mask_building.arguments(SMALL.split())
    honest = mask_building.mask_of

    def other(name, args):
        length, mask, same = honest(name, args)
        return length, mask, same & mask_building.masks.prefix(140)

    assert mask_building.of_lists(name, args)[0].status == "ok"
    monkeypatch.setattr(mask_building, "mask_of", other)
    assert mask_building.of_lists(name, args)[0].status == "wrong"


@pytest.mark.slow
def test_wrong_lists_are_reported(run, monkeypatch):
    status_of, right = mask_building.status_of, mask_building.right
    monkeypatch.setattr(mask_building, "status_of", lambda *given: tuple(~x for x in status_of(*given)))
    monkeypatch.setattr(mask_building, "right", lambda *given: right(*given) * jnp.nan)
    monkeypatch.setattr(mask_building, "BUILDERS", ("threshold",))
    status, rows = run("--table", "builders,dense")
    found = {(row["mask"], row["part"]): row["status"] for row in rows}
    assert status == 1
    assert found == {
        ("threshold", "build"): "ok",
        ("threshold", "attention"): "wrong",
        ("threshold", "together"): "wrong",
        ("dense", "copy"): "ok",
        ("dense", "status"): "wrong",
    }


def test_without_time_left(run):
    status, rows = run("--budget", "0.000001", "--table", "dense,lists")
    assert (status, [row["mask"] for row in rows]) == (1, ["dense", *mask_building.LISTS])
    assert {row["status"] for row in rows} == {"skipped"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--table masks", "table: got 'masks', want some of builders, dense, lists"),
        ("--kv-heads 3", "kv_heads: got 3, want a divisor of the 16 heads"),
        ("--keep 0", "got 0, want a positive number"),
    ],
)
def test_wrong_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit):
        mask_building.arguments(words.split())
    assert message in capsys.readouterr().err
