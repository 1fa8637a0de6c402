"""The Hopper kernels in JAX's Mosaic interpreter: numerics against float64, and races.

The interpreter sees neither overlap hazards of wgmma nor layouts nor shared-memory overflow. The compile tests and the
tests on a GPU do.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import flash_attention
from jax_kernels.dispatch import on_device
from jax_kernels.pallas.attention import softmax
from jax_kernels.testing.attention_cases import LOWEST, LOWEST_BF16
from tests.support.cases import tiers
from tests.support.processes import forked

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "tests" / "support" / "interpreters" / "mosaic.py"
SMALL = {"batch": 1, "q_length": 128, "kv_length": 128, "heads": 1, "kv_heads": 1}
LARGE = SMALL | {"q_length": 200, "kv_length": 300}
WIDE = {"head_dim": 128, "v_head_dim": 128}
VERY_WIDE = {"head_dim": 256, "v_head_dim": 256}
EVERYTHING = {
    "batch": 2,
    "q_length": 100,
    "kv_length": 140,
    "heads": 2,
    "kv_heads": 1,
    "is_causal": True,
    "q_offset": [50, -20],
    "kv_lengths": [230, 70],
    "window": 60,
    "segments": "packed",
    "softcap": 2.0,
    "sinks": True,
}

CASES = {
    "causal": SMALL | {"is_causal": True, "q_length": 256, "kv_length": 256, "races": True},
    "without_lse": SMALL | {"is_causal": True, "q_length": 77, "kv_length": 130, "races": True, "without_lse": True},
    "full_128": SMALL | {"head_dim": 128, "v_head_dim": 128, "races": True},
    # Blocks of keys in parts: of two heads, and a last block with fewer keys. A counter orders the parts, which the
    # race detection does not know.
    "split_128_gqa": SMALL | WIDE | {"q_length": 300, "kv_length": 130, "heads": 2, "cores": 132},
    "split_256": SMALL | VERY_WIDE | {"q_length": 500, "kv_length": 100, "cores": 6},
    "four_queries": SMALL | {"batch": 2, "q_length": 4, "heads": 2, "races": True},
    "odd": SMALL | {"q_length": 77, "kv_length": 203},
    "gqa": SMALL | {"heads": 4, "kv_heads": 2, "is_causal": True, "q_length": 70, "kv_length": 150, "q_offset": 80},
    # Queries without a key, and fewer keys than queries.
    "negative_offset": SMALL | {"is_causal": True, "q_offset": -40, "q_length": 133, "kv_length": 66},
    "lengths_and_offsets": SMALL
    | {"batch": 2, "is_causal": True, "kv_lengths": [300, 40], "q_offset": [-20, 60], "head_dim": 128},
    # The last work tile leaves warpgroups without queries.
    "idle_128": SMALL | WIDE | {"q_length": 190, "kv_length": 300, "heads": 2, "kv_heads": 1, "races": True},
    "idle_64": SMALL | {"q_length": 200, "kv_length": 203, "heads": 2, "races": True},
    "idle_256_bias": SMALL | VERY_WIDE | {"q_length": 20, "kv_length": 150, "bias": "ts"},
    # Odd numbers of queries: the backward reads copies of queries and dout.
    "odd_128_gqa": SMALL | WIDE | {"q_length": 65, "kv_length": 127, "heads": 2, "is_causal": True, "q_offset": 62},
    "odd_128_window": SMALL
    | WIDE
    | {"batch": 2, "q_length": 129, "kv_length": 129, "heads": 2, "kv_heads": 1, "window": [50, 20], "races": True},
    "odd_256": SMALL | VERY_WIDE | {"q_length": 133, "kv_length": 255},
    "odd_segments_128": LARGE
    | WIDE
    | {"q_length": 133, "kv_length": 201, "segments": "packed", "is_causal": True, "races": True},
    # Few causal queries behind many keys: the loops of neighbouring blocks of keys start at different queries.
    "few_queries_128": SMALL
    | WIDE
    | {"q_length": 200, "kv_length": 700, "heads": 2, "is_causal": True, "q_offset": 500, "races": True},
    "few_queries_64_persistent": SMALL
    | {"q_length": 257, "kv_length": 900, "is_causal": True, "q_offset": 300}
    | {"persistent": {"ctas": 2, "v_stages": 2}},
    # Without a running maximum: bounds that hold, that fail in some warps, and that always fail.
    "bounded": SMALL | {"q_length": 200, "kv_length": 300, "bounded": True, "races": True},
    "bounded_causal": SMALL | {"is_causal": True, "q_length": 300, "kv_length": 300, "heads": 2, "bounded": True},
    "bounded_mixed": SMALL | {"kv_length": 400, "magnitude": 3.0, "bounded": True},
    "bounded_never": SMALL | {"kv_length": 300, "magnitude": 100.0, "bounded": True},
    "bounded_rising": SMALL | {"kv_length": 300, "bounded": True, "rising": True},
    # Sums of these values overflow unless P is below 1.
    "bounded_large_values": SMALL
    | {"q_length": 200, "kv_length": 300, "magnitude": 2.5, "value_magnitude": 2.0**124}
    | {"bounded": True, "out_only": True},
    "bounded_fp16": SMALL | {"dtype": "float16", "kv_length": 300, "magnitude": 0.5, "bounded": True},
    "bounded_softcap": SMALL | {"kv_length": 300, "softcap": 30.0, "magnitude": 2.0, "bounded": True},
    "bounded_softcap_small": SMALL
    | {"kv_length": 300, "softcap": 50.0, "is_causal": True, "q_length": 300, "bounded": True},
    "bounded_lengths": SMALL | {"batch": 2, "kv_length": 300, "kv_lengths": [-5, 400], "bounded": True},
    "head_dim_40": SMALL | {"head_dim": 40, "v_head_dim": 24, "is_causal": True},
    "head_dim_192": SMALL | {"head_dim": 192, "v_head_dim": 128, "is_causal": True, "kv_length": 70},
    # Head_dims between 64, 128 and 256: each form of a backward's step, with larger and smaller values.
    "head_dim_80": SMALL | {"head_dim": 80, "v_head_dim": 80, "q_length": 200, "kv_length": 203, "races": True},
    "head_dim_72_40": SMALL | {"head_dim": 72, "v_head_dim": 40, "is_causal": True, "kv_length": 200, "q_offset": 72},
    "head_dim_96_window": LARGE
    | {"head_dim": 96, "v_head_dim": 96, "window": [30, 50], "heads": 4, "kv_heads": 2, "races": True},
    "head_dim_32_96_lists": LARGE | {"head_dim": 32, "v_head_dim": 96, "pattern": "cells", "heads": 2, "kv_heads": 1},
    "head_dim_96_bias": SMALL
    | {"head_dim": 96, "v_head_dim": 64, "bias": "hts", "bias_dtype": "float32", "heads": 2, "kv_length": 150},
    "head_dim_96_deterministic": SMALL
    | {"head_dim": 96, "v_head_dim": 32, "segments": "packed", "kv_length": 200, "deterministic": True},
    "head_dim_112_segments": LARGE | {"head_dim": 112, "v_head_dim": 112, "segments": "packed", "is_causal": True},
    "head_dim_160": LARGE | {"head_dim": 160, "v_head_dim": 160, "is_causal": True, "heads": 2, "races": True},
    "head_dim_160_80_fp16": SMALL
    | {"head_dim": 160, "v_head_dim": 80, "dtype": "float16", "softcap": 2.0, "kv_length": 200, "q_length": 70},
    "head_dim_192_128": LARGE | {"head_dim": 192, "v_head_dim": 128, "bounded": True, "races": True},
    "head_dim_192_128_lists": LARGE
    | {"head_dim": 192, "v_head_dim": 128, "pattern": "cells", "heads": 4, "kv_heads": 2, "races": True},
    "head_dim_192_128_bias": SMALL
    | {"head_dim": 192, "v_head_dim": 128, "bias": "hts", "bias_masks": True, "heads": 2, "kv_length": 150}
    | {"is_causal": True, "q_offset": 100},
    "head_dim_192_128_keys": SMALL
    | {"head_dim": 192, "v_head_dim": 128, "bias": "bhs", "batch": 2, "heads": 2, "kv_lengths": [90, 150]},
    "head_dim_192_128_everything": EVERYTHING | {"head_dim": 192, "v_head_dim": 128},
    "head_dim_192_128_deterministic": SMALL
    | {"head_dim": 192, "v_head_dim": 128, "is_causal": True, "kv_length": 200, "deterministic": True},
    "head_dim_128_192": SMALL | {"head_dim": 128, "v_head_dim": 192, "is_causal": True, "kv_length": 200},
    "head_dim_192_192": SMALL
    | {"head_dim": 192, "v_head_dim": 192, "is_causal": True, "q_length": 300, "kv_length": 300, "races": True},
    "head_dim_192_192_everything": EVERYTHING | {"head_dim": 192, "v_head_dim": 160},
    "head_dim_256": SMALL | {"head_dim": 256, "v_head_dim": 256, "is_causal": True, "races": True},
    "deterministic_128": LARGE | WIDE | {"is_causal": True, "kv_lengths": [200], "deterministic": True, "races": True},
    "window_64": LARGE | {"window": [30, 50], "q_length": 300, "kv_length": 200, "races": True},
    "window_128_causal": LARGE | WIDE | {"window": 40, "is_causal": True, "deterministic": True, "races": True},
    "window_128_right": LARGE | WIDE | {"window": [-1, 25], "deterministic": True},
    "window_256_offsets_lengths": SMALL
    | VERY_WIDE
    | {"batch": 2, "window": [20, 9], "q_offset": [17, -40], "kv_lengths": [120, 77], "q_length": 150}
    | {"deterministic": True},
    "segments_64": LARGE | {"segments": "packed", "heads": 2, "bounded": True, "races": True},
    "segments_128_causal": LARGE
    | WIDE
    | {"segments": "packed", "is_causal": True, "deterministic": True, "races": True},
    # Not causal: the loops of neighbouring blocks of keys start at different blocks of queries.
    "segments_128_persistent": SMALL
    | WIDE
    | {"q_length": 700, "kv_length": 700, "heads": 2, "segments": "packed", "races": True}
    | {"persistent": {"ctas": 2, "v_stages": 1}},
    "segments_128_mixed": SMALL | WIDE | {"segments": "mixed", "q_length": 77, "kv_length": 203},
    "segments_128_both": SMALL
    | WIDE
    | {"batch": 2, "segments": "both", "heads": 4, "kv_heads": 2, "is_causal": True, "q_length": 133, "kv_length": 203},
    "segments_64_both": SMALL
    | {"batch": 2, "segments": "both", "heads": 4, "kv_heads": 2, "window": 70, "q_length": 200},
    "segments_256_causal": SMALL
    | VERY_WIDE
    | {"segments": "packed", "is_causal": True, "q_length": 64, "kv_length": 200},
    "softcap_128_causal": LARGE | WIDE | {"softcap": 30.0, "is_causal": True, "magnitude": 10.0, "deterministic": True},
    "softcap_256_dead": SMALL | VERY_WIDE | {"softcap": 0.5, "is_causal": True, "q_offset": -40, "deterministic": True},
    "sinks_64": SMALL | {"sinks": True, "is_causal": True, "q_offset": -40, "heads": 2},
    "sinks_128": SMALL | WIDE | {"sinks": True, "window": 30, "deterministic": True},
    "no_sink_64": SMALL | {"sinks": True, "no_sink": True, "is_causal": True, "q_offset": -40, "heads": 2},
    "no_sink_lengths": SMALL
    | WIDE
    | {"sinks": True, "no_sink": True, "batch": 2, "kv_lengths": [0, 70], "heads": 2, "deterministic": True},
    # NaN and infinities past kv_lengths.
    "garbage_64": LARGE | {"batch": 2, "kv_lengths": [290, 0], "garbage": True, "races": True, "bounded": True},
    "garbage_128_causal": LARGE
    | WIDE
    | {"batch": 2, "kv_lengths": [130, 256], "is_causal": True, "q_offset": [100, -20], "garbage": True, "heads": 2}
    | {"deterministic": True, "races": True},
    "garbage_256": SMALL | VERY_WIDE | {"batch": 2, "kv_lengths": [100, 0], "garbage": True, "deterministic": True},
    "garbage_lists": LARGE
    | {"batch": 2, "kv_lengths": [290, 70], "pattern": "cells", "heads": 2, "garbage": True, "deterministic": True},
    "garbage_persistent_128": LARGE
    | WIDE
    | {"batch": 2, "kv_lengths": [70, 290], "garbage": True, "heads": 2, "bias": "s"}
    | {"persistent": {"ctas": 2}, "races": True},
    "bias_64": LARGE
    | {
        "without_lse": True,
        "bias": "hts",
        "bias_masks": True,
        "bias_whole": LOWEST_BF16,
        "is_causal": True,
        "q_offset": 100,
        "heads": 2,
        "races": True,
    },
    "bias_128_float32": SMALL
    | WIDE
    | {"bias": "bhts", "bias_dtype": "float32", "heads": 2, "window": 40, "kv_length": 70},
    "bias_256": SMALL | VERY_WIDE | {"bias": "ts", "q_length": 77, "kv_length": 100, "softcap": 2.0, "races": True},
    "bias_64_deterministic": SMALL
    | {"bias": "hts", "bias_masks": True, "is_causal": True, "q_offset": 30, "heads": 2}
    | {"deterministic": True, "races": True},
    "bias_128_deterministic": SMALL
    | WIDE
    | {"bias": "bts", "bias_dtype": "float32", "softcap": 2.0, "pattern": "global", "deterministic": True},
    "bias_256_deterministic": SMALL | VERY_WIDE | {"bias": "ts", "kv_length": 150, "deterministic": True},
    "bias_whole_64": LARGE | {"bias": "ts", "bias_whole": LOWEST_BF16, "races": True},
    "bias_whole_128": SMALL
    | WIDE
    | {"bias": "hts", "bias_dtype": "float32", "bias_whole": LOWEST, "heads": 2, "kv_length": 150, "is_causal": True}
    | {"q_offset": 100, "deterministic": True},
    "bias_whole_256": SMALL | VERY_WIDE | {"bias": "ts", "bias_whole": LOWEST_BF16, "deterministic": True},
    "bias_whole_keys_64": SMALL
    | {"bias": "bs", "bias_whole": LOWEST_BF16, "heads": 2, "kv_heads": 1, "q_length": 77, "kv_length": 150},
    "bias_whole_mask_64": SMALL | {"bias": "ts", "bias_whole": LOWEST_BF16, "pattern": "cells", "kv_length": 150},
    "bias_whole_mask_of_arrays_128": SMALL
    | WIDE
    | {"bias": "hts", "bias_whole": LOWEST_BF16, "mask": "ts", "heads": 2, "kv_heads": 1, "kv_length": 150},
    "bias_low": LARGE | {"bias": "ts", "bias_low": -1e30},
    "bias_keys_deterministic": SMALL
    | {"bias": "bhs", "batch": 2, "heads": 2, "kv_heads": 1, "kv_lengths": [90, 150], "deterministic": True},
    "bias_keys_64": LARGE | {"bias": "bhs", "batch": 2, "heads": 2, "kv_lengths": [290, 0], "races": True},
    "bias_keys_256": SMALL
    | VERY_WIDE
    | {"bias": "hs", "batch": 2, "q_length": 100, "kv_length": 150, "heads": 2, "kv_heads": 2, "is_causal": True},
    "mask_64": LARGE | {"mask": "bts", "is_causal": True, "batch": 2, "window": [70, 0], "q_offset": [100, -20]},
    "mask_128": LARGE | WIDE | {"mask": "hts", "heads": 2, "segments": "packed", "bounded": True, "races": True},
    "mask_keys_128_bias": SMALL | WIDE | {"mask": "s", "bias": "s", "kv_length": 150, "sinks": True},
    "mask_128_groups": LARGE | WIDE | {"mask": "hts", "heads": 4, "kv_heads": 2, "deterministic": True, "races": True},
    "mask_64_bias_keys": SMALL | {"mask": "hts", "heads": 2, "kv_heads": 1, "bias": "s", "kv_length": 150},
    "mask_queries_64": SMALL | {"mask": "bt", "batch": 2, "softcap": 3.0},
    "mask_bias_64": SMALL | {"mask": "ts", "bias": "hts", "heads": 2, "kv_length": 100},
    # Words of bits show the bias's gradient which pairs a block has.
    "stripes_bias_64": SMALL | {"pattern": "stripes", "bias": "hts", "heads": 2, "kv_length": 100},
    "lists_64": LARGE | {"pattern": "cells", "heads": 4, "kv_heads": 2, "bounded": True, "races": True},
    "lists_128": SMALL
    | WIDE
    | {"pattern": "cells_causal", "heads": 2, "kv_heads": 1, "q_offset": [50], "kv_length": 200},
    "lists_128_rising": LARGE
    | WIDE
    | {"pattern": "cells", "heads": 2, "kv_length": 400, "bounded": True, "rising": True, "races": True},
    "lists_256": SMALL | VERY_WIDE | {"pattern": "global", "heads": 2, "kv_heads": 1, "deterministic": True},
    "mask_bias_128_heads": LARGE | WIDE | {"mask": "hts", "bias": "ts", "heads": 2, "races": True},
    "lists_bias_64": LARGE
    | {"pattern": "cells", "bias": "hts", "bias_masks": True, "heads": 4, "kv_heads": 2, "races": True},
    "lists_bias_256": SMALL
    | VERY_WIDE
    | {"pattern": "global", "bias": "ts", "heads": 2, "kv_heads": 1, "is_causal": True, "kv_length": 100},
    "prepared_bias_128": SMALL
    | WIDE
    | {"pattern": "cells_causal", "bias": "bhts", "bias_dtype": "float32", "heads": 2, "kv_heads": 1, "prepared": True},
    "lists_everything": EVERYTHING | {"pattern": "stripes", "races": True},
    "prepared_64": LARGE | {"pattern": "cells_causal", "heads": 2, "batch": 2, "window": [150, 40], "prepared": True},
    "prepared_128": SMALL
    | WIDE
    | {"pattern": "global", "heads": 2, "kv_heads": 1, "is_causal": True, "deterministic": True, "prepared": True},
    "prepared_dense": SMALL | {"pattern": "dense", "heads": 2, "kv_heads": 1, "kv_length": 300, "prepared": True},
    # The kernels evaluate the mask, as they do if its bits would take too much memory.
    "predicate_64": LARGE
    | {"pattern": "documents", "heads": 2, "kv_heads": 1, "batch": 2, "predicate": True, "races": True},
    "predicate_128": SMALL
    | WIDE
    | {"pattern": "documents", "heads": 4, "kv_heads": 2, "kv_lengths": [70], "garbage": True}
    | {"predicate": True, "deterministic": True, "kv_length": 170},
    "predicate_prepared_64": SMALL
    | {"pattern": "global", "heads": 2, "kv_length": 280, "prepared": True, "predicate": True}
    | {"persistent": {"ctas": 2, "v_stages": 2}},
    # Masks of keys, whose dead blocks are skipped in long sequences.
    "keys_64": LARGE | {"mask": "bs", "batch": 2, "heads": 2, "kv_heads": 1, "skips_keys": True, "races": True},
    "keys_128": SMALL
    | WIDE
    | {"mask": "s", "is_causal": True, "q_offset": 60, "kv_lengths": [150], "garbage": True, "kv_length": 170}
    | {"skips_keys": True, "deterministic": True},
    "keys_256_everything": EVERYTHING | VERY_WIDE | {"mask": "bs", "skips_keys": True},
    "everything_64": EVERYTHING,
    "everything_128": EVERYTHING | WIDE | {"races": True},
    "everything_bias_64": EVERYTHING | {"bias": "bhts", "bias_masks": True, "mask": "bs"},
    # Backward with CTAs that take several tiles in turn. Tiles of the cells have no block, one block or all blocks.
    "persistent_cells_64": LARGE
    | {"pattern": "cells", "heads": 4, "kv_heads": 2, "persistent": {"ctas": 2, "v_stages": 2}, "races": True},
    "persistent_cells_128": SMALL
    | WIDE
    | {"pattern": "cells", "heads": 2, "kv_length": 400, "q_length": 300, "persistent": {"ctas": 1}, "races": True},
    "persistent_global_128": LARGE
    | WIDE
    | {"pattern": "global", "heads": 2, "kv_heads": 1, "races": True}
    | {"persistent": {"ctas": 2, "early_dv": True}},
    "persistent_causal_128": SMALL
    | WIDE
    | {"is_causal": True, "heads": 4, "kv_heads": 2, "q_length": 150, "kv_length": 150, "deterministic": True}
    | {"persistent": {"ctas": 3, "do_stages": 1}, "races": True},
    "persistent_everything_64": EVERYTHING
    | {"kv_length": 260, "kv_lengths": [250, 70], "persistent": {"ctas": 1, "v_stages": 2}, "races": True},
    "persistent_everything_128": EVERYTHING | WIDE | {"bias": "bhts", "persistent": {"ctas": 2}, "races": True},
    "everything_256": EVERYTHING | VERY_WIDE | {"deterministic": True, "races": True},
}


# The cases of `make test`: a large head_dim, a dense mask, block lists and the persistent backward.
QUICK = {"window_256_offsets_lengths", "mask_128", "lists_128", "persistent_everything_64"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", tiers.groups(CASES, QUICK, 4))
def test_interpreted(names):
    cases = [json.dumps(CASES[name]) for name in names]
    done = forked.run(SCRIPT, *cases, env=forked.UNOPTIMISED, timeout=280)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, (names[len(results)], done.stderr[-2000:])
    for name, result in zip(names, results, strict=True):
        assert not result["races"], name
        for what, error in result["errors"].items():
            assert error <= result["bounds"][what], (name, what, error, result["bounds"][what])


def test_softmax_room_fits_the_dtype():
    """softmax.room in P's dtype: float16 reaches at most 2**room; bfloat16 at least 2**-room of values of 1e-19."""
    assert 2 ** softmax.headroom(jnp.float16) < float(jnp.finfo(jnp.float16).max)
    assert 2 ** -softmax.headroom(jnp.bfloat16) * 1e-19 > float(jnp.finfo(jnp.float32).tiny)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("lengths", "heads", "looks"),
    [((3001, 3001), (16, 16), True), ((777, 3001), (16, 16), False), ((777, 3001), (16, 2), True)],
)
def test_norms_are_computed_if_enough_queries_use_them(lengths, heads, looks):
    query, key = (
        jax.ShapeDtypeStruct((1, length, count, 128), jnp.bfloat16)
        for length, count in zip(lengths, heads, strict=True)
    )
    with on_device("h200"):
        text = str(jax.make_jaxpr(lambda query, key: flash_attention(query, key, key))(query, key))
    assert ("attention_row_norms" in text) == looks


def test_deterministic_backward_has_no_atomic_adds():
    query = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def kernels(deterministic):
        with on_device("h200"):
            out = lambda query: flash_attention(query, query, query, deterministic=deterministic)
            gradient = jax.make_jaxpr(jax.grad(lambda query: out(query).astype(jnp.float32).sum()))(query)
        text = str(gradient)
        return "attention_backward_dq_sm90" in text, "reduction_op=add" in text

    assert kernels(deterministic=True) == (True, False)
    assert kernels(deterministic=False) == (False, True)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("shape", "arguments", "is_own"),
    [
        ((2, 4, 1, 512), {}, True),
        ((1, 1, 1, 512), {"is_causal": True, "deterministic": True}, True),
        ((1, 4, 1, 512), {"softcap": 3.0}, False),
        ((1, 4, 1, 512), {"kv_heads": 2}, False),
        ((1, 1, 1, 512), {"kv_heads": 2}, True),
        ((1, 4, 512, 512), {}, False),
    ],
)
def test_key_bias_gradient_needs_no_extra_pass(shape, arguments, is_own):
    """Exceptions: a softcap, and different biases of heads that share keys."""
    kv_heads, arguments = arguments.get("kv_heads", 4), {k: x for k, x in arguments.items() if k != "kv_heads"}
    query, key = (jax.ShapeDtypeStruct((2, 512, heads, 64), jnp.bfloat16) for heads in (4, kv_heads))
    bias = jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(query, key, bias):
        return flash_attention(query, key, key, bias=bias, **arguments).astype(jnp.float32).sum()

    with on_device("h200"):
        of_both = jax.eval_shape(jax.grad(loss, (0, 2)), query, key, bias)
        text = str(jax.make_jaxpr(jax.grad(loss, (0, 2)))(query, key, bias))
    assert of_both[1].shape == shape
    assert ("attention_backward_dbias_triton" in text) != is_own


@pytest.mark.parametrize("lengths", [(1001, 1001), (1024, 999)])
def test_odd_lengths_are_not_padded_by_xla(lengths):
    """XLA pads no array. The pass over the rows makes dquery's sums, and copies of queries and dout, of whole atoms."""
    x = lambda length: jax.ShapeDtypeStruct((2, length, 4, 128), jnp.bfloat16)

    def gradients(query, key, dout):
        attend = lambda query, key: flash_attention(query, key, key, implementation="mosaic_gpu")
        return jax.vjp(attend, query, key)[1](dout)

    with on_device("h200"):
        text = str(jax.make_jaxpr(gradients)(x(lengths[0]), x(lengths[1]), x(lengths[0])))
    assert not re.findall(r":(\w+)\[\d+,\d+,\d+,\d+\] = pad\[", text)
    assert "attention_backward_sm90" in text
