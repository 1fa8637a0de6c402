"""The attention benchmark without a GPU: arguments, results, whole runs with a host clock."""

import concurrent.futures
import json
import types

import attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, contenders, report, timing


def test_arguments_give_every_case():
    args = attention.arguments(["--shapes", "2,64,4,16; 1,32,8,64,2", "--causal", "both", "--mode", "fwd,bwd"])
    assert args.shapes == [cases.Shape(2, 64, 4, 16, 4), cases.Shape(1, 32, 8, 64, 2)]
    made = attention.cases(args)
    assert len(made) == 8
    assert made[5] == cases.Case(1, 32, 8, 64, 2, "bf16", False, "bwd")
    assert made[5].label == "1x32 8/2x64 bf16 full bwd"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shapes", "2,64,4"], "shape: got '2,64,4', want batch,seq,heads,head_dim[/value_head_dim][,kv_heads]"),
        (["--shapes", "2,64,4,16,4,8"], "shape: got '2,64,4,16,4,8', want batch,seq,heads,head_dim"),
        (["--shapes", "2,64,4,16/x"], "shape: got '2,64,4,16/x', want batch,seq,heads,head_dim"),
        (["--shapes", "2,64,4,16/0"], "value_head_dim: got 0, want a positive number"),
        (["--shapes", "2,64,4,16,3"], "kv_heads: got 3, want a divisor of the 4 heads"),
        (["--shapes", " ; "], "shape: got ' ; ', want batch,seq,heads,head_dim"),
        (["--shapes", "2,64,4,x"], "shape: got '2,64,4,x'"),
        (["--shapes", "2,0,4,16"], "seq: got 0, want a positive number"),
        (["--mode", "forward"], "mode: got 'forward', want some of fwd, bwd, fwdbwd"),
        (["--peers", "torch"], "peers: got 'torch', want some of torch-cudnn"),
        (["--implementations", "cuda"], "implementations: got 'cuda', want some of mosaic_gpu"),
        (["--rounds", "0"], "--rounds: got 0, want a positive number"),
        (["--seconds", "nan"], "--seconds: got nan, want a positive number"),
        (["--budget", "-1"], "--budget: got -1, want a positive number"),
        (["--ceiling", "0"], "--ceiling: got 0, want a positive number"),
        (["--mode", ""], "mode: got '', want some of fwd, bwd, fwdbwd"),
    ],
)
def test_bad_arguments_are_named(argv, message, capsys):
    with pytest.raises(SystemExit):
        attention.arguments(argv)
    assert message in capsys.readouterr().err


def test_flops(make_case):
    full = 4 * 2 * 16 * 8192**2 * 128
    shape = (2, 8192, 16, 128, 16)
    assert make_case("fwd", False, shape).flops == full == 1099511627776
    assert make_case("fwd", True, shape).flops == full / 2
    assert make_case("bwd", False, shape).flops == 2.5 * full
    assert make_case("fwdbwd", True, shape).flops == 3.5 * full / 2
    assert make_case("fwd", False, (2, 8192, 16, 128, 4)).flops == full  # grouped heads save no matmuls
    assert make_case("fwd", False, shape).tflops(1.55) == pytest.approx(709.4, abs=0.1)


def test_value_head_dim_differs():
    args = attention.arguments(["--shapes", "2,64,4,24/16,2;2,64,4,24", "--causal", "no", "--mode", "fwd,bwd"])
    assert [shape.numbers for shape in args.shapes] == [[2, 64, 4, 24, 2, 16], [2, 64, 4, 24, 4]]
    made = attention.cases(args)
    assert made[1].label == "2x64 4/2x24/16 bf16 full bwd"
    assert (made[1].shape, made[2].shape) == tuple(args.shapes)
    # Scores and two gradients have 24 columns; outputs, dv and the probabilities' gradient have 16.
    assert [case.flops for case in made[:2]] == [2 * 2 * 4 * 64**2 * width for width in (24 + 16, 3 * 24 + 2 * 16)]
    shapes = [x.shape for x in (*cases.input_sets(made[0])[0].qkv, cases.input_sets(made[0])[0].dout)]
    assert shapes == [(2, 64, 4, 24), (2, 64, 2, 24), (2, 64, 2, 16), (2, 64, 4, 16)]


def test_statistics():
    assert timing.spread([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "min": 1.0, "max": 10.0, "iqr": 3.0}
    assert timing.spread([2.0]) == {"median": 2.0, "min": 2.0, "max": 2.0, "iqr": 0.0}
    # The times drift together: the ratio of each round is 2, the ratio of the medians is not.
    assert timing.speed_ratio([1.0, 1.5, 4.0], [2.0, 3.0, 8.0, 100.0]) == 2.0


@pytest.mark.slow
def test_input_sets_overflow_the_cache(make_case):
    big = cases.input_sets(make_case(shape=(1, 1024, 8, 128, 8)))
    bytes_of_one = 4 * 1024 * 8 * 128 * 2
    assert len(big) * bytes_of_one >= cases.ROTATION_BYTES > (len(big) - 1) * bytes_of_one
    assert not np.array_equal(big[0].query, big[1].query)
    few = cases.input_sets(make_case(shape=(1, 64, 4, 16, 2)))
    assert len(few) == 64  # the limit: smaller inputs are not worth timing
    assert few[0].key.shape == (1, 64, 2, 16)
    assert few[0].dout.dtype == jnp.bfloat16
    assert float(jnp.std(few[0].query.astype(jnp.float32))) == pytest.approx(1, abs=0.1)


def test_rows_and_plot(tmp_path, make_case):
    given = make_case("fwd", False, (2, 8192, 16, 128, 16))
    ours, control = timing.Contender("mosaic_gpu", "jax"), timing.Contender("jax-cudnn", "jax")
    absent = timing.Contender("fa4", "torch")
    ours.times, control.times, ours.plan, ours.error = [1.0, 1.1, 1.2], [2.0, 2.2, 2.4], "blocks", 2e-3
    absent.give_up("unavailable", "not installed")
    ceilings = {"jax": 800.0, "torch": 750.0}
    rows = report.rows(given, [ours, control, absent], ceilings, timing.METHODS["cupti"])
    assert rows[0]["median_ms"] == 1.1
    assert rows[0]["tflops"] == pytest.approx(999.556)
    assert rows[0]["ceiling_share"] == pytest.approx(999.556 / 800)
    assert rows[0]["ratios"] == {"jax-cudnn": pytest.approx(2.0)}
    assert "CUPTI" in rows[0]["method"]
    assert (rows[2]["status"], rows[2]["reason"], "median_ms" in rows[2]) == ("unavailable", "not installed", False)
    results = {
        "rows": rows,
        "environment": {"device": "H200"},
        "timer": "cupti",
        "ceilings": {"jax": {"tflops": 800.0, "what": "matmul"}, "torch": {"tflops": None}},
    }
    assert report.absent(results) == ["fa4: unavailable in 1 cases: not installed"]
    assert report.table(results).row_count == 2
    report.plot(results, tmp_path / "plots" / "plot.png")
    assert (tmp_path / "plots" / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_non_finite_values_are_null(tmp_path):
    row = {"error": np.nan, "times": (1.5, np.inf), "calls": 3}
    report.write_json(tmp_path / "x.json", {"rows": [row], "ok": True})
    read = json.loads((tmp_path / "x.json").read_text())
    assert read == {"rows": [{"error": None, "times": [1.5, None], "calls": 3}], "ok": True}


@pytest.mark.slow
def test_concurrent_writers_leave_whole_files(tmp_path):
    """At any time the file has one writer's whole content."""
    path, rows = tmp_path / "x.json", [{"number": i} for i in range(200)]
    write = lambda name: [report.write_json(path, {"name": name, "rows": rows}) for _ in range(40)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, name) for name in "abcd"]
        while not all(writer.done() for writer in writers):
            if path.exists():
                assert json.loads(path.read_text())["rows"] == rows
        for writer in writers:
            writer.result()
    assert [x.name for x in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_full_run(tmp_path, run_script):
    output = tmp_path / "results.json"
    done = run_script(
        "attention.py", "--shapes", "1,64,4,16,2", "--causal", "both", "--mode", "fwd,bwd", "--timer", "host",
        "--implementations", "xla,mosaic_gpu", "--rounds", "3", "--seconds", "0.01", "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert {"schema", "environment", "arguments", "timer", "method", "ceilings", "rows", "complete"} == set(results)
    assert (results["schema"], results["timer"], results["complete"]) == (1, "host", True)
    assert "not device time" in results["method"]["jax"]
    assert results["environment"]["versions"]["jax"] == jax.__version__
    assert results["arguments"]["rounds"] == 3
    assert results["arguments"]["ceiling"] == attention.CEILING_WITHOUT_GPU
    tflops = results["ceilings"]["jax"]["tflops"]
    assert tflops > 0
    assert f"matmul ceiling, jax: {report.figure(tflops)} TFLOP/s" in done.stdout
    assert len(results["rows"]) == 4 * (2 + len(contenders.PEERS))
    timed = [row for row in results["rows"] if row["status"] == "ok"]
    assert [(row["contender"], row["causal"], row["mode"]) for row in timed] == [
        ("xla", False, "fwd"), ("xla", False, "bwd"), ("xla", True, "fwd"), ("xla", True, "bwd"),
    ]  # fmt: skip
    for row in timed:
        assert len(row["times_ms"]) == 3
        assert row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["error"] < 5e-3
        assert row["tflops"] == pytest.approx(4 * 64 * 64 * 4 * 16 * (2.5 if row["mode"] == "bwd" else 1)
                                              / (2 if row["causal"] else 1) / row["median_ms"] / 1e9)  # fmt: skip
    assert all(row["reason"] for row in results["rows"] if row["status"] != "ok")
    assert "mosaic_gpu: unavailable in 4 cases" in done.stdout


@pytest.mark.timeout(120)
def test_run_without_time_left_is_reported(tmp_path, capsys, monkeypatch, without_gpu):
    monkeypatch.setattr(attention, "prepare_process", lambda: None)
    monkeypatch.setattr(attention.threading, "Timer", lambda *_: types.SimpleNamespace(start=int, cancel=int))
    output = tmp_path / "results.json"
    status = attention.main(
        ["--shapes", "1,64,2,16", "--timer", "host", "--implementations", "xla", "--peers", "", "--ceiling", "64",
         "--budget", "0.001", "--mode", "fwd", "--output", str(output)]
    )  # fmt: skip
    results = json.loads(output.read_text())
    assert (status, results["complete"]) == (1, False)
    assert [row["status"] for row in results["rows"]] == ["skipped", "skipped"]
    assert "the time budget is spent" in capsys.readouterr().out


def test_wrong_contender_sets_the_exit_status(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(attention, "prepare_process", lambda: None)
    poisoned = lambda name, case, sets, oracle: contenders.Built(lambda index: (sets[0].query * jnp.nan,), "")
    monkeypatch.setattr(contenders, "_ours", poisoned)
    output = tmp_path / "results.json"
    words = "--shapes 1,64,2,16 --timer host --implementations xla --causal no --ceiling 64 --mode fwd --rounds 1"
    status = attention.main([*words.split(), "--peers", "fa4", "--seconds", "0.001", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert (status, [row["status"] for row in rows]) == (1, ["wrong", "unavailable"])


def test_self_check_without_a_gpu(capsys, monkeypatch, without_gpu):
    monkeypatch.setattr(attention, "prepare_process", lambda: None)
    status = attention.main(
        ["--self-check", "--shapes", "1,64,2,16", "--implementations", "xla", "--ceiling", "64", "--seconds", "0.01"]
    )
    told = capsys.readouterr().out
    assert status == 1
    assert told.count("does not start: RuntimeError: timer=") == 3
    assert "matmul-jax: " in told
    assert "jax-cudnn: unavailable it needs an NVIDIA GPU" in told


@pytest.mark.slow
def test_help_runs_from_the_root(run_script):
    for script in ("attention.py", "sweep_attention.py"):
        done = run_script(script, "--help")
        assert (done.returncode, done.stdout[:6]) == (0, "usage:")
