"""benchmarks/attention_table.py on small cases, without a GPU."""

import dataclasses
import json

import attention_table
import numpy as np
import pytest
from harness import cases, table_cases
from harness.table_cases import CASES, TableCase

SMALL = (
    TableCase("causal", 2, 48, 4, 16, kv_heads=2, is_causal=True),
    TableCase("offset", 1, 16, 2, 16, kv_length=40, is_causal=True),
    TableCase("uneven", 2, 21, 2, 16, kv_length=30, v_head_dim=8),
    TableCase("window", 1, 40, 2, 16, window=(5, 7)),
    TableCase("documents", 2, 40, 2, 16, is_causal=True, documents=(0.3, 0.1, 0.6)),
)


def test_cases():
    assert len(CASES) == len({case.label for case in CASES}) == 24
    assert {case.label for case in CASES if case.is_causal} == {x.label for x in CASES if "causal" in x.label}
    documents = next(case for case in CASES if case.label == "8 documents causal")
    assert np.diff(documents.starts).tolist() == [163, 410, 2458, 655, 1638, 328, 1311, 1229]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
def test_pairs(case):
    """The pairs are counted one by one, and the FLOPs are 2 (D + Dv) and 2 (3 D + 2 Dv) for each."""
    query, key = np.arange(case.q_length)[:, None] + case.q_offset, np.arange(case.kv_length)
    kept = np.ones((case.q_length, case.kv_length), bool)
    if case.is_causal:
        kept &= key <= query
    if case.window:
        kept &= (key >= query - case.window[0]) & (key <= query + case.window[1])
    if case.documents:
        document = np.repeat([0, 1, 2], [12, 4, 24])
        kept &= document[:, None] == document
    assert case.pairs == kept.sum() * case.batch * case.heads
    assert case.flops("bwd") - case.flops("fwd") == 2 * case.pairs * (2 * case.head_dim + case.v_head_dim)


@pytest.fixture(autouse=True)
def one_set(monkeypatch):
    monkeypatch.setattr(cases, "ROTATION_BYTES", 0)


@pytest.mark.parametrize(("case", "mode"), [(SMALL[0], "fwd"), (SMALL[-1], "bwd")], ids=["causal", "documents"])
def test_results(case, mode):
    sets = table_cases.input_sets(case)
    found = table_cases.build("ours", case, mode, sets, table_cases.oracle(case, sets[0]))
    assert found.status == "ok", found.reason
    wrong = table_cases.oracle(dataclasses.replace(case, is_causal=False, window=(1, 1)), sets[0])
    assert table_cases.build("ours", case, mode, sets, wrong).status == "wrong"


def test_peers_are_absent():
    sets = table_cases.input_sets(SMALL[0])
    for name in table_cases.PEERS:
        assert table_cases.build(name, SMALL[0], "fwd", sets, {}).status == "unavailable"


def test_summary(tmp_path, capsys):
    rows = [
        {"name": f"{case.label} fwd", "mode": "fwd", "ratio": ratio, "best_peer": "fa4"}
        | {"contenders": {"ours": {"tflops": 600 * ratio}, "fa4": {"tflops": 600.0}}}
        for case, ratio in zip(CASES[:2], (0.8, 1.25), strict=True)
    ]
    found = attention_table.summary(rows)
    assert found == {"fwd": {"geometric_mean": pytest.approx(1.0), "worst": 0.8, "rows": 2}}
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"rows": rows}))
    assert attention_table.main(["--summary", str(file)]) == 0
    printed = capsys.readouterr()
    assert "fa4 600" in printed.out
    assert "worst 0.800" in printed.out + printed.err


def test_arguments(capsys):
    with pytest.raises(SystemExit):
        attention_table.main(["--cases", "128 full; 129 full"])
    assert "129 full" in capsys.readouterr().err
