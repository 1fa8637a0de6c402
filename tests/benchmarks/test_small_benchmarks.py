"""The scripts features, decode, accuracy and long_sequence, as they run without a GPU."""

import json
import types

import accuracy
import decode
import features
import jax
import jax.numpy as jnp
import long_sequence
import numpy as np
import pytest


def brute_force(variant):
    """The pairs of a features.Variant, one by one."""
    arguments, length = variant.arguments, variant.seq
    i, j = np.ogrid[:length, :length]
    keep = np.ones((variant.batch, length, length), bool)
    if arguments.get("is_causal"):
        keep &= j <= i
    if "window" in arguments:
        sides = arguments["window"]
        left, right = sides if isinstance(sides, tuple) else (sides, sides)
        keep &= (i - left <= j) & (j <= i + right)
    if "segment_ids" in arguments:
        ids = np.asarray(arguments["segment_ids"])
        keep &= ids[:, :, None] == ids[:, None]
    return keep.sum() * variant.heads


def test_pairs_of_features():
    variants = [variant for group in features.groups(2, 60, 4, 16) for variant in group]
    assert len({variant.name for variant in variants}) >= 12
    ids = jnp.asarray(np.repeat([[0, 1, 2], [3, 5, 9]], 20, axis=1))
    extra = ({"window": (3, 7)}, {"window": (70, 2), "is_causal": True}, {"segment_ids": ids, "window": 9})
    variants += [features.Variant("", 2, 60, 3, 16, 3, arguments) for arguments in extra]
    for variant in variants:
        assert variant.pairs == brute_force(variant), variant


@pytest.fixture
def run_features(tmp_path, monkeypatch, without_gpu):
    """run_features(*words): the exit status of a run over tiny arrays, and what it writes."""
    monkeypatch.setattr(features, "prepare_process", lambda: None)

    def run(*words):
        out = tmp_path / "features.json"
        common = "--shape 1,32,2,16 --implementation xla --timer host --rounds 2 --seconds 0.001"
        status = features.main([*common.split(), "--output", str(out), *words])
        return status, json.loads(out.read_text())

    return run


def test_features_runs(run_features):
    status, results = run_features("--variants", "8 documents,ALiBi score_mod")
    rows = results["rows"]
    of_full, of_causal = ["ALiBi score_mod"], ["8 documents", "ALiBi score_mod"]
    assert (status, results["timer"]) == (0, "host")
    assert [(row["mode"], row["base"], row["name"]) for row in rows] == [
        (mode, base, name)
        for mode in ("fwd", "bwd")
        for base, names in (("full", of_full), ("causal", of_causal))
        for name in (base, *names)
    ]
    bases = {(row["mode"], row["base"]): row for row in rows if row["name"] == row["base"]}
    documents = features.groups(1, 32, 2, 16)[1]
    shares = {variant.name: variant.pairs / documents[0].pairs for variant in documents}
    for row in rows:
        base = bases[row["mode"], row["base"]]
        assert row["status"] == "ok"
        assert 1e-4 < row["error"] < 1e-2
        assert row["share"] == shares.get(row["name"], 1)
        assert row["cost"] == pytest.approx(row["ms"] / base["ms"] / row["share"])


@pytest.mark.parametrize("mode", features.MODES)
def test_score_mods_of_features(mode, monkeypatch):
    """Held against themselves, they are right; against a plain attention, wrong, and are not timed."""
    full = {variant.name: variant for variant in features.groups(1, 32, 2, 16)[0]}
    softcap = features.build(full["softcap score_mod"], mode, "xla")
    assert softcap.error == pytest.approx(features.build(full["softcap"], mode, "xla").error, rel=0.1)
    alibi = full["ALiBi score_mod"]
    function = alibi.arguments["score_mod"]
    assert function(1.0, 0, 1, jnp.int32(5), jnp.int32(2)) == 1 - 3 * 2.0**-8
    honest = features.right
    monkeypatch.setattr(features, "right", lambda variant, *arguments: honest(full["full"], *arguments))
    wrong = features.build(alibi, mode, "xla")
    assert (wrong.status, wrong.call) == ("wrong", None)


@pytest.mark.parametrize("place", range(3))
def test_a_nan_of_features_is_wrong(place, monkeypatch, run_features):
    """Of any one gradient."""
    honest = features.backward

    def poisoned(call, inputs, *arguments):
        found = honest(call, inputs, *arguments)
        return (
            found if call.options.softcap is None else found._replace(**{found._fields[place]: found[place] * jnp.nan})
        )

    monkeypatch.setattr(features, "backward", poisoned)
    status, results = run_features("--variants", "softcap", "--mode", "bwd")
    base, softcap = results["rows"]
    assert (status, base["status"], softcap["status"], softcap["error"]) == (1, "ok", "wrong", None)
    assert (softcap["times_ms"], "cost" in softcap) == ([], False)


def test_features_without_time_left(run_features):
    status, results = run_features("--variants", "softcap,sinks", "--budget", "0.000001")
    assert status == 1
    assert [(row["mode"], row["name"]) for row in results["rows"]] == [
        (mode, name) for mode in ("fwd", "bwd") for name in ("full", "softcap", "causal", "sinks")
    ]
    assert {row["status"] for row in results["rows"]} == {"skipped"}


def test_decode_runs(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(decode, "prepare_process", lambda: None)
    monkeypatch.setattr(decode, "PAGE", 16)
    out = tmp_path / "decode.json"
    words = f"--shapes 2,1,4,16,2 --kv-length 32 --implementations xla --timer host --rounds 2 --output {out}"
    decode.main([*words.split(), "--seconds", "0.001"])
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["copy", "xla", "xla paged", "cudnn"]
    assert (rows["cudnn"]["status"], rows["copy"]["of_copy"]) == ("failed", 1)
    size = 2 * 2 * 32 * 2 * 16 * 2  # keys and values in bfloat16
    for name, moved in (("copy", 2 * size), ("xla", size), ("xla paged", size)):
        assert rows[name]["terabytes_per_second"] == pytest.approx(moved / np.median(rows[name]["times_ms"]) / 1e9)


def test_accuracy_runs(tmp_path, monkeypatch, without_gpu):
    """Errors of bfloat16, and a ratio of one where both are the same implementation."""
    errors = accuracy.errors
    monkeypatch.setattr(accuracy, "errors", lambda is_causal, name: errors(is_causal, "xla"))
    monkeypatch.setattr(accuracy, "KINDS", ("peaked",))
    out = tmp_path / "accuracy.json"
    try:
        accuracy.main(["--lengths", "32", "--head-dims", "16", "--implementations", "xla,cudnn", "--output", str(out)])
    finally:
        jax.config.update("jax_enable_x64", False)
    rows = json.loads(out.read_text())["rows"]
    assert [row["causal"] for row in rows] == [False, True]
    for row in rows:
        assert row["errors"]["xla"] == row["errors"]["cudnn"]
        assert set(row["errors"]["xla"]) == set(accuracy.RESULTS)
        assert all(1e-4 < error < 1e-2 for error in row["errors"]["xla"].values())


@pytest.mark.parametrize("segments", [None, "16,64"])
def test_long_sequence_measures(segments):
    args = {"heads": 2, "head_dim": 8, "segments": segments, "rates": segments and "1,2", "repeats": 2}
    row = long_sequence.measure(32, types.SimpleNamespace(**args, implementation="xla"))
    assert len(row["seconds"]) == 2
    # Two segments of 16, and one of every second token.
    pairs = 32**2 if segments is None else 2 * 16**2 + 16**2
    assert row["tflops"] * min(row["seconds"]) == pytest.approx(3.5 * 4 * pairs * 2 * 8 / 2 / 1e12)
