"""jax-kernels check: its cases, its report, and its exit status."""

import dataclasses
import json
import math
import threading

import pytest

from jax_kernels import dispatch, testing
from jax_kernels.cli import check
from jax_kernels.cli.check import suites
from jax_kernels.device import device_info

pytestmark = pytest.mark.usefixtures("no_interpret")


CHECK = ("check", "--op", "flash_attention")


@pytest.fixture
def two_cases(monkeypatch):
    monkeypatch.setitem(check.QUICK, "flash_attention", ("one_query", "fp32"))


def test_check_passes(run, two_cases, tmp_path):
    code, out, _ = run(*CHECK, "--implementation", "xla", "--json", str(tmp_path / "report.json"))
    assert code == 0
    assert "2 passed, 0 failed, 0 not served" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] == 0
    assert [(result["implementation"], result["case"]) for result in report["results"]] == [
        ("xla", "one_query"),
        ("xla", "fp32"),
    ]
    for result in report["results"]:
        assert result["passed"]
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert 0 < result["errors"][name] <= result["bounds"][name] < 0.01


def test_check_prints_an_implementation_when_it_ends(run, two_cases, monkeypatch):
    """Without a progress bar, the table of an implementation comes before the cases of the next one."""
    monkeypatch.setitem(check.QUICK, "rms_norm", ("rms",))
    steps = []
    result = lambda op, name, case, by: steps.append(f"{op} by {by}") or check.Result(op, by, name, {}, {})
    monkeypatch.setattr(check, "run_case", result)
    monkeypatch.setattr(check, "_show", lambda console, op, results: steps.append(f"{len(results)} of {op}"))
    suite = check.SUITES["flash_attention"]
    monkeypatch.setitem(check.SUITES, "flash_attention", dataclasses.replace(suite, why_not=lambda case, by: None))
    named = [word for name in ("xla", "triton") for word in ("--implementation", name)]
    code, out, _ = run(*CHECK, "--op", "rms_norm", *named)
    assert (code, "5 passed, 0 failed" in out) == (0, True)
    of_attention = [[f"flash_attention by {by}"] * 2 + ["2 of flash_attention"] for by in ("triton", "xla")]
    assert steps == [*of_attention[0], *of_attention[1], "rms_norm by xla", "1 of rms_norm"]


def test_check_fails_on_a_wrong_result(run, two_cases, monkeypatch):
    right = suites.run_attention

    def wrong(case, arrays, implementation, op):
        results = right(case, arrays, implementation, op)
        return results | {"dk": results["dk"] * 1.01} if case.name == "fp32" else results

    monkeypatch.setattr(suites, "run_attention", wrong)
    code, out, _ = run(*CHECK, "--implementation", "xla")
    assert code == 1
    assert "1 passed, 1 failed" in out
    verdicts = {line.split()[1]: line.split()[-1] for line in out.splitlines() if line.startswith(" xla")}
    assert verdicts == {"one_query": "pass", "fp32": "FAIL"}


@pytest.mark.parametrize(
    ("by", "of_bound", "passes"), [("xla", 1.3, False), ("cudnn", 1.3, True), ("cudnn", 2.2, False)]
)
def test_another_librarys_kernels_have_twice_the_bound(monkeypatch, by, of_bound, passes):
    case = {case.name: case for case in testing.ATTENTION_CASES}["gqa"]
    arrays, bounds = testing.attention_inputs(case), testing.tolerance(case)
    want = testing.attention_float64(case, *arrays[:-1])
    got = {name: x * (1 + of_bound * bounds[name]) for name in ("out", "dk") for x in (getattr(want, name),)}
    monkeypatch.setattr(suites, "why_not", lambda case, name: None)
    monkeypatch.setattr(suites, "run_attention", lambda *_: got)
    result = check.run_case("flash_attention", "gqa", case, by)
    assert (result.raised, result.passed) == (None, passes)


def test_check_reports_a_raising_implementation(run, two_cases, monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("ptxas [exited]")

    monkeypatch.setattr(suites, "run_attention", broken)
    code, out, _ = run(*CHECK, "--implementation", "xla", "--json", str(tmp_path / "report.json"))
    assert code == 1
    assert "xla, fp32: RuntimeError: ptxas [exited]" in out
    assert json.loads((tmp_path / "report.json").read_text())["failed"] == 2


def _on_one_gpu(monkeypatch):
    monkeypatch.setattr(check, "find_device", lambda _: device_info("h200"))
    monkeypatch.setattr(check.jax, "device_count", lambda: 1)


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_interrupted_run_keeps_its_results(at_once, run, monkeypatch, tmp_path):
    monkeypatch.setitem(check.QUICK, "flash_attention", ("one_query", "fp32", "full", "causal"))
    monkeypatch.setattr(check, "_AT_ONCE", at_once)
    right = check.run_case

    def stopped(op, name, case, by):
        if name == "full":
            raise KeyboardInterrupt
        return right(op, name, case, by)

    monkeypatch.setattr(check, "run_case", stopped)
    if at_once > 1:
        _on_one_gpu(monkeypatch)
    path = tmp_path / "report.json"
    code, out, _ = run(*CHECK, "--implementation", "xla", "--json", str(path))
    assert (code, "2 passed, 0 failed, 0 not served, 2 not run" in out) == (130, True)
    report = json.loads(path.read_text())
    assert (report["complete"], [result["case"] for result in report["results"]]) == (False, ["one_query", "fp32"])


def test_cases_run_together_on_one_gpu(run, monkeypatch):
    """Two cases wait for each other; their results come in order."""
    both = threading.Barrier(2, timeout=60)

    def together(op, name, case, by):
        both.wait()
        return check.Result(op, by, name, {}, {})

    monkeypatch.setattr(check, "run_case", together)
    monkeypatch.setattr(check, "_AT_ONCE", 2)
    _on_one_gpu(monkeypatch)
    monkeypatch.setitem(check.QUICK, "flash_attention", ("fp32", "one_query"))
    code, out, _ = run(*CHECK, "--implementation", "xla")
    assert (code, "2 passed" in out, out.index("fp32") < out.index("one_query")) == (0, True, True)


@pytest.mark.parametrize("words", [(), ("--full",)])
def test_cases_run_alone_on_many_gpus_and_in_full(words, run, monkeypatch):
    """Programs of several GPUs would wait for each other, and large cases need the memory."""
    monkeypatch.setitem(check.SUITES, "rms_norm", dataclasses.replace(check.SUITES["rms_norm"], gpu_cases={}))
    _on_one_gpu(monkeypatch)
    monkeypatch.setattr(check.jax, "device_count", lambda: 1 if words else 2)
    threads = set()
    monkeypatch.setattr(
        check,
        "run_case",
        lambda op, name, case, by: threads.add(threading.get_ident()) or check.Result(op, by, name, {}, {}),
    )
    assert run("check", "--op", "rms_norm", "--implementation", "xla", *words)[0] == 0
    assert threads == {threading.get_ident()}


def test_an_interrupted_run_starts_no_further_cases(monkeypatch):
    started, end = [], threading.Event()

    def stopped(op, name, case, by):
        started.append(name)
        if name == "first":
            threading.Timer(0.3, end.set).start()
            raise KeyboardInterrupt
        end.wait(60)
        return check.Result(op, by, name, {}, {})

    monkeypatch.setattr(check, "run_case", stopped)
    with pytest.raises(KeyboardInterrupt):
        list(check._results([("op", name, None, "xla") for name in ("first", *map(str, range(9)))], 2))
    assert len(started) <= 3  # the two at once, and one after the first


def test_the_report_of_a_kernel_that_gives_nan_is_json(run, monkeypatch, tmp_path):
    failed = check.Result("rms_norm", "xla", "a case", {"out": math.nan, "dx": math.inf}, {"out": 1.0, "dx": 1.0})
    monkeypatch.setattr(check, "run_case", lambda *_: failed)
    path = tmp_path / "report.json"
    code, _, _ = run("check", "--op", "rms_norm", "--implementation", "xla", "--json", str(path))
    assert code == 1
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["results"][0]
    assert (found["errors"], found["passed"]) == ({"out": None, "dx": None}, False)


def test_check_counts_unsupported_cases(run, two_cases, monkeypatch):
    monkeypatch.setattr(suites, "why_not", lambda case, name: "too exact" if case.precision == "fp32" else None)
    code, out, _ = run(*CHECK, "--implementation", "xla")
    assert code == 0
    assert "1 passed, 0 failed, 1 not served" in out


# Triton has no 8-bit matmuls, and takes no mask that is an array. Some ops have no kernel in Triton.
WITHOUT_TRITON = {"fp8_matmul", "fp8_grouped_matmul"} | {
    op for op, suite in check.SUITES.items() if "triton" not in suite.implementations
}


@pytest.mark.triton
def test_check_runs_interpreted_kernels_on_request(monkeypatch):
    here = check._implementations(None, list(check.SUITES))
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for op, names in check._implementations(None, list(check.SUITES)).items():
        triton = [] if op in WITHOUT_TRITON else ["triton"]
        assert set(names) == {*here[op], *triton}, op


@pytest.mark.slow
def test_check_every_op(run, monkeypatch, tmp_path):
    """An implementation that one op lacks is checked for the other ops."""
    assert set(check.QUICK) == set(check.SUITES)
    quick = {
        "flash_attention": "one_query",
        "flash_attention_fp8": "odd",
        "decode_attention": "masked_odd",
        "block_sparse_attention": "cells_fp32",
        "dynamic_mask_attention": "kv_heads_fp32",
        "dilated_attention": "longnet",
        "ring_attention": "causal",
        "sequence_parallel_dilated_attention": "longnet",
        "matmul": "odd",
        "gated_matmul": "gated_odd",
        "mlp": "gated",
        "layer_norm": "residual",
        "fp8_matmul": "odd_row",
        "low_bit_matmul": "int4_gated",
        "fp8_norm": "rms_offset",
    }
    for op in check.QUICK:
        monkeypatch.setitem(check.QUICK, op, (quick[op],) if op in quick else ())
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    names = [word for name in ("triton", "xla") for word in ("--implementation", name)]
    code, out, _ = run("check", *names, "--json", str(tmp_path / "report.json"))
    assert code == 0
    assert "28 passed, 0 failed, 0 not served" in out
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert {(x["op"], x["implementation"], x["case"]) for x in results} == {
        (op, by, case)
        for op, case in quick.items()
        for by in ("triton", "xla")
        if by == "xla" or op not in WITHOUT_TRITON
    }
    of_op = {result["op"]: result["errors"].keys() for result in results}
    for result in results:
        assert result["passed"]
        assert result["errors"].keys() == result["bounds"].keys()
    assert {"dx", "dw", "dw_up"} <= of_op["gated_matmul"]
    assert {"total", "dscale"} <= of_op["layer_norm"]
    assert {"out", "lse", "dq", "dk", "dv"} <= of_op["ring_attention"] & of_op["dilated_attention"]


@pytest.mark.parametrize("op", ["matmul", "layer_norm"])
def test_check_fails_on_a_wrong_result_of_another_op(run, monkeypatch, op):
    right = check.SUITES[op]
    wrong = lambda case, by: (got := right.run(case, by)) | {"dx": got["dx"] * 1.05}
    monkeypatch.setitem(check.SUITES, op, dataclasses.replace(right, run=wrong))
    monkeypatch.setitem(check.QUICK, op, ("plain",))
    code, out, _ = run("check", "--op", op, "--implementation", "xla")
    assert code == 1
    assert "0 passed, 1 failed" in out


def test_check_takes_ops_as_bench_does(run, monkeypatch):
    """As words, as options, and by the short name of explain, bench and tune."""
    monkeypatch.setattr(check, "_run", lambda calls, *_: asked.append(list(dict.fromkeys(op for op, *_ in calls))))
    asked = []
    for words in (("attention", "rms_norm"), ("rms_norm", "--op", "flash_attention"), ("--op", "attention")):
        assert run("check", *words)[0] == 0
    assert asked == [["flash_attention", "rms_norm"]] * 2 + [["flash_attention"]]


def test_quick_cases_exist():
    for op, names in check.QUICK.items():
        assert set(names) <= set(check.SUITES[op].cases), op
        assert check.SUITES[op].chosen(None, True).keys() > check.SUITES[op].chosen(None, False).keys()


@pytest.mark.parametrize("op", [op for op, suite in check.SUITES.items() if "mosaic_gpu" in suite.implementations])
def test_check_reaches_the_hopper_kernels(op):
    suite = check.SUITES[op]
    served = lambda name: suite.why_not(suite.cases[name], "mosaic_gpu") is None
    with dispatch.on_device("h200"):
        if op == "fp8_norm":
            assert "it has no quantized out" in suite.reasons()["mosaic_gpu"]
        else:
            assert "mosaic_gpu" in check._implementations(None, [op])[op]
            assert any(map(served, check.QUICK[op]))
