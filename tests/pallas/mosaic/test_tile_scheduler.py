"""The order in which persistent CTAs take tiles: every tile runs once, and long and short tiles balance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_kernels.pallas.mosaic.tile_scheduler import Shape, TileScheduler


def tiles_by_cta(scheduler):
    """The tiles of each CTA, in order, without a counter."""
    taken = [[cta] for cta in range(scheduler.ctas)]
    for tiles in taken:
        while (following := int(scheduler.following(None, tiles[-1], len(tiles) - 1))) < scheduler.count:
            tiles.append(following)
            assert len(tiles) <= scheduler.count, "a CTA takes tiles without an end"
    return taken


def scheduler_of(heads, blocks, core_count, *, longest_last, head_group=1, dynamic=False, short_last=False):
    return TileScheduler(
        shapes=(Shape(1, heads, blocks),),
        longest_last=longest_last,
        head_group=head_group,
        dynamic=dynamic,
        core_count=core_count,
        short_last=short_last,
    )


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 50), st.booleans())
def test_every_tile_runs_once(heads, blocks, core_count, longest_last):
    scheduler = scheduler_of(heads, blocks, core_count, longest_last=longest_last)
    taken = [tile for tiles in tiles_by_cta(scheduler) for tile in tiles]
    assert sorted(taken) == list(range(heads * blocks))
    assert len({tuple(map(int, scheduler.place(tile))) for tile in taken}) == heads * blocks


@pytest.mark.parametrize(("heads", "blocks"), [(1, 256), (2, 128), (1, 140), (4, 64)])
def test_two_causal_tiles_of_a_cta_balance(heads, blocks):
    """Tile i of a head has i + 1 blocks of keys. No CTA has more than the longest tile, or its share of all tiles."""
    scheduler = scheduler_of(heads, blocks, 132, longest_last=True, head_group=32, dynamic=True)
    assert scheduler.is_mirrored
    assert not scheduler.fetches
    length = lambda tile: int(scheduler.place(tile)[2]) + 1
    longest = max(sum(map(length, tiles)) for tiles in tiles_by_cta(scheduler))
    share = heads * blocks * (blocks + 1) / 2 / 132
    assert longest <= max(blocks, 1.03 * share)


@pytest.mark.parametrize(("heads", "blocks", "longest_last"), [(1, 132, True), (1, 265, True), (1, 256, False)])
def test_other_launches_are_not_mirrored(heads, blocks, longest_last):
    scheduler = scheduler_of(heads, blocks, 132, longest_last=longest_last, dynamic=True)
    assert not scheduler.is_mirrored
    assert scheduler.fetches == (blocks > 132)


@given(st.integers(1, 5), st.integers(2, 9), st.integers(1, 6))
def test_short_tiles_are_last(heads, blocks, head_group):
    scheduler = scheduler_of(heads, blocks, 4, longest_last=False, head_group=head_group, short_last=True)
    tiles = [tuple(map(int, scheduler.place(tile))) for tile in range(heads * blocks)]
    assert sorted(tiles) == [(0, head, block) for head in range(heads) for block in range(blocks)]
    assert {block for _, _, block in tiles[-heads:]} == {blocks - 1}
