"""jax_kernels.analyze of ring_attention: its strategy, the work of each device, and the bytes that a device sends."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_kernels
from jax_kernels import analyze, masks, ring_attention

DEVICES, LENGTH, HEADS, HEAD_DIM = 4, 64, 4, 64  # LENGTH: of a device
MESH = AbstractMesh((DEVICES,), ("sequence",), axis_types=(AxisType.Auto,))
SPEC = jax.ShapeDtypeStruct((1, DEVICES * LENGTH, HEADS, HEAD_DIM), jnp.bfloat16)
ARRAY = LENGTH * HEADS * HEAD_DIM * 2  # bytes of a device's keys
LSE = LENGTH * HEADS * 4
SHARE = (DEVICES - 1) / DEVICES  # of an array that other devices get
ALL = (DEVICES * LENGTH) ** 2
CAUSAL = DEVICES * LENGTH * (DEVICES * LENGTH + 1) // 2


def of_ring(*, is_differentiated=False, **options):
    """The OpUse of a ring_attention, and the Analysis."""
    attend = functools.partial(ring_attention, axis_name="sequence", **options)
    shared = jax.shard_map(attend, mesh=MESH, in_specs=P(None, "sequence"), out_specs=P(None, "sequence"))
    op = lambda q: shared(q, q, q)
    gradients = jax.grad(lambda q: op(q).astype(jnp.float32).sum())
    found = analyze(gradients if is_differentiated else op, SPEC, device="h200")
    (use,) = found.uses
    assert (use.op, use.forward, use.backward) == ("ring_attention", 1, int(is_differentiated))
    return use, found


# (options, bytes of a call, bytes of a forward and a backward). Gradients that travel are float32.
SENT = {
    "ring": ({"strategy": "ring"}, 6 * ARRAY, 6 * ARRAY + (6 + 12) * ARRAY),
    "all_to_all": ({"strategy": "all_to_all"}, SHARE * (4 * ARRAY + LSE), SHARE * 2 * (4 * ARRAY + LSE)),
    "all_gather": ({"strategy": "all_gather"}, 6 * ARRAY, 6 * ARRAY + 2 * 3 * 2 * ARRAY),
    "window": ({"strategy": "ring", "window": (LENGTH, 0), "layout": "contiguous"}, 2 * ARRAY, (2 + 2 + 4) * ARRAY),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes_that_a_device_sends(name):
    options, forward, both = SENT[name]
    assert of_ring(**options)[0].sent_bytes == forward
    assert of_ring(**options, is_differentiated=True)[0].sent_bytes == both


def test_the_strategy_of_a_differentiated_call():
    """Its work and bytes count, in forward and backward. An exchange of heads balances a contiguous causal call."""
    use, found = of_ring(is_causal=True, layout="contiguous", is_differentiated=True)
    assert (use.plan.strategy, use.plan.differentiated) == ("all_to_all", "all_to_all")
    assert use.plan.differentiated_work == (0.25,) * 4
    assert use.cost.flops == CAUSAL / DEVICES * HEADS * HEAD_DIM * (4 + 10)
    assert use.sent_bytes == SENT["all_to_all"][2]
    assert "strategy all_to_all, layout contiguous; work 25 % each; a device sends 0.1981 MB" in str(found)


@pytest.mark.parametrize(
    ("layout", "shares", "text"),
    [
        ("zigzag", [0.25] * 4, "25 % each"),
        (
            "contiguous",
            [LENGTH**2 * i + LENGTH * (LENGTH + 1) / 2 for i in range(DEVICES)],
            "6.32 %, 18.8 %, 31.2 %, 43.7 %",
        ),
        (
            "striped",
            [LENGTH * (i + 1) + DEVICES * LENGTH * (LENGTH - 1) / 2 for i in range(DEVICES)],
            "24.7 %, 24.9 %, 25.1 %, 25.3 %",
        ),
    ],
)
def test_work_of_each_device(layout, shares, text):
    """The work of the device that has most is the call's."""
    use, found = of_ring(is_causal=True, layout=layout, strategy="ring")
    total = sum(shares)
    assert use.plan.work == pytest.approx([x / total for x in shares])
    assert use.cost.flops == pytest.approx(CAUSAL * max(shares) / total * HEADS * HEAD_DIM * 4)
    assert not use.cost.is_bound
    assert use.shape == "1x64(256 keys)x4x64 causal on 4 devices bfloat16"
    assert f"strategy ring, layout {layout}; work {text}" in str(found)


def test_a_mask_is_a_bound():
    use, _ = of_ring(mask=masks.causal() & masks.global_tokens(8), strategy="ring")
    assert use.cost.is_bound
    assert use.shape.endswith("mask on 4 devices bfloat16")


def test_one_device_sends_nothing():
    mesh = AbstractMesh((1,), ("sequence",), axis_types=(AxisType.Auto,))
    attend = functools.partial(ring_attention, axis_name="sequence")
    shared = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "sequence"), out_specs=P(None, "sequence"))
    found = analyze(lambda q: shared(q, q, q), SPEC, device="h200")
    assert found.uses[0].cost.flops == ALL * HEADS * HEAD_DIM * 4
    assert "work 100 % each; nothing is sent" in str(found)


def test_a_ring_is_not_timed():
    """It cannot run outside of its shard_map. Other ops are timed."""
    mesh = jax.make_mesh((1,), ("sequence",), (AxisType.Auto,))
    attend = functools.partial(ring_attention, axis_name="sequence")
    shared = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "sequence"), out_specs=P(None, "sequence"))
    x = jnp.ones((1, 16, 2, 8))
    found = analyze(lambda q: jax_kernels.rms_norm(shared(q, q, q)), x, measure=True, seconds=0.001)
    times = {use.op: use.ms for use in found.uses}
    assert times["ring_attention"] is None
    assert times["rms_norm"] > 0
