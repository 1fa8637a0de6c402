"""Passes before the Hopper kernels: a mask's bits packed into words, and the longest rows that bound the scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.pallas.attention import mask_bits_sm90, mask_bits_triton, row_lengths_triton


# Rows and columns of a block, and the mask's shape: whole blocks, parts of them, and more rows than a program has.
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        (128, 64, (2, 3, 300, 203)),
        (64, 128, (1, 1, 77, 500)),
        (192, 128, (1, 2, 256, 384)),
        (128, 80, (1, 1, 200, 160)),
    ],
)
def test_packed(rows, columns, shape, transposed):
    keep = np.random.default_rng(0).random(shape) < 0.5
    keep[:, :, :130, :130] = True
    keep[:, :, 160:, 100:] = False
    got = np.asarray(mask_bits_sm90.packed(jnp.asarray(keep), rows, columns, transposed=transposed))

    # By hand: [B, H, blocks of rows, rows, blocks of columns, bits, PART]
    lines = keep.swapaxes(2, 3) if transposed else keep
    pad = [(0, -size % block) for size, block in zip(lines.shape[2:], (rows, columns), strict=True)]
    padded = np.pad(lines, [(0, 0), (0, 0), *pad])
    blocks = padded.reshape(*shape[:2], -1, rows, padded.shape[3] // columns, columns // 8, 8)
    want = (blocks.astype(np.int64) << np.arange(columns // 8)[:, None]).sum(axis=5)
    np.testing.assert_array_equal(got, np.moveaxis(want, 4, 2))
    if mask_bits_triton.takes(keep.size, columns):
        words = mask_bits_triton.packed(jnp.asarray(keep), rows, columns, transposed=transposed, interpret=True)
        np.testing.assert_array_equal(np.asarray(words).reshape(got.shape), got)

    alive, full = (np.asarray(x) for x in mask_bits_sm90.judged(jnp.asarray(got), columns))
    kept = np.moveaxis(blocks.any(axis=(3, 5, 6)), 3, 2), np.moveaxis(blocks.all(axis=(3, 5, 6)), 3, 2)
    np.testing.assert_array_equal(alive, kept[0])
    np.testing.assert_array_equal(full, kept[1])


def test_what_it_takes():
    assert mask_bits_triton.takes((1 << 31) - 1, 128)
    assert mask_bits_triton.takes((1 << 32) + 1, 64)
    assert not mask_bits_triton.takes(1 << 31, 128)
    assert not mask_bits_triton.takes(1 << 32, 128)
    assert not mask_bits_triton.takes(1 << 20, 80)


@pytest.mark.parametrize("shape", [(2, 300, 3, 128), (1, 7, 2, 40), (2, 65, 1, 192)])
def test_longest(shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    want = jnp.square(x.astype(jnp.float32)).sum(axis=-1).max(axis=1)
    np.testing.assert_allclose(row_lengths_triton.longest(x, interpret=True), want, rtol=1e-6)
