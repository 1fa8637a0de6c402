"""The cost model of tuning: never leaves out the fastest blocks of a sweep, and leaves out hopeless ones."""

import dataclasses
import json
from pathlib import Path

import pytest

from jax_kernels import flash_attention, matmul, rms_norm
from jax_kernels.device import CPU, device_info
from jax_kernels.ops.matmul.implementations import MatmulRequest
from jax_kernels.ops.normalization.implementations import NormRequest
from jax_kernels.pallas.block_specs.candidates import TiledCall, attention_candidates, matmul_candidates
from jax_kernels.pallas.block_specs.matmul_specs import MatmulSm90, MatmulTriton
from jax_kernels.pallas.block_specs.normalization_specs import NormTriton
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton, AttentionForwardSm90, AttentionForwardTriton
from jax_kernels.tuning import cost_model
from tests.support.cases.requests import request_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def attention(batch, length, heads, kv_heads, head_dim, **arguments):
    keys = (batch, length, kv_heads, head_dim)
    return request_of(flash_attention, (batch, length, heads, head_dim), keys, keys, **arguments)


def of_matmul(gpu, m, n, k, *, is_gated=False):
    fields = {"dtype": "bfloat16", "out_dtype": "bfloat16", "shapes": ((m, k), (k, n), (m, n))}
    plain = {"activation": None, "precision": None, "scaling": None}
    return MatmulRequest(op="matmul", device=device_info(gpu), m=m, n=n, k=k, is_gated=is_gated, **fields, **plain)


# By file: the blocks of its contender "row", which the other contenders change.
_ROW = MatmulSm90(block_n=256, stages=4, row_group=8, cluster=2)
_WIDE = MatmulSm90(block_n=192, stages=4, row_group=8, pingpong=True, wg_rows=128)
MATMULS = {
    "matmul-wide-h200": _ROW,
    "matmul-options-h200": _ROW,
    "matmul-short-h100": _ROW,
    "matmul-short-rows-h100": _WIDE,
    "matmul-gated-wide-h100": dataclasses.replace(_ROW, cluster=1),
    "matmul-gated-blocks-h200": _ROW,
}
_NAMES = {"rows_together": "row_group"}  # a field's name when it was timed, and now


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def gpu_of(name):
    return "h100" if "h100" in name else "h200"


def changed(blocks, text):
    """The blocks with the changes of a contender's name, such as "block_n=192,cluster=1"; None for a peer."""
    if text == "row":
        return blocks
    values = text.split(",")
    if isinstance(blocks, MatmulSm90) and all(x.isdecimal() for x in values):
        names = "block_n", "stages", "row_group", "", "cluster", "compute_wgs"
        pairs = [(name, int(x)) for name, x in zip(names, values, strict=True) if name]
    else:
        pairs = [x.partition("=")[::2] for x in text.replace(" ", ",").split(",")]
        pairs = [(_NAMES.get(name, name), int(x)) for name, x in pairs if x]
    known = {field.name for field in dataclasses.fields(blocks)}
    return dataclasses.replace(blocks, **dict(pairs)) if pairs and {name for name, _ in pairs} <= known else None


def _of_matmuls():
    for name, blocks in MATMULS.items():
        for row in read(name):
            timed = [(changed(blocks, x["name"]), x["median_ms"]) for x in row["contenders"]]
            request = of_matmul(gpu_of(name), row["m"], row["n"], row["k"], is_gated=row["kind"] == "gated")
            yield f"{name} {row['label']}", request, [x for x in timed if x[0] is not None]


def _of_norms():
    blocks = NormTriton(block_rows=1, chunk=32768, num_warps=8)
    for row in read("normalization-blocks-h200"):
        if row["mode"] == "fwd":
            timed = [(changed(blocks, x["name"]), x["median_ms"]) for x in row["contenders"]]
            request = NormRequest("layer_norm", device_info("h200"), row["rows"], row["columns"], "bfloat16")
            yield row["label"], request, [x for x in timed if x[0] is not None]


def _of_attention():
    kinds = {"fwd": AttentionForwardTriton, "bwd": AttentionBackwardTriton}
    plain = {"full": (16, 128), "causal": (8, 256)}
    rows = read("triton-blocks-h100")
    for kind in sorted({(x["attention"], x["direction"]) for x in rows if x["attention"] in plain}):
        heads, head_dim = plain[kind[0]]
        request = attention(2, 8192, heads, heads, head_dim, gpu="h100", is_causal=kind[0] == "causal")
        of_kind = [x for x in rows if (x["attention"], x["direction"]) == kind]
        yield f"triton-blocks-h100 {kind}", request, [(kinds[kind[1]](*x["config"]), x["median_ms"]) for x in of_kind]
    request = attention(2, 8192, 8, 8, 256, is_causal=True)
    timed = [(AttentionBackwardTriton(**x["fields"]), x["ms"]) for x in read("triton-backward-256-h200") if "ms" in x]
    yield "triton-backward-256-h200", request, timed


SWEEPS = [*_of_matmuls(), *_of_norms(), *_of_attention()]


@pytest.mark.parametrize(("request_", "timed"), [x[1:] for x in SWEEPS], ids=[x[0] for x in SWEEPS])
def test_the_fastest_of_a_sweep_is_kept(request_, timed):
    """So is every entry of at most 1.05 times its time. Each entry has a prediction."""
    assert len(timed) > 1
    assert all(cost_model.predicted_seconds(request_, blocks) for blocks, _ in timed)
    least = min(ms for _, ms in timed)
    slower = cost_model.slower(request_, [blocks for blocks, _ in timed])
    assert not [blocks for blocks, ms in timed if ms <= 1.05 * least and blocks in slower]


def test_predictions_are_below_the_times():
    """Each part of the model is a lower bound, so that a prediction is at most the time that was measured."""
    for name, request, timed in SWEEPS:
        for blocks, ms in timed:
            assert cost_model.predicted_seconds(request, blocks) < 1.02e-3 * ms, (name, blocks)


def test_blocks_that_are_left_out():
    """Small tiles of a large matmul read too much; large tiles of a small one leave SMs idle, or are half empty."""
    fields = {"itemsize": 2, "shared_memory": device_info("h200").shared_memory_per_block}
    spec = MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=4, num_stages=4)
    blocks = matmul_candidates(spec, TiledCall(**fields))
    tile = lambda x: (x.block_m, x.block_n)
    large = cost_model.slower(of_matmul("h200", 8192, 8192, 8192), blocks)
    assert {tile(x) for x in large} == {(16, 64), (32, 64)}
    small = cost_model.slower(of_matmul("h200", 1024, 1024, 4096), blocks)
    assert {(128, 256), (256, 128)} < {tile(x) for x in small}
    assert all(times > cost_model.MARGIN for times in small.values())
    few = attention(1, 1056, 24, 24, 128)  # 216 tiles of 128 queries, or 144 of 192: each in two rounds of 132 SMs
    ours = AttentionForwardSm90(2, 128, 2)
    three = dataclasses.replace(ours, compute_warpgroups=3)
    assert cost_model.slower(few, [ours, three]) == {}  # 192 / 128 is no more than the margin
    short = dataclasses.replace(attention(1, 8192, 132, 4, 128), q_length=64)  # one tile a head, half of 128 queries
    candidates = attention_candidates(AttentionForwardTriton(64, 64, 4, 2), TiledCall(width=128, **fields))
    kept = [x for x in candidates if x not in cost_model.slower(short, candidates)]
    assert {x.block_q for x in kept} == {64}


def test_calls_without_a_prediction():
    blocks = AttentionForwardTriton(64, 64, 4, 2)
    plain = attention(1, 1024, 4, 2, 64)
    assert cost_model.predicted_seconds(plain, blocks) > 0
    windowed = attention(1, 1024, 4, 2, 64, is_causal=True, window=(128, 0))
    changes = {"has_kv_lengths": True}, {"q_offset": None}, {"has_mask_object": True}, {"has_score_mod": True}
    for request in (windowed, *(dataclasses.replace(plain, **x) for x in changes)):
        assert cost_model.predicted_seconds(request, blocks) is None
        assert cost_model.slower(request, [blocks]) == {}
    unknown = dataclasses.replace(plain, device=CPU)
    assert cost_model.predicted_seconds(unknown, blocks) is None
    assert cost_model.predicted_seconds(request_of(rms_norm, (64, 128)), object()) is None
    assert cost_model.predicted_seconds(dataclasses.replace(of_matmul("h200", 8, 8, 8), scaling="row"), _ROW) is None


def test_requests_of_ops():
    """The requests above are the ones that the ops make."""
    assert dataclasses.asdict(request_of(matmul, (64, 128), (128, 256))) == dataclasses.asdict(
        of_matmul("h200", 64, 256, 128)
    )


def test_split_matmuls():
    """With few work tiles, programs that split the inner dimension are predicted to be faster."""
    whole = MatmulTriton(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4)
    split = dataclasses.replace(whole, split_steps=4)
    request = of_matmul("h200", 64, 1024, 65536)
    assert cost_model.slower(request, [whole, split]).keys() == {whole}
