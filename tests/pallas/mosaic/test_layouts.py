"""Layouts of tiles: each has atoms of the widest of 64, 32 and 16 columns that divides the tile's columns."""

import pytest

from jax_kernels.pallas.mosaic import layouts


@pytest.mark.parametrize(
    ("columns", "width"),
    [(16, 16), (32, 32), (48, 16), (64, 64), (80, 16), (96, 32), (112, 16), (128, 64), (160, 32), (192, 64), (256, 64)],
)
def test_atoms_of_16_bits(columns, width):
    tiling, swizzle = layouts.swizzle(columns)
    assert tiling.tiling == (8, width)
    assert swizzle.swizzle == 2 * width


@pytest.mark.parametrize(("columns", "width"), [(16, 16), (32, 32), (48, 16), (64, 32), (80, 16), (96, 32)])
def test_atoms_of_float32(columns, width):
    tiling, swizzle = layouts.swizzle_float32(columns)
    assert tiling.tiling == (8, width)
    assert swizzle.swizzle == 4 * width
