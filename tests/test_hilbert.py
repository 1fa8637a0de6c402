"""The Hilbert curve's order."""

import numpy as np
import pytest

from jax_kernels import hilbert_order, invert_order


@pytest.mark.parametrize("bits", range(7))
def test_full_grid_is_a_hilbert_curve(bits):
    """Each step goes to an adjacent cell. Each quadrant is visited as a whole, at every scale."""
    side = 1 << bits
    order = hilbert_order(side * side)
    row, column = np.divmod(order, side)
    assert np.array_equal(np.sort(order), np.arange(side * side))
    assert (np.abs(np.diff(row)) + np.abs(np.diff(column)) == 1).all()
    for scale in range(bits):
        blocks = np.stack([row >> scale, column >> scale]).reshape(2, -1, 4**scale)
        assert (blocks == blocks[..., :1]).all()


def test_any_length_omits_cells_past_the_end():
    for n in range(200):
        order = hilbert_order(n)
        full = hilbert_order(4 ** next(bits for bits in range(5) if 4**bits >= n))
        assert order.dtype == np.int32
        np.testing.assert_array_equal(order, full[full < n])
        np.testing.assert_array_equal(order[invert_order(order)], np.arange(n))


def test_order_is_cached_and_read_only():
    assert hilbert_order(100) is hilbert_order(100)
    with pytest.raises(ValueError, match="read-only"):
        hilbert_order(100)[0] = 1


def test_errors():
    with pytest.raises(TypeError, match=r"n: got float, want an int"):
        hilbert_order(4.0)
    with pytest.raises(ValueError, match=r"n: got -1, want at least 0"):
        hilbert_order(-1)
    with pytest.raises(ValueError, match=r"order: got a value twice, want a permutation of 3"):
        invert_order([0, 1, 1])
    with pytest.raises(ValueError, match=r"order: got values from 0 to 3, want a permutation of 3"):
        invert_order([0, 1, 3])
    with pytest.raises(ValueError, match=r"order: got float64 of shape \(1,\), want integers"):
        invert_order([0.0])
