"""benchmarks/experts.py: its products, and its output."""

import json

import experts as benchmark
import jax
import numpy as np
import pytest

from tests.support.processes import cpu_devices

CASE = benchmark.Case(24, 16, 8, 4, 2)


def test_flops_are_counted():
    assert benchmark.Case(1000, 10, 100, 4, 2).tflops(1.0) == pytest.approx(9 * 2 * 2000 * 1000 / 1e9)


def test_products_are_nine():
    """The results and both gradients of three matmuls; no two are equal."""
    results = benchmark.products(CASE)(0)
    arrays = [x for out, gradients in results for x in (out, *gradients)]
    assert [x.shape for x in arrays[:3]] == [(48, 8), (48, 16), (4, 16, 8)]
    assert [x.shape for x in arrays[6:]] == [(48, 16), (48, 8), (4, 8, 16)]
    sums = [float(np.abs(np.asarray(x, np.float32)).sum()) for x in arrays]
    assert min(sums) > 0
    assert len({(x.shape, total) for x, total in zip(arrays, sums, strict=True)}) == len(sums)


@pytest.mark.slow
def test_a_contender_is_few_programs():
    """The initialisation is one program. As eager operations it would be 15."""
    compiled: list[str] = []
    listen = lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        benchmark.block(CASE)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 3 <= len(compiled) <= 6


def test_no_contender_is_built_after_the_deadline():
    contenders = benchmark.contenders_of(CASE, (), deadline=0.0)
    assert {c.name: c.status for c in contenders} == {"block": "skipped", "products": "skipped"}


@pytest.mark.timeout(300)
def test_runs(tmp_path, monkeypatch, capsys, without_gpu):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    output = tmp_path / "experts.json"
    words = "--shapes 24,16,8,4,2 --devices 1,2 --exchanges gather --timer host --rounds 2 --seconds 0.001"
    assert benchmark.main([*words.split(), "--output", str(output)]) == 0
    one, two = json.loads(output.read_text())["rows"]
    assert {c["name"]: c["status"] for c in one["contenders"]} == {"block": "ok", "products": "ok"}
    assert {c["name"]: c["status"] for c in two["contenders"]} == {"block": "unavailable", "gather": "unavailable"}
    stages = [line.split(":")[1].strip() for line in capsys.readouterr().out.splitlines() if "  block: " in line]
    assert stages[:4] == ["arrays", "tracing and lowering", "Mosaic kernels", "XLA"]


@pytest.mark.slow
def test_runs_on_two_devices(tmp_path):
    output = tmp_path / "experts.json"
    words = f"--shapes 24,16,8,4,2 --devices 1,2 --timer host --rounds 2 --seconds 0.001 --output {output}"
    done = cpu_devices.done_by(benchmark.__file__, *words.split(), devices=2)
    assert done.stdout.count("block: XLA") == 1  # both rows have the same program on one device
    _, row = json.loads(output.read_text())["rows"]
    assert {c["name"]: c["status"] for c in row["contenders"]} == dict.fromkeys(("block", "gather", "all_to_all"), "ok")
    assert set(row["efficiency"]) == {"gather", "all_to_all"}


def test_a_profile_needs_cupti(without_gpu, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    with pytest.raises(SystemExit):
        benchmark.main(["--profile", "--timer", "host"])
    assert "--profile: got --timer host, want cupti" in capsys.readouterr().err
