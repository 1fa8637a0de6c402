"""The blocks of rows that have one scale, as boxes along the outer axes of an array."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import matmul
from jax_kernels.quantization.scale_blocks import BLOCK, boxes, counts, largest, sizes_of, spread

# Outer axes, the axes that boxes() returns, and the sizes of a block.
CASES = [
    ((), (1,), (1,)),
    ((300,), (300,), (128,)),
    ((8, 16), (8, 16), (8, 16)),
    ((3, 5), (3, 5), (3, 5)),
    ((8, 64), (8, 64), (2, 64)),
    ((3, 64), (3, 64), (2, 64)),
    ((2, 256), (2, 256), (1, 128)),
    ((2, 4, 32), (2, 4, 32), (1, 4, 32)),
    ((3, 8, 32), (3, 8, 32), (1, 4, 32)),
    ((5, 96), (480,), (128,)),
    ((2, 5, 96), (960,), (128,)),
    ((0, 4), (0, 4), (32, 4)),
    ((4, 0), (0,), (128,)),
]


@pytest.mark.parametrize(("outer", "axes", "sizes"), CASES)
def test_scale_blocks_span_128_merged_rows(outer, axes, sizes):
    assert boxes(outer) == axes
    assert sizes_of(axes) == sizes
    rows = math.prod(outer)
    values = np.random.default_rng(0).standard_normal((rows, 3)).astype(np.float32)
    # The scales of all rows on a single axis.
    want = [np.abs(values[i : i + BLOCK]).max() for i in range(0, rows, BLOCK)]
    found = largest(jnp.asarray(values).reshape(*axes, 3), (*sizes, BLOCK), lambda x, axes: jnp.abs(x).max(axes))
    assert found.shape == counts((*axes, 3), (*sizes, BLOCK))
    np.testing.assert_array_equal(found.reshape(-1), want)
    wide = np.broadcast_to(spread(found, (*sizes, BLOCK), (*axes, 3)), (*axes, 3))
    np.testing.assert_array_equal(wide.reshape(rows, 3), np.repeat(want, BLOCK)[:rows, None].repeat(3, axis=1))


@pytest.mark.parametrize("outer", [(3, 64), (2, 5, 24)])
def test_outer_axes_keep_block_scaled_matmuls(outer):
    """Values and gradients, with computed scales and with given scales."""
    random = np.random.default_rng(0)
    rows = math.prod(outer)
    x, w = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((rows, 160), (160, 64)))
    scale = jnp.full((-(-rows // BLOCK), 2), 0.01, jnp.float32)
    for scales in ({}, {"x_scale": scale, "w_scale": jnp.full((2, 1), 0.02, jnp.float32)}):

        def loss(x, w, scales=scales):
            out = matmul(x, w, precision="fp8", scaling="block", **scales)
            return (out.reshape(rows, -1) * jnp.arange(64)).sum(), out

        differentiate = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        want, got = (jax.tree.leaves(differentiate(y, w)) for y in (x, x.reshape(*outer, 160)))
        for g, right in zip(got, want, strict=True):
            np.testing.assert_allclose(g.reshape(right.shape), right, rtol=1e-5, atol=1e-3)
