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


def test_features_runs(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(features, "prepare_process", lambda: None)
    wanted = [features.groups(1, 32, 2, 16)[1][:2]]
    monkeypatch.setattr(features, "groups", lambda *_: wanted)
    out = tmp_path / "features.json"
    words = f"--shape 1,32,2,16 --implementation xla --timer host --rounds 2 --seconds 0.001 --output {out}"
    features.main(words.split())
    results = json.loads(out.read_text())
    rows = results["rows"]
    assert (results["timer"], len(rows)) == ("host", 4)
    assert [row["mode"] for row in rows] == ["fwd"] * 2 + ["bwd"] * 2
    for row, base in zip(rows[1::2], rows[::2], strict=True):
        assert (base["cost"], base["share"], base["status"]) == (1, 1, "ok")
        share = 31 * 32 / (32 * 33)
        assert row["share"] == pytest.approx(share)
        assert row["cost"] == pytest.approx(row["ms"] / base["ms"] / share)


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
