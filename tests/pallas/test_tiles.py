"""Which blocks a tile visits, against the dense mask; and block specs that cannot be."""

import itertools

import numpy as np
import pytest

from jax_kernels.pallas.attention.tiles import Limits
from jax_kernels.pallas.block_specs import specs


def dense(limits, q_length, kv_length):
    queries, keys = np.arange(q_length)[:, None], np.arange(kv_length)
    keep = keys < limits.kv_length
    return keep & (keys <= queries + limits.q_offset) if limits.is_causal else keep & (queries >= 0)


# Every alignment of the diagonal and of the last key with the blocks.
EVERY = [
    (Limits(q_offset, kv_length, is_causal), block_q, block_kv)
    for q_offset, kv_length, is_causal in itertools.product(range(-20, 40), (0, 1, 6, 16, 31), (True, False))
    for block_q, block_kv in ((4, 4), (4, 8), (8, 4), (16, 8))
]
Q_LENGTH, KV_LENGTH = 32, 32


def test_key_blocks_are_the_live_ones_partial_first():
    for limits, block_q, block_kv in EVERY:
        mask = dense(limits, Q_LENGTH, KV_LENGTH)
        for q_start in range(0, Q_LENGTH, block_q):
            blocks = limits.key_blocks(q_start, block_q, block_kv)
            visited = [blocks.at(step) for step in range(blocks.count)]
            tiles = mask[q_start : q_start + block_q].reshape(block_q, -1, block_kv)
            assert sorted(visited) == np.flatnonzero(tiles.any(axis=(0, 2))).tolist(), (limits, q_start)
            assert all(tiles[:, block].all() for block in visited[blocks.partial :]), (limits, q_start)
            assert not any(tiles[:, block].all() for block in visited[: blocks.partial]), (limits, q_start)


@pytest.mark.parametrize("q_length", [32, 27])
def test_query_blocks_hold_every_live_one(q_length):
    for limits, block_q, block_kv in EVERY:
        mask = dense(limits, Q_LENGTH, KV_LENGTH)
        for kv_start in range(0, KV_LENGTH, block_kv):
            blocks = limits.query_blocks(kv_start, block_kv, block_q, q_length)
            visited = [blocks.at(step) for step in range(blocks.count)]
            tiles = mask[:, kv_start : kv_start + block_kv].reshape(-1, block_q, block_kv)[: -(-q_length // block_q)]
            live = np.flatnonzero(tiles.any(axis=(1, 2))).tolist()
            assert visited == live, (limits, kv_start)
            assert all(tiles[block].all() for block in visited[blocks.partial :]), (limits, kv_start)


def test_a_tile_without_keys_visits_one_block_with_the_predicate():
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
    ],
)
def test_wrong_block_specs_fail_where_they_are_written(make, message):
    with pytest.raises(ValueError, match=message):
        make()
