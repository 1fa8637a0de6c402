"""ring_attention on CPU devices in a process of its own, against flash_attention on one device.

As a script it prints, for each case, the errors of out, lse, dq, dk, dv and dsinks, and the number of sends.
"""

import contextlib
import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, ring_attention, shard_sequence, unshard_sequence
from jax_kernels.inputs.attention import HeadView
from jax_kernels.ops.ring import halo
from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.ops.ring.partial_results import Pair
from jax_kernels.ops.ring.steps import Step
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.sm90 import SM90
from tests.support.cases import rings, tiers
from tests.support.processes import cpu_devices

TOKENS, BATCH = 48, 2
# Devices, layout, options. Heads: 4 of queries, 2 of keys.
CASES = {
    "zigzag": (4, "zigzag", {"is_causal": True}),
    "striped": (4, "striped", {"is_causal": True}),
    "contiguous": (4, "contiguous", {"is_causal": True}),
    "full_zigzag": (2, "zigzag", {}),
    "full": (8, None, {"segment_ids": True, "sinks": True}),
    "one": (1, None, {"is_causal": True, "sinks": True}),
    "three": (3, "zigzag", {"is_causal": True, "softcap": 2.0, "scale": -0.5}),
    "packed": (4, "zigzag", {"is_causal": True, "segment_ids": True, "sinks": True}),
    "packed_striped": (2, "striped", {"is_causal": True, "segment_ids": True}),
    "window": (4, "zigzag", {"is_causal": True, "window": (7, 0), "segment_ids": True}),
    "window_striped": (4, "striped", {"is_causal": True, "window": (9, 0)}),
    "window_contiguous": (4, "contiguous", {"window": (5, 3), "sinks": True}),
    "window_zigzag_both": (4, "zigzag", {"window": (11, 2)}),
    "window_striped_both": (4, "striped", {"window": (3, 10)}),
    "window_right": (4, "zigzag", {"window": (-1, 4)}),
    "window_of_no_layout": (2, None, {"window": (5, 3)}),
    "to_all": (2, "zigzag", {"is_causal": True, "segment_ids": True, "sinks": True, "strategy": "all_to_all"}),
    "auto": (2, "zigzag", {"is_causal": True, "segment_ids": True, "sinks": True, "strategy": "auto"}),
    "gather": (4, "zigzag", {"is_causal": True, "segment_ids": True, "sinks": True, "strategy": "all_gather"}),
    "gather_window": (3, "contiguous", {"window": (7, 20), "strategy": "all_gather"}),
    "to_all_striped": (2, "striped", {"window": (4, 9), "strategy": "all_to_all"}),
    "to_all_by_all_to_alls": (2, "zigzag", {"is_causal": True, "strategy": "all_to_all", "permutes_up_to": 1}),
    "halo": (
        4,
        "zigzag",
        {"is_causal": True, "window": (5, 0), "segment_ids": True, "sinks": True, "strategy": "halo"},
    ),
    "halo_both": (4, "zigzag", {"window": (3, 6), "strategy": "halo"}),
    "halo_of_a_part": (
        4,
        "zigzag",
        {"window": (3, 1), "strategy": "halo", "sinks": True, "tile": 2},
    ),
    "halo_of_a_part_causal": (
        2,
        "contiguous",
        {"is_causal": True, "window": (5, 0), "strategy": "halo", "sinks": True, "tile": 4},
    ),
    "halo_right": (2, "zigzag", {"window": (0, 12), "sinks": True, "strategy": "halo"}),
    "halo_contiguous": (4, "contiguous", {"window": (12, 5), "sinks": True, "strategy": "halo"}),
    "halo_causal": (3, "contiguous", {"is_causal": True, "window": (16, 0), "softcap": 2.0, "strategy": "halo"}),
    "halo_of_itself": (4, "zigzag", {"window": (0, 0), "strategy": "halo"}),
    "halo_alone": (1, "zigzag", {"is_causal": True, "window": (9, 0), "strategy": "halo"}),
    "halo_of_one_device": (1, "contiguous", {"window": (9, 5), "strategy": "halo"}),
    "halo_unchecked": (4, "zigzag", {"is_causal": True, "window": (6, 0), "strategy": "halo", "check_vma": False}),
    "halo_interpreted": (
        2,
        "zigzag",
        {"is_causal": True, "window": (10, 0), "strategy": "halo", "implementation": "triton"},
    ),
    "interpreted": (2, "zigzag", {"is_causal": True, "window": (30, 0), "implementation": "triton"}),
    "halves": (4, "zigzag", {"is_causal": True, "halves": True}),
    "halves_packed": (3, "contiguous", {"segment_ids": True, "sinks": True, "halves": True}),
    "ahead": (4, "zigzag", {"is_causal": True, "sends_ahead": 2}),
    "ahead_halves": (4, "zigzag", {"is_causal": True, "segment_ids": True, "halves": True, "sends_ahead": 2}),
    "ahead_window": (8, "contiguous", {"window": (20, 8), "sinks": True, "sends_ahead": 3}),
    "unchecked": (4, "zigzag", {"is_causal": True, "check_vma": False}),
}
# "window_contiguous" skips its last step but one: the next send goes two devices further.
QUICK = ["packed", "window", "auto", "ahead_halves", "halo_of_a_part"]


@contextlib.contextmanager
def heads_in_halves():
    """The backward takes the heads in two halves, like the Hopper kernels. Each half is cut out of all gradients."""
    own = Step.gradients

    def gradients(self, visitors, rows, dquery, heads=None):
        if heads is None:
            return own(self, visitors, rows, dquery)
        found, pair = own(self, visitors, rows, jnp.zeros_like(dquery))
        group = dquery.shape[2] // pair.key.shape[2]
        cut = lambda x, size: x[:, :, heads.first * size : (heads.first + heads.count) * size]
        mine = (
            jnp.zeros_like(dquery)
            .at[:, :, heads.first * group : (heads.first + heads.count) * group]
            .set(cut(found, group))
        )
        return dquery + mine, Pair.of(cut(pair.key, 1), cut(pair.value, 1))

    halves = [HeadView(count=1, first=first, run=1, skip=0) for first in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "gradients", gradients)
        patch.setattr(Step, "in_parts", lambda self, visitors, share: halves)
        yield


def run_case(devices, layout, options):
    if options.get("halves"):
        with heads_in_halves():
            return run_case(devices, layout, {name: x for name, x in options.items() if name != "halves"})
    if "tile" in options:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(halo, "TILE", options["tile"])
            return run_case(devices, layout, {name: x for name, x in options.items() if name != "tile"})
    if "permutes_up_to" in options:
        options = dict(options)
        row = dataclasses.replace(SM90.ring[0], permutes_up_to=options.pop("permutes_up_to"))
        with block_specs.replaced_tables((9, 0), ring=(row,)):
            return run_case(devices, layout, options)
    options = dict(options)
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    query, key, value = (normal(BATCH, TOKENS, heads, 8) for heads in (4, 2, 2))
    dout, dlse = normal(BATCH, TOKENS, 4, 8), normal(BATCH, 4, TOKENS)
    ids = np.sort(random.integers(-1, 3, (BATCH, TOKENS)), axis=1).astype(np.int32)
    ids = jnp.asarray(ids) if options.pop("segment_ids", False) else None
    sinks = normal(4) if options.pop("sinks", False) else None
    check_vma = options.pop("check_vma", options.get("implementation") is None)
    of_ring = {"strategy": "ring"} | {
        name: options.pop(name) for name in ("strategy", "sends_ahead") if name in options
    }
    implementation = options.pop("implementation", "xla")

    def both(attention, query, key, value, ids, sinks, dout, dlse):
        call = lambda query, key, value, sinks: attention(query, key, value, segment_ids=ids, sinks=sinks)
        results, vjp = jax.vjp(call, query, key, value, sinks)
        dlse = jnp.where(jnp.isneginf(results[1]), 0, dlse)
        *gradients, dsinks = vjp((dout, dlse))
        return *results, *gradients, dsinks

    mesh = jax.make_mesh((devices,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    name = layout or "zigzag"
    attention = functools.partial(
        ring_attention, axis_name="sequence", layout=layout, return_lse=True, implementation=implementation,
        **of_ring, **options,
    )  # fmt: skip

    def ring(*arrays):
        *results, dsinks = both(attention, *arrays)
        dsinks = dsinks if dsinks is None or check_vma else jax.lax.psum(dsinks, "sequence")
        query, key, value, ids, sinks, *_ = arrays
        return *results, dsinks, attention(query, key, value, segment_ids=ids, sinks=sinks)[0]

    tokens, rows, one = jax.P(None, "sequence"), jax.P(None, None, "sequence"), jax.P()
    of_sinks = None if sinks is None else one
    shared = jax.jit(
        jax.shard_map(
            ring,
            mesh=mesh,
            in_specs=(
                tokens,
                tokens,
                tokens,
                None if ids is None else tokens,
                of_sinks,
                tokens,
                rows,
            ),
            out_specs=(tokens, rows, tokens, tokens, tokens, of_sinks, tokens),
            check_vma=check_vma,
        )
    )
    shard = functools.partial(shard_sequence, mesh=mesh, axis_name="sequence", layout=name)
    given = *(shard(x) for x in (query, key, value)), None if ids is None else shard(ids), sinks, shard(dout)
    given = *given, shard(dlse, axis=2)
    *got, alone = shared(*given)
    if of_ring["strategy"] == "auto":  # a call without gradients has another strategy
        np.testing.assert_allclose(alone, got[0], atol=1e-5)
    else:
        np.testing.assert_array_equal(alone, got[0])
    travels = str(jax.make_jaxpr(shared)(*given)).count("ppermute[")
    for i in range(5):
        got[i] = unshard_sequence(got[i], mesh, "sequence", layout=name, axis=2 if i == 1 else 1)
    one_device = functools.partial(flash_attention, return_lse=True, implementation="xla", **options)
    with jax.default_matmul_precision("highest"):
        want = both(one_device, query, key, value, ids, sinks, dout, dlse)
    errors = rings.errors_of(("out", "lse", "dq", "dk", "dv", "dsinks"), got, want)
    return {"errors": errors, "travels": travels}


def main(names) -> dict:
    return {name: run_case(*CASES[name]) for name in names}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", tiers.groups(CASES, QUICK, 10))
def test_matches_flash_attention(names):
    results = cpu_devices.results_of(__file__, names, JAX_KERNELS_INTERPRET="1")
    for name, found in results.items():
        for what, error in found["errors"].items():
            assert error < 2e-6, (name, what, error)
    if {"striped", "window_contiguous"} <= set(names):
        # The window of 5 and 3 tokens reaches only the neighbours: three steps of four.
        assert results["window_contiguous"]["travels"] < results["striped"]["travels"]


LIMITS = [(None, None), (None, 0), (5, 0), (3, 7), (None, 2), (0, 0), (1, 9), (9, 1)]


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("axis", [1, 2])
def test_gathered_tokens_are_ordered_and_restored(layout, axis):
    ring = Layout(name=layout, devices=3, length=4, left=None, right=None)
    of_devices = np.concatenate([ring.tokens(device) for device in range(3)])
    x = np.moveaxis(np.broadcast_to(of_devices, (2, 5, 12)), -1, axis)
    found = ring.in_order(jnp.asarray(x), axis)
    np.testing.assert_array_equal(found, np.sort(x, axis))
    np.testing.assert_array_equal(ring.in_order(found, axis, back=True), x)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize(
    ("left", "right"), [(None, None), (None, 0), (5, 0), (3, 7), (None, 2), (0, 0), (1, 9), (9, 1)]
)
def test_steps_cover_every_pair_once(layout, left, right):
    """The calls of all steps keep each pair of query and key within the limits exactly once, and no other pair."""
    devices, length = 4, 6
    found = np.zeros((devices * length, devices * length), int)
    ring = Layout(name=layout, devices=devices, length=length, left=left, right=right)
    for step in range(devices):
        is_causal, window = ring.window(step)
        low, high = window or (-1, -1)
        high = 0 if is_causal else high
        alive = np.zeros_like(found)
        for device in range(devices):
            source = (device - step) % devices
            mine, theirs = (np.split(ring.tokens(i), ring.chunks) for i in (device, source))
            if layout == "zigzag" and step == 0 and (left, right) == (None, 0):
                alive[np.ix_(ring.tokens(device), ring.tokens(device))] += np.tri(length, dtype=int)
                continue
            for pair in ring.pairs(step, jnp.int32(device)):
                q, k = mine[int(pair.query)], theirs[int(pair.key)]
                rows, columns = np.arange(len(q))[:, None], np.arange(len(k))
                keep = np.ones((len(q), len(k)), bool)
                if pair.q_offset is not None:
                    at = rows + int(pair.q_offset)
                    keep &= (low < 0 or left is None or columns >= at - low) & np.ones_like(keep)
                    keep &= (right is None or columns <= at + high) & np.ones_like(keep)
                alive[np.ix_(q, k)] += keep
        assert not (ring.is_dead(step) and alive.any())
        found += alive
    distance = np.arange(devices * length)[:, None] - np.arange(devices * length)
    want = (distance <= (left if left is not None else 10**6)) & (-distance <= (right if right is not None else 10**6))
    np.testing.assert_array_equal(found, want.astype(int))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
