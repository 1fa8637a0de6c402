"""Masks, their block lists and bitmaps against definitions in NumPy."""

import functools
import operator

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.masks import block_lists
from jax_kernels.masks.block_arithmetic import Grid
from tests.support.cases import masks as cases
from tests.support.cases import tiers
from tests.support.cases.masks import BLOCKS, CASES, B, H, S, T, block_status, unlist

# Compiling dominates the time. Unoptimised code compiles in half of it.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def results(mask, q_offset, blocks=BLOCKS, with_bitmaps=True):
    """(the dense form, block lists by side, bitmaps by side, the density) of a mask."""
    call = {"q_offset": q_offset}
    sides = {by: mask.block_lists(T, S, *blocks, by, **call) for by in ("query", "key")}
    packed = {by: mask.packed_partial(T, S, *blocks, by, **call) for by in sides if with_bitmaps}
    return mask.to_dense(T, S, **call), sides, packed, mask.density(T, S, blocks, **call) if with_bitmaps else None


def check(case, q_offset=0, **kwargs):
    """Compares with the definition, at an offset that is known when tracing."""
    got = jit(lambda mask: results(mask, q_offset, **kwargs))(case.mask)
    compare(case, q_offset, got, kwargs.get("blocks", BLOCKS))


def compare(case, q_offset, got, blocks=BLOCKS):
    dense, sides, packed, density = got
    want = case.dense(np.asarray(q_offset))
    np.testing.assert_array_equal(np.broadcast_to(dense, want.shape), want)
    status = block_status(want, *blocks)
    live = {}
    for by, listed in sides.items():
        want_live, want_full = status if by == "query" else (x.swapaxes(2, 3) for x in status)
        live[by], full = unlist(listed, want_live.shape[-1])
        alive, full = (np.broadcast_to(x, want_live.shape) for x in (live[by], full))
        if case.exact:
            np.testing.assert_array_equal(alive, want_live)
            np.testing.assert_array_equal(full, want_full)
        assert alive[want_live].all(), "a live block is left out"
        assert want_full[full].all(), "a partial block counts as full"
        if packed:
            check_bitmaps(packed[by], listed, want, by, blocks)
    if packed:
        np.testing.assert_allclose(density, live["query"].mean(), rtol=1e-6)


def check_bitmaps(packed, listed, dense, by, blocks):
    words, entries = (np.asarray(x) for x in packed)
    assert words.dtype == np.uint32
    # [entries, rows, positions of the other side]
    bits = (words.swapaxes(1, 2)[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)
    bits = bits.reshape(len(words), words.shape[2], -1)
    own, other = blocks[:: 1 if by == "query" else -1]
    assert bits.shape[1:] == (own, -(-other // 32) * 32)
    assert not bits[..., other:].any()
    assert not bits[-1].any()
    past_full = np.arange(entries.shape[-1]) - np.asarray(listed.full_count)[..., None]
    is_partial = (past_full >= 0) & (past_full < np.asarray(listed.partial_count)[..., None])
    np.testing.assert_array_equal(entries >= 0, is_partial)
    used = np.sort(entries[is_partial])
    np.testing.assert_array_equal(used, np.arange(used.size))
    rows, columns = -(-T // blocks[0]), -(-S // blocks[1])
    whole = np.zeros((B, H, rows * blocks[0], columns * blocks[1]), bool)
    whole[:, :, :T, :S] = dense
    tiles = whole.reshape(B, H, rows, blocks[0], columns, blocks[1]).swapaxes(3, 4)
    own, other = np.arange(entries.shape[2])[:, None], np.asarray(listed.indices)
    place = np.broadcast_arrays(own, other)[:: 1 if by == "query" else -1]
    b, h = np.arange(entries.shape[0])[:, None, None, None], np.arange(entries.shape[1])[:, None, None]
    want = tiles[b, h, place[0], place[1]][is_partial]
    got = bits[entries][is_partial][..., : blocks[1 if by == "query" else 0]]
    np.testing.assert_array_equal(got if by == "query" else got.swapaxes(1, 2), want)


# Bitmaps double the compile time.
WITH_BITMAPS = ("block_sparse_odd", "dense", "causal_dense", "function")


@pytest.mark.parametrize("name", tiers.cases(CASES, set(list(CASES)[::2])))
def test_cases(name):
    check(CASES[name], 7 if name == "window" else 0, with_bitmaps=name in WITH_BITMAPS)


@pytest.mark.parametrize("name", ["causal_window", "everything_packed", "strided", "causal_dense", "function"])
def test_traced_offsets(name):
    """One program serves every offset, common or for each batch entry. Some queries are far from all keys."""
    case, traces = CASES[name], []

    @jit
    def run(mask, q_offset):
        traces.append(name)
        return results(mask, q_offset, with_bitmaps=False)

    for q_offset in (0, 13, -21, 40, -60, 90):
        for offset in (q_offset, (q_offset, 5 - q_offset)):
            offset = jnp.asarray(np.broadcast_to(offset, (B,)), jnp.int32)
            compare(case, offset, run(case.mask, offset))
    assert len(traces) == 1


leaves = st.one_of(
    st.just(cases.causal()),
    st.builds(cases.window, st.integers(-1, 30), st.integers(-1, 30)),
    st.builds(cases.prefix, st.integers(0, S + 3) | st.tuples(*[st.integers(0, S + 3)] * B)),
    st.builds(cases.global_tokens, st.integers(0, 12) | st.tuples(*[st.integers(0, 12)] * B)),
    st.builds(cases.dilated, st.integers(1, 40)),
    st.builds(cases.packed, st.integers(0, 5), st.sampled_from([1, B])),
    st.builds(cases.mixed, st.integers(0, 5)),
    st.builds(cases.block_sparse, st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, B])),
    st.builds(cases.dense, st.sampled_from([(B, H, T, S), (1, H, 1, S)]), seed=st.integers(0, 5)),
)


def compositions(leaves):
    joined = lambda x: st.one_of(
        st.builds(operator.invert, x), st.builds(operator.and_, x, x), st.builds(operator.or_, x, x)
    )
    return st.recursive(leaves, joined, max_leaves=4)


@hypothesis.settings(max_examples=8)
@hypothesis.given(compositions(leaves), st.integers(-30, 30), st.sampled_from([(8, 16), (5, 7), (16, 4), (64, 64)]))
def test_any_composition(case, q_offset, blocks):
    """No live block is left out, and no partial block counts as full."""
    check(case.conservative(), q_offset, blocks=blocks, with_bitmaps=False)


# A composition of these is exact, however deep.
of_intervals = st.one_of(
    st.just(cases.causal()),
    st.builds(cases.window, st.integers(-1, 30), st.integers(-1, 30)),
    st.builds(cases.prefix, st.tuples(*[st.integers(0, S + 3)] * B)),
    st.builds(cases.global_tokens, st.integers(0, 12)),
    st.builds(cases.packed, st.integers(0, 5)),
)


@hypothesis.settings(max_examples=6)
@hypothesis.given(compositions(of_intervals), st.integers(-30, 30))
def test_interval_compositions_are_exact(case, q_offset):
    check(case, q_offset, with_bitmaps=False)


def test_too_many_terms_to_expand():
    """An intersection of unions grows with each union. Past a limit it has the live blocks of its sparsest union."""
    unions = [cases.window(n, 0) | cases.prefix(n) for n in range(1, 8)]
    check(functools.reduce(operator.and_, unions) & cases.window(0, 0), with_bitmaps=False)


WIDTHS = [
    # mask, lengths, blocks, side, offset, width
    (masks.causal(), (1024, 1024), (128, 128), "query", 0, 8),
    (masks.causal(), (256, 1024), (128, 128), "query", 0, 2),
    (masks.causal(), (256, 1024), (128, 128), "query", 768, 8),
    (masks.causal(), (1024, 256), (128, 64), "key", 0, 8),
    (masks.causal() & masks.sliding_window(256, None), (4096, 4096), (128, 128), "query", 0, 3),
    (masks.causal() & masks.sliding_window(256, None), (4096, 4096), (128, 128), "key", 0, 3),
    (masks.sliding_window(100, 30), (4096, 4096), (128, 64), "query", 0, 5),
    (masks.sliding_window(0, 0), (4096, 4096), (128, 128), "query", 0, 1),
    (masks.sliding_window(0, 0), (4096, 4096), (128, 128), "query", 1, 2),
    # The offset is unknown: the window may touch one key of a block, a whole block, and one key of the next.
    (masks.sliding_window(2, 0), (4096, 4096), (64, 64), "query", np.array(0, np.int32), 3),
    (masks.prefix(100), (4096, 4096), (128, 64), "query", 0, 2),
    (masks.prefix(100) | masks.sliding_window(64, 0), (4096, 4096), (64, 64), "query", 0, 4),
    (masks.dilated(1024), (4096, 4096), (64, 64), "query", 0, 5),
    (masks.dilated(1024) & masks.sliding_window(2048, 0), (8192, 8192), (64, 64), "query", 0, 3),
    (masks.dilated(1000), (4096, 4096), (64, 64), "query", 0, 10),
    (masks.dilated(1024), (4096, 4096), (64, 128), "key", 32, 15),
    (masks.global_tokens(64), (4096, 4096), (64, 64), "query", 0, 64),
    (~masks.global_tokens(64), (4096, 4096), (64, 64), "query", 32, 63),
    (~masks.global_tokens(64), (4096, 4096), (64, 64), "key", 32, 64),
    (~masks.global_tokens(64), (4096, 4096), (64, 64), "key", -64, 62),
    (masks.sliding_window(9, 9) & ~masks.sliding_window(20, 20), (4096, 4096), (64, 64), "query", 0, 1),
    (masks.dense(np.ones((512, 512), bool)), (512, 512), (64, 128), "query", 0, 4),
    (masks.dense(np.ones((512, 512), bool)) & masks.sliding_window(64, 0), (512, 512), (64, 64), "key", 0, 2),
    (masks.top_k_blocks(jnp.ones((32, 32)), 3, 128), (4096, 4096), (128, 128), "query", 0, 3),
    (masks.top_k_blocks(jnp.ones((32, 32)), 3, 128), (4096, 4096), (64, 64), "query", 0, 6),
    (masks.top_k_blocks(jnp.ones((64, 64)), 3, 64), (4096, 4096), (256, 64), "query", 0, 12),
]


@pytest.mark.parametrize(
    ("mask", "lengths", "blocks", "by", "q_offset", "width"), WIDTHS, ids=[f"{i}-{x[0]}" for i, x in enumerate(WIDTHS)]
)
def test_widths(mask, lengths, blocks, by, q_offset, width):
    shapes = jax.eval_shape(lambda: mask.block_lists(*lengths, *blocks, by, q_offset=q_offset))
    rows = -(-lengths[by == "key"] // blocks[by == "key"])
    assert shapes.indices.shape == (1, 1, rows, width)
    assert shapes.partial_count.shape == shapes.full_count.shape == (1, 1, rows)


@pytest.mark.parametrize("left", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("blocks", [(8, 16), (16, 8), (6, 4)])
def test_window_width_is_reached(left, blocks):
    """Some list reaches the bound, if the offset is known and the lengths do not limit the window."""
    for q_offset in (0, 3):
        for by in ("query", "key"):
            keep = np.arange(200)[:, None] + q_offset - np.arange(200)
            live, _ = block_status(((keep >= 0) & (keep <= left))[None, None], *blocks)
            want = live.sum(axis=3 if by == "query" else 2).max()
            mask = masks.sliding_window(left, 0)
            listed = functools.partial(mask.block_lists, 200, 200, *blocks, by, q_offset=q_offset)
            assert jax.eval_shape(listed).indices.shape[-1] == want


@pytest.mark.parametrize(
    ("mask", "limit"),
    [
        (masks.causal() & masks.sliding_window(4096, None), 40),
        (masks.causal() & masks.segments(np.zeros(1 << 17, np.int32)) | masks.prefix(64), 60),
        (masks.causal() & (masks.dilated(256) | masks.block_sparse(np.ones((1024, 1024), bool), 128)), 60),
        (masks.causal() & masks.from_function(lambda b, h, q, k: (q ^ k) % 3 == 0), 80),
    ],
    ids=["window", "segments", "block_sparse", "from_function"],
)
def test_long_sequences_fit(mask, limit):
    """131,072 queries and keys have 16 GiB of pairs. limit: MiB of temporary memory."""
    compiled = jit(lambda mask: mask.block_lists(1 << 17, 1 << 17, 128, 128)).lower(mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < limit << 20
    assert f"{1 << 17},{1 << 17}]" not in compiled.as_text()


@pytest.mark.parametrize("rows", [1, 3])
def test_evaluation_in_chunks(rows, monkeypatch):
    """A chunk has `rows` rows of blocks. There are seven rows."""
    case = CASES["function"]
    monkeypatch.setattr(block_lists, "_CHUNK", B * H * BLOCKS[0] * S * rows)
    got = block_lists.counts(case.mask, Grid(T, S, *BLOCKS, jnp.zeros(1, jnp.int32), 0))
    np.testing.assert_array_equal(got > 0, block_status(case.dense(), *BLOCKS)[0])
    assert got.sum() == case.dense().sum()


def test_64_bit_mode():
    with jax.enable_x64(True):
        for name in ("everything_packed", "strided", "function_or_window", "not_block_sparse_smaller"):
            mask = CASES[name].mask
            listed = jax.eval_shape(lambda mask: mask.block_lists(T, S, *BLOCKS), mask)
            packed = jax.eval_shape(lambda mask: mask.packed_partial(T, S, *BLOCKS), mask)
            assert {x.dtype.name for x in (*listed, packed.entries)} == {"int32"}
            assert packed.words.dtype == jnp.uint32


def test_only_partial_blocks_have_bitmaps():
    """Only if the number of partial blocks is known."""
    mask = masks.causal() & masks.dense(np.ones((128, 128), bool))
    assert mask.packed_partial(128, 128, 16, 16).words.shape == (9, 1, 16)
    assert jit(lambda mask: mask.packed_partial(128, 128, 16, 16))(mask).words.shape == (65, 1, 16)
    assert masks.sliding_window(None, None).packed_partial(128, 128, 16, 64).words.shape == (1, 2, 16)


ODD = lambda b, h, q, k: (q ^ k) % 3 == 0
CELLS = np.ones((2, 3, 8, 8), bool)
MOST_PARTIAL = {
    # mask, lengths, blocks, offset: entries under a trace; one more entry belongs to no block
    "causal": (masks.causal(), (1024, 1024), (128, 128), 0, 8),
    "causal_further": (masks.causal(), (1024, 1024), (128, 128), 1, 16),
    "causal_past_end": (masks.causal(), (1024, 1000), (128, 128), 0, 16),
    "window": (masks.sliding_window(256, 0), (1024, 1024), (128, 64), 0, 8 * 4),
    "one_query": (masks.causal(), (9, 64), (1, 8), 0, 9),
    "window_of_one_query": (masks.sliding_window(5, None), (32, 32), (1, 16), 0, 32),
    "global": (masks.global_tokens(np.array([3, 5])) | masks.causal(), (1024, 512), (128, 128), 0, 2 * (8 + 4 + 8)),
    "cells": (masks.block_sparse(CELLS, 128), (1024, 1024), (64, 128), 0, 0),
    "cells_causal": (masks.block_sparse(CELLS, 128) & masks.causal(), (1024, 1024), (128, 128), 0, 6 * 8),
    "split_cells": (masks.block_sparse(CELLS, 128), (1024, 1024), (256, 128), 0, 6 * 4 * 8),
    "segments": (masks.segments(np.zeros(1024, np.int32)), (1024, 1024), (128, 128), 0, 64),
    "dilated_window": (masks.dilated(2) & masks.sliding_window(1024, 0), (1 << 17, 1 << 17), (128, 128), 0, 9 << 10),
    "function_window": (masks.from_function(ODD) & masks.sliding_window(256, 0), (1024, 1024), (128, 64), 0, 8 * 6),
    "function_key_lists": (masks.from_function(ODD) & ~masks.global_tokens(960), (1024, 1024), (64, 128), 0, 8),
    "function": (masks.from_function(ODD), (1024, 1024), (128, 128), 0, 64),
}


@pytest.mark.parametrize("name", MOST_PARTIAL)
def test_bound_on_partial_blocks(name):
    mask, lengths, blocks, offset, most = MOST_PARTIAL[name]
    packed = lambda mask: mask.packed_partial(*lengths, *blocks, q_offset=offset)
    assert jax.eval_shape(packed, mask).words.shape[0] == most + 1


def test_bitmaps_of_narrow_lists():
    """There are only as many entries as the lists have room for, in all batch entries and heads, and none is lost."""
    case = cases.dilated(3) & cases.window(6, 0) & cases.block_sparse(16, 16).conservative()
    words = jax.eval_shape(lambda mask: mask.packed_partial(T, S, 4, 4), case.mask).words
    assert words.shape[0] == B * H * min(13 * 3, 12 * 3) + 1
    check(case, blocks=(4, 4))


@pytest.mark.parametrize("window", [(5, 4), (5, 0), (3, 12)])
def test_live_block_has_a_pair_within_every_limit(window):
    """A block is dead if one pair is in the window and only another pair is in the dilated mask."""
    check(cases.dilated(7) & cases.window(*window), blocks=(2, 2), with_bitmaps=False)


@hypothesis.settings(max_examples=6)
@hypothesis.given(compositions(leaves), st.integers(-30, 30), st.sampled_from([(8, 16), (5, 7), (1, 4), (64, 64)]))
def test_compositions_keep_the_partial_block_bound(case, q_offset, blocks):
    count = lambda mask: mask.block_lists(T, S, *blocks, q_offset=q_offset).partial_count.sum()
    packed = jax.eval_shape(lambda mask: mask.packed_partial(T, S, *blocks, q_offset=q_offset), case.mask)
    assert jit(count)(case.mask) <= packed.words.shape[0] - 1
