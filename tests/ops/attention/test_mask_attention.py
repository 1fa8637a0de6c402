"""flash_attention under Mask objects, and block_sparse_attention."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import block_sparse_attention, explain, flash_attention, masks
from jax_kernels.dispatch import on_device
from jax_kernels.masks.limits import Limits, joined
from jax_kernels.pallas.block_specs import attention_row
from jax_kernels.reference import attention_chunks
from jax_kernels.testing import rms_error
from tests.support.cases import tiers
from tests.support.cases.masks import CASES, B, H, S, T

pytestmark = pytest.mark.usefixtures("no_interpret")

jit = lambda f: jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def arrays(batch=B, seed=0):
    random = np.random.default_rng(seed)
    shapes = ((batch, T, H, 16), (batch, S, 1, 16), (batch, S, 1, 8))
    return tuple(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)


def definition(query, key, value, keep):
    """(out, lse) in NumPy float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.einsum("bthd,bsd->bhts", query, key[:, :, 0]) / 4
    weights = np.exp(scores) * keep
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.einsum("bhts,bsd->bthd", weights / np.where(total == 0, 1, total), value[:, :, 0]), np.log(
            total[..., 0]
        )


@pytest.fixture
def small_chunks(monkeypatch):
    """16 queries at a time, so that the last chunk is padded."""
    monkeypatch.setattr(attention_chunks, "CPU_CHUNK_BYTES", 16 * S * 4)


OF_EACH_BATCH_ENTRY = ("everything_packed", "block_sparse_larger", "causal_dense", "function")


@pytest.mark.parametrize(
    ("name", "q_offset"), [(name, 3) for name in CASES] + [(name, (5, -30)) for name in OF_EACH_BATCH_ENTRY], ids=str
)
def test_against_float64(name, q_offset, small_chunks):
    case = CASES[name]
    offset = q_offset if isinstance(q_offset, int) else jnp.asarray(q_offset, jnp.int32)
    attend = lambda mask, offset: flash_attention(*arrays(), mask=mask, q_offset=offset, return_lse=True)
    if isinstance(q_offset, int):
        got = jit(lambda mask: attend(mask, q_offset))(case.mask)
    else:
        got = jit(attend)(case.mask, offset)
    want = definition(*arrays(), case.dense(q_offset))
    assert rms_error(got[0], want[0]) < 1e-6
    assert rms_error(got[1], want[1]) < 1e-6
    dead = ~case.dense(q_offset).any(axis=-1)
    assert not np.asarray(got[0])[dead.swapaxes(1, 2)].any()


@jit
def value_and_gradients(mask):
    """One program for all dense masks."""

    def loss(query, key, value):
        other = {"window": (20, 10), "q_offset": 3, "softcap": 2.0}
        out, lse = flash_attention(query, key, value, mask=mask, return_lse=True, **other)
        return (out * jnp.cos(out)).sum() + jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(*arrays())


@pytest.mark.parametrize("name", [*list(CASES)[1::3], "everything_packed"])
def test_gradients(name, small_chunks):
    """Gradients equal the dense mask's, together with the other arguments."""
    case = CASES[name]
    got, want = value_and_gradients(case.mask), value_and_gradients(case.dense(3))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rms_error(g, w) < 1e-6


def test_no_array_of_all_pairs():
    """There are 4 chunks of 64 queries. The mask is evaluated for one chunk at a time."""
    query = jnp.ones((1, 256, 1, 16))
    mask = masks.causal() & masks.segments(jnp.zeros(256, jnp.int32)) | masks.from_function(lambda b, h, q, k: q == k)
    old, attention_chunks.CPU_CHUNK_BYTES = attention_chunks.CPU_CHUNK_BYTES, 64 * 256 * 4
    try:
        loss = lambda q: flash_attention(q, q, q, mask=mask).sum()
        text = jax.jit(jax.grad(loss)).lower(query).as_text()
    finally:
        attention_chunks.CPU_CHUNK_BYTES = old
    assert "64x256x" in text
    assert "256x256x" not in text


@pytest.mark.parametrize(
    ("mask", "mapped"),
    tiers.pairs(["shared", "of_batch", "function"], ["query", "mask", "both"], ("of_batch", "both")),
)
def test_vmap(mapped, mask):
    """Includes gradients. Each call has a mask of its own, or all share one mask."""
    query, key, value = (jnp.stack([x, x + 1, x * 2]) for x in arrays())
    rows = jnp.arange(3 * B).reshape(3, B) * 7 if mask == "of_batch" else jnp.arange(3).reshape(3, 1) * 7

    def mask_of(limit):
        if mask == "function":
            return masks.from_function(lambda b, h, q, k, n: (k < n[0]) | (q >= k), limit)
        return masks.prefix(limit) | masks.causal()

    def gradient(query, limit):
        attend = lambda q: jnp.sin(flash_attention(q, key[0], value[0], mask=mask_of(limit))).sum()
        return jax.grad(attend)(query)

    axes = (None if mapped == "mask" else 0, None if mapped == "query" else 0)
    pick = lambda x, axis, i: x[0 if axis is None else i]
    arguments = [x[0] if axis is None else x for x, axis in zip((query, rows), axes, strict=True)]
    got = jit(jax.vmap(gradient, axes))(*arguments)
    one = jit(gradient)
    want = jnp.stack([one(pick(query, axes[0], i), pick(rows, axes[1], i)) for i in range(3)])
    assert rms_error(got, want) < 1e-6


IDS = np.repeat([0, 1, -1, 2], [T // 4, T // 3, 5, T - T // 4 - T // 3 - 5]).astype(np.int32)


@pytest.mark.parametrize(
    ("mask", "as_lists"),
    [
        (masks.causal(), False),
        (masks.sliding_window(7, 3) & masks.causal() & masks.segments(IDS), False),
        (masks.prefix(20) & masks.dense(np.tri(T, dtype=bool)), False),
        (masks.causal() | masks.prefix(4), True),
        (~masks.causal(), True),
        (masks.segments(IDS) & masks.segments(IDS[::-1].copy()), True),
        (masks.dilated(3), True),
    ],
)
@pytest.mark.triton
def test_chosen_implementation(mask, as_lists):
    query = jax.ShapeDtypeStruct((B, T, H, 64), jnp.bfloat16)
    bias, of_queries = (jax.ShapeDtypeStruct((1, H, T, n), jnp.bfloat16) for n in (T, 1))
    with on_device("H200"):
        plan = explain(flash_attention, query, query, query, mask=mask)
        assert plan.implementation == "mosaic_gpu"
        row, _ = attention_row((9, 0), "mosaic_gpu", head_dim=64, bits=16, is_causal=False, has_lists=True)
        assert (plan.config.forward is row.forward) == as_lists
        if as_lists:
            plan = explain(flash_attention, query, query, query, mask=mask, bias=bias)
            assert plan.implementation == "mosaic_gpu"
            of_bias, _ = attention_row((9, 0), "mosaic_gpu", head_dim=64, bits=16, is_causal=False, dense_bits=16)
            assert plan.config.forward is of_bias.forward
            plan = explain(flash_attention, query, query, query, mask=mask, bias=of_queries)
            passed_over = dict(plan.passed_over)
            assert plan.implementation == "triton"
            assert passed_over["mosaic_gpu"].startswith("it takes a bias with a value for each key")
            assert passed_over["cudnn"].startswith("it supports only Masks")
            with pytest.raises(NotImplementedError, match=r"'cudnn' cannot serve .*: it supports only Masks"):
                explain(flash_attention, query, query, query, mask=mask, implementation="cudnn")


# The other arguments of the call, which limit the keys as well.
BESIDE = (
    {},
    {"is_causal": True},
    {"window": (5, 9)},
    {"window": (-1, 2), "kv_lengths": np.array([S, 11], np.int32)},
    {"segment_ids": (IDS[None].repeat(B, 0), np.resize(IDS, (B, S)))},
)
OF_ARGUMENTS = (
    masks.sliding_window(6, 4),
    masks.causal() & masks.sliding_window(3, None),
    masks.sliding_window(None, 8) & masks.sliding_window(20, 30) & masks.prefix(np.array([17, S], np.int32)),
    masks.segments(IDS, np.resize(IDS[::-1], S)) & masks.prefix(25),
    masks.dense(np.random.default_rng(0).random((H, T, S)) < 0.6) & masks.sliding_window(9, 0),
)


@pytest.mark.parametrize("beside", BESIDE, ids=lambda beside: "_".join(beside) or "alone")
def test_masks_that_are_arguments(beside):
    """Each mask against its dense form, together with the same arguments."""
    query, key, value = arrays()
    for mask in OF_ARGUMENTS:
        attend = lambda mask: flash_attention(query, key, value, mask=mask, q_offset=2, return_lse=True, **beside)
        got, want = jit(attend)(mask), jit(attend)(mask.to_dense(T, S, q_offset=2))
        for x, y in zip(got, want, strict=True):
            assert rms_error(x, y) < 2e-6, mask
    assert joined(Limits(mask=OF_ARGUMENTS[0], window=(5, -1)), B) == Limits(window=(5, 4))


def test_block_sparse_attention():
    query, key, value = arrays()
    blocks = np.random.default_rng(3).random((B, H, 7, 3)) < 0.5
    blocks[0, 0, 2] = False
    keep = blocks.repeat(8, 2)[:, :, :T].repeat(16, 3)[..., :S] & (np.arange(T)[:, None] + 4 >= np.arange(S))
    attend = lambda blocks: block_sparse_attention(
        query, key, value, blocks, block_size=(8, 16), is_causal=True, q_offset=4, return_lse=True
    )
    want = definition(query, key, value, keep)
    for got in (
        jit(attend)(blocks),
        block_sparse_attention(
            query, key, value, masks.block_sparse(blocks, (8, 16)), is_causal=True, q_offset=4, return_lse=True
        ),
    ):
        assert rms_error(got[0], want[0]) < 1e-6
        assert rms_error(got[1], want[1]) < 1e-6
    assert not np.asarray(got[0])[0, 16:24, 0].any()
    plan = explain(block_sparse_attention, query, key, value, blocks, block_size=(8, 16))
    assert (plan.op, plan.implementation) == ("flash_attention", "xla")


BAD = {
    "lengths": (
        lambda *x: flash_attention(*x, mask=masks.segments(np.zeros(T, np.int32))),
        ValueError,
        "segments: got kv_ids of shape (1, 50), want [batch, 45] for this call",
    ),
    "batch": (
        lambda *x: flash_attention(*x, mask=masks.prefix(np.arange(3))),
        ValueError,
        "mask: got a Mask of 3 batch entries and 1 heads, want 1 or 2 batch entries and 1 or 3 heads",
    ),
    "heads": (
        lambda *x: flash_attention(*x, mask=masks.dense(np.ones((2, 1, 1), bool))),
        ValueError,
        "mask: got a Mask of 1 batch entries and 2 heads, want 1 or 2 batch entries and 1 or 3 heads",
    ),
    "mask_type": (
        lambda *x: flash_attention(*x, mask="causal"),
        TypeError,
        "mask: got str, want a bool array or a Mask",
    ),
    "blocks": (
        lambda *x: block_sparse_attention(*x, np.ones((1, 1), bool), block_size=32),
        ValueError,
        "block_mask: got shape (1, 1) for 50 queries and 45 keys, want [batch, heads, 2, 2] at block_size (32, 32)",
    ),
    "blocks_none": (
        lambda *x: block_sparse_attention(*x, None),
        TypeError,
        "block_mask: got NoneType, want a bool array",
    ),
    "blocks_dtype": (
        lambda *x: block_sparse_attention(*x, np.ones((1, 1), np.int32)),
        TypeError,
        "block_mask: got dtype int32, want bool (True = attend)",
    ),
    "blocks_batch": (
        lambda *x: block_sparse_attention(*x, np.ones((3, 1, 1, 1), bool)),
        ValueError,
        "block_mask: got 3 batch entries and 1 heads, want 1 or 2 batch entries and 1 or 3 heads",
    ),
    "blocks_of_a_mask": (
        lambda *x: block_sparse_attention(*x, masks.prefix(np.arange(3))),
        ValueError,
        "block_mask: got 3 batch entries and 1 heads, want 1 or 2 batch entries and 1 or 3 heads",
    ),
    "blocks_explained": (
        lambda *x: explain(block_sparse_attention, *x, jax.ShapeDtypeStruct((1, 2), bool)),
        ValueError,
        "block_mask: got shape (1, 2) for 50 queries and 45 keys, want [batch, heads, 1, 1] at block_size (128, 128)",
    ),
    "blocks_with_a_bad_query": (
        lambda query, *x: block_sparse_attention(query[0], *x, np.ones((1, 1), bool)),
        ValueError,
        "query: got shape (50, 3, 16), want 4 axes",
    ),
    "block_size": (
        lambda *x: block_sparse_attention(*x, masks.causal(), block_size=32),
        ValueError,
        "block_size: got 32 with a Mask, want None: a Mask has its own",
    ),
    "two_masks": (
        lambda *x: block_sparse_attention(*x, np.ones((1, 1), bool), mask=masks.causal()),
        TypeError,
        "mask: got the argument with block_sparse_attention, want block_mask",
    ),
    "unknown": (
        lambda *x: block_sparse_attention(*x, np.ones((1, 1), bool), causal=True),
        TypeError,
        "got an unexpected keyword argument 'causal'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call(*arrays())
