"""benchmarks/cross_entropy.py: its cases and its output."""

import json

import cross_entropy as benchmark
import jax
import numpy as np
import pytest

from jax_kernels.inputs import linear_cross_entropy as loss_inputs


def test_flops_are_counted():
    case = benchmark.Case(8, 16, 32, "bf16")
    assert case.flops == 3 * 2 * 8 * 16 * 32
    assert benchmark.Case(8, 16, 32, "bf16", has_gradients=False).flops == 2 * 8 * 16 * 32


def test_contenders_agree():
    """The mean of the tokens that count, also where a chunk has padding."""
    case = benchmark.Case(1100, 8, 32, "fp32")
    (x, w, targets) = case.arrays()[0]
    losses = [benchmark.chunked, benchmark.ours("xla"), benchmark.ours("xla", "none")]
    found = [float(loss(x, w, targets)) for loss in losses]
    logits = np.asarray(x) @ np.asarray(w).T
    chosen = np.take_along_axis(logits, np.maximum(targets, 0)[:, None], 1)[:, 0]
    want = (np.log(np.exp(logits).sum(1)) - chosen)[np.asarray(targets) >= 0].mean()
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_memory_is_less_than_the_logits(monkeypatch):
    """XLA's plan for the three contenders, and for the plain loss, which has all logits."""
    monkeypatch.setattr(loss_inputs, "LOGITS_BYTES", 2**16)
    monkeypatch.setattr(benchmark, "CHUNK", 64)
    case = benchmark.Case(1024, 8, 2048, "fp32")
    sets = [tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.arrays()[0])]
    bytes_of = lambda loss: benchmark.compiled(case, sets, loss)[1]
    for loss in (benchmark.ours("xla"), benchmark.chunked):
        assert bytes_of(loss) < 4 * case.tokens * case.vocabulary / 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", ["", "--forward-only --dtype fp32"])
def test_runs(tmp_path, monkeypatch, without_gpu, words):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    output = tmp_path / "cross_entropy.json"
    given = f"--shapes 32,16,24 --timer host --rounds 2 --seconds 0.001 --peers chunked,none {words}"
    assert benchmark.main([*given.split(), "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    statuses = {c["name"]: c["status"] for c in row["contenders"]}
    run, absent = ("xla", "chunked", "none"), ("mosaic_gpu", "triton", "mosaic_gpu_8_bits")
    assert statuses == dict.fromkeys(run, "ok") | dict.fromkeys(absent, "unavailable")
    assert row["contenders"][0]["tflops"] > 0


@pytest.mark.parametrize("name", ["jla", "liger", "cce"])
def test_peers_without_a_gpu(name, without_gpu):
    with pytest.raises(NotImplementedError, match=r"is not installed|needs a GPU"):
        benchmark.need_module(name)
