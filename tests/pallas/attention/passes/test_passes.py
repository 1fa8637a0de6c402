"""Passes before the Hopper kernels: a mask's bits packed into words, the longest rows, the rows of the backward."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks, prepare_mask
from jax_kernels.dispatch import on_device
from jax_kernels.masks.ranked_mask import Ranked
from jax_kernels.pallas.attention.passes import mask_bits as mask_bits_pass
from jax_kernels.pallas.attention.passes import prepare_backward, ranked_bits, row_norms
from jax_kernels.pallas.attention.sm90.features import mask_bits
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.reference.attention import row_terms
from tests.tools import compile_case

pytestmark = pytest.mark.triton


# Rows and columns of a block, and the mask's shape: whole blocks, partial blocks, and more rows than a program has.
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

    # The expected bits: [B, H, blocks of rows, rows, blocks of columns, bits, PART]
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


def test_mask_bits_supported_shapes():
    assert mask_bits_pass.takes(1 << 31, 128)
    assert mask_bits_pass.takes((1 << 32) + 1, 64)
    assert not mask_bits_pass.takes((1 << 31) + 1, 128)
    assert not mask_bits_pass.takes(1 << 32, 128)
    assert not mask_bits_pass.takes(1 << 20, 80)


# Causal with queries before the first key; a window in which some queries have no key left.
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


def test_rank_reads():
    """A kernel reads the ranks if lowered for a GPU, also for a prepared mask."""
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
    assert str(program).count("attention_ranked_bits") >= 2, "lists by query and lists by key"


def _compile(name: str, option: int) -> list[str]:
    """Compiles a pass in this process. Returns the names of its kernels."""
    array = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
    if name == "ranked_bits":
        blocks = {"rows": 128, "columns": 128, "transposed": bool(option)}
        words = lambda *arrays: ranked_bits.packed(Ranked(*arrays), **blocks, interpret=False)
        shapes = [array(2, 16, 4096), array(2, 16, 4096), array(2, 4096), array(2, 4096)]
        return compile_case.lower_and_compile("h200", words, *shapes)[1]
    blocks = {"block_q": 128 if option == 64 else 64, "width": option, "zeros": True, "interpret": False}
    rows = lambda out, lse: prepare_backward.rows_of(out, out, lse, lse, **blocks)
    shapes = [array(2, 1000, 4, option, dtype=jnp.bfloat16), array(2, 4, 1000, dtype=jnp.float32)]
    return compile_case.lower_and_compile("h200", rows, *shapes)[1]


# By pass: the most registers with each of its options.
@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize(
    ("name", "option", "registers"),
    [("ranked_bits", 0, 128), ("ranked_bits", 1, 128), *(("backward_rows", width, 64) for width in (64, 128, 256))],
)
def test_passes_compile(name, option, registers):
    printed, _, others = compile_case.compile_script(__file__, name, str(option))
    assert json.loads(printed) == [f"attention_{name}"]
    figures = others[f"attention_{name}"]
    assert figures["spill_stores"] + figures["spill_loads"] == 0
    assert figures["registers"] <= registers


@pytest.mark.parametrize("shape", [(2, 300, 3, 128), (1, 7, 2, 40), (2, 65, 1, 192)])
def test_longest(shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    want = jnp.square(x.astype(jnp.float32)).sum(axis=-1).max(axis=1)
    np.testing.assert_allclose(row_norms.longest(x, interpret=True), want, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "has_dlse"), [("bfloat16", False), ("float16", True)])
@pytest.mark.parametrize(
    ("shape", "width", "block_q"),
    [
        ((2, 1, 2, 64), 64, 128),
        ((1, 63, 3, 64), 64, 128),
        ((2, 65, 1, 40), 64, 128),
        ((1, 128, 2, 128), 128, 64),
        ((2, 130, 3, 72), 128, 128),
        ((1, 200, 2, 24), 256, 64),
        ((1, 77, 2, 192), 256, 64),
    ],
)
def test_backward_rows(shape, width, block_q, has_dlse, dtype):
    batch, length, heads, _ = shape
    random = np.random.default_rng(0)
    normal = lambda *shape, dtype=np.float32: random.standard_normal(shape, np.float32).astype(dtype)
    out, dout, lse = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype), normal(batch, heads, length)
    lse[:, -1, length // 2] = -np.inf
    dlse = normal(batch, heads, length) if has_dlse else None
    out, dout, lse, dlse = jax.tree.map(jnp.asarray, (out, dout, lse, dlse))
    statics = {"block_q": block_q, "width": width, "interpret": True}
    rows = prepare_backward.rows_of(out, dout, lse, dlse, zeros=True, **statics)
    want_lse, want_delta = row_terms(out, lse, dout, dlse)
    pad = [(0, 0), (0, 0), (0, -length % block_q)]
    np.testing.assert_array_equal(rows.lse, jnp.pad(want_lse * LOG2E, pad, constant_values=jnp.inf))
    np.testing.assert_allclose(rows.delta, jnp.pad(want_delta, pad), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rows.dquery, np.zeros((batch, -(-length // 8) * 8, heads, width)))
    alone = prepare_backward.rows_of(out, dout, lse, dlse, zeros=False, **statics)
    np.testing.assert_array_equal(alone.delta, rows.delta)
    assert alone.dquery is alone.query is alone.dout is None
    query = jnp.asarray(normal(batch, length, heads, 40, dtype=dtype))
    copied = prepare_backward.rows_of(out, dout, lse, dlse, query, zeros=has_dlse, **statics)
    np.testing.assert_array_equal(copied.delta, rows.delta)
    assert (copied.dquery is not None) == has_dlse
    for copy, x in ((copied.query, query), (copied.dout, dout)):
        np.testing.assert_array_equal(copy, jnp.pad(x, [(0, 0), (0, -length % 8), (0, 0), (0, 0)]))


def test_backward_rows_supported_shapes():
    takes = lambda *shape: prepare_backward.takes(jax.ShapeDtypeStruct(shape, jnp.bfloat16), 128, 64)
    assert takes(2, 8192, 16, 128)
    assert takes(4, 262144, 8, 128)  # 2 GiB of out, and 4 GiB of dquery
    assert not takes(1, 65535 * 32 + 1, 1, 16)


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], int(sys.argv[2]))))
