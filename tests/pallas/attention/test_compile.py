"""Every block spec row, compiled for its GPU generation without the GPU, and compared with compile_budget.json.

`python tests/pallas/attention/test_compile.py [WORD...]` compiles the rows whose name has all the words, and writes
their figures into the budget. Each spill needs a reason, written by hand as "why" next to the figures.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cases import tiers
from tests.tools.compile_budget import GPUS, ROWS, planned
from tests.tools.compile_case import TIMEOUT, Spec, compile_spec

BUDGET = Path(__file__).with_name("compile_budget.json")
MOST_MOSAIC_SPILLS = 64  # bytes stored and loaded, with a reason, outside of the loop over blocks


def figures(report):
    """The budget's figures of each kernel. Registers are allocated in multiples of eight."""
    found = {}
    for kernel, got in sorted(report["kernels"].items()):
        found[kernel] = {
            "registers": -(-got["registers"] // 8) * 8,
            "spills": got["spill_stores"] + got["spill_loads"],
            "shared_memory": got["shared_memory"],
            "notes": sorted({note[1:6] for note in got["notes"]}),
        }
    return found


def test_budget_has_every_row():
    assert sorted(json.loads(BUDGET.read_text())) == sorted(ROWS)


def test_no_row_hides_another():
    hidden = [entry for entry, (gpu, row, spec) in ROWS.items() if planned(gpu, row, spec) is not row]
    assert not hidden, "an earlier row serves all calls that these could serve"


# A forward and a backward for each GPU: these, and the first row of every other GPU.
QUICK = {
    "a100, triton, 64, bfloat16, causal",
    "a6000, triton, 256, bfloat16",
    "h200, mosaic_gpu, 64, bfloat16, lists",
}
QUICK |= {
    next(entry for entry in ROWS if entry.startswith(f"{gpu},"))
    for gpu in GPUS.values()
    if not any(entry.startswith(f"{gpu},") for entry in QUICK)
}


@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("entry", tiers.cases(ROWS, QUICK))
def test_row(entry):
    gpu, _, spec = ROWS[entry]
    report = compile_spec(gpu, spec)
    assert report["error"] is None, report["error"]
    got = figures(report)
    budget = json.loads(BUDGET.read_text()).get(entry)
    assert budget is not None, f"not in {BUDGET.name}; ptxas says {got}"
    why = budget.pop("why", None)
    assert sorted(got) == sorted(budget)
    for kernel, found in got.items():
        if spec.implementation == "mosaic_gpu" and not kernel.endswith("_triton"):
            assert found["notes"] == [], kernel
            assert found["spills"] <= (MOST_MOSAIC_SPILLS if why else 0), kernel
        assert (budget[kernel]["spills"] == 0 and budget[kernel]["notes"] == []) or why, "spills need a reason"
        for figure in ("registers", "spills", "shared_memory"):
            assert found[figure] <= budget[kernel][figure], (kernel, figure)
        assert set(found["notes"]) <= set(budget[kernel]["notes"]), kernel


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_causal_segments_on_hopper(head_dim):
    report = compile_spec("h200", Spec("mosaic_gpu", head_dim, is_causal=True, segment_ids=True, lse=True))
    assert report["error"] is None, report["error"]
    forward, backward = (
        figures(report)[f"attention_{pass_}_sm90_mosaic_gpu_kernel"] for pass_ in ("forward", "backward")
    )
    assert forward["notes"] == backward["notes"] == []
    assert forward["spills"] == 0
    assert backward["spills"] <= 32  # four addresses; without persistent CTAs it takes 1.05 of the time at 128


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize(
    ("head_dim", "is_causal", "q_length"), [(64, False, 4001), (128, False, 4001), (128, True, 4001), (128, True, 4004)]
)
def test_odd_lengths_on_hopper(head_dim, is_causal, q_length):
    spec = Spec("mosaic_gpu", head_dim, is_causal=is_causal, q_length=q_length, kv_length=3999)
    report = compile_spec("h200", spec)
    assert report["error"] is None, report["error"]
    forward, backward = (
        figures(report)[f"attention_{pass_}_sm90_mosaic_gpu_kernel"] for pass_ in ("forward", "backward")
    )
    assert forward["notes"] == backward["notes"] == []
    assert forward["spills"] == backward["spills"] == 0


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
def test_causal_segments_of_odd_lengths_on_hopper():
    """Ids end the keys. With a limit of their length, too, the forward spills 408 bytes."""
    spec = Spec("mosaic_gpu", 128, is_causal=True, segment_ids=True, q_length=4001, kv_length=4001, backward=False)
    report = compile_spec("h200", spec)
    assert report["error"] is None, report["error"]
    found = figures(report)["attention_forward_sm90_mosaic_gpu_kernel"]
    assert found["notes"] == []
    assert found["spills"] <= 16


# Bytes that ptxas may spill and load again: a few integers of a step.
SEGMENT_SPILLS = {(64, 64): 0, (80, 80): 48, (96, 96): 56, (128, 128): 0, (160, 160): 16, (192, 128): 24, (192, 192): 0}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), SEGMENT_SPILLS)
def test_segments_of_grouped_heads_on_hopper(head_dim, v_head_dim, is_causal):
    """If a step keeps its block of queries in registers, ptxas serialises the matmuls of 96, 160, 192/128 (C7512)."""
    sizes = {"head_dim": head_dim, "v_head_dim": v_head_dim, "heads": 32, "kv_heads": 8}
    spec = Spec("mosaic_gpu", is_causal=is_causal, segment_ids=True, q_length=4001, kv_length=4001, **sizes)
    report = compile_spec("h200", spec)
    assert report["error"] is None, report["error"]
    found = figures(report)["attention_backward_sm90_mosaic_gpu_kernel"]
    assert found["notes"] == []
    assert found["spills"] <= SEGMENT_SPILLS[head_dim, v_head_dim]


def write(words):
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    budget = {entry: held for entry, held in budget.items() if entry in ROWS}
    chosen = [entry for entry in ROWS if all(word in entry for word in words)]
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda entry: compile_spec(ROWS[entry][0], ROWS[entry][2]), chosen)
        for entry, report in zip(chosen, reports, strict=True):
            if report["error"]:
                print(f"{entry}: {report['error']}", file=sys.stderr)
                continue
            why = {key: text for key, text in budget.get(entry, {}).items() if key == "why"}
            budget[entry] = figures(report) | why
            print(entry, budget[entry], flush=True)
    text = json.dumps({entry: budget[entry] for entry in ROWS if entry in budget}, indent=1)
    BUDGET.write_text(text + "\n")


if __name__ == "__main__":
    write(sys.argv[1:])
