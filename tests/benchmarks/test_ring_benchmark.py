"""benchmarks/ring.py on CPU devices, and the processes of its cases."""

import dataclasses
import json
import re
import sys
import time
import types
from pathlib import Path

import pytest
import ring
from harness import ring_cases, ring_model, workers

from tests.support.processes import forked

ROOT = Path(__file__).parents[2]
WORDS = "--local-tokens 16 --heads 2 --head-dim 8 --rounds 2 --seconds 0.001 --implementation xla"


@pytest.mark.slow
def test_runs_on_two_devices(tmp_path, run_script, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=2 {forked.QUICK_COMPILES}")
    output = tmp_path / "ring.json"
    words = f"--devices 1,2,4 --tokens 32 --processes 2 --long 64 {WORDS} --output {output}"
    done = run_script("ring.py", *words.split())
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads(output.read_text())
    rows = {(x["devices"], x["tokens"], x["causal"], x["mode"], x["contender"]): x for x in results["rows"]}
    assert {key for key, row in rows.items() if row["status"] == "unavailable"} == {k for k in rows if k[0] == 4}
    for mode, products in (("fwd", 2), ("fwdbwd", 7)):
        row = rows[2, 32, True, mode, "ring"]
        assert row["error"] < 1e-2
        # Two FLOPs for each multiply-add, half of the pairs, two devices.
        assert row["tflops"] * row["median_ms"] == pytest.approx(products * 2 * 32 * 32 * 2 * 8 / 2 / 2 / 1e9)
        assert {rows[2, 32, True, mode, part]["status"] for part in ring.PARTS} == {"ok"}
    assert 64 not in {
        key[1] for key, row in rows.items() if row["status"] == "ok"
    }  # the largest mesh's length: this mesh is unavailable
    assert rows[2, 32, True, "fwd", "ring"]["gigabytes"] > 0
    assert {row["link"] for row in results["expected"]} == {"NVLink", "400 Gb/s"}
    (scale,) = (x for x in results["scaling"] if x["causal"] and x["mode"] == "fwd")
    alone = rows[1, 16, True, "fwd", "ring"]["tflops"]
    assert scale["weak"] == pytest.approx(rows[2, 32, True, "fwd", "ring"]["tflops"] / alone)
    assert results["environment"]["platform"] == "cpu"


def test_sent_bytes_match_the_op():
    """The forward sends keys and values as one array. The backward sends them again, and their gradients in float32."""
    import jax

    abstract = jax.sharding.AbstractMesh((4,), ("sequence",), (jax.sharding.AxisType.Auto,))
    case = ring.cases(ring.arguments(["--devices", "4", "--tokens", "64", "--implementation", "xla"]))[0]
    given = [jax.ShapeDtypeStruct((1, 64, 16, 128), "bfloat16")] * 4
    found = {}
    for mode, count in (("fwd", 3), ("fwdbwd", 4)):
        attend = lambda *qkv: ring_cases.ring_attention(
            *qkv, axis_name="sequence", strategy="ring", is_causal=True, implementation="xla"
        )
        body = ring_cases._in_mode(attend, mode)
        shared = jax.shard_map(body, mesh=abstract, in_specs=ring_cases.TOKENS, out_specs=ring_cases.TOKENS)
        found[mode] = ring_cases._permutes(jax.make_jaxpr(shared)(*given[:count]).jaxpr)
    assert case.label == "4 x 16 tokens, 16x128, causal"
    assert [dtype for _, dtype, _ in found["fwd"]] == ["bfloat16"] * 3
    assert sorted(dtype for _, dtype, _ in found["fwdbwd"]) == ["bfloat16"] * 6 + ["float32"] * 3
    assert {shape for shape, *_ in found["fwdbwd"]} == {(2, 1, 16, 16, 128)}


def test_window_and_sends_ahead(capsys):
    """On one device in this process: the results are right, and a window has no TFLOP/s."""
    words = f"--devices 1 --tokens 32 --window 5 --sends-ahead 2 {WORDS}".split()
    (case, full) = ring.cases(ring.arguments(words))
    assert (case.window, full.window, case.sends_ahead) == (5, 0, 2)
    rows = ring_cases.measure(dataclasses.replace(case, check=True))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert {(row["window"], row["sends_ahead"], "tflops" in row) for row in rows} == {(5, 2, False)}
    assert max(row["error"] for row in rows) < 1e-2
    assert ring_model.expected(rows) == []


def test_layout_and_mask(capsys):
    """On one device in this process: the results equal the same mask's on one device."""
    words = f"--devices 1 --tokens 256 --window 5 --layout contiguous --masked {WORDS}".split()
    (case, full) = ring.cases(ring.arguments(words))
    assert case.limits.keys() == {"mask"}
    assert full.limits == {"is_causal": False, "window": None}
    rows = ring_cases.measure(dataclasses.replace(case, check=True))
    assert {(row["status"], row["layout"], row["is_masked"], "tflops" in row) for row in rows} == {
        ("ok", "contiguous", True, False)
    }
    assert max(row["error"] for row in rows) < 1e-2


def test_profile(monkeypatch):
    """Additional calls of programs that are compiled already. Each row has CUPTI's figures."""
    asked = []

    def profile(work, calls):
        asked.append(calls)
        work()
        return {"kernels": [], "span": 2.0}

    monkeypatch.setattr(ring_cases, "_device_activity", lambda: types.SimpleNamespace(profile=profile))
    (case, _) = ring.cases(ring.arguments(f"--devices 1 --tokens 32 --profile {WORDS}".split()))
    rows = ring_cases.measure(case)
    assert asked == [10, 10]
    assert [row["profile_ms"] for row in rows] == [{"kernels": [], "span": 2.0}] * 2
    assert ring_cases.measure(dataclasses.replace(case, has_profile=False))[0]["profile_ms"] is None


def test_cases():
    """One GPU gets the tokens of each GPU of a larger mesh, and also all of the mesh's tokens."""
    args = ring.arguments(["--devices", "1,2", "--tokens", "16384,65536", "--local-tokens", "4096"])
    found = [(case.devices, case.tokens, case.causal, case.modes, case.check) for case in ring.cases(args)]
    modes = ("fwd", "fwdbwd")
    causal = [(2, 16384, True, modes, True), (2, 65536, True, modes, False)]
    alone = [(1, tokens, True, modes, False) for tokens in (8192, 16384, 32768, 65536)]
    assert found == [*causal, (2, 8192, False, ("fwd",), True), *alone, (1, 4096, False, ("fwd",), False)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 1028", "tokens: got 1028 for 4 devices, want a multiple of 8"),
        ("--window -3", "window: got -3, want 0 or more"),
        ("--devices 0", "got '0', want positive integers"),
        ("--mode bwd", "mode: got 'bwd', want some of fwd, fwdbwd"),
    ],
)
def test_wrong_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit):
        ring.main(words.split())
    assert message in capsys.readouterr().err


WORKER = """
import json, sys, time
print("noise", flush=True)
for line in sys.stdin:
    case = json.loads(line)
    if case == "hang":
        print("came so far", file=sys.stderr, flush=True)
        time.sleep(60)
    if case == "die":
        raise SystemExit("no such device")
    print("ANSWER " + json.dumps([case]), flush=True)
"""


@pytest.mark.slow
def test_hanging_and_crashing_cases_are_isolated(capfd):
    command = [sys.executable, "-c", WORKER]
    cases = ["a", "hang", "b", "die", "c"]
    start = time.monotonic()
    found = list(workers.run_cases(command, cases, limit=3, deadline=start + 60, environment={}))
    assert time.monotonic() - start < 30
    assert [(case, answer) for case, answer, _ in found] == [
        *(("a", ["a"]), ("hang", None), ("b", ["b"]), ("die", None), ("c", ["c"]))
    ]
    assert [reason for *_, reason in found] == ["", "no answer within 3 s", "", "exit status 1: no such device", ""]
    said = capfd.readouterr()
    assert "noise" in said.out
    assert said.err.splitlines() == ["came so far", "no such device"]


def test_budget_is_kept():
    late = list(workers.run_cases(["nowhere"], ["a"], limit=1, deadline=time.monotonic() - 1, environment={}))
    assert late == [("a", None, "the time budget was spent before it began")]
    case = ring.cases(ring.arguments(["--devices", "2", "--local-tokens="]))[0]
    rows = ring.failed(case, ring.PARTS, late[0][2])
    assert {row["status"] for row in rows} == {"skipped"}
    assert len(rows) == 6
    assert "skipped" in [ring._cell(row) for row in rows]


def test_expected_efficiency():
    """Sends that are shorter than a step cost nothing. Longer sends delay all steps except one."""
    assert ring_model.efficiency(8, 2.0, 1.5) == 1
    assert ring_model.efficiency(4, 2.0, 3.0) == pytest.approx(8 / 11)
    assert ring_model.bytes_of_step(8192, 16, 128, backward=False) == 2 * 8192 * 16 * 128 * 2
    fields = {"devices": 2, "causal": True, "local_tokens": 8192, "heads": 16, "head_dim": 128}
    fields |= {"strategy": "ring"}
    rows = [fields | {"mode": "fwd", "contender": "ring", "median_ms": 1.0}]
    rows += [fields | {"mode": "fwdbwd", "contender": "ring", "median_ms": 4.0}]
    rows += [fields | {"mode": "fwd", "contender": "communication", "median_ms": 0.25}]
    assert ring_model.expected([row | {"strategy": "all_gather"} for row in rows]) == []
    found = {(row["direction"], row["link"]): row for row in ring_model.expected(rows)}
    assert found["forward", "NVLink"]["8"] == 1
    assert found["backward", "NVLink"]["send_ms"] == pytest.approx(0.75)
    size = 2 * 8192 * 16 * 128 * 2
    assert found["forward", "400 Gb/s"]["send_ms"] == pytest.approx(size / 50e6)
    assert found["forward", "400 Gb/s"]["8"] == pytest.approx(4 / (4 + 7 * (size / 50e6 - 0.5)))


def test_docs_table_follows_from_the_results():
    """Each row of the table of more devices in docs/guides/ring_attention.md follows by its formula from its run."""
    rows = json.loads((ROOT / "benchmarks/results/ring-h200-x2.json").read_text())["rows"]
    found = {(x["local_tokens"], x["direction"], x["link"]): x for x in ring_model.expected(rows)}
    text = (ROOT / "docs/guides/ring_attention.md").read_text()
    table = re.findall(
        r"^\| ([\d,]+) \| (forward|backward) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE
    )
    assert len(table) == 4
    for tokens, direction, step, sends, *shares in table:
        of_links = [found[int(tokens.replace(",", "")), direction, link] for link in ("NVLink", "400 Gb/s")]
        assert f"{of_links[0]['step_ms']:.2f}" == step
        assert ", ".join(f"{x['send_ms']:.2f}" for x in of_links) == sends
        for told, x in zip(shares, of_links, strict=True):
            assert ", ".join(f"{100 * x[n]:.0f}" for n in ("8", "64", "512")) + " %" == told


def test_documents_in_their_layout():
    """On one device in this process: documents leave 40 % of the pairs, and the results are right."""
    words = f"--devices 1 --tokens 32 --documents 0.5,0.3,0.2 --layout documents --mode fwd {WORDS}".split()
    (case, full) = ring.cases(ring.arguments(words))
    assert full.ids is None
    assert case.live == pytest.approx((16 * 17 + 10 * 11 + 6 * 7) / (32 * 33))
    (row,) = ring_cases.measure(dataclasses.replace(case, check=True))
    assert (row["status"], row["documents"]) == ("ok", (0.5, 0.3, 0.2)), row["reason"]
    assert row["error"] < 1e-2
    assert row["tflops"] * row["median_ms"] == pytest.approx(case.live * 2 * 2 * 32 * 32 * 2 * 8 / 2 / 1e9)
