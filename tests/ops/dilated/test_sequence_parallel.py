"""sequence_parallel_dilated_attention on four CPU devices in a process of its own, against one device.

As a script it prints, for each case, the errors of out, lse, dq, dk and dv against float64, the arrays that the
backward keeps, and the arrays that are sent.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import hilbert_order, sequence_parallel_dilated_attention
from jax_kernels.ops.dilated.sharded_segments import dealt_out
from jax_kernels.testing import rms_error
from tests.support.cases import tiers
from tests.support.oracles import dilated as dilated_oracle
from tests.support.processes import cpu_devices

DEVICES = 4
BATCH, HEAD_DIM, V_HEAD_DIM = 2, 8, 6
MIXED = ((4, 8, 16, 100), (1, 2, 4, 8))
# segment_lengths, dilation_rates, is_causal, heads, key heads, others. There are 32 tokens: 8 on each device.
CASES = {
    "all_lengths": (*MIXED, True, 4, 4, {}),
    "not_causal": ((8, 16, 32), (3, 2, 4), False, 8, 2, {}),
    "across_alone": ((32,), (2,), True, 4, 1, {}),
    "local_alone": ((8,), (3,), True, 3, 3, {}),
    "packed": ((8, 16, 32), (3, 2, 4), True, 8, 2, {"segment_ids": True}),
    "packed_not_causal": ((8, 32), (2, 4), False, 4, 4, {"segment_ids": True, "order": "hilbert"}),
    "groups": (*MIXED, True, 8, 2, {"heads": "groups"}),
    "groups_mean": ((32, 4, 32), (2, 3, 4), False, 7, 7, {"heads": "groups", "combine": "mean", "segment_ids": True}),
    "mean": ((4, 16, 32), (1, 2, 4), True, 4, 2, {"combine": "mean"}),
    "mean_not_causal": ((8, 16, 32), (1, 8, 4), False, 4, 4, {"combine": "mean", "order": "hilbert"}),
    "stopped": ((4, 16, 32), (1, 2, 4), True, 4, 2, {"stop_gradient_weights": True}),
    "stopped_not_causal": ((8, 32), (1, 4), False, 4, 4, {"stop_gradient_weights": True, "segment_ids": True}),
    "hilbert": ((8, 16, 32), (3, 2, 4), True, 8, 2, {"order": "hilbert"}),
    "hilbert_by_eight": ((16, 32), (8, 8), True, 8, 8, {"order": "hilbert"}),
    "interpreted": ((8, 32), (2, 4), True, 4, 2, {"implementation": "triton", "order": "hilbert"}),
    "hilbert_at_rate_1": ((32,), (1,), False, 2, 2, {"order": "hilbert"}),
}
# Segments that begin and end within devices, rates that do not divide a device's tokens, and layout="partition". The
# last item is the number of steps round the ring that each branch takes.
ODD = {
    "longnet": ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12), True, 8, 4, {}, (4, 4, 4, 4, 4)),
    "odd_lengths": ((3, 12, 20, 11), (2, 5, 3, 1), False, 8, 2, {}, (3, 3, 4, 3)),
    "odd_rate_of_pairs": ((16,), (3,), False, 3, 3, {}, (2,)),
    "odd_causal": ((3, 12), (2, 5), True, 4, 2, {"segment_ids": True}, (2, 2)),
    "odd_hilbert": ((12, 20), (3, 3), True, 4, 4, {"segment_ids": True, "order": "hilbert"}, (2, 3)),
    "odd_groups": ((12, 30), (3, 4), False, 4, 2, {"heads": "groups", "combine": "mean"}, (3, 4)),
    "odd_mean": ((12, 8, 32), (12, 2, 3), True, 4, 2, {"combine": "mean", "segment_ids": True}, (2, 1, 4)),
    "odd_stopped": ((12, 20), (1, 3), False, 2, 1, {"stop_gradient_weights": True}, (3, 4)),
    "odd_interpreted": ((12, 8), (3, 2), True, 2, 1, {"implementation": "triton", "segment_ids": True}, (2, 1)),
    "partition": ((5, 14, 6), (2, 7, 1), True, 4, 2, {"layout": "partition"}, (3,)),
    "partition_of_one": ((16,) * 2, (4,) * 2, False, 4, 2, {"layout": "partition"}, (2,)),
    "partition_local": ((4, 4, 8, 8, 8), (2, 1, 8, 4, 2), False, 2, 2, {"layout": "partition"}, (1,)),
    "partition_packed": (
        *((3, 20), (2, 4), False, 4, 2),
        {"layout": "partition", "segment_ids": True, "order": "hilbert"},
        (4,),
    ),
    "partition_interpreted": (
        *((5, 14), (2, 7), True, 2, 1),
        {"layout": "partition", "implementation": "triton"},
        (3,),
    ),
}
# Branches within a device and across several devices. The other cases combine these with the modes.
QUICK = ("packed",)
QUICK_ODD = ("odd_causal", "partition")


def ids_of(length):
    """Packed sequences that begin and end within a device, and tokens of no sequence."""
    ids = np.repeat(np.arange(length), 11)[:length].astype(np.int32)
    return np.stack([np.where(np.arange(length) % 13 == 7, -1, ids), np.random.default_rng(1).integers(-1, 2, length)])


def arrangement(length, rate):
    """The tokens of a segment, ordered so that each class of the curve (every rate-th token) is ascending."""
    visited = hilbert_order(length)
    tokens = np.empty(length, np.int32)
    for phase in range(rate):
        tokens[phase::rate] = np.sort(visited[phase::rate])
    return tokens


def travels(jaxpr, found=None):
    """(primitive, dtype, rows on one device) of each collective in a jaxpr and in its inner jaxprs."""
    found = [] if found is None else found
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("all_gather", "reduce_scatter", "psum", "all_to_all", "ppermute"):
            gathered = equation.outvars if equation.primitive.name == "all_gather" else equation.invars
            found += [(equation.primitive.name, x.aval.dtype.name, x.aval.shape[1]) for x in gathered]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                travels(getattr(inner, "jaxpr", inner), found)
    return found


def run_case(mesh, lengths, rates, is_causal, heads, kv_heads, others):
    P = jax.sharding.PartitionSpec
    tokens, of_lse = P(None, "sequence"), P(None, None, "sequence")
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    query, dout = normal(BATCH, 32, heads, HEAD_DIM), normal(BATCH, 32, heads, V_HEAD_DIM)
    key, value = normal(BATCH, 32, kv_heads, HEAD_DIM), normal(BATCH, 32, kv_heads, V_HEAD_DIM)
    dlse = normal(BATCH, heads, 32)
    pattern = {"segment_lengths": lengths, "dilation_rates": rates, "is_causal": is_causal} | others
    ids = ids_of(32).astype(np.int32) if pattern.pop("segment_ids", False) else None
    implementation = pattern.pop("implementation", "xla")
    kept = []

    def attend(query, key, value, ids):
        op = functools.partial(sequence_parallel_dilated_attention, axis_name="sequence", return_lse=True, **pattern)
        return op(query, key, value, segment_ids=ids, implementation=implementation)

    def with_gradients(query, key, value, ids, dout, dlse):
        results, vjp = jax.vjp(lambda *qkv: attend(*qkv, ids), query, key, value)
        kept[:] = sorted(x.shape for x in jax.tree.leaves(vjp))
        return *results, *vjp((dout, dlse))

    shared = jax.shard_map(
        with_gradients,
        mesh=mesh,
        in_specs=(*[tokens] * 5, of_lse),
        out_specs=(tokens, of_lse, *[tokens] * 3),
        check_vma=implementation == "xla",
    )
    got = jax.jit(shared)(query, key, value, ids, dout, dlse)
    want = dilated_oracle.dilated_attention(query, key, value, dout, dlse, segment_ids=ids, **pattern)
    halves = [x.astype(jnp.bfloat16) for x in (query, key, value)]
    traced = jax.make_jaxpr(shared)(*halves, ids, dout.astype(jnp.bfloat16), dlse)
    return {
        "errors": [rms_error(g, w) for g, w in zip(got, want, strict=True)],
        "dead": bool(np.isneginf(want[1]).any()),
        "dtypes": [x.dtype.name for x in traced.out_avals],
        "travels": travels(traced.jaxpr),
        "kept": kept,
    }


def main(names) -> dict:
    mesh = jax.make_mesh((DEVICES,), ("sequence",), (jax.sharding.AxisType.Auto,))
    return {name: run_case(mesh, *(CASES | ODD)[name][:6]) for name in names}


def results_of(names):
    return cpu_devices.results_of(__file__, names, devices=DEVICES, JAX_KERNELS_INTERPRET="1")


# One test checks all results of a process. With separate tests, each worker would start the process.
@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", tiers.groups(CASES, QUICK, len(CASES)))
def test_matches_dilated_attention(names):
    for name, result in results_of(names).items():
        for what, error in zip(("out", "lse", "dq", "dk", "dv"), result["errors"], strict=True):
            assert error < 1e-6, (name, what)
        assert result["dtypes"] == ["bfloat16", "float32", *["bfloat16"] * 3], name
        assert result["kept"] == what_the_backward_keeps(name), name
        assert sorted(map(tuple, result["travels"])) == what_travels(name), name
        if name in ("across_alone", "packed", "groups_mean"):
            assert result["dead"], f"{name}: every token attends to some token"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", tiers.groups(ODD, QUICK_ODD, 7))
def test_serves_any_segments(names):
    for name, result in results_of(names).items():
        for what, error in zip(("out", "lse", "dq", "dk", "dv"), result["errors"], strict=True):
            assert error < 1e-6, (name, what)
        assert result["dtypes"] == ["bfloat16", "float32", *["bfloat16"] * 3], name
        assert result["kept"] == what_the_backward_keeps(name), name
        # Only the ids are gathered from all devices. A device's float32 gradients travel back as far as keys came.
        others, steps = ODD[name][5:]
        of_kind = lambda kind, dtype, found=result["travels"]: [x for x in found if x[:2] == [kind, dtype]]
        hops = sum(count - 1 for count in steps)
        assert not of_kind("all_gather", "bfloat16"), name
        assert bool(of_kind("all_gather", "int32")) == ("segment_ids" in others), name
        assert len(of_kind("ppermute", "float32")) == 2 * hops, name
        has_own_softmax = "combine" in others or "stop_gradient_weights" in others
        turns = 3 if has_own_softmax and others.get("heads") != "groups" else 2
        assert len(of_kind("ppermute", "bfloat16")) == 2 * turns * hops, name


def what_the_backward_keeps(name):
    """A device's query, key, value, out and lse, and its ids; nothing gathered, and nothing of a branch."""
    _, _, _, heads, kv_heads, others = (CASES | ODD)[name][:6]
    local = (BATCH, 32 // DEVICES)
    of_heads = [(heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, V_HEAD_DIM), (heads, V_HEAD_DIM)]
    want = [[*local, *x] for x in of_heads] + [[BATCH, heads, 32 // DEVICES]]
    return sorted(want + ([list(local)] if "segment_ids" in others else []))


def what_travels(name):
    """Only long segments send keys and values (the rows that take part), and their float32 gradients.

    They go from device to device, with the ids of these rows: nothing is gathered. Branches with a softmax of their own
    need it in the backward, and send keys and values once more.
    """
    lengths, rates, *_, others = CASES[name]
    has_own_softmax = "combine" in others or "stop_gradient_weights" in others
    turns = 3 if has_own_softmax and others.get("heads") != "groups" else 2
    want = []
    for size, rate in zip(lengths, rates, strict=True):
        devices = min(size // 8, DEVICES)
        if devices < 2:
            continue
        rows = 8 // rate
        if "order" in others and rate > 1:
            tokens = arrangement(8 * devices, rate)
            rows = dealt_out([tokens[phase::rate] for phase in range(rate)], devices, 8)[0].shape[1] // rate
        hops = devices - 1
        want += [("ppermute", "bfloat16", rows)] * 2 * turns * hops + [("ppermute", "float32", rows)] * 2 * hops
        if "segment_ids" in others or rows != 8 // rate:
            want += [("ppermute", "int32", rows)] * turns * hops
    return sorted(want)


@pytest.mark.parametrize(("length", "rate", "devices"), [(64, 4, 4), (64, 8, 8), (48, 3, 4), (60, 5, 2)])
def test_order_is_dealt_to_devices(length, rate, devices):
    """The rows of a class, concatenated over the devices, are the class in the order of the sequence."""
    tokens = arrangement(length, rate)
    at, places = dealt_out([tokens[phase::rate] for phase in range(rate)], devices, 8)
    local = length // devices
    assert at.shape[1] // rate % 8 == 0 or at.shape[1] == local
    for device in range(devices):
        assert (at[device, places[device]] == np.arange(local)).all()
        assert (at[device] < local).sum() == local
    for phase in range(rate):
        taken = np.concatenate([device * local + row[row < local] for device, row in enumerate(at[:, phase::rate])])
        assert taken.tolist() == tokens[phase::rate].tolist()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"segment_lengths": (8, 0)}, ValueError, "segment_lengths: got (8, 0), want one number or more, all positive"),
        ({"axis_name": "j"}, ValueError, "axis_name: got 'j', want an axis of the jax.shard_map around this call"),
        ({"axis_name": 0}, TypeError, "axis_name: got int, want the name of a mesh axis"),
        ({"heads": "some"}, ValueError, "heads: got 'some', want 'all' or 'groups'"),
        (
            {"heads": "groups", "segment_lengths": (8,) * 3, "dilation_rates": (1,) * 3},
            ValueError,
            "heads: got 'groups'",
        ),
        ({"order": "snake"}, ValueError, "order: got 'snake', want None or 'hilbert'"),
        (
            {"combine": "mean", "stop_gradient_weights": True},
            ValueError,
            "stop_gradient_weights: got True with combine='mean'",
        ),
        ({"segment_ids": np.zeros((1, 32), np.int32)}, ValueError, "segment_ids: got shape (1, 32)"),
        ({"segment_ids": np.zeros((1, 8), np.float32)}, TypeError, "segment_ids: got dtype float32"),
        ({"layout": "columns"}, ValueError, "layout: got 'columns', want 'overlap' or 'partition'"),
        ({"layout": "partition", "heads": "groups"}, ValueError, "layout: got 'partition' with heads='groups'"),
    ],
)
def test_errors(arguments, error, message):
    x = jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.float32)
    given = {"axis_name": "i", "segment_lengths": (8, 16), "dilation_rates": (1, 1)} | arguments
    attend = functools.partial(sequence_parallel_dilated_attention, **given)
    with pytest.raises(error, match=re.escape(message)):
        jax.make_jaxpr(attend, axis_env=[("i", 4)])(x, x, x)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
