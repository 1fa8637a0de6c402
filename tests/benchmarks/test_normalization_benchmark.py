"""benchmarks/normalization.py: its measurements and its output."""

import json

import jax
import jax.numpy as jnp
import normalization as benchmark
import pytest

from jax_kernels.dispatch import on_device


def test_blocks_by_direction():
    text = "1,4;2,8;1,8,2;1,16,1,8192;sm90:4,4,3;sm90:4,4,5;sm90:16,4,3;sm90:4,3,2"
    text += ";fwd:triton:num_warps=8,programs=4;bwd:mosaic_gpu:stages=2"
    forward, backward = (benchmark.Case("layer_norm", mode, 8, 4096) for mode in ("fwd", "bwd"))
    hopper = lambda *numbers: ("mosaic_gpu", dict(zip(("row_warps", "warpgroups", "stages"), numbers, strict=True)))
    assert benchmark._blocks(forward, text) == [
        ("triton", {}),
        ("mosaic_gpu", {}),
        ("triton", {"block_rows": 1, "num_warps": 4}),
        ("triton", {"block_rows": 2, "num_warps": 8}),
        *(hopper(4, 4, 3), hopper(4, 4, 5), hopper(16, 4, 3), hopper(4, 3, 2)),
        ("triton", {"num_warps": 8, "programs": 4}),
    ]
    assert benchmark._blocks(backward, text) == [
        ("triton", {}),
        ("mosaic_gpu", {}),
        ("triton", {"block_rows": 1, "num_warps": 8, "programs": 2}),
        ("triton", {"block_rows": 1, "num_warps": 16, "programs": 1, "chunk": 8192}),
        *(hopper(4, 4, 3), hopper(16, 4, 3), hopper(4, 3, 2)),  # shared memory has no room for five stages
        ("mosaic_gpu", {"stages": 2}),
    ]
    assert forward.megabytes * 1.5 == backward.megabytes == 3 * 2 * 8 * 4096 / 1e6


def test_rows_shared_by_ctas():
    """Includes rows that are too long for the block spec's kernel."""
    case = benchmark.Case("rms_norm", "fwd", 64, 32768)
    x = jax.ShapeDtypeStruct((case.rows, case.columns), jnp.bfloat16)
    blocks = {"cluster": 2, "claims": 0, "turns": 2}
    with on_device("H200"):
        run = lambda x: benchmark._with_blocks(case, (), "mosaic_gpu", blocks, x)
        assert "cluster=(2,)" in str(jax.make_jaxpr(run)(x))
        with pytest.raises(NotImplementedError, match="these are 32768"):
            jax.eval_shape(lambda x: benchmark._with_blocks(case, (), "mosaic_gpu", {"stages": 2}, x), x)


@pytest.mark.timeout(300)
def test_runs(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    output = tmp_path / "norms.json"
    common = ["--shapes", "16,40", "--timer", "host", "--rounds", "2", "--seconds", "0.001", "--output", str(output)]
    assert benchmark.main([*common, "--peers", "torch,liger"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["label"] for row in rows] == [
        f"{op} {mode} 16x40 bf16" for op in ("layer_norm", "rms_norm") for mode in ("fwd", "bwd")
    ]
    for row in rows:
        statuses = {c["name"]: c["status"] for c in row["contenders"]}
        assert statuses == {
            "triton": "ok",
            "mosaic_gpu": "unavailable",
            "xla": "ok",
            "torch": "ok",
            "liger": "unavailable",
            "copy": "ok",
        }
        ours = row["contenders"][0]
        assert ours["error"] < 0.01
        assert ours["gigabytes_per_second"] > 0
    assert benchmark.main([*common, "--sweep", "2,1;2,1,1", "--ops", "rms_norm"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [[c["name"] for c in row["contenders"]] for row in rows] == [
        ["triton", "mosaic_gpu", "triton block_rows=2 num_warps=1", "copy"],
        ["triton", "mosaic_gpu", "triton block_rows=2 num_warps=1 programs=1", "copy"],
    ]
    statuses = {c["name"].split()[0]: c["status"] for row in rows for c in row["contenders"]}
    assert statuses == {"triton": "ok", "mosaic_gpu": "unavailable", "copy": "ok"}
