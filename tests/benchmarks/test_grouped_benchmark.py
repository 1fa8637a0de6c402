"""benchmarks/grouped.py: its cases and its output."""

import dataclasses
import json

import grouped as benchmark
import jax
import jax.numpy as jnp
import pytest

from jax_kernels.dispatch import on_device


def test_sizes_add_up():
    even, skewed = (benchmark.Case(32768, 1280, 2560, 64, sizes, "bf16").group_sizes for sizes in benchmark.SIZES)
    assert even.sum() == skewed.sum() == 32768
    assert even.min() == even.max() == 512
    assert skewed.min() < 120 < 6500 < skewed.max()


def test_flops_are_counted():
    case = benchmark.Case(8, 16, 32, 2, "even", "bf16", has_gradients=True)
    assert case.tflops(1.0) == 3 * 2 * 8 * 16 * 32 / 1e9


def test_blocks_override_the_plan(monkeypatch):
    case = benchmark.Case(512, 128, 64, 4, "even", "bf16", has_gradients=True)
    programs = []
    trace = lambda case, sets, op: programs.append(str(jax.make_jaxpr(lambda x: case.call(op, x))(sets[0])))
    monkeypatch.setattr(benchmark, "compiled", trace)
    shapes = {"x": (512, 64), "w": (4, 64, 128), "dout": (512, 128)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    arrays |= {"group_sizes": jax.ShapeDtypeStruct((4,), jnp.int32)}
    with on_device("H200"):
        benchmark.ours(case, [arrays], "triton", benchmark._blocks("num_warps=2,block_m=32"))
        part = "mosaic_gpu:row_group=3,snake=0"
        benchmark.ours(case, [arrays], benchmark._implementation(part), benchmark._blocks(part))
        in_8_bits = dataclasses.replace(case, k=128, has_gradients=False)
        arrays |= {"x": jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)}
        arrays |= {"w": jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)}
        for stages in (2, 3):
            benchmark.in_8_bits(in_8_bits, [arrays], "mosaic_gpu", blocks={"stages": stages})
    assert programs[2] != programs[3]
    assert programs[0].count("num_warps=2") == 3
    assert programs[1].count("grouped_matmul_sm90") >= 2
    assert benchmark._blocks(part) == {"row_group": 3, "snake": 0}
    assert benchmark._blocks("128,64,32,4,3,8") == {
        "block_m": 128, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 3, "row_group": 8
    }  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        "",
        "--with-gradients",
        "--epilogue --with-gradients",
        "--gated --with-gradients",
        "--gather --with-gradients",
        "--precision fp8",
        "--precision fp8 --gated",
    ],
)
def test_runs(tmp_path, monkeypatch, without_gpu, words):
    monkeypatch.setattr(benchmark, "prepare_process", lambda: None)
    output = tmp_path / "grouped.json"
    given = f"--shapes 32,16,24,3 --timer host --rounds 2 --seconds 0.001 --peers ragged_dot,dense {words}"
    assert benchmark.main([*given.split(), "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["sizes"] for row in rows] == ["even", "skewed"]
    assert (rows[1]["smallest_group"], rows[1]["largest_group"]) == (6, 17)
    peers = {} if "epilogue" in words else {"ragged_dot": "ok", "dense": "ok"}
    if "gated" in words:
        peers = {"two": "unavailable", "ragged_dot": "unavailable", "dense": "ok"}
    if "fp8" in words:
        for ending in ("", ", w quantized", ", all quantized"):
            peers |= {f"fp8 mosaic_gpu{ending}": "unavailable", f"fp8 xla{ending}": "ok"}
    if "gather" in words:
        peers = {"copy": "ok"}
    for row in rows:
        statuses = {c["name"]: c["status"] for c in row["contenders"]}
        assert statuses == {"mosaic_gpu": "unavailable", "triton": "unavailable", "xla": "ok"} | peers
        assert row["contenders"][2]["tflops"] > 0
