"""Documents dealt out to the devices of a ring: the layout, its errors, and ring_attention against flash_attention.

As a script it prints, for each case, the errors of out, lse, dq, dk, dv and dsinks, and the number of sends.
"""

import dataclasses
import functools
import json
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import DocumentLayout, explain, flash_attention, ring_attention, shard_sequence, unshard_sequence
from jax_kernels.ops.ring.planning import documents as of_documents
from jax_kernels.ops.ring.planning.balance import deal
from tests.support.cases import rings, tiers
from tests.support.processes import cpu_devices

HEADS, KV_HEADS = 4, 2
TOKENS = 96
# Lengths of the documents of each row; the rest is padding.
CUT = ([50, 29, 17], [96])
FEW = ([48, 30, 18], [50, 16, 14, 10, 6])  # two devices share some tokens only
WHOLE = ([30, 18, 30, 18],)
MANY = ([40, 3, 1, 22, 7, 9], [5, 5, 60, 26])
INTERPRETED = {"implementation": "triton", "check_vma": False}
# Devices, documents, options. "steps": the layout is the DocumentLayout's steps, "name": it is "documents", "all": the
# steps send all keys. is_whole: each device has the ids of all devices.
CASES = {
    "two": (2, CUT, {"is_causal": True, "sinks": True, "is_whole": True}),
    "two_full": (2, CUT, {}),
    "two_whole": (2, WHOLE, {"is_causal": True}),
    "two_named": (2, CUT, {"is_causal": True, "layout": "name"}),
    "four": (4, MANY, {"is_causal": True, "softcap": 2.0, "layout": "steps", "is_whole": True}),
    "four_full": (4, MANY, {"sinks": True}),
    "four_full_of_causal": (4, MANY, {"balanced_for": True}),
    "four_causal_of_full": (4, MANY, {"is_causal": True, "balanced_for": False}),
    "eight": (8, MANY, {"is_causal": True}),
    "eight_full": (8, CUT, {"layout": "name", "is_whole": True}),
    "one": (1, MANY, {"is_causal": True, "is_whole": True}),
    "two_all": (2, FEW, {"is_causal": True, "layout": "all", "is_whole": True} | INTERPRETED),
    "two_all_full": (2, FEW, {"layout": "all"} | INTERPRETED),
    "two_some": (2, FEW, {"is_causal": True} | INTERPRETED),
    "unchecked": (4, CUT, {"is_causal": True, "check_vma": False}),
    "ahead": (4, MANY, {"is_causal": True, "sends_ahead": 2}),
    "interpreted": (2, MANY, {"is_causal": True, "is_whole": True} | INTERPRETED),
}
QUICK = ["two"]


def ids_of(documents, tokens=TOKENS, scattered=False):
    """int32 [B, tokens]: ids of documents of these lengths, in an order that is not their own, with padding at the end.

    scattered: whether the tokens of the documents alternate.
    """
    rows = []
    for lengths in documents:
        ids = np.repeat(np.arange(len(lengths))[::-1] + 3, lengths)
        rows.append(np.pad(ids, (0, tokens - len(ids)), constant_values=-7))
    ids = np.stack(rows).astype(np.int32)
    return np.random.default_rng(1).permuted(ids, axis=1) if scattered else ids


def run_case(devices, documents, options):
    options = dict(options)
    kind, check_vma = options.pop("layout", "object"), options.pop("check_vma", True)
    is_whole = options.pop("is_whole", False)
    of_ring = {name: options.pop(name) for name in ("sends_ahead", "implementation") if name in options}
    of_ring = {"implementation": "xla"} | of_ring
    is_causal = options.get("is_causal", False)
    ids = ids_of(documents)
    with unittest.mock.patch.object(of_documents, "TILE", 8):
        layout = DocumentLayout.of(ids, devices, is_causal=options.pop("balanced_for", is_causal), heads=10**6)
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    query, key, value = (normal(len(ids), TOKENS, heads, 8) for heads in (HEADS, KV_HEADS, KV_HEADS))
    dout, dlse = normal(len(ids), TOKENS, HEADS, 8), normal(len(ids), HEADS, TOKENS)
    sinks = normal(HEADS) if options.pop("sinks", False) else None

    def both(attention, query, key, value, ids, sinks, dout, dlse):
        call = lambda query, key, value, sinks: attention(query, key, value, segment_ids=ids, sinks=sinks)
        results, vjp = jax.vjp(call, query, key, value, sinks)
        dlse = jnp.where(jnp.isneginf(results[1]), 0, dlse)
        *gradients, dsinks = vjp((dout, dlse))
        return *results, *gradients, dsinks

    mesh = jax.make_mesh((devices,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    sends_all = dataclasses.replace(layout.steps, sends_all=True)
    given_layout = {"object": layout, "steps": layout.steps, "name": "documents", "all": sends_all}[kind]
    attention = functools.partial(
        ring_attention, axis_name="sequence", layout=given_layout, return_lse=True, **of_ring, **options
    )

    def ring(*arrays):
        *results, dsinks = both(attention, *arrays)
        return *results, dsinks if dsinks is None or check_vma else jax.lax.psum(dsinks, "sequence")

    tokens, rows, one = jax.P(None, "sequence"), jax.P(None, None, "sequence"), None if sinks is None else jax.P()
    shared = jax.jit(
        jax.shard_map(
            ring,
            mesh=mesh,
            in_specs=(tokens, tokens, tokens, jax.P() if is_whole else tokens, one, tokens, rows),
            out_specs=(tokens, rows, tokens, tokens, tokens, one),
            check_vma=check_vma,
        )
    )
    shard = functools.partial(shard_sequence, mesh=mesh, axis_name="sequence", layout=layout)
    ring_ids = jnp.asarray(layout.ring_ids) if is_whole else shard(layout.segment_ids)
    given = *map(shard, (query, key, value)), ring_ids, sinks, shard(dout), shard(dlse, axis=2)
    got = list(shared(*given))
    for i in range(5):
        got[i] = unshard_sequence(got[i], mesh, "sequence", layout=layout, axis=2 if i == 1 else 1)
    one_device = functools.partial(flash_attention, return_lse=True, implementation="xla", **options)
    with jax.default_matmul_precision("highest"):
        want = both(one_device, query, key, value, jnp.asarray(ids), sinks, dout, dlse)
    errors = rings.errors_of(("out", "lse", "dq", "dk", "dv", "dsinks"), got, want)
    return {"errors": errors, "travels": str(jax.make_jaxpr(shared)(*given)).count("ppermute[")}


def main(names) -> dict:
    return {name: run_case(*CASES[name]) for name in names}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", tiers.groups(CASES, QUICK, 5))
def test_matches_flash_attention(names):
    results = cpu_devices.results_of(__file__, names, JAX_KERNELS_INTERPRET="1")
    for name, found in results.items():
        for array, error in found["errors"].items():
            assert error < 2e-6, (name, array, error)
    for whole in {"two_whole", "one"} & set(names):
        assert results[whole]["travels"] == 0


def dealt(lengths, devices, *, padding=0, is_causal=True, step_pairs=0.0):
    """The Dealt of `deal`, after checks that each token is dealt out once and that all devices have equally many."""
    lengths = np.array(lengths, int)
    found = deal(lengths, padding, devices, is_causal=is_causal, step_pairs=step_pairs)
    tokens = found.early + found.late
    np.testing.assert_array_equal(tokens.sum(1), lengths)
    assert set(tokens.sum(0) + found.padding) == {(lengths.sum() + padding) // devices}
    assert min(found.early.min(initial=0), found.late.min(initial=0), found.padding.min()) >= 0
    return found


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_have_equal_pairs(devices, is_causal):
    random = np.random.default_rng(devices)
    for documents in (1, 3, 8, 60):
        borders = np.sort(random.choice(np.arange(1, 1 << 14), documents - 1, replace=False))
        lengths = np.diff([0, *borders, 1 << 14])
        found = dealt(lengths, devices, is_causal=is_causal)
        assert found.pairs.max() <= 1.02 * found.pairs.mean(), (documents, found.pairs)
        pairs = lengths * (lengths + 1) / 2 if is_causal else lengths.astype(float) ** 2
        assert found.pairs.sum() == pytest.approx(pairs.sum())


def test_documents_stay_whole_if_they_fit():
    assert not dealt([30, 18, 30, 18], 2).cut.any()
    assert dealt([30, 18, 30, 18], 4).cut.sum() == 4
    # The first document has more than half of the pairs. A cut costs more than it saves with expensive steps.
    assert list(dealt([48, 30, 18], 2).cut) == [True, False, False]
    assert not dealt([48, 30, 18], 2, step_pairs=1000).cut.any()
    assert not dealt([50, 20], 2, padding=30, step_pairs=1000).cut.any()
    assert dealt([], 2, padding=8).pairs.sum() == 0


@pytest.mark.parametrize("scattered", [False, True])
def test_layout_holds_each_pair_once(scattered):
    """The steps' ids keep the pairs of one document with a key before the query, each once, and no others."""
    devices, ids = 4, ids_of(MANY, scattered=scattered)
    layout = DocumentLayout.of(ids, devices, heads=10**6)
    np.testing.assert_array_equal(np.sort(layout.order), np.tile(np.arange(TOKENS), (2, 1)))
    for row in range(2):
        for document in np.unique(ids[row][ids[row] >= 0]):
            here = ids[row] == document
            assert len(set(layout.segment_ids[row][here] >> 1)) == 1
            np.testing.assert_array_equal(layout.positions[row][here], np.arange(here.sum()))
    assert (layout.segment_ids[ids < 0] == -1).all()
    order, length = layout.order[0], TOKENS // devices
    late = layout.segment_ids[0][order] & 1
    got = np.zeros((TOKENS, TOKENS), int)
    rank = np.arange(TOKENS) // length
    same = (ids[0][:, None] == ids[0]) & (ids[0] >= 0)
    of_order = same[np.ix_(order, order)]
    own = rank[:, None] == rank
    later = rank[:, None] > rank
    sees = np.where(later, late[None] == 0, late[:, None] == 1)
    got[np.ix_(order, order)] = of_order & np.where(own, np.tri(TOKENS, dtype=bool), sees)
    np.testing.assert_array_equal(got, same & np.tri(TOKENS, dtype=bool))
    pairs = got[order].reshape(devices, length, TOKENS).sum((1, 2))
    assert layout.pairs.sum() == pytest.approx(sum((np.array(x) * (np.array(x) + 1) / 2).sum() for x in MANY))
    assert pairs.max() <= 1.1 * pairs.mean()


@pytest.mark.parametrize(
    ("lengths", "devices", "heads"),
    [([9000, 3000, 2000, 2384], 2, 10**6), ([9000, 3000, 2000, 2384], 4, 10**6), ([64, 64, 128], 2, 1)],
)
def test_shared_tokens(lengths, devices, heads):
    """Each device sends room for the most tokens that a device has of cut documents, in whole tiles of 128."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    layout = DocumentLayout.of(ids, devices, heads=heads)
    document = ids[layout.order[0]].reshape(devices, -1)
    cut = [len(set(np.nonzero(document == number)[0])) > 1 for number in range(len(lengths))]
    most = max(np.isin(row, np.flatnonzero(cut)).sum() for row in document)
    assert layout.steps.shared == -(-most // 128) * 128
    assert bool(layout.steps.steps) == any(cut)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("devices", [2, 4])
def test_pairs_of_steps(devices, is_causal):
    lengths = np.array([9000, 3000, 2000, 2384])
    dealt = deal(lengths, 0, devices, is_causal=is_causal, step_pairs=0.0)
    assert dealt.cut.any()
    pairs = sum(dealt.pairs_of_step(step, is_causal) for step in range(devices))
    np.testing.assert_allclose(pairs, dealt.pairs)


@pytest.mark.parametrize(
    ("lengths", "sends_all"), [([32768, 19661, 13107], True), ([8192] * 8, False), ([9000, 3000, 2000, 2384], False)]
)
def test_keys_are_copied_unless_their_send_is_hidden(lengths, sends_all):
    """Only the keys of long documents take less time to send than a step takes."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    steps = DocumentLayout.of(ids, 2).steps
    assert steps.sends_all == sends_all
    assert not sends_all or steps.shared < steps.length


TWO = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))


def shapes(tokens):
    return [jax.ShapeDtypeStruct((1, tokens, heads, 64), jnp.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def test_only_keys_of_cut_documents_travel():
    layout = DocumentLayout.of(np.repeat(np.arange(3), [2000, 1096, 1000]), 2, heads=10**6)
    assert layout.steps.steps == (1,)
    assert layout.steps.shared == 1152  # 2,000 tokens cut in nearly equal parts, rounded up
    attend = functools.partial(ring_attention, axis_name="sequence", is_causal=True, layout=layout)
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    given = jax.P(None, "sequence")
    shared = jax.shard_map(
        lambda q, k, v, ids: attend(q, k, v, segment_ids=ids),
        mesh=TWO, in_specs=given, out_specs=given, check_vma=False,
    )  # fmt: skip
    permutes = [line for line in str(jax.make_jaxpr(shared)(*shapes(4096), ids)).splitlines() if "ppermute[" in line]
    assert len(permutes) == 2
    assert sum("1152" in line for line in permutes) == 2
    with jax.sharding.use_abstract_mesh(TWO):
        plan = explain(attend, *shapes(2048), segment_ids=jax.ShapeDtypeStruct((1, 2048), jnp.int32))
    assert (plan.layout, plan.strategy, [name for name, _ in plan.steps]) == ("documents", "ring", ["step 0", "step 1"])


def called(layout, tokens=48, dtype=jnp.int32, **options):
    ids = None if dtype is None else jnp.zeros((1, 2 * tokens), dtype)
    given = [jnp.ones(x.shape, x.dtype) for x in shapes(2 * tokens)]
    attend = lambda q, k, v, ids: ring_attention(
        q, k, v, axis_name="sequence", layout=layout, segment_ids=ids, **options
    )
    spec = jax.P(None, "sequence")
    return jax.eval_shape(jax.shard_map(attend, mesh=TWO, in_specs=spec, out_specs=spec), *given, ids)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "window: got 4 with layout='documents', want None", {"window": 4}),
        (ValueError, "strategy: got 'all_to_all' with layout='documents', want 'ring' or 'auto'",
         {"strategy": "all_to_all"}),
        (ValueError, "score_mod: got function with layout='documents', want None", {"score_mod": lambda s, *_: s}),
        (ValueError, "segment_ids: got None with layout='documents'", {"dtype": None}),
        (TypeError, "segment_ids: got int16 with layout='documents', want the int32", {"dtype": jnp.int16}),
        (ValueError, "want 2 devices with 24 tokens each", {"tokens": 24}),
        (TypeError, "layout: got tuple, want a str, a DocumentLayout", {"layout": ("documents",)}),
    ],
)  # fmt: skip
def test_errors_of_calls(error, message, options):
    layout = DocumentLayout.of(ids_of(WHOLE), 2)
    with pytest.raises(error, match=message):
        called(**{"layout": layout} | options)


def test_errors_of_layouts():
    with pytest.raises(TypeError, match="segment_ids: got a traced array, want known ids"):
        jax.jit(lambda ids: DocumentLayout.of(ids, 2).order)(jnp.zeros((1, 8), jnp.int32))
    with pytest.raises(TypeError, match="segment_ids: got dtype float64, want integers"):
        DocumentLayout.of(np.zeros(8), 2)
    with pytest.raises(ValueError, match="segment_ids: got 9 tokens for 2 devices, want a multiple"):
        DocumentLayout.of(np.zeros(9, int), 2)
    with pytest.raises(ValueError, match="devices: got 0, want an int of 1 or more"):
        DocumentLayout.of(np.zeros(8, int), 0)
    mesh = jax.make_mesh((1,), ("sequence",), (jax.sharding.AxisType.Auto,))
    layout = DocumentLayout.of(ids_of(CUT), 1)
    with pytest.raises(ValueError, match="layout: got documents of 96 tokens for 1 devices, want 8 tokens for 1"):
        shard_sequence(np.zeros((2, 8)), mesh, "sequence", layout=layout)
    with pytest.raises(
        ValueError, match=r"x: got shape \(3, 96\) with axis=1, want the 2 rows of documents along axis 0"
    ):
        shard_sequence(np.zeros((3, 96)), TWO, "sequence", layout=DocumentLayout.of(ids_of(CUT), 2))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
