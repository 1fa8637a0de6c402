"""benchmarks/matmul.py: its measurements and its output."""

import json

import jax
import jax.numpy as jnp
import matmul as benchmark
import pytest

from jax_kernels.dispatch import on_device


def test_flops_are_counted():
    plain, gated = (benchmark.Case(kind, 8, 16, 32, "bf16") for kind in ("plain", "gated"))
    assert gated.tflops(2.0) == plain.tflops(1.0) == 2 * 8 * 16 * 32 / 1e9


@pytest.mark.parametrize("kind", ["plain", "epilogue", "gated"])
def test_blocks_override_the_plan(kind):
    case = benchmark.Case(kind, 128, 256, 64, "bf16")
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in case.arrays()[0]]
    blocks = {"block_n": 128, "stages": 3, "row_group": 2}
    with on_device("H200"):
        program = str(jax.make_jaxpr(lambda *x: benchmark._with_blocks(case, "mosaic_gpu", blocks, *x))(*arrays))
        assert "bf16[3,16,1,8,64]" in program, "three stages of 128 x 64"
        blocks = {"block_m": 64, "num_warps": 2}
        program = str(jax.make_jaxpr(lambda *x: benchmark._with_blocks(case, "triton", blocks, *x))(*arrays))
        assert "num_warps=2" in program
        assert "bf16[64,64]" in program, "64 rows"


def test_blocks_by_name():
    """Also for the matmuls that are gradients."""
    assert benchmark._blocks("128,3,8", ("block_n", "stages", "row_group")) == {
        "block_n": 128, "stages": 3, "row_group": 8
    }  # fmt: skip
    blocks = benchmark._blocks("pingpong=1,block_n=128,wg_rows=128", ())
    case = benchmark.Case("gated", 128, 256, 64, "bf16", has_gradients=True)
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in case.arrays()[0]]
    with on_device("H200"):
        run = lambda *x: benchmark._with_blocks(case, "mosaic_gpu", blocks, *x)
        program = str(jax.make_jaxpr(run)(*arrays))
    launches = program.count("name=matmul_sm90")
    assert launches > 1
    assert program.count("bf16[4,16,1,8,64]") >= launches, "four stages of 128 x 64"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_runs(tmp_path, monkeypatch, without_gpu, has_gradients):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    output = tmp_path / "matmul.json"
    words = "--shapes 16,64,32 --timer host --rounds 2 --seconds 0.001 --peers torch --kinds plain,epilogue,gated,mlp"
    words += " --with-gradients" if has_gradients else ""
    assert benchmark.main([*words.split(), "--output", str(output)]) == 0
    rows, rest = json.loads(output.read_text())["rows"], " with gradients" if has_gradients else ""
    assert [row["label"] for row in rows] == [f"{kind} 16x64x32 bf16{rest}" for kind in benchmark.KINDS]
    for row in rows:
        statuses = {c["name"]: c["status"] for c in row["contenders"]}
        assert statuses == {"mosaic_gpu": "unavailable", "triton": "unavailable", "xla": "ok", "torch": "ok"}
        assert row["contenders"][2]["tflops"] > 0
        assert row["speed_ratios"]["torch"] > 0


@pytest.mark.slow
def test_block_and_tensor_scaling_rows(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    built, ours = [], benchmark.ours

    def recorded(case, sets, name):
        built.append((name, case.scaling, sets[0][0].scale.shape))
        return ours(case, sets, name)

    monkeypatch.setattr(benchmark, "ours", recorded)
    output = tmp_path / "matmul.json"
    words = "--shapes 128,256,128 --timer host --kinds plain --dtype fp8 --scaling block --implementations mosaic_gpu"
    assert benchmark.main([*words.split(), "--peers", "", "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert [c["name"] for c in row["contenders"]] == ["mosaic_gpu", "scales of tensors"]
    assert built == [("xla", "block", (1, 1)), ("mosaic_gpu", "block", (1, 1)), ("mosaic_gpu", "tensor", ())]


def test_sweep_without_a_gpu(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    output = tmp_path / "matmul.json"
    words = "--shapes 16,64,32 --timer host --kinds epilogue --sweep pingpong=1,early_bias=1;256,4,8,1,1,2"
    assert benchmark.main([*words.split(), "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    names = ["row", "pingpong=1,early_bias=1", "256,4,8,1,1,2"]
    assert [(c["name"], c["status"]) for c in row["contenders"]] == [(name, "unavailable") for name in names]


@pytest.mark.timeout(300)
def test_low_bit_weights(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    monkeypatch.setattr(benchmark.low_bit_weights, "COPIED_BYTES", 1 << 12)
    monkeypatch.setattr(benchmark.low_bit_weights, "ROTATION_BYTES", 1)
    output = tmp_path / "matmul.json"
    words = "--shapes 16,64,128 --kinds plain --timer host --rounds 2 --seconds 0.001 --weights int4,mxfp8"
    assert benchmark.main([*words.split(), "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    statuses = {c["name"]: c["status"] for c in row["contenders"]}
    kernels = {f"{name} {by}": "unavailable" for name in ("int4", "mxfp8") for by in ("mosaic_gpu", "triton")}
    assert statuses == {"copy": "ok", "bf16": "ok", "int4 xla": "ok", "mxfp8 xla": "ok"} | kernels
    assert row["contenders"][-1]["share_of_copy"] > 0


def test_low_bit_sweep():
    assert benchmark.low_bit_weights.swept("4,3") == ("mosaic_gpu", {"compute_wgs": 4, "stages": 3})
    assert benchmark.low_bit_weights.swept("cluster_join=1") == ("mosaic_gpu", {"cluster_join": 1})
    with pytest.raises(ValueError, match="got '4', want compute_wgs, stages or block_m"):
        benchmark.low_bit_weights.swept("4")


@pytest.mark.slow
def test_low_bit_blocks():
    case = benchmark.low_bit_weights.Case("plain", 16, 256, 512, "bf16", "int4")
    arrays = case.arrays()[0]
    with on_device("H200"):
        run = lambda *x: benchmark.low_bit_weights.with_blocks(case, "triton", {"num_warps": 2, "programs": None}, *x)
        assert "num_warps=2" in str(jax.make_jaxpr(run)(*arrays))
        run = lambda *x: benchmark.low_bit_weights.with_blocks(case, "mosaic_gpu", {"compute_wgs": 1}, *x)
        assert "num_threads=2" in str(jax.make_jaxpr(run)(*arrays))
