"""The plans of dilated_attention, its errors, and its gradients traced for a GPU. No attention runs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import dilated_attention, explain, sequence_parallel_dilated_attention
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.ops.dilated import plan as ops

QUERY = np.zeros((2, 20, 4, 8), np.float32)
LONGNET = {"segment_lengths": (512, 1024, 2048), "dilation_rates": (1, 2, 4)}


@pytest.mark.parametrize(
    ("device", "arguments", "attentions"),
    [
        ("H200", {}, ["view"] * 3),
        ("H200", {"is_causal": True, "head_dim": 64}, ["view"] * 3),
        ("H200", {"head_dim": 256}, ["view"] * 3),
        ("H200", {"deterministic": True}, [3]),
        ("H200", {"head_dim": 96}, [3]),
        ("H200", {"v_head_dim": 64}, [3]),
        ("H200", {"segment_ids": True}, [1, 1, 1]),
        ("H200", {"segment_ids": True, "dilation_rates": (1, 1, 1), "segment_lengths": (512,) * 3}, [3]),
        ("H200", {"order": "hilbert"}, ["view", 2]),
        ("H200", {"length": 3072}, ["view", "view", 1, 1]),  # the last branch and its shorter end
        ("H200", {"segment_lengths": (512, 1024, 9999)}, ["view"] * 3),
        ("H200", {"dilation_rates": (1, 3, 6), "is_causal": True}, ["view", 2]),
        ("H200", {"dilation_rates": (1, 3, 6)}, ["view", 1, 1]),
        ("H200", {"segment_lengths": (64, 128, 256), "dilation_rates": (8, 32, 64)}, ["view", 2]),
        ("H200", {"heads": "groups"}, ["view"] * 3),
        ("H200", {"heads": "groups", "kv_heads": 2}, ["view", 1, 1]),  # groups start at the heads 0, 3 and 6
        ("H200", {"heads": "groups", "deterministic": True}, [2, 1]),  # they are of 3, 3 and 2 heads
        ("H200", {"kv_heads": 2}, ["view"] * 3),
        ("H200", {"kv_heads": 2, "deterministic": True}, [2, 1]),  # rate 4 has two classes to a key head
        ("H200", {"layout": "partition"}, [2, 1, 1]),
        ("H200", {"layout": "partition", "segment_lengths": (2048,) * 2, "dilation_rates": (4,) * 2}, ["view"]),
        ("H200", {"implementation": "triton"}, [3]),
        ("A100", {}, [3]),
        ("B200", {}, [3]),
    ],
)
def test_branches_read_in_place(device, arguments, attentions):
    """For each attention "view", or the number of gathered pieces, if no launch is worth a copy."""
    given = LONGNET | {"length": 4096, "kv_heads": 8, "head_dim": 128} | arguments
    length, kv_heads, head_dim = (given.pop(name) for name in ("length", "kv_heads", "head_dim"))
    spec = lambda heads, dim: jax.ShapeDtypeStruct((1, length, heads, dim), jnp.bfloat16)
    qkv = spec(8, head_dim), spec(kv_heads, head_dim), spec(kv_heads, given.pop("v_head_dim", head_dim))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32) if given.pop("segment_ids", False) else None
    calls = []

    def prepare(query, key, value, segment_ids):
        call, _ = ops.prepare(query=query, key=key, value=value, segment_ids=segment_ids, **given)
        calls.extend(views for views, _ in call.attentions)

    with on_device(dataclasses.replace(device_info(device), memory_bandwidth=1)):
        jax.eval_shape(prepare, *qkv, ids)
    assert ["view" if views.is_strided else len(views.pieces) for views in calls] == attentions


def test_explain():
    inputs = [jax.ShapeDtypeStruct((2, 5000, 8, 64), jnp.bfloat16)] * 3
    with on_device("h200"):
        plan = explain(dilated_attention, *inputs, segment_lengths=(2048, 4096), dilation_rates=(1, 4), is_causal=True)
    assert plan.op == "dilated_attention"
    assert [(length, rate) for length, rate, _ in plan.branches] == [(2048, 1), (904, 1), (4096, 4), (904, 4)]
    assert {branch.implementation for *_, branch in plan.branches} == {"mosaic_gpu"}
    assert "segments of 4096 at rate 4: mosaic_gpu" in str(plan)
    plan = explain(dilated_attention, *inputs, segment_lengths=[64], dilation_rates=[1], implementation="xla")
    assert plan.implementation == "xla"
    assert plan.why == "asked for by name"


def test_explain_of_a_sharded_sequence():
    """The plan tells how many devices share a segment, and the distances that its keys travel."""
    shapes = [jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)] * 3
    mesh = jax.sharding.AbstractMesh((8,), ("sequence",), (jax.sharding.AxisType.Auto,))
    pattern = {"segment_lengths": (2048, 8192, 9999), "dilation_rates": (1, 2, 4), "is_causal": True}
    call = functools.partial(explain, sequence_parallel_dilated_attention, *shapes, axis_name="sequence", **pattern)
    with on_device("h200"), jax.sharding.use_abstract_mesh(mesh):
        plan = call()
        ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
        assert call(segment_ids=ids, implementation="triton").implementation == "triton"
    assert (plan.op, plan.implementation) == ("sequence_parallel_dilated_attention", "mosaic_gpu")
    assert plan.devices == (1, 2, 8)
    assert plan.shifts == ((0,), (0, 1), (0, 1, 2, 3))
    assert plan.in_place == (True, False, False)
    assert "segments of 4096 at rate 2: mosaic_gpu of gathered rows in 2 steps of a ring of 2 devices, Bl" in str(plan)
    with pytest.raises(ValueError, match=r"axis_name: got 'sequence', want an axis of the jax.shard_map around"):
        call()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"segment_lengths": (8, 0)}, ValueError, "segment_lengths: got (8, 0), want one number or more, all positive"),
        ({"dilation_rates": (1, -2)}, ValueError, "dilation_rates: got (1, -2), want one number or more, all positive"),
        ({"segment_lengths": ()}, ValueError, "segment_lengths: got (), want one number or more"),
        ({"segment_lengths": (8, 2.0)}, TypeError, "segment_lengths: got (8, 2.0), want a sequence of ints"),
        ({"segment_lengths": 8}, TypeError, "segment_lengths: got int, want a sequence of ints"),
        (
            {"dilation_rates": (1,)},
            ValueError,
            "dilation_rates: got 1 of them for 2 segment_lengths, want one for each",
        ),
        (
            {"dilation_rates": (1, 17)},
            ValueError,
            "dilation_rates[1]: got 17, want at most segment_lengths[1] = 16",
        ),
        (
            {"heads": "groups", "segment_lengths": (8,) * 5, "dilation_rates": (1,) * 5},
            ValueError,
            "heads: got 'groups' with 5 segment_lengths for 4 heads",
        ),
        ({"heads": "some"}, ValueError, "heads: got 'some', want 'all' or 'groups'"),
        ({"combine": "sum"}, ValueError, "combine: got 'sum', want 'lse' or 'mean'"),
        ({"layout": "ring"}, ValueError, "layout: got 'ring', want 'overlap' or 'partition'"),
        ({"order": "snake"}, ValueError, "order: got 'snake', want None or 'hilbert'"),
        ({"layout": "partition", "combine": "mean"}, ValueError, "layout: got 'partition' with heads='all', combine="),
        (
            {"combine": "mean", "stop_gradient_weights": True},
            ValueError,
            "stop_gradient_weights: got True with combine=",
        ),
        ({"stop_gradient_weights": 1}, TypeError, "stop_gradient_weights: got int, want a bool"),
        ({"is_causal": 1}, TypeError, "is_causal: got int, want a bool"),
        ({"segment_ids": (np.zeros((2, 20), np.int32),) * 2}, TypeError, "segment_ids: got a pair, want one"),
        ({"segment_ids": np.zeros((2, 9), np.int32)}, ValueError, "segment_ids: got shape (2, 9)"),
        (
            {"implementation": "cudnn"},
            NotImplementedError,
            "implementation='cudnn' cannot serve this dilated_attention: it serves no branch",
        ),
        (
            {"implementation": "nope"},
            ValueError,
            "implementation: got 'nope' for dilated_attention, want one of 'mosaic_gpu', 'triton', 'xla'",
        ),
        ({"window": 3}, TypeError, "unexpected keyword argument 'window'"),
        ({"key": np.zeros((2, 21, 4, 8), np.float32)}, ValueError, "value: got (length, heads)"),
    ],
)
def test_errors(arguments, error, message, monkeypatch):
    query, key, value = QUERY, QUERY, QUERY[..., :6]
    given = {"key": key, "value": value, "segment_lengths": (8, 16), "dilation_rates": (1, 2)} | arguments
    for function in (dilated_attention, functools.partial(explain, dilated_attention)):
        with pytest.raises(error, match=re.escape(message)):
            function(query, **given)


def test_queries_and_keys_need_one_length():
    query, key, value = QUERY, QUERY, QUERY[..., :6]
    with pytest.raises(ValueError, match=r"key: got length 19, want query's length 20"):
        dilated_attention(query, key[:, :19], value[:, :19], segment_lengths=(8,), dilation_rates=(1,))


@pytest.mark.parametrize("heads", ["all", "groups"])
def test_gradients_inside_shard_map_on_hopper(heads):
    """Traced for an H100. In shard_map a kernel takes no varying ref, so the branches' gradients of query are added."""
    pattern = {"segment_lengths": (256, 2048), "dilation_rates": (1, 2), "heads": heads}
    gradient = jax.grad(lambda x: dilated_attention(x, x, x, **pattern).astype(jnp.float32).sum())
    mesh = jax.sharding.AbstractMesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((4, 2048, 4, 64), jnp.bfloat16)
    with on_device("H100"):
        shared = jax.shard_map(gradient, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
        assert jax.eval_shape(shared, x).shape == x.shape
