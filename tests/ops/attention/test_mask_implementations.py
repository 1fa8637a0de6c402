"""The implementation of each mask on each GPU, as docs/guides/masks.md lists it; never "xla" without a reason."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import (
    decode_attention,
    dilated_attention,
    dynamic_mask_attention,
    explain,
    flash_attention,
    masks,
)
from jax_kernels.cli.ops import OPS
from jax_kernels.dispatch import on_device

pytestmark = pytest.mark.triton
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "masks.md"
GPUS = {
    "Hopper": ("h100", "h200"),
    "Ampere, Ada": ("a100", "a6000", "rtx 4090"),
    "Blackwell": ("b200", "rtx 5090"),
}
B, T, H, KV_HEADS = 2, 4096, 8, 4
OTHER = masks.causal() & masks.sliding_window(500, 0) | masks.prefix(16)
IDS = np.zeros((B, T), np.int32)


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


bools = functools.partial(shaped, dtype=bool)
slopes = lambda score, b, h, q, k: score - 0.1 * jnp.abs(q - k)
by_pair = lambda score, b, h, q, k: score + jnp.zeros((T, T))[q, k]
SPARSE: dict[str, dict[str, Any]] = {
    "other": {"mask": OTHER},
    "blocks": {"mask": masks.block_sparse(np.ones((32, 32), bool), 128)},
    "function": {"mask": masks.from_function(lambda b, h, q, k: (q + k) % 3 == 0)},
}
WITH: dict[str, dict[str, Any]] = {
    "score_mod": {"mask": OTHER, "score_mod": slopes},
    "score_mod of an array": {"mask": bools(B, 1, T, T), "score_mod": slopes},
    "sinks": {"mask": OTHER, "sinks": shaped(H, dtype=jnp.float32), "softcap": 30.0},
    "deterministic": {"mask": OTHER, "deterministic": True},
}
WINDOW = masks.causal() & masks.sliding_window(255, 0)
# The arguments of the calls in each row of the page's table.
FLASH: dict[str, list[dict[str, Any]]] = {
    "causal; causal with a window": [{"mask": masks.causal()}, {"mask": WINDOW}],
    "a window on both sides; segments": [
        {"mask": masks.sliding_window(255, 255)},
        {"mask": masks.causal() & masks.segments(IDS)},
    ],
    "prefix (`kv_lengths`)": [{"mask": masks.prefix(100)}],
    "an array with rows for queries": [{"mask": bools(B, 1, T, T)}],
    "an array of keys": [{"mask": bools(B, 1, 1, T)}],
    "any other Mask": list(SPARSE.values()),
    "any other Mask with a score_mod, sinks, or `deterministic=True`": list(WITH.values()),
    "any other Mask with a bias": [
        {"mask": OTHER, "bias": shaped(1, H, T, T, dtype=dtype)} for dtype in (jnp.bfloat16, jnp.float32)
    ],
}
DYNAMIC = [
    {"mask": bools(B, KV_HEADS, T, T), "bias": shaped(B, KV_HEADS, T, T)},
    {"mask": bools(B, KV_HEADS, 1, T), "bias": shaped(B, KV_HEADS, 1, T)},
]
DECODE: dict[str, list[dict[str, Any]]] = {
    "`decode_attention`: a Mask, an array of keys, a window": [
        {"mask": OTHER, "kv_lengths": shaped(B, dtype=jnp.int32)},
        {"mask": bools(B, 1, 1, T)},
        {"window": 100},
    ],
    "`decode_attention`: a mask that differs between heads": [{"mask": bools(B, H, 1, T)}],
    "`decode_attention`: a bias without a mask": [{"bias": shaped(1, H, 1, T)}],
}
HEAD_DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256)]


def qkv(head_dim: int, v_head_dim: int, *, dtype: Any = jnp.bfloat16, length: int = T, kv_heads: int = KV_HEADS):
    sizes = (H, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim)
    return [shaped(B, length, heads, size, dtype=dtype) for heads, size in sizes]


def rows() -> dict[str, tuple[str, ...]]:
    """The cells of the page's table by its first column."""
    text = PAGE.read_text().split("### The implementation on each GPU")[1].split("`xla` runs")[0]
    found = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in text.splitlines() if "|" in line]
    assert found[0] == ("mask", *GPUS)
    return {name: cells for name, *cells in found[2:]}


def named(cell: str) -> list[str]:
    """The implementations that a cell names, its default first."""
    return re.findall(r"`(\w+)`", cell)


def plans(op: Any, arrays: Any, calls: list[dict[str, Any]]):
    """(generation, Plan) of each call on each GPU."""
    for generation, gpus in GPUS.items():
        for gpu in gpus:
            yield from ((generation, explain(op, *arrays, device=gpu, **call)) for call in calls)


@pytest.mark.parametrize("name", FLASH)
def test_table_of_masks(name):
    """At head_dim 128 the first name of a cell runs; at other head_dims one of the cell's names."""
    for head_dims in HEAD_DIMS:
        for generation, plan in plans(flash_attention, qkv(*head_dims), FLASH[name]):
            names = named(rows()[name][list(GPUS).index(generation)])
            assert plan.implementation in (names[:1] if head_dims == (128, 128) else names), (head_dims, plan)


def test_table_of_other_calls():
    table, every = rows(), qkv(128, 128)
    own = qkv(128, 128, kv_heads=H)
    dilated = {"segment_lengths": (1024, 2048), "dilation_rates": (1, 2), "is_causal": True}
    short = qkv(128, 128, length=2048)
    cases: dict[str, list[Any]] = {
        "an array of keys, shorter than 4096 x 4096": [(flash_attention, short, [{"mask": bools(B, 1, 1, 2048)}])],
        "any Mask in float32": [(flash_attention, qkv(64, 64, dtype=jnp.float32), list(SPARSE.values()))],
        "`dynamic_mask_attention`, `dilated_attention`": [
            (dynamic_mask_attention, every, DYNAMIC),
            (dilated_attention, own, [dilated]),
        ],
    }
    query = shaped(B, 1, H, 128)
    cases |= {name: [(decode_attention, [query, *every[1:]], calls)] for name, calls in DECODE.items()}
    assert {*table} == {*FLASH, *cases}
    for name, of_row in cases.items():
        for op, arrays, calls in of_row:
            for generation, plan in plans(op, arrays, calls):
                assert plan.implementation == named(table[name][list(GPUS).index(generation)])[0], (name, plan)


def test_stars_skip_no_block():
    """A star: the mask is read as a bias. Other masks of keys are lists, which have their own block specs on Hopper."""
    of_length = lambda length: explain(
        flash_attention, *qkv(128, 128, length=length), mask=bools(B, 1, 1, length), device="h100"
    )
    listed = explain(flash_attention, *qkv(128, 128), mask=OTHER, device="h100")
    assert of_length(T).config == listed.config != of_length(2048).config


@pytest.mark.parametrize("gpu", ["a100", "a6000", "rtx 4090", "b200", "rtx 5090"])
def test_sharded_attention_runs_by_a_kernel(gpu):
    for name in ("ring_attention", "sequence_parallel_dilated_attention"):
        with on_device(gpu):
            plan = OPS[name].plan("bfloat16", None)
        assert plan.implementation == "triton", (name, plan)


@pytest.mark.parametrize("gpu", [gpu for gpus in GPUS.values() for gpu in gpus])
def test_xla_runs_only_what_no_kernel_can_inline(gpu):
    plan = explain(flash_attention, *qkv(128, 128), score_mod=by_pair, mask=OTHER, device=gpu)
    assert plan.implementation == "xla"
    assert "score_mod" in str(plan)
