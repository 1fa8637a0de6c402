"""Masks of a whole sequence in a call with some of its tokens: pairs, blocks and the steps of a ring."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.masks.block_lists import block_status
from jax_kernels.masks.mask import node, static
from jax_kernels.masks.placed_mask import Placed
from jax_kernels.masks.prepared import PreparedMask
from jax_kernels.ops.ring.layouts import LAYOUTS, Layout
from tests.support.cases import tiers
from tests.support.cases.masks import CASES, B, H, S, T

TOKENS, DEVICES = 96, 4
RANDOM = np.random.default_rng(0)
IDS = jnp.asarray(np.sort(RANDOM.integers(-1, 4, (2, TOKENS)), axis=1).astype(np.int32))
CELLS = jnp.asarray(RANDOM.random((1, 2, 8, 8)) < 0.3)
PAIRS = jnp.asarray(RANDOM.random((TOKENS, TOKENS)) < 0.2)
MASKS = {
    "global": masks.causal() & masks.sliding_window(7, 0) | masks.global_tokens(3),
    "prefix": masks.causal() | masks.prefix(jnp.asarray([5, 40], jnp.int32)),
    "dilated": masks.preset("longformer", window=8, n=2, rate=2),
    "segments": masks.segments(IDS) & (masks.causal() | masks.prefix(9)),
    "cells": masks.block_sparse(CELLS, 12),
    "not": ~(masks.sliding_window(3, 3) | masks.segments(IDS) | masks.global_tokens(2)),
    "function": masks.from_function(lambda b, h, q, k: (q * 3 + k) % 5 < 2) & masks.causal(),
    "array": masks.dense(PAIRS) | masks.prefix(4),
}

QUICK = "global", "cells", "array"


@functools.partial(jax.jit, static_argnames=("layout", "step", "blocks"))
def of_step(mask, index, *, layout, step, blocks):
    placed = layout.placed(mask, step, index)
    length = layout.length
    statics = {"lengths": (length, length), "blocks": blocks, "static_offset": 0}
    lists = [placed.block_lists(length, length, *blocks, by) for by in ("query", "key")]
    return placed.to_dense(length, length), block_status(placed, jnp.zeros(1, jnp.int32), **statics), lists


def any_all(keep, block_q, block_kv):
    """(whether a block keeps any pair, whether it keeps all its pairs before the end)."""
    pads = (0, 0), (0, 0), (0, -keep.shape[2] % block_q), (0, -keep.shape[3] % block_kv)
    cut = lambda fill: np.pad(keep, pads, constant_values=fill)
    split = lambda x: x.reshape(*x.shape[:2], -1, block_q, x.shape[3] // block_kv, block_kv)
    return split(cut(False)).any((3, 5)), split(cut(True)).all((3, 5))


@pytest.mark.parametrize("blocks", [(8, 6), pytest.param((7, 5), marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in MASKS])
def test_step_pairs_and_blocks(name, layout, blocks):
    """The blocks of one piece are exact. Blocks of two pieces may be partial. Lists and bits have room for all."""
    ring = Layout(name=layout, devices=DEVICES, length=TOKENS // DEVICES, left=None, right=None)
    dense = np.asarray(MASKS[name].to_dense(TOKENS, TOKENS))
    for index, step in ((2, 1), (0, 1)):
        q, k = ring.tokens(index), ring.tokens((index - step) % DEVICES)
        keep, (alive, full), lists = of_step(MASKS[name], jnp.int32(index), layout=ring, step=step, blocks=blocks)
        want = dense[:, :, q][..., k]
        np.testing.assert_array_equal(keep, np.broadcast_to(want, keep.shape))
        some, every = any_all(np.asarray(keep), *blocks)
        alive, full = (np.broadcast_to(x, some.shape) for x in (alive, full))
        assert not (some & ~alive).any()
        assert not (full & ~every).any()
        if ring.chunks == 1:
            np.testing.assert_array_equal(alive, some)
        for of_side in lists:
            assert int((of_side.full_count + of_side.partial_count).max()) <= of_side.indices.shape[-1]


def test_step_window_has_short_lists():
    """Under jit a step's lists have the length of the window, not of the device's tokens."""
    ring = Layout(name="zigzag", devices=4, length=2048, left=None, right=None)
    mask = masks.causal() & masks.sliding_window(100, 0)

    def of_first(index):
        placed = ring.placed(mask, 1, index)
        return placed.block_lists(2048, 2048, 64, 64), placed.packed_partial(2048, 2048, 64, 64)

    lists, bits = jax.eval_shape(of_first, jnp.int32(0))
    assert lists.indices.shape[-1] <= 2 * 4
    assert bits.words.shape[0] < 32 * 32 / 2


DEAD = {
    "window": masks.sliding_window(5, 0),
    "global": masks.sliding_window(5, 0) | masks.global_tokens(2),
    "dilated": masks.dilated(4),
    "odd": masks.causal() & ~masks.dilated(2),
    "prefix": masks.prefix(2) & masks.causal(),
    "first": masks.prefix(2) & masks.sliding_window(9, 9),
    "cells": masks.block_sparse(jnp.eye(4, dtype=bool), 24),
    "cells and more": masks.block_sparse(jnp.eye(8, dtype=bool), 12) & masks.causal() | masks.sliding_window(0, 0),
    "function": masks.from_function(lambda b, h, q, k, size: q // size == k // size, jnp.int32(24)),
}
# Unknown while tracing: steps under traced arrays, functions, or excluded distances.
UNKNOWN = {("odd", "striped"), ("cells", True), ("cells and more", True), ("function", True), ("function", False)}


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DEAD)
def test_empty_steps(name, layout, is_traced):
    mask = DEAD[name]
    ring = Layout(name=layout, devices=DEVICES, length=TOKENS // DEVICES, left=None, right=None)
    dense = np.asarray(mask.to_dense(TOKENS, TOKENS))[0, 0]
    tokens = [ring.tokens(device) for device in range(DEVICES)]
    is_empty = lambda s: not any(dense[np.ix_(tokens[i], tokens[(i - s) % DEVICES])].any() for i in range(DEVICES))
    right = {step for step in range(1, DEVICES) if is_empty(step)}
    found: list[tuple[int, ...]] = []
    look = lambda mask: found.append(ring.dead_steps(mask))
    jax.eval_shape(look, mask) if is_traced else look(mask)
    assert set(found[0]) <= right
    assert {(name, layout), (name, is_traced)} & UNKNOWN or set(found[0]) == right


@pytest.mark.parametrize("name", tiers.cases(CASES, set(list(CASES)[::3])))
def test_pieces_of_each_mask(name):
    """Every second token from query 3 and key 1 on, the last two heads, and parts of the sequence without a pair."""
    mask, dense = CASES[name].mask, CASES[name].dense()
    placed = Placed(mask, jnp.array([3]), jnp.array([1]), lengths=(20, 20), stride=2)
    alive, full = block_status(placed, jnp.zeros(1, jnp.int32), lengths=(20, 20), blocks=(4, 6), static_offset=0)
    some, every = any_all(dense[:, :, 3:43:2, 1:41:2], 4, 6)
    assert not (some & ~np.asarray(alive)).any(), "a live block is left out"
    assert not (np.asarray(full) & ~every).any(), "a partial block counts as full"
    heads = mask.of_heads(1, 2).to_dense(T, S)
    np.testing.assert_array_equal(np.broadcast_to(heads, (B, H - 1, T, S)), dense[:, 1:])
    for q, k in itertools.product((range(T // 2), range(T // 2, T, 3)), (range(S // 2), range(S - 5, S))):
        assert not (mask.keeps_none(q, k) and dense[:, :, q][..., k].any())


@pytest.mark.parametrize("name", ["ranked", "function"])
def test_some_heads(name):
    heads = masks.from_function(lambda b, h, q, k: (q + h) % 3 == k % 3, heads=4)
    scores = jnp.asarray(RANDOM.standard_normal((1, 4, 1, 24)), jnp.float32)
    mask = {
        "ranked": masks.top_k(scores, 5, among=masks.causal(), q_length=24),
        "function": heads & masks.causal(),
    }[name]
    found = jax.jit(lambda first: mask.of_heads(first, 2).to_dense(24, 24))(jnp.int32(1))
    np.testing.assert_array_equal(found, mask.to_dense(24, 24)[:, 1:3])


def test_a_prepared_mask_answers_as_the_mask_that_was_prepared():
    cells = np.array([[[1, 0], [0, 1]], [[0, 1], [1, 0]]], bool)[None]
    mask = masks.block_sparse(cells, 12) & masks.sliding_window(20, 0)
    prepared = PreparedMask(mask, ())
    assert not Placed(prepared, jnp.array([12]), jnp.array([0]), lengths=(12, 24)).is_evaluated
    np.testing.assert_array_equal(prepared.of_heads(1, 1).to_dense(24, 24), mask.to_dense(24, 24)[:, 1:])
    assert prepared.of_heads(0, 1).keeps_none(range(12), range(12, 24))
    assert prepared.keeps_none(range(3), range(12, 24))


@node
class Checkered(masks.Mask):
    """A kind of mask that defines its pairs alone."""

    size: int = static()

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        return ((q_offset + q_index) // self.size + k_index // self.size) % 2 == 0


def test_elements_alone_make_a_mask():
    """Blocks are judged by their pairs, also in a piece and in a composition."""
    mask = Checkered(6) & masks.causal()
    placed = Placed(mask, jnp.array([12]), jnp.array([0]), lengths=(12, 24))
    keep = placed.to_dense(12, 24)
    np.testing.assert_array_equal(keep, mask.to_dense(24, 24)[:, :, 12:])
    status = block_status(placed, jnp.zeros(1, jnp.int32), lengths=(12, 24), blocks=(4, 4), static_offset=0)
    for got, want in zip(status, any_all(np.asarray(keep), 4, 4), strict=True):
        np.testing.assert_array_equal(got, want)
    assert mask.of_heads(0, 1).to_dense(24, 24).shape == (1, 1, 24, 24)
    assert not mask.keeps_none(range(12), range(12))
