"""The pass over segment ids: its kernel against XLA, and the order of blocks against counts of live blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.pallas.attention.passes import segment_blocks
from jax_kernels.pallas.attention.passes.segment_blocks import Reach, Side

QUERIES, KEYS = Side(block=16, none=-1), Side(block=32, none=-2)


def ids_of(length, *, seed, is_sorted):
    ids = np.random.default_rng(seed).integers(-1, 9, (3, length), np.int32)
    ids = np.sort(ids) if is_sorted else ids
    ids[0, :40] = -1
    return ids


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    ("limits", "lengths", "is_sorted"),
    [
        ({"is_causal": False, "window": None, "q_offset": 0}, (64, 70), True),
        ({"is_causal": True, "window": None, "q_offset": 50}, (129, 300), True),
        ({"is_causal": True, "window": (60, 0), "q_offset": -9}, (127, 128), True),
        ({"is_causal": False, "window": (20, 33), "q_offset": 7}, (256, 65), False),
    ],
)
def test_kernel_equals_xla(limits, lengths, is_sorted, of_keys):
    sides = [(ids_of(lengths[0], seed=0, is_sorted=is_sorted), QUERIES)]
    sides += [(ids_of(lengths[1], seed=1, is_sorted=is_sorted), KEYS)]
    (own_ids, own), (other_ids, others) = sides[::-1] if of_keys else sides
    reach = Reach.of(of_keys=of_keys, **limits)
    got = segment_blocks.of_ids(jnp.asarray(own_ids), jnp.asarray(other_ids), own, others, reach, interpret=True)
    want = segment_blocks._by_xla(own.whole(own_ids), others.whole(other_ids), own, others, reach)
    blocks = -(-own_ids.shape[1] // own.block)
    assert got.ranges.shape == (3, blocks, 4)
    assert got.own.shape == (3, blocks * own.block)
    for found, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(found, np.asarray(expected).reshape(found.shape))


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_order_is_by_the_number_of_live_blocks(is_causal, of_keys):
    ids = np.repeat(np.arange(5), [70, 10, 200, 33, 127])[None].astype(np.int32)
    position = np.arange(440)
    live = (ids[0][:, None] == ids[0]) & ((position[:, None] >= position) | (not is_causal))
    live = np.pad(live, [(0, 8), (0, 8)]).reshape(28, 16, 14, 32).any(axis=(1, 3))
    visited = live.sum(axis=0 if of_keys else 1)
    own, others = (KEYS, QUERIES) if of_keys else (QUERIES, KEYS)
    reach = Reach.of(is_causal=is_causal, window=None, q_offset=0, of_keys=of_keys)
    found = segment_blocks.of_ids(jnp.asarray(ids), jnp.asarray(ids), own, others, reach, interpret=True)
    np.testing.assert_array_equal(found.order[0], np.argsort(visited, kind="stable"))


@pytest.mark.parametrize(
    ("length", "block", "is_one_launch"), [(16384, 128, True), (16385, 128, False), (999, 96, False)]
)
def test_long_or_uneven_blocks_are_left_to_xla(monkeypatch, length, block, is_one_launch):
    launched = []
    monkeypatch.setattr(segment_blocks, "_launch", lambda *args, **kwargs: launched.append(1) or _BY_XLA(*args))
    ids, side = jnp.zeros((1, length), jnp.int32), Side(block=block, none=-1)
    found = segment_blocks.of_ids(ids, ids, side, Side(block=128, none=-2), Reach(), interpret=True)
    assert bool(launched) == is_one_launch
    assert found.order.shape == (1, -(-length // block))


_BY_XLA = segment_blocks._by_xla
