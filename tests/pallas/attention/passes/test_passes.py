"""Passes before the Hopper kernels: a mask's bits packed into words, and the longest rows that bound the scores."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

import aot

from jax_kernels import masks, prepare_mask
from jax_kernels.dispatch import on_device
from jax_kernels.masks.ranked import Ranked
from jax_kernels.pallas.attention.passes import mask_bits as mask_bits_pass
from jax_kernels.pallas.attention.passes import ranked_bits, row_norms
from jax_kernels.pallas.attention.sm90 import mask_bits


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
    got = np.asarray(mask_bits.packed(jnp.asarray(keep), rows, columns, transposed=transposed))

    # By hand: [B, H, blocks of rows, rows, blocks of columns, bits, PART]
    lines = keep.swapaxes(2, 3) if transposed else keep
    pad = [(0, -size % block) for size, block in zip(lines.shape[2:], (rows, columns), strict=True)]
    padded = np.pad(lines, [(0, 0), (0, 0), *pad])
    blocks = padded.reshape(*shape[:2], -1, rows, padded.shape[3] // columns, columns // 8, 8)
    want = (blocks.astype(np.int64) << np.arange(columns // 8)[:, None]).sum(axis=5)
    np.testing.assert_array_equal(got, np.moveaxis(want, 4, 2))
    if mask_bits_pass.takes(keep.size, columns):
        words = mask_bits_pass.packed(jnp.asarray(keep), rows, columns, transposed=transposed, interpret=True)
        np.testing.assert_array_equal(np.asarray(words).reshape(got.shape), got)

    alive, full = (np.asarray(x) for x in mask_bits.judged(jnp.asarray(got), columns))
    kept = np.moveaxis(blocks.any(axis=(3, 5, 6)), 3, 2), np.moveaxis(blocks.all(axis=(3, 5, 6)), 3, 2)
    np.testing.assert_array_equal(alive, kept[0])
    np.testing.assert_array_equal(full, kept[1])


def test_what_it_takes():
    assert mask_bits_pass.takes((1 << 31) - 1, 128)
    assert mask_bits_pass.takes((1 << 32) + 1, 64)
    assert not mask_bits_pass.takes(1 << 31, 128)
    assert not mask_bits_pass.takes(1 << 32, 128)
    assert not mask_bits_pass.takes(1 << 20, 80)


# Causal with queries before the first key; a window of which some queries have no key left.
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "sizes", "offset", "among"),
    [
        (96, 64, (2, 3, 200, 300), -9, masks.causal()),
        (64, 128, (1, 2, 300, 130), 20, masks.sliding_window(30, 0)),
    ],
)
def test_packed_by_rank(rows, columns, sizes, offset, among, transposed):
    batch, heads, q_length, kv_length = sizes
    bias = jax.random.normal(jax.random.key(0), (batch, heads, 1, kv_length)).at[0, 0, 0, 10:40].set(-jnp.inf)
    mask = masks.top_k(bias, 20, among=among, q_length=q_length, q_offset=offset)
    assert isinstance(mask, Ranked)
    assert ranked_bits.takes(mask, columns)
    blocks = {"rows": rows, "columns": columns, "transposed": transposed}
    want = mask_bits.packed(mask.to_dense(q_length, kv_length), **blocks)
    got = ranked_bits.packed(mask, **blocks, interpret=True)
    np.testing.assert_array_equal(got.reshape(want.shape), want)
    assert (want != 0).any()
    assert (want == 0).any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (64, 128)])
def test_packed_of_one_row(rows, columns, transposed):
    keep = jnp.asarray(np.random.default_rng(0).random((2, 3, 1, 300)) < 0.5)
    blocks = {"rows": rows, "columns": columns, "transposed": transposed}
    for array, offset in ((keep, [0]), (keep[..., :1], [0]), (keep[:1], [0, 5])):
        dense = masks.dense(array)
        got = mask_bits.of_mask(dense, (200, 300), jnp.array(offset), **blocks, interpret=True)
        want = mask_bits.packed(dense.to_dense(200, 300, q_offset=jnp.array(offset)), **blocks)
        np.testing.assert_array_equal(got, want)


def test_where_ranks_are_read():
    """By a kernel where it is lowered for a GPU, also for a mask that is prepared."""
    mask = masks.top_k(jnp.arange(200.0)[None], 7, among=masks.causal(), q_length=100)
    of = lambda mask, interpret: mask_bits.of_mask(
        mask, (100, 200), jnp.zeros(1, jnp.int32), 64, 64, transposed=False, interpret=interpret
    )
    for given, interpret, expected in (
        (mask, False, True),
        (mask, True, False),
        (~mask, False, False),
    ):
        program = jax.make_jaxpr(lambda given, interpret=interpret: of(given, interpret))(given)
        assert ("attention_ranked_bits" in str(program)) is expected
        want = mask_bits.packed(given.to_dense(100, 200), 64, 64, transposed=False)
        np.testing.assert_array_equal(of(given, interpret), want)
    query, key = (jax.ShapeDtypeStruct((1, length, 1, 128), jnp.bfloat16) for length in (100, 200))
    with on_device("h200"):
        program = jax.make_jaxpr(lambda mask: prepare_mask(mask, query, key))(mask)
    assert str(program).count("attention_ranked_bits") >= 2, "the lists by query, and those by key"


def _compile(transposed: bool) -> list[str]:
    shapes = [(2, 16, 4096), (2, 16, 4096), (2, 4096), (2, 4096)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    blocks = {"rows": 128, "columns": 128, "transposed": transposed}
    words = lambda *arrays: ranked_bits.packed(Ranked(*arrays), **blocks, interpret=False)
    return aot.lower_and_compile("h200", words, *shapes)[1]


@pytest.mark.compile
@pytest.mark.timeout(aot.TIMEOUT + 30)
@pytest.mark.parametrize("transposed", [False, True])
def test_ranked_bits_compile(transposed):
    printed, _, others = aot.compile_script(__file__, json.dumps(transposed))
    assert json.loads(printed) == ["attention_ranked_bits"]
    figures = others["attention_ranked_bits"]
    assert figures["spill_stores"] + figures["spill_loads"] == 0
    assert figures["registers"] <= 128


@pytest.mark.parametrize("shape", [(2, 300, 3, 128), (1, 7, 2, 40), (2, 65, 1, 192)])
def test_longest(shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    want = jnp.square(x.astype(jnp.float32)).sum(axis=-1).max(axis=1)
    np.testing.assert_allclose(row_norms.longest(x, interpret=True), want, rtol=1e-6)


if __name__ == "__main__":
    print(json.dumps(_compile(json.loads(sys.argv[1]))))
