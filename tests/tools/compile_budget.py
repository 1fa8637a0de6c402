"""Programs to compile for GPUs that are not present: every block spec row, and features of the Hopper kernels."""

import dataclasses

from jax_kernels.device import ARCHITECTURES
from jax_kernels.pallas import block_specs
from tests.tools.compile_case import Spec

# The GPU of each record of block specs. tests/test_device.py fails if a record has none.
GPUS = {capability: ARCHITECTURES[capability].gpu for capability in block_specs.BLOCK_SPECS}


def rows():
    """Yields (GPU, row, Spec) for every program to compile."""
    for capability, specs in block_specs.BLOCK_SPECS.items():
        gpu = GPUS[capability]
        for row in specs.attention:
            if row.has_lists:  # one list per query head; the lists of a group are merged
                yield gpu, row, dataclasses.replace(_spec(row, False, ""), cells="bhts", kv_heads=4)
                continue
            if row.dense_bits is not None:
                yield from _dense(gpu, row)
                continue
            # A causal kernel has a loop with the predicate and one without. It is enough in float32, which compiles
            # slowly.
            both = (True,) if row.bits == 32 else (True, False)
            if row.has_segments:  # causal kernels have a test of their own
                both = (False,)
            for is_causal in both if row.is_causal is None else (row.is_causal,):
                for precision in ("fp32", "tf32") if row.bits == 32 else ("",):
                    spec = _spec(row, is_causal, precision)
                    if row.max_kv_length is None and planned(gpu, row, spec) is not row:  # rows with one are first
                        spec = dataclasses.replace(spec, q_length=2 * spec.q_length, kv_length=2 * spec.kv_length)
                    yield gpu, row, spec


def _dense(gpu, row):
    """Causal cases of a row for biases and masks: with the widest bias, with this bias and lists, and with a mask."""
    spec = _spec(row, row.is_causal is not False, "")
    bias = dataclasses.replace(spec, bias="hts", bias_dtype="float32" if row.dense_bits == 32 else "")
    if row.dense_bits > 1:
        yield gpu, row, bias
    lists = dataclasses.replace(bias, cells="bhts", kv_heads=2)
    # At head_dim 256 a tile spills registers, outside of its loop.
    if row.dense_bits > 1 and row.head_dim <= 128 and planned(gpu, row, lists) is row:
        yield gpu, row, lists
    mask = dataclasses.replace(spec, mask="bts")
    if not row.is_limited and planned(gpu, row, mask) is row:
        yield gpu, row, mask


def planned(gpu, wanted, spec):
    """The planned row for a spec that `wanted` could serve."""
    capability = next(capability for capability, name in GPUS.items() if name == gpu)
    bits = 32 if spec.bias_dtype == "float32" else 16 if spec.bias else 1
    row, _ = block_specs.attention_row(
        capability,
        wanted.implementation,
        head_dim=wanted.head_dim,
        v_head_dim=wanted.v_head_dim,
        bits=wanted.bits,
        is_causal=spec.is_causal,
        is_limited=bool(spec.window) or spec.segment_ids,
        has_segments=spec.segment_ids,
        dense_bits=bits if spec.bias or spec.mask else 0,
        has_lists=bool(spec.cells) and not spec.bias,
        kv_length=spec.kv_length,
    )
    return row


def _spec(row, is_causal, precision):
    return Spec(
        window="1000,-1" if row.is_limited else "",
        segment_ids=bool(row.has_segments),
        implementation=row.implementation,
        head_dim=row.head_dim,
        v_head_dim=row.v_head_dim or 0,
        dtype="float32" if row.bits == 32 else "bfloat16",
        precision=precision,
        is_causal=is_causal,
        q_length=row.max_kv_length or 4096,
        kv_length=row.max_kv_length or 4096,
        lse=True,
    )


def name(gpu, row, spec):
    kind = spec.precision or spec.dtype
    limits = {"causal": spec.is_causal, "window": spec.window, "segments": spec.segment_ids}
    masks = "".join(f", {limit}" for limit, is_given in limits.items() if is_given)
    dense = (
        f"{', bias' if spec.bias else ''}{', mask' if spec.mask else ''}{spec.bias_dtype and ' in ' + spec.bias_dtype}"
    )
    lists = ", lists" if spec.cells else ""
    length = f", up to {row.max_kv_length}" if row.max_kv_length else ""
    head_dims = f"{spec.head_dim}/{spec.v_head_dim}" if spec.v_head_dim else spec.head_dim
    return f"{gpu}, {spec.implementation}, {head_dims}, {kind}{masks}{dense}{lists}{length}"


ROWS = {name(gpu, row, spec): (gpu, row, spec) for gpu, row, spec in rows()}

# Bytes that a Mosaic kernel may spill, in the forward and in the backward. The forward does not spill in its main loop:
# it spills in the first block of a tile, which has the causal predicate, and in the branch of scores near a softcap.
MOSAIC = {
    "tanh_64": ({"head_dim": 64, "score_mod": "tanh"}, 240, 130),
    "tanh_128": ({"score_mod": "tanh"}, 0, 0),
    "tanh_128_causal": ({"score_mod": "tanh", "is_causal": True}, 0, 0),
    "alibi_64": ({"head_dim": 64, "score_mod": "alibi"}, 0, 0),
    "alibi_64_causal": ({"head_dim": 64, "score_mod": "alibi", "is_causal": True}, 900, 50),
    "alibi_128": ({"score_mod": "alibi", "kv_heads": 2, "kv_lengths": True}, 0, 0),
    "alibi_128_causal": ({"score_mod": "alibi", "is_causal": True, "score_mod_gradients": True}, 0, 0),
    "alibi_256_lists": ({"head_dim": 256, "score_mod": "alibi", "cells": "ts"}, 30, 30),
    "tanh_64_deterministic": ({"head_dim": 64, "score_mod": "tanh", "deterministic": True}, 240, 100),
    "relative_64": ({"head_dim": 64, "score_mod": "relative"}, 0, 0),
    "relative_128_causal": ({"score_mod": "relative", "is_causal": True, "score_mod_gradients": True}, 0, 0),
    "relative_256_deterministic": ({"head_dim": 256, "score_mod": "relative", "deterministic": True}, 0, 0),
    "times_relative_64": ({"head_dim": 64, "score_mod": "times_relative", "kv_heads": 2}, 0, 300),
    "lowest_64_causal": ({"head_dim": 64, "score_mod": "lowest", "is_causal": True}, 0, 930),
    "lowest_128": ({"score_mod": "lowest"}, 0, 40),
    "of_key_128": ({"score_mod": "of_key", "window": "300,0"}, 0, 40),
    "bias_keys_64_mask": ({"head_dim": 64, "bias": "bhs", "mask": "bhts", "bias_gradient": True}, 0, 80),
    "bias_keys_128": ({"bias": "bhs", "bias_gradient": True}, 0, 10),
    "bias_keys_256": ({"head_dim": 256, "bias": "hs", "bias_gradient": True}, 0, 60),
    "bias_128_deterministic": ({"bias": "bhts", "is_causal": True, "deterministic": True}, 0, 0),
}
