"""The benchmark of dilated attention, run without a GPU."""

import functools
import json
import sys
import types

import dilated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import gathers
from harness.cases import Case, as_numpy, input_sets
from harness.gathers import Pattern

from jax_kernels import dilated_attention
from tests.support.cases import tiers

PATTERNS = {
    "all": (Pattern((8, 16, 32), (1, 2, 4)), False),
    "rates that divide nothing": (Pattern((8, 16, 40), (1, 3, 12)), True),
    "hilbert": (Pattern((8, 16, 32), (1, 2, 4), order="hilbert"), False),
    "hilbert where rates divide nothing": (Pattern((8, 16, 32), (1, 3, 5), order="hilbert"), True),
    "groups": (Pattern((8, 16, 32), (1, 3, 4), heads="groups"), True),
    "partition": (Pattern((8, 12, 6), (4, 3, 2), layout="partition", order="hilbert"), False),
    "partition past the end": (Pattern((8, 16, 16), (3, 5, 9), layout="partition"), True),
}


@pytest.mark.slow
def test_runs_and_writes(tmp_path, run_script):
    out = tmp_path / "dilated.json"
    words = [
        "--shapes",
        "1,64,4,16,2",
        "--segments",
        "16,32",
        "--rates",
        "1,2",
        "--timer",
        "host",
        "--output",
        str(out),
    ]
    done = run_script("dilated.py", *words, "--mode", "fwd", "--rounds", "2", "--seconds", "0.01")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == set(dilated.CONTENDERS) - {"plain"}
    absent = ("gather-cudnn", "torch-gather", "dilated-attention-pytorch")
    assert {rows.pop(name)["status"] for name in absent} == {"unavailable"}
    assert 0 < rows["ours"]["error"] < 0.01
    assert all(len(row["times_ms"]) == 2 for row in rows.values())
    assert rows["ours"]["ours_is_faster_by"] == 1
    # Two branches with 16 tokens in a segment, and 4 and 2 segments. Dense attention has 64 tokens.
    work = {name: row["tflops"] * row["median_ms"] for name, row in rows.items() if name != "copy"}
    assert work["ours"] == pytest.approx(work["gather"])
    share = (4 + 2) * 16**2 / 64**2
    assert work["ours"] / work["dense"] == pytest.approx(share)
    # Query and out have four heads of 16 values for each of 64 tokens, key and value have two.
    milliseconds = 2 * 64 * 16 * (4 + 4 + 2 + 2) / (1e9 * rows["copy"]["terabytes_per_second"])
    ideal = share * rows["dense"]["median_ms"] + milliseconds
    assert rows["ours"]["ideal_ms"] == pytest.approx(ideal)
    assert rows["ours"]["over_ideal"] == pytest.approx(rows["ours"]["median_ms"] / ideal)
    assert f"of the ideal {ideal:.4f} ms" in done.stdout
    assert not any("ideal_ms" in row for name, row in rows.items() if name != "ours")


def results_of(pattern, is_causal, function):
    """(out, dq, dk, dv), inputs."""
    inputs = [jax.random.normal(jax.random.key(i), (2, 32, heads, 8)) for i, heads in enumerate((4, 2, 2, 4))]
    attend = functools.partial(function, is_causal=is_causal, implementation="xla")
    out, vjp = jax.vjp(jax.jit(attend), *inputs[:3])
    return (out, *vjp(inputs[3])), inputs


@pytest.mark.parametrize("name", tiers.cases(PATTERNS, set(list(PATTERNS)[:1])))
def test_gathers_and_scatters_match_dilated_attention(name):
    pattern, is_causal = PATTERNS[name]
    want, inputs = results_of(*PATTERNS[name], functools.partial(dilated_attention, **pattern.arguments))
    got, _ = results_of(*PATTERNS[name], functools.partial(gathers.gathered, pattern=pattern))
    for g, w in zip(got, want, strict=True):
        assert float(jnp.abs(g - w).max()) < 1e-5

    torch = pytest.importorskip("torch")

    def attend(query, key, value):
        scores = torch.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
        if is_causal:
            scores = scores + torch.full(scores.shape[2:], -torch.inf).triu(1)
        return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), value), scores.logsumexp(-1)

    case = Case(2, 32, 4, 8, 2, "bf16", is_causal, "fwdbwd")
    places = gathers.places_in_torch(pattern, case, "cpu")
    query, key, value, dout = (torch.from_numpy(np.array(x)) for x in inputs)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = gathers.gathered_in_torch(*leaves, pattern=pattern, places=places, attend=attend)
    for g, w in zip((out, *torch.autograd.grad(out, leaves, dout)), want, strict=True):
        assert np.abs(as_numpy(g) - w).max() < 1e-5


def test_gathers_reject_unsupported_patterns():
    for pattern, is_causal, message in (
        (Pattern((8, 16), (1, 3)), False, "if not causal its rates must divide its segments"),
        (Pattern((8, 12), (1, 3)), True, "its segments must divide 32"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            results_of(pattern, is_causal, functools.partial(gathers.gathered, pattern=pattern))


@pytest.mark.parametrize("name", PATTERNS)
def test_flops_count_pairs(name):
    pattern, is_causal = PATTERNS[name]
    case = Case(3, 32, 4, 8, 2, "bf16", False, "fwd")
    # Missing rows of a segment count here.
    pairs = sum(places.size * places.shape[1] for places, _ in pattern.places(32, 4, True))
    exact = case.flops * pairs / (4 * 32 * 32)
    assert pattern.flops(case) == pytest.approx(exact, rel=1e-9 if not is_causal else 0.35)


@pytest.mark.slow
def test_torch_variants(monkeypatch, without_gpu):
    """The two variants, uncompiled."""
    torch = pytest.importorskip("torch")
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: (compiled.append(options), function)[1])
    for pattern, is_causal in (Pattern((8, 32), (1, 4)), True), (Pattern((8, 32), (1, 4), heads="groups"), False):
        case = Case(2, 32, 4, 16, 2, "bf16", is_causal, "fwd")
        sets = input_sets(case)[:2]
        built = gathers.in_torch(pattern, case, sets)
        assert built.plan.startswith("index_select, flex_attention and index_copy for each branch, ")
        (got,) = built.call(1)
        want = dilated_attention(*sets[1].qkv, is_causal=is_causal, implementation="xla", **pattern.arguments)
        assert np.linalg.norm(as_numpy(got) - as_numpy(want)) < 0.01 * np.linalg.norm(as_numpy(want))
    assert compiled.count({"dynamic": False}) == 4  # flex_attention compiles the others


def test_dilated_attention_package(monkeypatch, without_gpu):
    pytest.importorskip("torch")

    class DilatedAttention:
        def __init__(self, segment_lengths, dilation_rates):
            assert (segment_lengths, dilation_rates) == ([8, 32], [1, 4])

        def __call__(self, query, key, value, is_causal):
            assert is_causal
            return query + key + value

    case = Case(2, 32, 4, 16, 4, "bf16", True, "fwd")
    sets = input_sets(case)[:1]
    package, module = "dilated_attention_pytorch", "dilated_attention_pytorch.dilated_attention"
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(DilatedAttention=DilatedAttention))
    groups = Pattern((8, 32), (1, 4), heads="groups")
    built = gathers.by_package(groups, case, sets)
    assert "divided by their sums" in built.plan
    want = as_numpy(sum(x.astype(jnp.float32) for x in sets[0].qkv))
    assert np.abs(as_numpy(built.call(0)[0]) - want).max() < 0.1
    for pattern, of, message in (
        (Pattern((8, 32), (1, 4)), case, "it has only heads='groups'"),
        (groups, Case(2, 32, 4, 16, 2, "bf16", True, "fwd"), "equal numbers of key heads and query heads"),
        (groups, Case(2, 32, 3, 16, 3, "bf16", True, "fwd"), "groups of equal size"),
        (groups, Case(2, 36, 4, 16, 4, "bf16", True, "fwd"), "its segments must divide 36"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            gathers.by_package(pattern, of, sets)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotImplementedError, match="dilated_attention_pytorch cannot be imported"):
        gathers.by_package(groups, case, sets)


@pytest.mark.parametrize(
    ("words", "names", "told"),
    [
        ("--heads groups", ["gather", "ours"], ("groups", "overlap", None)),
        ("--order hilbert", ["gather", "ours", "plain"], ("all", "overlap", "hilbert")),
        ("--layout partition --full", ["gather", "ours", "plain"], ("all", "partition", None)),
    ],
)
def test_other_patterns(words, names, told, tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(dilated, "prepare_process", lambda: None)
    out = tmp_path / "dilated.json"
    words += " --shapes 1,64,4,16,2 --segments 16,32 --rates 1,2 --mode fwd --implementation xla --timer host"
    words += f" --rounds 1 --seconds 0.001 --contenders {','.join(names)} --output {out}"
    assert dilated.main(words.split()) == 0
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert sorted(rows) == names
    assert 0 <= rows["ours"]["error"] < 0.01
    assert tuple(rows["ours"][name] for name in ("heads", "layout", "order")) == told
    if "plain" in names:
        assert (rows["plain"]["layout"], rows["plain"]["order"], rows["plain"]["error"]) == ("overlap", None, None)
        assert rows["plain"]["ours_is_faster_by"] > 0


@pytest.mark.parametrize(("mode", "arrays"), [("fwd", 4), ("bwd", 8), ("fwdbwd", 12)])
def test_moved_bytes(mode, arrays):
    case = Case(2, 32, 4, 16, 4, "bf16", True, mode)
    assert dilated.moved_bytes(case) == arrays * 2 * (2 * 32 * 4 * 16)


def test_default_contenders():
    assert "plain" not in dilated.arguments([]).contenders
    assert dilated.arguments(["--order", "hilbert"]).contenders == list(dilated.CONTENDERS)


def test_rows_without_time_left_are_reported(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(dilated, "prepare_process", lambda: None)
    out = tmp_path / "dilated.json"
    words = f"--shapes 1,64,2,16;2,64,2,16 --mode fwd --timer host --budget 0.000001 --output {out}"
    assert dilated.main(words.split()) == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"][:4], row["contender"]) for row in rows] == [
        (case, name) for case in ("1x64", "2x64") for name in dilated.CONTENDERS if name != "plain"
    ]
    assert {(row["status"], row["reason"], "times_ms" in row) for row in rows} == {
        ("skipped", "the time budget was spent before it was built", False)
    }


@pytest.mark.slow
def test_nan_gradients_are_wrong(tmp_path, monkeypatch, without_gpu):
    @jax.custom_vjp
    def poisoned(x):
        return x

    poisoned.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * jnp.nan,))
    attend = dilated.dilated_attention
    of_poisoned_values = lambda *qkv, **options: attend(*qkv[:2], poisoned(qkv[2]), **options)
    monkeypatch.setattr(dilated, "dilated_attention", of_poisoned_values)
    monkeypatch.setattr(dilated, "plan_of", lambda *_: "")
    monkeypatch.setattr(dilated, "prepare_process", lambda: None)
    out = tmp_path / "dilated.json"
    words = "--shapes 1,64,2,16 --segments 16,32 --rates 1,2 --mode fwdbwd --implementation xla --timer host"
    words += f" --rounds 1 --seconds 0.001 --contenders gather,ours --output {out}"
    assert dilated.main(words.split()) == 1
    gather, ours = json.loads(out.read_text())["rows"]
    assert (gather["status"], ours["status"], ours["error"]) == ("ok", "wrong", None)
    assert ours["reason"] == "its results hold a NaN"
    assert "times_ms" not in ours


@pytest.mark.parametrize("name", ["gather", "dense"])
def test_nan_in_the_reference_is_reported(name, tmp_path, monkeypatch, without_gpu):
    honest = dilated.function_of
    poisoned = lambda *qkv: honest("dense", *arguments)(*qkv) * jnp.nan
    arguments = []

    def function_of(which, *given):
        arguments[:] = given
        return poisoned if which == name else honest(which, *given)

    monkeypatch.setattr(dilated, "function_of", function_of)
    monkeypatch.setattr(dilated, "plan_of", lambda *_: "")
    monkeypatch.setattr(dilated, "prepare_process", lambda: None)
    out = tmp_path / "dilated.json"
    words = "--shapes 1,64,2,16 --segments 16 --rates 1 --mode fwd --implementation xla --timer host"
    words += f" --rounds 1 --seconds 0.001 --contenders {name},ours --output {out}"
    assert dilated.main(words.split()) == 1
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert (rows[name]["status"], rows[name]["reason"]) == ("wrong", "its results hold a NaN")
    assert rows["ours"]["status"] == "ok"


def test_wrong_arguments_are_named(capsys):
    for words, message in (
        (["--rates", "1,2"], "segments, rates: got"),
        (["--segments", "16,x"], "got '16,x', want positive integers with commas between them"),
        (["--mode", "forward"], "mode: got 'forward', want some of fwd"),
        (["--contenders", "theirs"], "contenders: got 'theirs', want some of ours"),
        (["--contenders", "ours,plain"], "contenders: got plain, which is ours here"),
        (["--layout", "partition", "--heads", "groups"], "layout: got partition with heads groups"),
    ):
        with pytest.raises(SystemExit):
            dilated.arguments(words)
        assert message in capsys.readouterr().err
