"""The pieces of a dilated attention that are read in place, and the pieces gathered for one launch with gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import dilated_attention, explain
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.ops.dilated import branches as views
from jax_kernels.ops.dilated import plan as ops
from jax_kernels.ops.dilated.pieces import pieces_of

SHORT = {"segment_lengths": (1024, 2048, 4096, 8192), "dilation_rates": (1, 2, 4, 8)}
GROUPS = SHORT | {"heads": "groups", "is_causal": True}
LONG = GROUPS | {"segment_lengths": (2048, 4096, 8192, 16384)}
EVERY_VIEW = [("view", branch) for branch in range(4)]


def launches(shape, kv_heads=None, device="h200", **pattern):
    """With gradients: for each attention ("view", its branch), or the list of its gathered branches."""
    batch, length, heads, head_dim = shape
    spec = lambda heads: jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.bfloat16)
    calls = []

    def prepare(query, key, value):
        call, _ = ops.prepare(query=query, key=key, value=value, **pattern)
        calls.extend(views for views, _ in call.differentiated)

    with on_device(device):
        jax.eval_shape(prepare, spec(heads), *[spec(kv_heads or heads)] * 2)
    branches = [[piece.branch for piece in views.pieces] for views in calls]
    return [*(("view", *of) if views.is_strided else of for views, of in zip(calls, branches, strict=True))]


@pytest.mark.parametrize(
    ("shape", "arguments", "expected"),
    [
        ((1, 8192, 16, 128), GROUPS, [[0, 1, 2, 3]]),
        ((2, 8192, 16, 128), GROUPS, [("view", 0), [1, 2, 3]]),
        ((1, 8192, 12, 64), GROUPS, [[0, 1, 2, 3]]),
        ((1, 8192, 16, 128), GROUPS | {"kv_heads": 4}, [[0, 1, 2, 3]]),  # less to gather
        ((1, 8192, 16, 128), GROUPS | {"is_causal": False}, [[0, 1, 2, 3]]),
        ((1, 16384, 16, 128), LONG, [("view", 0), [1, 2, 3]]),
        ((1, 2048, 16, 128), GROUPS | {"segment_lengths": (256, 512, 1024, 2048)}, [[0, 1, 2, 3]]),
        # Each launch fills the device.
        ((1, 32768, 16, 128), LONG, EVERY_VIEW),
        ((4, 8192, 16, 128), GROUPS, EVERY_VIEW),
        ((1, 8192, 16, 128), GROUPS | {"heads": "all"}, EVERY_VIEW),
        # Keys of different lengths cannot share a launch.
        ((1, 1024, 16, 128), {"segment_lengths": (1024,) * 2, "dilation_rates": (1, 2)}, [("view", 0), ("view", 1)]),
    ],
)
def test_joined_launches(shape, arguments, expected):
    assert launches(shape, **arguments) == expected


@pytest.mark.parametrize(
    ("bandwidth", "expected"),
    [
        (1.2e12, EVERY_VIEW),
        (2.4e12, [("view", 0), [1, 2, 3]]),
        (4.8e12, [[0, 1, 2, 3]]),
        (None, EVERY_VIEW),  # an unknown device
    ],
)
def test_joining_depends_on_the_device(bandwidth, expected):
    device = dataclasses.replace(device_info("h200"), memory_bandwidth=bandwidth)
    assert launches((1, 8192, 16, 128), device=device, **GROUPS) == expected


def test_piece_joins_gathered_branches():
    """The last branch, whose segments do not divide the sequence, and the branch before it."""
    pattern = {"segment_lengths": (512, 1024, 2048), "dilation_rates": (1, 2, 4)}
    assert launches((1, 3072, 16, 128), **pattern) == [("view", 0), [1, 2], [2]]
    dear = dataclasses.replace(device_info("h200"), memory_bandwidth=1)
    assert launches((1, 3072, 16, 128), device=dear, **pattern) == [("view", 0), ("view", 1), [2], [2]]


@pytest.mark.triton
def test_explain_shows_joined_branches():
    arrays = [jax.ShapeDtypeStruct((2, 8192, 16, 128), jnp.bfloat16)] * 3
    with on_device("h200"):
        plan = explain(dilated_attention, *arrays, **GROUPS)
    assert plan.in_place == (True,) * 4
    assert plan.in_place_differentiated == (True, False, False, False)
    assert "segments of 1024 at rate 1: mosaic_gpu in place, Blocks(" in str(plan)
    assert "segments of 8192 at rate 8: mosaic_gpu in place, with gradients of gathered rows, " in str(plan)
    with on_device("a100"):
        plan = explain(dilated_attention, *arrays, **GROUPS)
    assert plan.in_place == plan.in_place_differentiated == (False,) * 4
    assert "segments of 1024 at rate 1: triton of gathered rows, " in str(plan)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "served", "rates"),
    [
        (8, 8, "all", (1, 2, 4)),
        (8, 2, "all", (2, 4, 8)),  # classes end within the queries of a key head
        (12, 3, "all", (2, 3, 4)),
        (6, 3, "groups", (1, 2, 4)),
        (12, 6, "groups", (2, 4, 8)),
        (16, 4, "groups", (1, 2, 4, 8)),
        (16, 2, "groups", (2, 4)),
        (9, 3, "groups", (2, 4)),  # one group of 5 heads and one of 4
    ],
)
def test_view_head_indices(heads, kv_heads, served, rates):
    """Query head h reads head class * H + h of a view [B, rows, rate * H, D]; keys likewise."""
    length, group = 64 * max(rates) * 3, heads // kv_heads
    branches = tuple((length, rate) for rate in rates)
    pieces = pieces_of(length, heads, branches, heads=served, layout="overlap", order=None)
    calls = views.calls_of(pieces, heads, kv_heads, is_causal=True, has_segment_ids=False)
    strided = [one for call in calls for one in views.split_strided(call, length, group) if one.is_strided]
    assert len(strided) >= len(rates) - (heads == 9)
    for call in strided:
        (piece,) = call.pieces
        first, end = piece.heads
        of_query, of_key = (call.head_view(heads, count) for count in (heads, kv_heads))
        counts = [end - first if view is None else view.count for view in (of_query, of_key or of_query)]
        counts[1] = counts[1] if of_key is not None else kv_heads
        for number, head in enumerate(range(first, end)):
            kv_number = number // (counts[0] // counts[1])
            query = number if of_query is None else of_query.of_array(number)
            key = kv_number if of_key is None else of_key.of_array(kv_number)
            assert query == piece.offsets[head] * heads + head
            assert key == piece.offsets[head] * kv_heads + head // group
