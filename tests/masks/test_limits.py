"""The limits of a call: the result of `joined`, and the number of keys that count, past which any value may follow."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.masks.limits import Limits, joined, key_lengths

STRIPES = masks.from_function(lambda b, h, q, k: k % 3 > 0)


def _inputs(mask, kv_lengths):
    x = jnp.zeros((2, 50, 1, 8))
    return AttentionInputs(x, x, x, mask=mask, kv_lengths=None if kv_lengths is None else jnp.asarray(kv_lengths))


@pytest.mark.parametrize(
    ("mask", "kv_lengths", "want"),
    [
        (None, [30, 70], [30, 50]),
        (None, [-3, 0], [0, 0]),
        (masks.prefix(20) & STRIPES, None, [20, 20]),
        (masks.prefix(jnp.asarray([20, 60])) & STRIPES & masks.prefix(40), [30, 35], [20, 35]),
        (masks.prefix(20), [10, 30], [10, 20]),
        (STRIPES & masks.causal(), [10, 30], [10, 30]),
    ],
)
def test_key_lengths(mask, kv_lengths, want):
    np.testing.assert_array_equal(key_lengths(_inputs(mask, kv_lengths)), want)


@pytest.mark.parametrize(
    "mask", [None, STRIPES, masks.prefix(20) | STRIPES, ~masks.prefix(20), jnp.ones((1, 1, 1, 50), bool)]
)
def test_key_lengths_are_unknown(mask):
    assert key_lengths(_inputs(mask, None)) is None


LENGTHS, ARRAY = jnp.asarray([20, 60]), jnp.ones((1, 1, 50, 50), bool)
IDS = jnp.arange(50)[None] // 10


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (Limits(mask=ARRAY, is_causal=True), Limits(mask=ARRAY, is_causal=True)),
        (Limits(mask=masks.causal() & masks.sliding_window(9, 4)), Limits(is_causal=True, window=(9, 0))),
        (Limits(mask=masks.prefix(LENGTHS), kv_lengths=jnp.asarray([30, 30])), Limits(kv_lengths=[20, 30])),
        (Limits(mask=masks.segments(IDS) & masks.dense(ARRAY)), Limits(mask=ARRAY, segment_ids=(IDS, IDS))),
        (Limits(mask=STRIPES & masks.causal()), Limits(mask=STRIPES & masks.causal())),
        (Limits(mask=~masks.causal(), window=(3, 3)), Limits(mask=~masks.causal(), window=(3, 3))),
    ],
    ids=["array", "bands", "lengths", "ids_and_array", "others", "negated"],
)
def test_masks_become_arguments(given, want):
    got = joined(given, 2)
    assert (got.is_causal, got.window, got.lists) == (want.is_causal, want.window, None)
    for x, y in zip((got.mask, got.kv_lengths), (want.mask, want.kv_lengths), strict=True):
        assert x == y if isinstance(y, masks.Mask | None) else np.array_equal(x, y)
    assert (got.segment_ids is None) == (want.segment_ids is None)
    for x, y in zip(got.segment_ids or (), want.segment_ids or (), strict=True):
        np.testing.assert_array_equal(x, np.broadcast_to(y, (2, 50)))


def test_segment_ids_and_segments_mask_stay_apart():
    mask, ids = masks.segments(IDS), (jnp.zeros((2, 50), jnp.int32),) * 2
    assert joined(Limits(mask=mask, segment_ids=ids), 2) == Limits(mask=mask, segment_ids=ids)


def test_lists_are_kept_if_they_cover_all_limits():
    lists = ("lists",)
    for mask in (masks.dense(ARRAY) & masks.prefix(20), STRIPES):
        prepared = masks.PreparedMask(mask, lists)
        got = joined(Limits(mask=prepared, is_causal=True), 2)
        assert got.lists == lists
        assert not isinstance(got.mask, masks.PreparedMask)
        for name, beside in {"kv_lengths": LENGTHS, "segment_ids": (IDS, IDS)}.items():
            assert joined(Limits(mask=prepared)._replace(**{name: beside}), 2).lists is None
    assert joined(Limits(mask=masks.PreparedMask(masks.prefix(20), lists)), 2).lists is None
    assert joined(Limits(mask=masks.PreparedMask(STRIPES, ())), 2).lists is None
