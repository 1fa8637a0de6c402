"""The blocks that a tile visits, against the dense mask; and impossible block specs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.block_ranges import Limits
from jax_kernels.pallas.block_specs import specs


def dense(limits, q_length, kv_length):
    positions, keys = np.arange(q_length)[:, None] + limits.q_offset, np.arange(kv_length)
    keep = np.broadcast_to(keys < limits.kv_length, (q_length, kv_length))
    left, right = limits.window or (-1, -1)
    right = 0 if limits.is_causal else right
    keep = keep & (keys >= positions - left) if left >= 0 else keep
    return keep & (keys <= positions + right) if right >= 0 else keep


BLOCKS = ((4, 4), (4, 8), (8, 4), (16, 8))
# Every alignment of the diagonal, of a window's sides and of the last key with the blocks.
EVERY = [
    (Limits(q_offset, kv_length, is_causal), *blocks)
    for q_offset, kv_length, is_causal in itertools.product(range(-20, 40), (0, 1, 6, 16, 31), (True, False))
    for blocks in BLOCKS
] + [
    (Limits(q_offset, kv_length, False, window), *blocks)
    for q_offset, kv_length in itertools.product(range(-25, 45, 3), (1, 16, 31))
    for window in ((0, 0), (3, 0), (5, 9), (18, 2), (-1, 4), (7, -1), (40, 40))
    for blocks in BLOCKS
]
EVERY += [(Limits(q_offset, 31, True, (left, 0)), 4, 8) for q_offset in range(-20, 40) for left in (0, 1, 5, 13)]
Q_LENGTH, KV_LENGTH = 32, 32


def test_key_blocks_are_live_and_partial_first():
    for limits, block_q, block_kv in EVERY:
        mask = dense(limits, Q_LENGTH, KV_LENGTH)
        for q_start in range(0, Q_LENGTH, block_q):
            blocks = limits.key_blocks(q_start, block_q, block_kv)
            visited = [blocks.at(step) for step in range(blocks.count)]
            cut = mask[q_start : q_start + block_q].reshape(block_q, -1, block_kv)
            assert sorted(visited) == np.flatnonzero(cut.any(axis=(0, 2))).tolist(), (limits, q_start)
            assert all(cut[:, block].all() for block in visited[blocks.partial :]), (limits, q_start)
            assert not any(cut[:, block].all() for block in visited[: blocks.partial]), (limits, q_start)


@pytest.mark.parametrize("predicate_at_end", [True, False])
@pytest.mark.parametrize("q_length", [32, 27])
def test_query_blocks_cover_live_blocks(q_length, predicate_at_end):
    for limits, block_q, block_kv in EVERY:
        mask = dense(limits, Q_LENGTH, KV_LENGTH)
        for kv_start in range(0, KV_LENGTH if predicate_at_end else limits.kv_length, block_kv):
            blocks = limits.query_blocks(kv_start, block_kv, block_q, q_length, predicate_at_end=predicate_at_end)
            visited = [blocks.at(step) for step in range(blocks.count)]
            cut = mask[:, kv_start : kv_start + block_kv].reshape(-1, block_q, block_kv)[: -(-q_length // block_q)]
            live = np.flatnonzero(cut.any(axis=(1, 2))).tolist()
            assert sorted(visited) == live, (limits, kv_start)
            assert visited == live or limits.left >= 0
            kept = cut if predicate_at_end else cut[..., : limits.kv_length - kv_start]
            assert all(kept[block].all() for block in visited[blocks.partial :]), (limits, kv_start)
            if kv_start + block_kv <= limits.kv_length and q_length == Q_LENGTH:
                assert not any(kept[block].all() for block in visited[: blocks.partial]), (limits, kv_start)


def test_traced_limits_match_python_limits():
    """Kernels compute with int32 scalars. Known scalars may be Python's."""

    @jax.jit
    def traced(q_offset, kv_length, start):
        def order(blocks):
            return blocks.count, blocks.partial, jax.vmap(blocks.at)(jnp.arange(8))

        limits = [Limits(q_offset, kv_length, *rest) for rest in ((True,), (False,), (False, (5, 9)), (True, (6, 0)))]
        keys = [order(x.key_blocks(start, 4, 8)) for x in limits]
        return keys, [order(x.query_blocks(start, 8, 4, 31)) for x in limits]

    for q_offset, kv_length, start in itertools.product((-9, 0, 5, 30), (0, 6, 31), (0, 8, 24)):
        keys, queries = traced(q_offset, kv_length, start)
        for index, rest in enumerate(((True,), (False,), (False, (5, 9)), (True, (6, 0)))):
            limits = Limits(q_offset, kv_length, *rest)
            pairs = ((keys, limits.key_blocks(start, 4, 8)), (queries, limits.query_blocks(start, 8, 4, 31)))
            for got, want in pairs:
                count, partial, order = got[index]
                assert (int(count), int(partial)) == (want.count, want.partial), limits
                assert order[: want.count].tolist() == [want.at(step) for step in range(want.count)], limits


@pytest.mark.parametrize("ordered", [True, False])
def test_segment_ranges_cover_live_blocks(ordered):
    random = np.random.default_rng(0)
    q_ids, kv_ids = (random.integers(-1, 9, (20, length), np.int32) for length in (27, 40))
    q_ids[3, :8], kv_ids[3, :16], kv_ids[4], q_ids[4, :4] = 4, 4, 5, 5
    if ordered:
        q_ids, kv_ids = np.sort(q_ids), np.sort(kv_ids)
    q_ids[0], kv_ids[1], q_ids[2, 8:12] = -1, -1, -1
    q_ids, kv_ids = (np.asarray(x) for x in block_ranges.segment_arrays(q_ids, kv_ids))
    whole = np.zeros((20, 28, 40), bool)
    whole[:, :27] = q_ids[:, :, None] == kv_ids[:, None]
    tiled = whole.reshape(20, 7, 4, 5, 8)
    live, full = tiled.any(axis=(2, 4)), tiled.all(axis=(2, 4))
    for turn, ranges in (
        (lambda x: x, block_ranges.segment_ranges(jnp.asarray(q_ids), 4, jnp.asarray(kv_ids), 8)),
        (lambda x: x.swapaxes(1, 2), block_ranges.segment_ranges(jnp.asarray(kv_ids), 8, jnp.asarray(q_ids), 4)),
    ):
        indices = np.arange(turn(live).shape[2])
        first, end, full_first, full_end = (np.asarray(ranges)[..., i : i + 1] for i in range(4))
        inside = (indices >= first) & (indices < end)
        assert (inside | ~turn(live)).all()
        # A block with lower and higher ids, but without the id, counts as a block with the id.
        assert (inside & ~turn(live)).mean() < (0.01 if ordered else 0.6)
        inside = (indices >= full_first) & (indices < full_end)
        assert not (inside & ~turn(full)).any()
        assert inside.any(axis=-1).tolist() == turn(full).any(axis=-1).tolist()
        if ordered:  # the blocks are adjacent
            np.testing.assert_array_equal(inside, turn(full))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (9, 5), (14, -1)])
@pytest.mark.parametrize("in_order", [False, True])
def test_segments_and_limits_intersect(is_causal, window, in_order):
    q_ids, kv_ids = (np.repeat([0, 1, -1, 2], lengths)[None] for lengths in ((17, 6, 3, 14), (10, 13, 2, 15)))
    limits = Limits(3, 37, is_causal, window)
    query, key = np.arange(40)[:, None] + 3, np.arange(40)
    left, right = window or (-1, -1)
    live = (key < 37) & (q_ids[0][:, None] == kv_ids[0]) & (kv_ids[0] >= 0)
    live &= (key <= query) if is_causal else True
    live &= (key >= query - left) & ((key <= query + right) if right >= 0 else True) if window else True
    tiled = live.reshape(10, 4, 5, 8)
    some, every = tiled.any(axis=(1, 3)), tiled.all(axis=(1, 3))
    arrays = [jnp.asarray(x) for x in block_ranges.segment_arrays(q_ids, kv_ids)]
    keys = block_ranges.segment_ranges(arrays[0], 4, arrays[1], 8)
    queries = block_ranges.segment_ranges(arrays[1], 8, arrays[0], 4)
    found = [
        (limits.key_blocks(4 * i, 4, 8, block_ranges.among(keys, 0, i), in_order=in_order), some[i], every[i])
        for i in range(10)
    ]
    found += [
        (
            limits.query_blocks(8 * j, 8, 4, 40, block_ranges.among(queries, 0, j), in_order=in_order),
            some[:, j],
            every[:, j],
        )
        for j in range(5)
    ]
    for blocks, some_of, every_of in found:
        visited = [int(blocks.at(step)) for step in range(int(blocks.count))]
        assert sorted(set(visited)) == (
            sorted(visited) if not in_order else visited[:: 1 if len(every_of) == 10 else -1]
        )
        assert set(np.flatnonzero(some_of)) <= set(visited)
        partial = [bool(blocks.is_partial(step)) for step in range(int(blocks.count))]
        assert sum(partial) == blocks.partial
        assert {block for block, part in zip(visited, partial, strict=True) if not part} <= set(
            np.flatnonzero(every_of)
        )
    assert sum(int(blocks.count - blocks.partial) for blocks, *_ in found[:10]) == every.sum()


def test_tile_without_keys_visits_one_masked_block():
    blocks = Limits(-100, 64, True).key_blocks(0, 16, 16).at_least_one()
    assert (blocks.count, blocks.partial, blocks.at(0)) == (1, 1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: specs.AttentionForwardSm90(2, 96, 2), "block_kv=96 must be a positive multiple of 64"),
        (lambda: specs.AttentionForwardSm90(4, 64, 2), "compute_warpgroups=4 must be 2 or 3"),
        (lambda: specs.AttentionBackwardSm90(32), "block_q=32 must be a positive multiple of 64"),
        (lambda: specs.AttentionForwardTriton(96, 64, 4, 2), "block_q=96 must be a power of two"),
        (lambda: specs.AttentionForwardTriton(64, 64, 3, 2), "num_warps=3 must be a power of two"),
        (lambda: specs.AttentionBackwardTriton(64, 64, 64, 8, 4, 2), "block_kv_dq=8 must be a positive multiple of 16"),
        (lambda: specs.AttentionBackwardTriton(64, 64, 64, 64, 4, 2, 48), "block_q_dv=48 must be a power of two"),
    ],
)
def test_wrong_block_specs_fail_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()
