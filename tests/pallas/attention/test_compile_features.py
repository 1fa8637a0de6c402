"""The attention kernels with windows, segments, softcap, sinks, biases and a score_mod, compiled without a GPU.

Each case compiles in a process of its own. Its tiles must fit the GPU's shared memory, and roughly the registers.
"""

import json
import sys

import pytest

from tests.support.cases import tiers
from tests.tools import compile_case
from tests.tools.compile_budget import MOSAIC

EVERYTHING = {"window": 512, "segment_ids": True, "softcap": 30.0, "sinks": True, "kv_lengths": True, "kv_heads": 2}
# The lengths are odd, so that rows of the bias are not aligned in the caller's array.
CASES = {
    "window": ("h200", {"window": [512, 128]}),
    "segments": ("h200", {"segment_ids": True, "is_causal": True}),
    "bias": ("h200", {"bias": [2, 8, 4001, 3999]}),
    "bias_float32": ("a6000", {"bias": [2, 8, 4001, 3999], "bias_dtype": "float32", "is_causal": True}),
    "bias_of_keys": ("a100", {"bias": [2, 1, 1, 3999]}),
    # With Hopper's own backward, where the gradient of the bias is Triton's, too.
    "bias_mask": ("h200", {"bias": [1, 8, 4001, 3999], "mask": [1, 1, 4001, 3999], "implementation": "mosaic_gpu"}),
    "bias_lists": ("h200", {"bias": [1, 8, 4001, 3999], "longformer": 512, "implementation": "mosaic_gpu"}),
    "score_mod": ("h200", {"score_mod": True, "is_causal": True, "kv_heads": 2}),
    "score_mod_float32": ("a100", {"score_mod": True, "dtype": "float32"}),
    "lists": ("a6000", {"longformer": 512, "kv_heads": 2}),
    "lists_segments": ("a100", {"longformer": 512, "segment_ids": True, "kv_lengths": True, "is_causal": True}),
    "lists_of_an_array": ("rtx4090", {"mask": [1, 8, 4001, 3999], "is_causal": True}),
    # The last block alone is partial. Its loop must not be unrolled into the other loop, whose tiles fill memory.
    "odd_lengths_64": ("h200", {"head_dim": 64}),
    "odd_lengths_128": ("h200", {}),
    "odd_lengths_256": ("h200", {"head_dim": 256}),
    "odd_lengths_ada": ("rtx4090", {}),
    "odd_lengths_ada_256": ("rtx4090", {"head_dim": 256}),
    "odd_lengths_ampere": ("a100", {"head_dim": 256}),
    "lists_of_keys": ("a100", {"mask": [2, 8, 1, 3999], "is_causal": True, "kv_heads": 2}),
    "lists_of_keys_bias": ("rtx4090", {"mask": [2, 1, 1, 3999], "bias": [1, 8, 1, 3999]}),
    "lists_blackwell": ("b200", {"longformer": 512, "segment_ids": True}),
    "lists_rtx_blackwell": ("rtx pro 6000", {"longformer": 512, "segment_ids": True}),
    "lists_bias": ("a100", {"longformer": 512, "bias": [1, 8, 4001, 3999]}),
    "lists_score_mod": ("h200", {"longformer": 512, "score_mod": True}),
    "everything": ("a100", EVERYTHING | {"bias": [1, 8, 4001, 3999], "bias_dtype": "float32"}),
}
# Bytes that a kernel may spill. Reading a bias value by value would spill 25,000.
MOST_SPILLS = 1500
# The gradient of a bias judges an arithmetic mask by its positions: on sm_80 ptxas gives it 128 registers.
SPILLED = {"lists_bias": 2800}
# The row for 256 columns on an H200 has a kernel of its own for dvalue.
APART = {"odd_lengths_256"}


def _compile(gpu: str, options: dict) -> list[str]:
    """Compiles forward and gradients in this process. Returns the names of the kernels."""
    import jax
    import jax.numpy as jnp

    from jax_kernels import flash_attention, masks

    batch, q_length, kv_length, heads, head_dim = 2, 4001, 3999, 8, options.pop("head_dim", 128)
    kv_heads = options.pop("kv_heads", heads)
    dtype = options.pop("dtype", "bfloat16")
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arrays = {"query": array(batch, q_length, heads, head_dim)}
    arrays |= {name: array(batch, kv_length, kv_heads, head_dim) for name in ("key", "value")}
    if "bias" in options:
        arrays["bias"] = array(*options.pop("bias"), dtype=options.pop("bias_dtype", "bfloat16"))
    if options.pop("sinks", False):
        arrays["sinks"] = array(heads, dtype="float32")
    integers = {}
    if "mask" in options:
        integers["mask"] = array(*options.pop("mask"), dtype="bool")
    if "longformer" in options:
        integers["mask"] = masks.preset("longformer", window=options.pop("longformer"), n=64)
    if options.pop("score_mod", False):
        arrays |= {"slopes": array(heads, dtype="float32"), "rows": array(batch, q_length)}
        arrays |= {"columns": array(kv_length, dtype="float32")}
        integers |= {"ids": array(batch, kv_length + q_length, dtype="int32")}
    implementation = options.pop("implementation", "triton")
    if options.pop("segment_ids", False):
        integers["segment_ids"] = array(batch, q_length, dtype="int32"), array(batch, kv_length, dtype="int32")
    if options.pop("kv_lengths", False):
        integers["kv_lengths"] = array(batch, dtype="int32")

    def both(arrays, integers, cotangents):
        def attend(arrays):
            given = arrays | integers | options
            if "slopes" in given:
                slopes, rows, columns, ids = (given.pop(name) for name in ("slopes", "rows", "columns", "ids"))

                def mod(score, b, h, q, k):
                    score = score * columns[k] - slopes[h] * jnp.abs(q - k) + rows[b, q].astype(jnp.float32)
                    return jnp.where(ids[b, q] == ids[b, k], score, -jnp.inf)

                given["score_mod"] = mod
            return flash_attention(**given, return_lse=True, implementation=implementation)

        return jax.vjp(attend, arrays)[1](cotangents)

    cotangents = arrays["query"], array(batch, heads, q_length, dtype="float32")
    return compile_case.lower_and_compile(gpu, both, arrays, integers, cotangents)[1]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("case", tiers.cases(CASES, {"lists_segments"}))
def test_features_in_triton(case):
    gpu, options = CASES[case]
    printed, _, others = compile_case.compile_script(__file__, gpu, json.dumps(options))
    names = json.loads(printed)
    kernels = {name: figures for name, figures in others.items() if name.startswith(tuple(names))}
    # The bias's gradient, and a kernel for rows far from 0. In Hopper kernels an array mask adds its bits, for both
    # directions, and its live blocks.
    of_mosaic = 5 if "mask" in options else 2
    expected = of_mosaic if "implementation" in options else 4 if "bias" in options else 3
    expected += case in APART
    assert len(names) == len(kernels) == expected, (names, kernels)
    for name, figures in kernels.items():
        assert figures["spill_stores"] + figures["spill_loads"] <= SPILLED.get(case, MOST_SPILLS), (name, figures)


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("case", tiers.cases(MOSAIC, ()))
def test_features_in_mosaic(case):
    options, *most = MOSAIC[case]
    report = compile_case.compile_spec("h200", compile_case.Spec(implementation="mosaic_gpu", **options))
    assert report["error"] is None
    # dquery's own kernel spills nothing.
    kernels = {"forward": most[0], "backward": most[1]} | ({"backward_dq": 0} if options.get("deterministic") else {})
    for name, allowed in kernels.items():
        figures = report["kernels"][f"attention_{name}_sm90_mosaic_gpu_kernel"]
        assert not figures["notes"], (name, figures)
        assert figures["spill_stores"] + figures["spill_loads"] <= allowed, (name, figures)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
def test_one_key_block_with_a_bias():
    """Triton, which takes the rows far from 0, unrolls a loop over one block: it has to fit in shared memory, too."""
    spec = compile_case.Spec(implementation="mosaic_gpu", bias="bhts", q_length=320, kv_length=40)
    report = compile_case.compile_spec("h200", spec)
    assert report["error"] is None
    assert report["kernels"]["attention_far_rows_triton"]["shared_memory"] <= 232448


# Persistent CTAs of the backward, and the bytes they may spill: with segments, an address that each step reads again.
FORWARD = "AttentionForwardSm90(2, 128, 2, share_q_out=True)"
NARROW = "AttentionBackwardSm90(128, head_group=4, persistent=True, v_stages=2)"
BROAD = "AttentionBackwardSm90(64, head_group=4, early_dv=True, persistent=True)"
PERSISTENT = {
    "lists_64": ({"head_dim": 64, "cells": "bhts", "kv_heads": 2}, 0),
    "lists_128": ({"cells": "bhts", "kv_heads": 2}, 0),
    "mask_128": ({"mask": "bts"}, 0),
    "window_64": ({"head_dim": 64, "window": "1000,-1", "is_causal": True}, 0),
    "window_128": ({"window": "1000,-1", "is_causal": True}, 0),
    "window_128_gqa": ({"window": "1000,-1", "is_causal": True, "kv_heads": 2}, 0),
    "segments_128": ({"segment_ids": True}, 0),
    "segments_128_causal": ({"segment_ids": True, "is_causal": True}, 24),
}


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.slow
@pytest.mark.parametrize("case", PERSISTENT)
def test_persistent_backward_in_mosaic(case):
    options, most = PERSISTENT[case]
    blocks = f"{FORWARD}, {NARROW if options.get('head_dim') == 64 else BROAD}"
    spec = compile_case.Spec(implementation="mosaic_gpu", blocks=blocks, q_length=8192, kv_length=8192, **options)
    report = compile_case.compile_spec("h200", spec)
    assert report["error"] is None
    figures = report["kernels"]["attention_backward_sm90_mosaic_gpu_kernel"]
    assert not figures["notes"], figures
    assert figures["spill_stores"] + figures["spill_loads"] <= most, figures


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], json.loads(sys.argv[2]))))
