"""ring_attention under masks of the whole sequence on CPU devices, against flash_attention on one device.

As a script it prints, for each case, the largest error of its results and gradients, and the number of sends.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, masks, ring_attention, shard_sequence, unshard_sequence
from jax_kernels.dispatch import on_device
from jax_kernels.masks.mask import node
from jax_kernels.ops.ring.layouts import LAYOUTS, Layout
from tests.support.cases import rings, tiers
from tests.support.processes import cpu_devices

TOKENS, BATCH, HEADS = 48, 2, 4
RANDOM = np.random.default_rng(1)
IDS = jnp.asarray(np.sort(RANDOM.integers(-1, 3, (BATCH, TOKENS)), axis=1).astype(np.int32))
CELLS = jnp.asarray(RANDOM.random((1, HEADS, 6, 6)) < 0.4)
PAIRS = jnp.asarray(RANDOM.random((BATCH, 1, TOKENS, TOKENS)) < 0.2)
TABLE = jnp.asarray(RANDOM.random((HEADS, TOKENS)) < 0.5)
SCORES = jnp.asarray(RANDOM.standard_normal((BATCH, HEADS, 1, TOKENS)), jnp.float32)
MASKS = {
    "global": masks.causal() & masks.sliding_window(7, 0) | masks.global_tokens(3),
    "prefix": masks.causal() | masks.prefix(jnp.asarray([5, 20], jnp.int32)),
    "segments": masks.segments(IDS) & masks.causal(),
    "cells": masks.block_sparse(CELLS, 8),
    "array": masks.dense(PAIRS) & masks.causal(),
    "ranked": masks.top_k(SCORES, 5, among=masks.causal(), q_length=TOKENS),
    "function": masks.from_function(lambda b, h, q, k, table: table[h, (q * 3 + k) % TOKENS], TABLE, heads=HEADS),
    "stripes": masks.dilated(4) & masks.sliding_window(20, 20),
}
# Devices, layout, strategy, mask, other options.
CASES = {
    "zigzag global": (4, "zigzag", "ring", "global", {}),
    "striped cells": (4, "striped", "ring", "cells", {}),
    "contiguous prefix": (2, "contiguous", "ring", "prefix", {"is_causal": False, "sinks": True}),
    "heads function": (2, "zigzag", "all_to_all", "function", {"is_causal": True}),
    "gather array": (2, "zigzag", "all_gather", "array", {}),
    "striped stripes": (4, "striped", "ring", "stripes", {}),
    "auto segments": (2, None, "auto", "segments", {"softcap": 3.0}),
    "one": (1, "zigzag", "ring", "global", {"segment_ids": True}),
    "striped global": (4, "striped", "ring", "global", {"window": (20, 3), "segment_ids": True}),
    "contiguous global": (4, "contiguous", "ring", "global", {"sinks": True}),
    "zigzag cells": (2, "zigzag", "ring", "cells", {"is_causal": True}),
    "zigzag array": (4, "zigzag", "ring", "array", {}),
    "striped array": (2, "striped", "ring", "array", {}),
    "zigzag ranked": (4, "zigzag", "ring", "ranked", {"sends_ahead": 2}),
    "striped ranked": (2, "striped", "ring", "ranked", {}),
    "striped function": (4, "striped", "ring", "function", {}),
    "contiguous function": (2, "contiguous", "ring", "function", {"window": (9, 4)}),
    "zigzag prefix": (4, "zigzag", "ring", "prefix", {}),
    "zigzag stripes": (4, "zigzag", "ring", "stripes", {}),
    "heads cells": (2, "striped", "all_to_all", "cells", {}),
    "heads ranked": (2, "zigzag", "all_to_all", "ranked", {}),
    "gather global": (4, "contiguous", "all_gather", "global", {"segment_ids": True}),
    "gather cells": (4, "zigzag", "all_gather", "cells", {"is_causal": True}),
    "unchecked": (2, "zigzag", "ring", "global", {"check_vma": False}),
}
QUICK = list(CASES)[:4]


def run_case(devices, layout, strategy, mask, options):
    options = dict(options)
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    query, key, value = (normal(BATCH, TOKENS, heads, 8) for heads in (HEADS, 2, 2))
    dout, dlse = normal(BATCH, TOKENS, HEADS, 8), normal(BATCH, HEADS, TOKENS)
    sinks = normal(HEADS) if options.pop("sinks", False) else None
    ids = IDS if options.pop("segment_ids", False) else None
    check_vma, ahead = options.pop("check_vma", True), options.pop("sends_ahead", None)

    def both(attention, mask, query, key, value, ids, dout, dlse):
        call = lambda *arrays: attention(
            *arrays, mask=mask, segment_ids=ids, sinks=sinks, return_lse=True, implementation="xla", **options
        )
        results, vjp = jax.vjp(call, query, key, value)
        return *results, *vjp((dout, jnp.where(jnp.isneginf(results[1]), 0, dlse)))

    mesh = jax.make_mesh((devices,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    attention = functools.partial(
        ring_attention, axis_name="sequence", layout=layout, strategy=strategy, sends_ahead=ahead
    )
    tokens, rows, name = jax.P(None, "sequence"), jax.P(None, None, "sequence"), layout or "zigzag"
    of_ids = None if ids is None else tokens
    ring = functools.partial(both, attention, MASKS[mask])
    shared = jax.jit(
        jax.shard_map(
            ring,
            mesh=mesh,
            in_specs=(tokens, tokens, tokens, of_ids, tokens, rows),
            out_specs=(tokens, rows, tokens, tokens, tokens),
            check_vma=check_vma,
        )
    )
    shard = functools.partial(shard_sequence, mesh=mesh, axis_name="sequence", layout=name)
    of_tokens = [None if x is None else shard(x) for x in (query, key, value, ids, dout)]
    given = *of_tokens, shard(dlse, axis=2)
    back = functools.partial(unshard_sequence, mesh=mesh, axis_name="sequence", layout=name)
    got = [back(x, axis=2 if i == 1 else 1) for i, x in enumerate(shared(*given))]
    with jax.default_matmul_precision("highest"):
        want = both(flash_attention, MASKS[mask], query, key, value, ids, dout, dlse)
    errors = rings.errors_of(("out", "lse", "dq", "dk", "dv"), got, want)
    return {"error": max(errors.values()), "travels": str(jax.make_jaxpr(shared)(*given)).count("ppermute[")}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", tiers.groups(CASES, QUICK, 9))
def test_matches_flash_attention(names):
    results = cpu_devices.results_of(__file__, names, devices=4)
    for name, found in results.items():
        assert found["error"] < 2e-6, (name, found)
    if "striped stripes" in results:  # all keys of a query are on the query's device
        assert results["striped stripes"]["travels"] == 0 < max(found["travels"] for found in results.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipped_steps_have_no_pair(layout):
    """No step with a pair is left out. Under bands, stripes and cells, known while tracing, every empty step is."""
    ring = Layout(name=layout, devices=4, length=TOKENS // 4, left=None, right=None)
    few = masks.block_sparse(jnp.asarray(np.eye(6, dtype=bool)[None, None]), 8)
    near = {"band": masks.sliding_window(3, 3), "diagonal": few, "both": few & masks.causal()}
    places = jnp.arange(TOKENS)
    for name, mask in (MASKS | near).items():
        kept = [mask.elements(b, h, places[:, None], places) for b in range(mask.batch) for h in range(mask.heads)]
        kept = np.any([np.broadcast_to(x, (TOKENS, TOKENS)) for x in kept], axis=0)
        pairs = lambda device, source, kept=kept: kept[np.ix_(ring.tokens(device), ring.tokens(source))]
        empty = [s for s in range(1, 4) if not any(pairs(device, (device - s) % 4).any() for device in range(4))]
        found = ring.dead_steps(mask)
        assert set(found) <= set(empty), name
        if name in ("stripes", "band", "diagonal", "both"):
            assert sorted(found) == empty, name
            assert empty or (layout, name) not in {("striped", "stripes"), ("contiguous", "band")}


MESH = jax.make_mesh((1,), ("sequence",), (jax.sharding.AxisType.Auto,))
X = jnp.ones((1, 6, 4, 8))


@node
class Own(masks.Mask):
    heads = 4

    def terms(self, negated):
        return masks.causal().terms(negated)


def ring_of(**options):
    call = lambda x: ring_attention(x, x, x, axis_name="sequence", **options)
    return jax.shard_map(call, mesh=MESH, in_specs=jax.P(None, "sequence"), out_specs=jax.P(None, "sequence"))(X)


BAD = {
    "array": (jnp.ones((6, 6), bool), "mask: got ArrayImpl, want a masks.Mask of the whole sequence"),
    "length": (masks.dense(jnp.ones((5, 6), bool)), "dense: got an array of shape (1, 1, 5, 6)"),
    "heads": (masks.block_sparse(jnp.ones((1, 3, 1, 1), bool), 6), "mask: got a Mask of 1 batch entries and 3 heads"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks(name):
    mask, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        ring_of(mask=mask)


def test_mask_windows_and_segments_become_arguments():
    """Kernels without support for Masks serve them."""
    ids = jnp.asarray([[0, 0, 0, 1, 1, -1]], jnp.int32)
    packed = masks.segments(ids)
    assert packed.q_ids is packed.kv_ids
    call = lambda x: ring_attention(
        x,
        x,
        x,
        axis_name="sequence",
        mask=masks.causal() & masks.sliding_window(2, 0) & packed,
        implementation="triton",
    )
    shared = jax.shard_map(call, mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    with on_device("A100"):
        assert "pallas_call" in str(jax.make_jaxpr(shared)(X.astype(jnp.bfloat16)))


def test_floats_other_than_0_and_1_give_nan():
    floats = jnp.full((6, 6), 0.5)
    call = lambda x, floats: ring_attention(x, x, x, axis_name="sequence", mask=masks.dense(floats))
    out = jax.jit(jax.shard_map(call, mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False))(X, floats)
    assert np.isnan(out).all()


def test_heads_of_an_unknown_mask_are_not_sharded():
    with pytest.raises(NotImplementedError, match="mask: got Own, whose heads cannot be sharded"):
        ring_of(strategy="all_to_all", mask=Own())


if __name__ == "__main__":
    print(json.dumps({name: run_case(*CASES[name]) for name in sys.argv[1:]}))
