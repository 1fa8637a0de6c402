"""The last round of tiles in parts: every step of every tile runs once, and tiles split only if that saves time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_kernels.pallas.mosaic.split_tail import MOST_PARTS, SplitTail


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 140))
def test_every_step_belongs_to_a_part(tiles, steps, core_count):
    split = SplitTail.of(tiles, steps, core_count)
    assert 1 <= split.parts <= min(MOST_PARTS, max(1, steps))
    taken: dict[int, list[int]] = {}
    for cta in range(split.ctas):
        if split.parts == 1:
            assert split.tile(cta) == cta
            continue
        first, count = int(split.first(cta)), int(split.count(cta))
        assert count > 0
        taken.setdefault(int(split.tile(cta)), []).extend(range(first, first + count))
    if split.parts > 1:
        assert taken == {tile: list(range(steps)) for tile in range(tiles)}


@pytest.mark.parametrize(
    ("tiles", "steps", "parts"),
    [
        (4, 32, 32),  # a short batch on an idle machine: the time of 1 + 2 steps instead of 32
        (130, 64, 1),  # the machine is full
        (140, 128, 16),  # one round and a bit more
        (2048, 128, 1),  # 16 rounds instead of 15.6
        (4, 2, 1),  # a part would have only its start
    ],
)
def test_splits_only_when_it_saves_time(tiles, steps, parts):
    split = SplitTail.of(tiles, steps, core_count=132)
    assert split.parts == parts
    assert split.ctas == tiles + (tiles % 132 if parts > 1 else 0) * (parts - 1)
