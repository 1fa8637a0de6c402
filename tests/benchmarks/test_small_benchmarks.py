"""The scripts features, decode, accuracy, matmul_accuracy, long_sequence and versions, run without a GPU."""

import dataclasses
import importlib.util
import json
import math
import sys
import types

import accuracy
import decode
import features
import jax
import jax.numpy as jnp
import long_sequence
import matmul_accuracy
import numpy as np
import pytest
import torch
import versions
from harness.table_cases import TableCase

from tests.support.cases import tiers


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


def test_feature_pairs():
    variants = [variant for group in features.groups(2, 60, 4, 16) for variant in group]
    assert len({variant.name for variant in variants}) >= 12
    ids = jnp.asarray(np.repeat([[0, 1, 2], [3, 5, 9]], 20, axis=1))
    extra = ({"window": (3, 7)}, {"window": (70, 2), "is_causal": True}, {"segment_ids": ids, "window": 9})
    variants += [features.Variant("", 2, 60, 3, 16, 3, arguments) for arguments in extra]
    for variant in variants:
        assert variant.pairs == brute_force(variant), variant


@pytest.fixture
def run_features(tmp_path, monkeypatch, without_gpu):
    """run_features(*words): the exit status of a run over tiny arrays, and its results."""
    monkeypatch.setattr(features, "prepare_process", lambda: None)

    def run(*words):
        out = tmp_path / "features.json"
        common = "--shape 1,32,2,16 --implementation xla --timer host --rounds 2 --seconds 0.001"
        status = features.main([*common.split(), "--output", str(out), *words])
        return status, json.loads(out.read_text())

    return run


@pytest.mark.slow
def test_features(run_features):
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


@pytest.mark.parametrize("mode", tiers.cases(features.MODES, {"fwd"}))
def test_feature_score_mods(mode, monkeypatch):
    """Compared with themselves they are right. Compared with plain attention they are wrong, and are not timed."""
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
def test_nan_in_features_is_wrong(place, monkeypatch, run_features):
    """A NaN in any gradient counts."""
    honest = features.backward

    def poisoned(call, inputs, *arguments):
        found = honest(call, inputs, *arguments)
        return (
            found if call.options.softcap is None else found._replace(**{found._fields[place]: found[place] * jnp.nan})
        )

    monkeypatch.setattr(features, "backward", jax.jit(poisoned, static_argnums=0))
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


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (features, "--shape 2,64,4,16,2", "shape: got '2,64,4,16,2', want batch,seq,heads,head_dim; some"),
        (features, "--shape 2,64,1,16", "want two heads and two tokens at least"),
        (features, "--variants softcap,causal", "variants: got 'causal', want some of length"),
        (decode, "--shapes 2,1,4,16,3", "kv_heads: got 3, want a divisor of the 4 heads"),
        (decode, "--kv-length 100", "kv_length: got 100, want a multiple of 64, the length of a page"),
        (decode, "--implementations cudnn", "implementations: got 'cudnn', want some of mosaic_gpu"),
        (versions, "--base nowhere --table --seq 8", "seq: got 8 with --table"),
        (versions, "--base nowhere", "base: got nowhere, want a folder with jax_kernels_base in it, as --export"),
        (accuracy, "--implementations xla", "implementations: got 'xla', want cudnn among them"),
        (accuracy, "--lengths 32,0", "got '32,0', want positive integers"),
        (matmul_accuracy, "--shapes 3,4", "shapes: got [3, 4], want M,N,K"),
        (matmul_accuracy, "--kinds int8", "kinds: got 'int8', want some of bfloat16"),
        (long_sequence, "--segments 16,32 --rates 1", "segments, rates: got (16, 32) and (1,), want equally many"),
        (long_sequence, "--rates 1", "segments, rates: got None and (1,)"),
    ],
)
def test_wrong_arguments_are_named(script, words, message, monkeypatch, capsys):
    monkeypatch.setattr(features, "prepare_process", lambda: None)
    with pytest.raises(SystemExit):
        script.main(words.split())
    assert message in capsys.readouterr().err


@pytest.fixture
def run_decode(tmp_path, monkeypatch, without_gpu):
    """run_decode(): the exit status of a run over tiny arrays, and its rows by contender."""
    monkeypatch.setattr(decode, "prepare_process", lambda: None)
    monkeypatch.setattr(decode, "PAGE", 16)

    def run():
        out = tmp_path / "decode.json"
        words = "--shapes 2,3,4,16,2 --kv-length 32 --implementations xla --timer host --rounds 2 --seconds 0.001"
        status = decode.main([*words.split(), "--output", str(out)])
        return status, {row["contender"]: row for row in json.loads(out.read_text())["rows"]}

    return run


def test_decode_runs(run_decode):
    status, rows = run_decode()
    assert (status, list(rows)) == (0, ["copy", "xla", "xla paged", "cudnn"])
    assert (rows["cudnn"]["status"], rows["copy"]["of_copy"]) == ("unavailable", 1)
    assert 1e-4 < rows["xla"]["error"] < 1e-2
    assert rows["xla paged"]["error"] == pytest.approx(rows["xla"]["error"])
    size = 2 * 2 * 32 * 2 * 16 * 2  # keys and values in bfloat16
    for name, moved in (("copy", 2 * size), ("xla", size), ("xla paged", size)):
        assert rows[name]["terabytes_per_second"] == pytest.approx(moved / np.median(rows[name]["times_ms"]) / 1e9)


def test_wrong_and_failed_decode_is_reported(run_decode, monkeypatch):
    honest = decode.decode_attention

    def broken(*arrays, block_tables=None, **options):
        if block_tables is not None:
            raise RuntimeError("no such page")
        return honest(*arrays, **options) * jnp.nan

    monkeypatch.setattr(decode, "decode_attention", broken)
    status, rows = run_decode()
    assert (status, rows["xla"]["status"], rows["xla"]["error"]) == (1, "wrong", None)
    assert (rows["xla paged"]["status"], rows["xla paged"]["reason"]) == ("failed", "RuntimeError: no such page")
    assert (rows["copy"]["status"], rows["xla"]["times_ms"]) == ("ok", [])


@pytest.fixture
def run_accuracy(tmp_path, monkeypatch, without_gpu):
    """run_accuracy(kind, errors): the exit status and the rows. errors(is_causal, name) replaces accuracy's."""

    def run(kind, errors):
        monkeypatch.setattr(accuracy, "KINDS", (kind,))
        monkeypatch.setattr(accuracy, "errors", errors)
        out = tmp_path / "accuracy.json"
        words = "--lengths 32 --head-dims 16 --implementations xla,cudnn --output"
        try:
            status = accuracy.main([*words.split(), str(out)])
        finally:
            jax.config.update("jax_enable_x64", False)
        return status, json.loads(out.read_text())["rows"]

    return run


def test_accuracy_runs(run_accuracy):
    """Errors of bfloat16, and a ratio of one if both implementations are the same."""
    errors = accuracy.errors
    status, rows = run_accuracy("peaked", lambda is_causal, name: errors(is_causal, "xla"))
    assert (status, [row["causal"] for row in rows]) == (0, [False, True])
    for row in rows:
        assert row["errors"]["xla"] == row["errors"]["cudnn"]
        assert set(row["errors"]["xla"]) == set(accuracy.RESULTS)
        assert all(1e-4 < error < 1e-2 for error in row["errors"]["xla"].values())


@pytest.mark.parametrize(
    ("kind", "error", "exit_status", "status"),
    [
        ("normal", 0.03, 1, "wrong"),
        ("peaked", 0.03, 0, "ok"),
        ("peaked", np.nan, 1, "wrong"),
        ("normal", None, 1, "failed"),
    ],
)
def test_wrong_and_failed_accuracy_is_reported(kind, error, exit_status, status, run_accuracy, monkeypatch):
    def of_cudnn(*_):
        if error is None:
            raise RuntimeError("no plan")
        return dict.fromkeys(accuracy.RESULTS, 1e-3) | {"dk": error}

    of_xla = lambda *_: dict.fromkeys(accuracy.RESULTS, 1e-3)
    monkeypatch.setattr(accuracy, "right", lambda is_causal: lambda *_: None)
    found, rows = run_accuracy(kind, lambda is_causal, name: of_xla if name == "xla" else of_cudnn)
    assert (found, len(rows)) == (exit_status, 2)
    for row in rows:
        assert [row["contenders"][name]["status"] for name in ("xla", "cudnn")] == ["ok", status]


@pytest.mark.parametrize("segments", [None, (16, 64)])
def test_long_sequence_measures(segments):
    args = {"heads": 2, "head_dim": 8, "segments": segments, "rates": segments and (1, 2), "repeats": 2}
    row = long_sequence.measure(32, types.SimpleNamespace(**args, implementation="xla"))
    assert (len(row["seconds"]), row["status"]) == (2, "ok")
    # Two segments of 16, and a segment of every second token.
    pairs = 32**2 if segments is None else 2 * 16**2 + 16**2
    assert row["tflops"] * min(row["seconds"]) == pytest.approx(3.5 * 4 * pairs * 2 * 8 / 2 / 1e12)


def test_nan_in_long_sequence_is_wrong(monkeypatch):
    attend = long_sequence.flash_attention
    monkeypatch.setattr(long_sequence, "flash_attention", lambda *qkv, **options: attend(*qkv, **options) * jnp.nan)
    args = {"heads": 1, "head_dim": 8, "segments": None, "repeats": 1, "implementation": "xla"}
    assert long_sequence.measure(16, types.SimpleNamespace(**args))["status"] == "wrong"


def test_failing_length_ends_no_other(tmp_path, monkeypatch, capsys):
    def process(command, **_):
        length = int(command[-1])
        row = {"length": length, "status": "ok", "seconds": [0.5], "tflops": 1.0, "peak_bytes": None}
        if length == 64:
            return types.SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nMemoryError: out of memory\n")
        return types.SimpleNamespace(returncode=0, stdout=f"noise\n{json.dumps(row)}\n", stderr="")

    monkeypatch.setattr(long_sequence.subprocess, "run", process)
    monkeypatch.setattr(long_sequence.report, "environment", lambda commit: {"commit": commit})
    out = tmp_path / "long.json"
    assert long_sequence.main(["--lengths", "32,64,128", "--commit", "abc", "--output", str(out)]) == 1
    results = json.loads(out.read_text())
    assert [(row["length"], row["status"]) for row in results["rows"]] == [(32, "ok"), (64, "failed"), (128, "ok")]
    assert (results["rows"][1]["reason"], results["environment"]) == ("MemoryError: out of memory", {"commit": "abc"})
    assert "64: failed: MemoryError: out of memory" in capsys.readouterr().out
    assert long_sequence.main(["--lengths", "32"]) == 0


@pytest.mark.parametrize("case", versions.TABLE, ids=lambda case: case.label)
def test_versions_of_the_table_have_its_inputs(case, monkeypatch):
    """The shapes, the factor of the queries, and enough sets for an L2 cache of 60 MB."""
    of = versions.of_table(case)
    query, key, value, dout = of.shapes()
    assert query == (case.batch, case.q_length, case.heads, case.head_dim)
    assert key == (case.batch, case.kv_length, case.kv_heads, case.head_dim)
    assert (value, dout) == ((*key[:3], case.v_head_dim), (*query[:3], case.v_head_dim))
    assert of.sets * 2 * sum(map(math.prod, of.shapes())) >= 60e6
    small = dataclasses.replace(of, batch=1, seq=8, kv_length=8, heads=2, kv_heads=1)
    plain = dataclasses.replace(small, query_scale=1.0)
    np.testing.assert_array_equal(small.inputs()[0], plain.inputs()[0] * case.query_scale)


@pytest.mark.slow
def test_versions_side_by_side(tmp_path, monkeypatch):
    # The "earlier version" is this version under another name: first with the same results, then broken on purpose.
    for folder in versions.FOLDERS:
        place = tmp_path / versions.BASE / ("" if folder == "jax_kernels" else folder)
        for source in (versions.report.ROOT / folder).rglob("*.py"):
            target = place / source.relative_to(versions.report.ROOT / folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text().replace("jax_kernels", versions.BASE))
    monkeypatch.setattr(versions, "prepare_process", lambda: None)
    monkeypatch.setattr("sys.path", list(sys.path))
    output = tmp_path / "versions.json"
    arguments = ["--base", str(tmp_path), "--timer", "host", "--seq", "32", "--rounds", "1", "--seconds", "0.001"]
    arguments += ["--cases", "bias bs,causal triton", "--output", str(output)]
    assert versions.main(arguments) == 0
    rows = {(row["case"], row["mode"]): row for row in json.loads(output.read_text())["rows"]}
    for mode in versions.MODES:
        assert rows["bias bs", mode]["ours"]["error"] == 0
        assert rows["bias bs", mode]["ratio"] > 0
        assert rows["causal triton", mode]["ours"]["status"] == "unavailable"
    short = TableCase("4 queries", 1, 4, 2, 16, kv_length=12, kv_heads=1, v_head_dim=8, is_causal=True)
    packed = TableCase("documents", 1, 16, 1, 16, documents=(0.5, 0.5), query_scale=2.0)
    monkeypatch.setattr(versions, "TABLE", (short, packed))
    with_table = ["--base", str(tmp_path), "--timer", "host", "--rounds", "1", "--seconds", "0.001", "--table"]
    assert versions.main([*with_table, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["case"], row["mode"]) for row in rows] == [
        (case.label, mode) for mode in versions.MODES for case in (short, packed)
    ]
    assert all(row["ours"]["error"] == 0 and row["ratio"] > 0 for row in rows)
    base = sys.modules[versions.BASE]
    right = base.flash_attention
    monkeypatch.setattr(base, "flash_attention", lambda *args, **kwargs: 2 * right(*args, **kwargs))
    assert versions.main(arguments) == 1
    rows = json.loads(output.read_text())["rows"]
    assert [row["ours"]["status"] for row in rows if row["case"] == "bias bs"] == ["wrong", "wrong"]


def test_slow_host_periods_are_excluded(monkeypatch):
    bridge = importlib.import_module("bridge")  # the script
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timed = bridge.Timed("sdpa", "no grad", lambda: None)
    timed.turn(3, 20, 60.0)
    assert len(timed.times) == len(timed.paces) == 3
    timed.times, timed.paces = [1e-6, 9e-6, 2e-6, 8e-6], [1.0, 1.3, 1.1, 2.0]
    row = timed.row(least=1.0)
    assert (row["host_us"], row["all_us"], row["quiet"]) == pytest.approx((1.5, 5.0, 0.5))
    timed = bridge.Timed("sdpa", "no grad", lambda: 1 / 0)
    for _ in range(2):
        timed.turn(3, 20, 60.0)
    assert timed.row(least=1.0)["reason"] == "ZeroDivisionError: division by zero"


@pytest.mark.slow
def test_flash_attention_4_route(monkeypatch):
    """An installed package is a route. A missing package is a route that says so."""
    bridge = importlib.import_module("bridge")  # the script

    assert bridge.missing("sdpa") is None
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: own(name) if name == "torch" else None)
    assert bridge.missing("fa4") == "the Python module flash_attn is not installed"
    package, cute = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = lambda query, key, value: (query + key + value, "lse")
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    assert bridge.attention_of("fa4")(1, 2, 3) == 6


@pytest.mark.slow
def test_huggingface_runs(tmp_path, run_script):
    pytest.importorskip("transformers", minversion="5.0")
    out = tmp_path / "huggingface.json"
    tiny = "--shapes tiny --device cpu --length 16 --steps 2 --rounds 1 --seconds 0.001"
    done = run_script("huggingface.py", *tiny.split(), "--output", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    ok = [(row["mode"], row["contender"]) for row in rows if row["status"] == "ok"]
    train, decode = ("jax_kernels", "sdpa"), ("jax_kernels", "jax_kernels-growing", "sdpa")
    assert ok == [("train", name) for name in train] + [("decode", name) for name in decode]
    assert all(row["median_ms"] > 0 and row["ratios"]["sdpa"] > 0 for row in rows if row["status"] == "ok")
    assert all(row["error"] < 0.02 for row in rows if row["mode"] == "decode" and row["status"] == "ok")
    assert {row["status"] for row in rows if row["contender"] == "sdpa-cudnn"} == {"unavailable"}


@pytest.fixture
def run_matmul_accuracy(tmp_path, without_gpu):
    """run_matmul_accuracy(*words): the exit status and the rows."""

    def run(*words):
        out = tmp_path / "accuracy.json"
        status = matmul_accuracy.main(["--implementations", "xla", "--output", str(out), *words])
        return status, json.loads(out.read_text())["rows"]

    return run


def test_matmul_accuracy_runs(run_matmul_accuracy):
    """Errors of each kind's size; the first implementation's over PyTorch's."""
    status, rows = run_matmul_accuracy("--shapes", "32,64,128", "--kinds", "bfloat16,float32,fp8")
    assert (status, [row["kind"] for row in rows]) == (0, ["bfloat16", "float32", "fp8"])
    sizes = {"bfloat16": (1e-4, 1e-2), "float32": (1e-8, 1e-6), "fp8": (0, 1e-6)}
    for row in rows:
        low, high = sizes[row["kind"]]
        results = ["out"] if row["kind"] == "fp8" else ["out", "dx", "dw"]
        for found in row["errors"].values():
            assert list(found) == results
            assert all(low <= error <= high for error in found.values())
        assert all(ratio < 1.05 for ratio in row["first_over_torch"].values())


def test_matmul_with_a_large_error_is_reported(run_matmul_accuracy, monkeypatch):
    honest = matmul_accuracy.ours
    monkeypatch.setattr(matmul_accuracy, "ours", lambda *which: lambda x, w: honest(*which)(x, w) * 1.01)
    status, (row,) = run_matmul_accuracy("--shapes", "32,64,128", "--kinds", "bfloat16")
    assert (status, row["contenders"]["xla"]["status"]) == (1, "wrong")
    assert row["contenders"]["torch"]["status"] == "ok"
