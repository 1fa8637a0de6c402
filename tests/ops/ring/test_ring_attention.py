"""ring_attention on CPU devices, in a process of its own: as flash_attention on one device.

As a script it prints, for each case, the errors of out, lse, dq, dk, dv and dsinks, and what travels.
"""

import contextlib
import functools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import cpu_devices
import rings
import tiers

from jax_kernels import flash_attention, masks, ring_attention, shard_sequence, unshard_sequence
from jax_kernels.attention_inputs import HeadView
from jax_kernels.dispatch import on_device
from jax_kernels.ops.attention.vjp import RESIDUALS as OF_ATTENTION
from jax_kernels.ops.ring import halo
from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.ops.ring.ring_attention import OF_HEADS, prepare, with_results
from jax_kernels.ops.ring.steps import Pair, Step, Visitors
from jax_kernels.ops.ring.vjp import RESIDUALS
from jax_kernels.pallas.block_specs import sm90
from jax_kernels.pallas.block_specs.specs import RingRow

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
QUICK = ["zigzag", "packed", "window", "auto", "ahead_halves", "halo_of_a_part"]


@contextlib.contextmanager
def heads_in_halves():
    """Has the backward take the heads in two halves, as the Hopper kernels do, each cut out of the gradients of all."""
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
        row = RingRow(strategy="ring", permutes_up_to=options.pop("permutes_up_to"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sm90, "RING", (row,))
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
def test_is_flash_attention(names):
    results = cpu_devices.results_of(__file__, names, JAX_KERNELS_INTERPRET="1")
    for name, found in results.items():
        for what, error in found["errors"].items():
            assert error < 2e-6, (name, what, error)
    if {"striped", "window_contiguous"} <= set(names):
        # The window of 5 and 3 tokens reaches the neighbours alone: three steps of four.
        assert results["window_contiguous"]["travels"] < results["striped"]["travels"]


LIMITS = [(None, None), (None, 0), (5, 0), (3, 7), (None, 2), (0, 0), (1, 9), (9, 1)]


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("axis", [1, 2])
def test_gathered_tokens_come_into_their_order_and_back(layout, axis):
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
def test_steps_hold_every_pair_once(layout, left, right):
    """The calls of all steps keep each pair of a query and a key that the limits keep, once, and no other."""
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


MESH = jax.make_mesh((1,), ("sequence",), (jax.sharding.AxisType.Auto,))
X = jnp.ones((1, 6, 4, 8))


def ring_of(**options):
    call = lambda x: ring_attention(x, x, x, **({"axis_name": "sequence"} | options))
    return jax.shard_map(call, mesh=MESH, in_specs=jax.P(None, "sequence"), out_specs=jax.P(None, "sequence"))(X)


def of_two(**options):
    options = {"axis_name": "sequence", "strategy": "halo", "is_causal": True, "window": (2, 0)} | options
    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    call = lambda x: ring_attention(x, x, x, **options)
    tokens = jax.P(None, "sequence")
    return jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=tokens, out_specs=tokens), jnp.ones((1, 12, 4, 8)))


BAD = {
    "axis": (lambda: ring_of(axis_name="rows"), "axis_name: got 'rows', want an axis of the jax.shard_map"),
    "layout": (lambda: ring_of(layout="zig"), "layout: got 'zig', want one of 'zigzag', 'striped', 'contiguous'"),
    "strategy": (
        lambda: ring_of(strategy="tree"),
        "strategy: got 'tree', want one of 'ring', 'halo', 'all_to_all', 'all_gather', 'auto'",
    ),
    "halo_striped": (
        lambda: of_two(layout="striped"),
        "layout: got 'striped' with strategy='halo', want 'zigzag' or 'contiguous'",
    ),
    "halo_of_all": (
        lambda: of_two(window=None),
        "window: got (-1, 0) with strategy='halo' and runs of 3 tokens on each device, want at most 3 on both sides",
    ),
    "halo_too_wide": (
        lambda: of_two(window=(4, 0)),
        "window: got (4, 0) with strategy='halo' and runs of 3 tokens on each device, want at most 3 on both sides",
    ),
    "halo_masked": (lambda: of_two(mask=masks.global_tokens(2)), "mask: got one with strategy='halo', want None"),
    "halo_biased": (lambda: of_two(bias=jnp.ones((1, 1, 6, 12))), "bias: got one with strategy='halo', want None"),
    "halo_modified": (
        lambda: of_two(score_mod=rings.score_mod),
        "score_mod: got one with strategy='halo', want None",
    ),
    "ahead": (lambda: ring_of(sends_ahead=0), "sends_ahead: got 0, want an int of 1 or more, or None"),
    "half_ahead": (lambda: ring_of(sends_ahead=1.5), "sends_ahead: got 1.5, want an int of 1 or more, or None"),
    "ahead_halo": (
        lambda: of_two(sends_ahead=2),
        "sends_ahead: got 2 with strategy='halo', want None: it is a ring's",
    ),
    "striped": (
        lambda: of_two(strategy="all_gather", layout="striped"),
        "layout: got 'striped' with strategy='all_gather', want 'zigzag' or 'contiguous'",
    ),
    "window": (lambda: ring_of(window=-7), "window: got"),
    "order": (lambda: shard_sequence(X, MESH, "sequence", layout="zig"), "layout: got 'zig'"),
    "mesh": (lambda: shard_sequence(X, MESH, "rows"), "axis_name: got 'rows', want an axis of the mesh"),
    "tokens": (
        lambda: shard_sequence(X[:, :5], MESH, "sequence"),
        "x: got 5 tokens for 1 devices with layout='zigzag', want a multiple of 2",
    ),
    "key": (
        lambda: jax.shard_map(
            lambda x: ring_attention(x, x[:, :4], x[:, :4], axis_name="sequence"), mesh=MESH, in_specs=jax.P(),
            out_specs=jax.P("sequence"),
        )(X),
        "key: got 4 tokens, want query's 6",
    ),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "halo", "all_to_all", "all_gather"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_forward_mode_raises_as_for_flash_attention(strategy, is_traced):
    limits = {"is_causal": True, "window": (2, 0)}
    call = lambda x: ring_attention(x, x, x, axis_name="sequence", strategy=strategy, **limits)
    shared = jax.shard_map(call, mesh=MESH, in_specs=jax.P(None, "sequence"), out_specs=jax.P(None, "sequence"))
    alone = jax.shard_map(lambda x: flash_attention(x, x, x, **limits), mesh=MESH, in_specs=jax.P(), out_specs=jax.P())
    for function in (shared, alone):
        with pytest.raises(TypeError, match=re.escape("can't apply forward-mode")):
            jax.jvp(jax.jit(function) if is_traced else function, (X,), (X,))
    if not is_traced:  # gradients are there
        loss = lambda function: lambda x: jnp.sin(function(x)).sum()
        np.testing.assert_allclose(jax.grad(loss(shared))(X), jax.grad(loss(alone))(X), atol=1e-6)


def test_ids_of_queries_and_of_keys_are_refused():
    ids = jnp.zeros(X.shape[:2], jnp.int32)
    with pytest.raises(TypeError, match="segment_ids: got a pair, want one array"):
        ring_of(segment_ids=(ids, ids))


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_the_block_specs_choose_by_size(monkeypatch):
    """ "auto" takes the row for its tokens and its window; a named strategy, or number of steps, takes precedence."""
    rows = (
        RingRow(strategy="all_gather", up_to=4, is_windowed=False),
        RingRow(strategy="ring", sends_ahead=3, up_to=6),
        RingRow(strategy="halo"),
    )
    monkeypatch.setattr(sm90, "RING", rows)

    two = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))

    def chosen(tokens, **options):
        arguments = {"axis_name": "sequence", "layout": None, "strategy": "auto", "scale": None, "softcap": None}
        arguments |= {"deterministic": None, "precision": None, "implementation": None} | options
        found = []
        attend = lambda x: found.append(prepare(x, x, x, is_causal=False, **arguments)[0])
        shared = jax.shard_map(attend, mesh=two, in_specs=jax.P(), out_specs=jax.P())
        jax.eval_shape(shared, jnp.ones((1, tokens, 4, 8)))
        return found[0].strategy, found[0].sends_ahead

    assert chosen(4) == ("all_gather", 1)
    assert chosen(4, window=(1, 1)) == chosen(6) == ("ring", 3)
    assert chosen(4, layout="striped") == ("ring", 1)
    assert chosen(8) == chosen(8, window=(5, 2)) == chosen(8, window=(-1, 2)) == ("ring", 1)
    assert chosen(8, window=(4, 2)) == chosen(8, window=(8, 2), layout="contiguous") == ("halo", 1)
    assert chosen(8, window=(4, 2), layout="striped") == ("ring", 1)
    assert chosen(8, window=(4, 2), sends_ahead=2) == ("ring", 2)
    assert chosen(8, window=(4, 2), mask=masks.global_tokens(2)) == ("ring", 1)
    assert chosen(6, strategy="all_gather")[0] == "all_gather"
    assert chosen(6, sends_ahead=2) == ("ring", 2)
    with pytest.raises(ValueError, match=r"self.strategy='all_to_all' must be 'ring', 'halo' or 'all_gather'"):
        RingRow(strategy="all_to_all")
    with pytest.raises(ValueError, match=r"self.differentiated='ring' must be 'all_to_all' or None"):
        RingRow(strategy="ring", differentiated="ring")
    with pytest.raises(ValueError, match=r"self.halo_share=2 must be 0 to 1"):
        RingRow(strategy="halo", halo_share=2)
    with pytest.raises(ValueError, match=r"self.permutes_up_to=-1 must be 0 or more"):
        RingRow(strategy="ring", permutes_up_to=-1)


@pytest.mark.parametrize(
    ("options", "kv_heads", "permutes"),
    [
        ({}, 2, (1, 9)),
        ({}, 1, (1, 3)),
        ({"window": (4, 0)}, 2, (2, 4)),
        ({"mask": masks.sliding_window(4, 0)}, 2, (2, 4)),
        ({"window": (4, 0), "strategy": "ring"}, 2, (1, 3)),
        ({"window": (5, 0)}, 2, (2, 9)),
        ({"window": (5, 0)}, 1, (2, 4)),
        ({"window": (17, 0)}, 2, (1, 9)),
        ({"sends_ahead": 1}, 2, (1, 3)),
        ({"strategy": "ring"}, 2, (1, 3)),
        ({"strategy": "all_to_all"}, 2, (4, 8)),
    ],
)
def test_auto_shares_out_the_heads_of_a_call_that_is_differentiated(options, kv_heads, permutes):
    """permutes: those of a call alone, and with its gradients, a cotangent of lse among them."""
    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    attend = functools.partial(ring_attention, axis_name="sequence", is_causal=True, implementation="xla", **options)
    loss = lambda *tensors: attend(*tensors).sum(dtype=jnp.float32)
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    tokens, shapes = jax.P(None, "sequence"), [(1, 64, heads, 8) for heads in (4, kv_heads, kv_heads)]
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    found = []
    for function in (attend, gradients):
        shared = jax.shard_map(function, mesh=mesh, in_specs=tokens, out_specs=tokens)
        found.append(str(jax.make_jaxpr(shared)(*given)).count("ppermute["))
    assert tuple(found) == permutes


@pytest.mark.parametrize(("policy", "forwards"), [("nothing_saveable", 2), ("names", 1)])
def test_names_for_checkpoint_policies(policy, forwards):
    """A policy keeps out and lse, so that the backward does not run the forward again."""
    policies = jax.checkpoint_policies
    chosen = policies.save_only_these_names(*RESIDUALS) if policy == "names" else policies.nothing_saveable
    loss = lambda x: jnp.sin(ring_attention(jnp.sin(x), x, x, axis_name="sequence", implementation="triton")).sum()
    shared = jax.shard_map(
        jax.checkpoint(loss, policy=chosen), mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    with on_device("A100"):
        program = jax.make_jaxpr(jax.value_and_grad(shared))(X.astype(jnp.bfloat16))
    assert _forwards(program.jaxpr) == forwards


@pytest.mark.parametrize(
    ("local", "heads", "together"),
    [(4096, 16, 16), (8192, 16, 8), (8192, 12, 12), (16384, 16, 4), (65536, 16, 1), (65536, 7, 1), (2048, 4, 4)],
)
def test_the_heads_of_a_causal_step_fill_the_gpu_twice(local, heads, together):
    """A step whose queries, or keys, meet others in one half: on an H100 32 blocks of 128 queries, with 8 heads 256."""
    found = []

    def look(query, key, value):
        call, _ = prepare(
            query, key, value, axis_name="sequence", layout="zigzag", strategy="ring", is_causal=True,
            **dict.fromkeys(("scale", "softcap", "deterministic", "precision", "implementation")),
        )  # fmt: skip
        step = Step(
            layout=call.layout, number=1, index=jnp.int32(0), query=query, q_ids=None, options=dict(call.options)
        )
        planned, _ = step._whole_call(Visitors(Pair((key, value)), None))
        found.append(planned.config.forward.heads_together)
        return query

    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "sequence")
    whole = jax.ShapeDtypeStruct((1, 2 * local, heads, 128), jnp.bfloat16)
    with on_device("h100"):
        jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), *[whole] * 3)
    assert found == [together]


@pytest.mark.parametrize(
    ("names", "permutes"), [((), 10), (OF_ATTENTION, 10), ((*OF_ATTENTION, *OF_HEADS, *RESIDUALS), 7)]
)
def test_what_a_policy_keeps_is_not_exchanged_again(names, permutes):
    """The forward has three sends, the backward four; where nothing is kept, the forward's come again."""
    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    attend = functools.partial(ring_attention, axis_name="sequence", implementation="xla", strategy="all_to_all")
    tokens = jax.P(None, "sequence")
    shared = jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens)
    loss = lambda *tensors: jnp.sin(shared(*(jnp.sin(x) for x in tensors))).sum(dtype=jnp.float32)
    kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(*names))
    given = [jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.bfloat16)] * 3
    assert str(jax.make_jaxpr(jax.grad(kept, argnums=(0, 1, 2)))(*given)).count("ppermute[") == permutes


@pytest.mark.parametrize(("strategy", "forwards"), [("ring", 0), ("halo", 0), ("all_to_all", 0), ("all_gather", 1)])
def test_known_results_are_not_computed_again(strategy, forwards):
    """The call of all keys and values runs again."""

    def gradients(x, lse):
        arguments = {"axis_name": "sequence", "layout": None, "scale": None, "softcap": None, "deterministic": None}
        arguments |= {"precision": None, "implementation": "triton", "is_causal": True, "strategy": strategy}
        arguments |= {"window": (2, 0)}
        known = lambda x: with_results(*prepare(x, x, x, **arguments), x, lse)
        return jax.vjp(known, x)[1]((x, lse))

    shared = jax.shard_map(gradients, mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    x = X.astype(jnp.bfloat16)
    with on_device("A100"):
        program = jax.make_jaxpr(shared)(x, jnp.zeros((x.shape[0], x.shape[2], x.shape[1]), jnp.float32))
    assert _forwards(program.jaxpr) == forwards


def _forwards(jaxpr) -> int:
    """The forward kernels of a program. A printed one may have equal parts once."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found += "attention_forward" in str(equation.params["name"])
            continue
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            found += _forwards(inner) if hasattr(inner, "eqns") else 0
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
