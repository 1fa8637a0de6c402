"""Which blocks a tile visits, against the dense mask; and block specs that cannot be."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jax_kernels.pallas.attention.tiles import Limits
from jax_kernels.pallas.block_specs import specs


def dense(limits, q_length, kv_length):
    queries, keys = np.arange(q_length)[:, None], np.arange(kv_length)
    keep = keys < limits.kv_length
    return keep & (keys <= queries + limits.q_offset) if limits.is_causal else keep & (queries >= 0)


lengths = st.integers(1, 70)
some_limits = st.builds(Limits, st.integers(-80, 80), st.integers(0, 70), st.booleans())


@given(some_limits, lengths, st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16]))
def test_key_blocks_are_the_live_ones_partial_first(limits, q_length, block_q, block_kv):
    kv_length = -(-70 // block_kv) * block_kv
    q_length = -(-q_length // block_q) * block_q
    mask = dense(limits, q_length, kv_length)
    for q_start in range(0, q_length, block_q):
        blocks = limits.key_blocks(q_start, block_q, block_kv)
        visited = [blocks.at(step) for step in range(blocks.count)]
        tiles = mask[q_start : q_start + block_q].reshape(block_q, -1, block_kv)
        assert sorted(visited) == np.flatnonzero(tiles.any(axis=(0, 2))).tolist()
        assert all(tiles[:, block].all() for block in visited[blocks.partial :])
        assert not any(tiles[:, block].all() for block in visited[: blocks.partial])


@given(some_limits, lengths, st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16]))
def test_query_blocks_hold_every_live_one(limits, q_length, block_q, block_kv):
    kv_length = -(-70 // block_kv) * block_kv
    rows = -(-q_length // block_q) * block_q
    mask = dense(limits, rows, kv_length)
    for kv_start in range(0, kv_length, block_kv):
        blocks = limits.query_blocks(kv_start, block_kv, block_q, q_length)
        visited = [blocks.at(step) for step in range(blocks.count)]
        tiles = mask[:, kv_start : kv_start + block_kv].reshape(-1, block_q, block_kv)
        assert set(np.flatnonzero(tiles.any(axis=(1, 2)))) <= set(visited)
        assert all(tiles[block].all() for block in visited[blocks.partial :])


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
