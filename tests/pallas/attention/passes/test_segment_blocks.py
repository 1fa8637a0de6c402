"""The pass over segment ids: its kernel against XLA."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.passes import segment_blocks
from jax_kernels.pallas.attention.passes.segment_blocks import Side

QUERIES, KEYS = Side(block=16, none=-1), Side(block=32, none=-2)


def ids_of(length, *, seed, is_sorted):
    """Three batch entries; if sorted, the first has ids below 0 in front, and the others at the end."""
    ids = np.random.default_rng(seed).integers(-1, 9, (3, length), np.int32)
    if is_sorted:
        ids = np.sort(ids)
        ids[1:] = np.where(np.sort(ids[1:] < 0), -1, np.sort(np.abs(ids[1:])))
    ids[0, : length // 3] = -1
    return ids


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    ("lengths", "is_sorted"), [((64, 70), True), ((129, 300), True), ((127, 128), True), ((256, 65), False)]
)
def test_kernel_equals_xla(lengths, is_sorted, of_keys):
    sides = [(ids_of(lengths[0], seed=0, is_sorted=is_sorted), QUERIES)]
    sides += [(ids_of(lengths[1], seed=1, is_sorted=is_sorted), KEYS)]
    (own_ids, own), (other_ids, others) = sides[::-1] if of_keys else sides
    got = segment_blocks.of_ids(jnp.asarray(own_ids), jnp.asarray(other_ids), own, others, interpret=True)
    want = segment_blocks._by_xla(own.whole(own_ids), others.whole(other_ids), own, others)
    blocks = -(-own_ids.shape[1] // own.block)
    assert got.ranges.shape == (3, blocks, 4)
    assert got.own.shape == (3, blocks * own.block)
    for found, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(found, np.asarray(expected).reshape(found.shape))
    spans = np.asarray(got.spans[:, :, : own_ids.shape[1]])
    for b in range(3):
        if b == 0 or not is_sorted:
            assert (spans[b] == [[0], [block_ranges.NOT_SORTED]]).all()
            continue
        other = np.arange(other_ids.shape[1])
        inside = (other >= spans[b, 0][:, None]) & (other < spans[b, 1][:, None])
        np.testing.assert_array_equal(inside, (own_ids[b][:, None] == other_ids[b]) & (own_ids[b] >= 0)[:, None])


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_parts_equal_one_part(monkeypatch, is_sorted, of_keys):
    """Blocks that meet, full blocks and unsorted neighbours lie in different parts. The last part is short."""
    sides = [(jnp.asarray(ids_of(300, seed=i, is_sorted=is_sorted)), side) for i, side in enumerate((QUERIES, KEYS))]
    (own_ids, own), (other_ids, others) = sides[::-1] if of_keys else sides
    run = lambda: segment_blocks.of_ids(own_ids, other_ids, own, others, interpret=True)
    want = run()
    monkeypatch.setattr(segment_blocks, "PART_IDS", 128)
    for found, expected in zip(run(), want, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("highest", [2**31 - 2, 2**31 - 1])
def test_spans_of_the_largest_ids(highest):
    """No id is above the largest: it counts as not sorted."""
    ids, side = jnp.array([[3, 3, highest, highest, -1]], jnp.int32), Side(block=16, none=-1)
    spans = segment_blocks.of_ids(ids, ids, side, side, interpret=True).spans
    if highest == block_ranges.NOT_SORTED:
        np.testing.assert_array_equal(spans[0], np.broadcast_to([[0], [highest]], (2, 16)))
    else:
        np.testing.assert_array_equal(spans[0, :, :5], [[0, 0, 2, 2, 0], [2, 2, 4, 4, 0]])


def test_a_single_swap_is_not_sorted():
    """Only neighbours are in the wrong order: 1 then 0 at indices 1 and 2."""
    ids, side = jnp.array([[0, 1, 0, 1, 1, 2]], jnp.int32), Side(block=16, none=-1)
    spans = segment_blocks.of_ids(ids, ids, side, side, interpret=True).spans
    np.testing.assert_array_equal(spans[0, 1], block_ranges.NOT_SORTED)


@pytest.mark.parametrize(
    ("length", "block", "is_one_launch"), [(32768, 128, True), (32769, 128, False), (999, 96, False)]
)
def test_long_or_uneven_blocks_are_left_to_xla(monkeypatch, length, block, is_one_launch):
    launched = []
    monkeypatch.setattr(segment_blocks, "_launch", lambda *args, **kwargs: launched.append(1) or _BY_XLA(*args))
    ids, side = jnp.zeros((1, length), jnp.int32), Side(block=block, none=-1)
    found = segment_blocks.of_ids(ids, ids, side, Side(block=128, none=-2), interpret=True)
    assert bool(launched) == is_one_launch
    assert found.ranges.shape == (1, -(-length // block), 4)


_BY_XLA = segment_blocks._by_xla
