"""Every block spec row, compiled for its GPU generation without the GPU, and held to compile_budget.json.

`python tests/pallas/test_compile.py [WORD...]` compiles the rows whose name has all the words, and writes what it
finds into the budget. What spills there needs a reason, in "why" next to the figures, written by hand.
"""

import dataclasses
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from aot import TIMEOUT, Spec, compile_spec

from jax_kernels.pallas import block_specs

GPUS = {80: "a100", 86: "a6000", 89: "rtx4090", 90: "h200", 100: "b200", 120: "rtx pro 6000"}
BUDGET = Path(__file__).with_name("compile_budget.json")


def rows():
    """(GPU, row, Spec) of everything to compile."""
    for number, file in block_specs._FILES.items():
        for row in file.ATTENTION:
            if row.has_lists:  # of each query head, which those of a group are joined of
                yield GPUS[number], row, dataclasses.replace(_spec(row, False, ""), cells="bhts", kv_heads=4)
                continue
            if row.dense_bits is not None:
                yield from _dense(GPUS[number], row)
                continue
            # A causal kernel has a loop with the predicate and one without: enough in float32, slow to compile.
            both = (True,) if row.bits == 32 else (True, False)
            if row.has_segments:  # causal ones have a test of their own
                both = (False,)
            for is_causal in both if row.is_causal is None else (row.is_causal,):
                for precision in ("fp32", "tf32") if row.bits == 32 else ("",):
                    spec = _spec(row, is_causal, precision)
                    if row.up_to is None and _planned(GPUS[number], row, spec) is not row:  # a row for less is first
                        spec = dataclasses.replace(spec, q_length=2 * spec.q_length, kv_length=2 * spec.kv_length)
                    yield GPUS[number], row, spec


def _dense(gpu, row):
    """Of a row for biases and masks, under a causal mask: with the widest bias, also beside lists, and with a mask."""
    spec = _spec(row, row.is_causal is not False, "")
    bias = dataclasses.replace(spec, bias="hts", bias_dtype="float32" if row.dense_bits == 32 else "")
    if row.dense_bits > 1:
        yield gpu, row, bias
    lists = dataclasses.replace(bias, cells="bhts", kv_heads=2)
    # At 256 some of what a tile has is spilled, outside of its loop.
    if row.dense_bits > 1 and row.head_dim <= 128 and _planned(gpu, row, lists) is row:
        yield gpu, row, lists
    mask = dataclasses.replace(spec, mask="bts")
    if not row.is_limited and _planned(gpu, row, mask) is row:
        yield gpu, row, mask


def _planned(gpu, row, spec):
    capability = next(number for number, gpu_of_file in GPUS.items() if gpu_of_file == gpu)
    bits = 32 if spec.bias_dtype == "float32" else 16 if spec.bias else 1
    planned, _ = block_specs.attention_row(
        divmod(capability, 10),
        row.implementation,
        head_dim=row.head_dim,
        bits=row.bits,
        is_causal=spec.is_causal,
        is_limited=bool(spec.window) or spec.segment_ids,
        has_segments=spec.segment_ids,
        dense_bits=bits if spec.bias or spec.mask else 0,
        has_lists=bool(spec.cells) and not spec.bias,
        kv_length=spec.kv_length,
    )
    return planned


def _spec(row, is_causal, precision):
    return Spec(
        window="1000,-1" if row.is_limited else "",
        segment_ids=bool(row.has_segments),
        implementation=row.implementation,
        head_dim=row.head_dim,
        dtype="float32" if row.bits == 32 else "bfloat16",
        precision=precision,
        is_causal=is_causal,
        q_length=row.up_to or 4096,
        kv_length=row.up_to or 4096,
        lse=True,
    )


def name(gpu, row, spec):
    kind = spec.precision or spec.dtype
    limits = {"causal": spec.is_causal, "window": spec.window, "segments": spec.segment_ids}
    masks = "".join(f", {limit}" for limit, is_given in limits.items() if is_given)
    dense = (
        f"{', bias' if spec.bias else ''}{', mask' if spec.mask else ''}{spec.bias_dtype and ' in ' + spec.bias_dtype}"
    )
    lists = ", lists" if spec.cells else ""
    length = f", up to {row.up_to}" if row.up_to else ""
    return f"{gpu}, {spec.implementation}, {spec.head_dim}, {kind}{masks}{dense}{lists}{length}"


ROWS = {name(gpu, row, spec): (gpu, row, spec) for gpu, row, spec in rows()}


def figures(report):
    """What the budget says of each kernel. Registers are given out in eights."""
    found = {}
    for kernel, got in sorted(report["kernels"].items()):
        found[kernel] = {
            "registers": -(-got["registers"] // 8) * 8,
            "spills": got["spill_stores"] + got["spill_loads"],
            "shared_memory": got["shared_memory"],
            "notes": sorted({note[1:6] for note in got["notes"]}),
        }
    return found


def test_every_generation_is_compiled():
    assert set(GPUS) == set(block_specs._FILES)


def test_the_budget_has_the_rows_that_there_are():
    assert sorted(json.loads(BUDGET.read_text())) == sorted(ROWS)


def _tiers():
    """The rows, those marked slow whose blocks an earlier GPU has too, but for the first row of each GPU."""
    seen, gpus = set(), set()
    for entry, (gpu, row, spec) in ROWS.items():
        alike = row.forward, row.backward, spec
        is_repeated = alike in seen and gpu in gpus
        seen.add(alike)
        gpus.add(gpu)
        yield pytest.param(entry, marks=pytest.mark.slow if is_repeated else ())


@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("entry", list(_tiers()))
def test_row(entry):
    gpu, row, spec = ROWS[entry]
    assert _planned(gpu, row, spec) is row, "a row before it takes everything that it could serve"

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
            assert found["spills"] == 0, kernel
        assert (budget[kernel]["spills"] == 0 and budget[kernel]["notes"] == []) or why, "spills need a reason"
        for figure in ("registers", "spills", "shared_memory"):
            assert found[figure] <= budget[kernel][figure], (kernel, figure)
        assert set(found["notes"]) <= set(budget[kernel]["notes"]), kernel


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
    assert backward["spills"] <= 24  # three addresses; CTAs that are not persistent take 1.05 of the time at 128


@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, False), (128, False), (128, True)])
def test_odd_lengths_on_hopper(head_dim, is_causal):
    spec = Spec("mosaic_gpu", head_dim, is_causal=is_causal, q_length=4001, kv_length=3999)
    report = compile_spec("h200", spec)
    assert report["error"] is None, report["error"]
    forward, backward = (
        figures(report)[f"attention_{pass_}_sm90_mosaic_gpu_kernel"] for pass_ in ("forward", "backward")
    )
    assert forward["notes"] == backward["notes"] == []
    assert forward["spills"] == 0
    assert backward["spills"] <= 8  # of the warpgroup that loads


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
