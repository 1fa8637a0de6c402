"""Masks in the Triton attention kernels, interpreted on the CPU: the visited blocks, and the values."""

import functools
import itertools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, masks, prepare_mask
from jax_kernels.dispatch import explain, on_device
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.masks.placed_mask import Placed
from jax_kernels.pallas.attention.triton import bias_gradient, block_lists
from jax_kernels.pallas.attention.triton.common import QueryPrograms, TracedCall
from jax_kernels.testing import rms_error
from tests.support.cases import tiers

pytestmark = pytest.mark.timeout(120)
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

B, T, S, H, KV_HEADS, D = 2, 150, 131, 4, 2, 64
RANDOM = np.random.default_rng(0)
IDS = tuple(np.sort(RANDOM.integers(-1, 4, (B, n)), axis=1).astype(np.int32) for n in (T, S))
MIXED_IDS = tuple(RANDOM.integers(0, 5, (B, n)).astype(np.int32) for n in (T, S))
COUNTS = np.array([90, 7], np.int32)
CAUSAL = masks.causal()

ARITHMETIC = {
    "longformer": (CAUSAL & masks.sliding_window(20, 0)) | masks.prefix(16),
    "prefixes": CAUSAL | masks.prefix(COUNTS),
    "documents": CAUSAL & masks.segments(*IDS) | masks.prefix(16),
    "mixed": masks.segments(*MIXED_IDS) & ~masks.sliding_window(5, 5),
    "not": ~(CAUSAL & masks.dilated(3)),
    "global": masks.global_tokens(COUNTS) | masks.sliding_window(10, 10),
}
KEYS = {
    "padded prefixes": masks.dense(RANDOM.random((B, 1, 1, S)) < 0.7) & (CAUSAL | masks.prefix(COUNTS)),
    "not these keys": ~masks.dense(np.arange(S)[None] % 64 < 40) | masks.sliding_window(3, 3),
    "keys": jnp.asarray(RANDOM.random((B, 1, 1, S)) < 0.7),
    "keys of heads": jnp.asarray(
        (RANDOM.random((B, H, 1, S)) < 0.5) & (RANDOM.random((B, H, 1, S // 33 + 1)) < 0.5).repeat(33, 3)[..., :S]
    ),
    "shared keys": jnp.asarray(np.arange(S) % 64 < 40)[None, None, None],
}
BITS = {
    "function": masks.from_function(lambda b, h, q, k: (q * 7 + k * 3 + h + b) % 5 == 0, batch=B, heads=H),
    "heads": masks.dense(RANDOM.random((1, H, T, S)) < 0.3),
    "array": jnp.asarray(RANDOM.random((B, H, T, S)) < 0.3),
    "cells": masks.block_sparse(RANDOM.random((H, 5, 5)) < 0.4, (31, 28)),
    "none": masks.dense(np.zeros((T, S), bool)),
}
OPTIONS = {
    "plain": {},
    "offset": {"is_causal": True, "q_offset": 5},
    "softcap": {"softcap": 3.0, "sinks": jnp.linspace(-1, 1, H)},
    "lengths": {"kv_lengths": np.array([S, S // 3], np.int32), "q_offset": np.array([3, 40], np.int32)},
    "window": {"window": (30, 9), "scale": 0.3},
}


@pytest.fixture(autouse=True)
def _interpret(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")


def normal(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def results(implementation: str, mask: Any, **options: Any) -> Any:
    """(out, lse), and the gradients of query, key and value, through out and lse."""
    arrays = normal(B, T, H, D, seed=0), normal(B, S, KV_HEADS, D, seed=1), normal(B, S, KV_HEADS, D, seed=2)
    attend = functools.partial(flash_attention, mask=mask, return_lse=True, implementation=implementation, **options)

    @jit
    def run(arrays):
        (out, lse), vjp = jax.vjp(attend, *arrays)
        dlse = jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0.0)
        return out, lse, vjp((jnp.sin(out + 1), dlse))

    return run(arrays)


def check(mask: Any, **options: Any) -> None:
    got, want = results("triton", mask, **options), results("xla", mask, **options)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rms_error(x, y) < 5e-6


# Each mask with one of the options, in turn.
MASKS = ARITHMETIC | KEYS | BITS
QUICK = list(zip([*ARITHMETIC, "keys of heads", *BITS], itertools.cycle(OPTIONS), strict=False))


@pytest.mark.parametrize(("name", "options"), tiers.some_pairs(MASKS, OPTIONS, QUICK))
def test_matches_plain_attention(name, options):
    check(MASKS[name], **OPTIONS[options])


@pytest.mark.parametrize(
    "bias", tiers.cases([(B, H, T, S), (1, H, 1, S), (1, 1, T, S), (B, 1, T, 1)], {str((1, H, 1, S))})
)
@pytest.mark.parametrize("name", tiers.cases(["documents", "heads", "keys of heads"], {"documents", "heads"}))
def test_gradient_of_a_bias(name, bias, monkeypatch):
    """The pass reads dquery's lists: it does not evaluate the mask again."""
    mask = MASKS[name]
    monkeypatch.setattr(bias_gradient, "packed_status", None)
    monkeypatch.setattr(bias_gradient, "block_status", None)

    def gradient(implementation):
        arrays = normal(B, T, H, D, seed=0), normal(B, S, H, D, seed=1), normal(B, S, H, D, seed=2)

        def loss(bias):
            attend = functools.partial(flash_attention, mask=mask, return_lse=True, implementation=implementation)
            out, lse = attend(*arrays, bias=bias)
            return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()

        return jit(jax.grad(loss))(normal(*bias, seed=3))

    assert rms_error(gradient("triton"), gradient("xla")) < 5e-6


@pytest.mark.parametrize("name", tiers.cases(["longformer", "keys of heads"], {"longformer"}))
def test_score_mod(name):
    """A score_mod's arrays get gradients, also under a mask."""
    slopes = jnp.linspace(0.1, 1, H)
    query, key = normal(B, T, H, D, seed=0), normal(B, S, H, D, seed=1)

    def gradient(implementation):
        def loss(slopes):
            mod = lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k)
            out = flash_attention(query, key, key, mask=MASKS[name], score_mod=mod, implementation=implementation)
            return jnp.sin(out).sum()

        return jit(jax.grad(loss))(slopes)

    assert rms_error(gradient("triton"), gradient("xla")) < 5e-6


def test_keys_past_the_length_are_not_read():
    """NaN past kv_lengths, and past a prefix that `&` joins, has no effect."""
    mask, lengths = masks.prefix(COUNTS) & (CAUSAL | masks.prefix(9)), np.array([100, S], np.int32)
    query, key = normal(B, T, H, D, seed=0), normal(B, S, H, D, seed=1)
    past = (np.arange(S) >= np.minimum(COUNTS, lengths)[:, None])[..., None, None]
    run = jit(lambda key: flash_attention(query, key, key, mask=mask, kv_lengths=lengths, implementation="triton"))
    np.testing.assert_array_equal(run(jnp.where(past, jnp.nan, key)), run(key))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["all_queries", "causal"])
def test_keys_of_dead_blocks_are_not_read(options):
    """NaN in keys and values of a block that a mask of keys leaves out has no effect, nor on the gradients."""
    kept = np.zeros((1, 1, 1, 512), bool)
    kept[..., 100:228] = True
    arrays = [normal(1, 512, 2, D, seed=i) for i in range(3)]

    @jit
    def run(query, key, value):
        attend = functools.partial(flash_attention, mask=kept, implementation="triton", **options)
        out, vjp = jax.vjp(attend, query, key, value)
        return out, *vjp(jnp.cos(out))

    block = 128  # the largest block of keys
    live = np.zeros(512 // block, bool)
    live[[100 // block, 227 // block]] = True
    dead = ~live.repeat(block)[:, None, None]
    got = run(arrays[0], *(jnp.where(dead, jnp.nan, x) for x in arrays[1:]))
    for x, y in zip(got, run(*arrays), strict=True):
        np.testing.assert_array_equal(x, y)
    for gradient in got[2:]:
        assert not np.asarray(gradient)[:, dead[:, 0, 0]].any()


def test_a_piece_keeps_the_keys_of_the_whole_sequence():
    """A mask of 512 keys, in a call of the second half of the queries and of the keys."""
    keys = np.isin(np.arange(512) // 64, [1, 5])
    second = jnp.array([256], jnp.int32)
    mask = Placed(mask=masks.dense(keys[None]), q_firsts=second, k_firsts=second, lengths=(256, 256))
    query = jax.ShapeDtypeStruct((1, 256, 2, D), jnp.float32)
    inputs = AttentionInputs(query=query, key=query, value=query, mask=mask)
    lists = block_lists.lists_of(inputs, AttentionOptions(scale=1.0), (64, 64), by="query")
    np.testing.assert_array_equal(lists.counts[0, 0, :, 1], [1] * 4)
    np.testing.assert_array_equal(lists.indices[0, 0, :, 0], [1] * 4)


def test_masks_of_keys_have_one_list_for_all_queries():
    """The lists of a mask of 131,072 keys take 12 bytes a key, where a list for each block of queries takes more."""
    query = jax.ShapeDtypeStruct((1, 131072, 4, 128), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1, 4, 1, 131072), bool)

    def lists(mask):
        inputs = AttentionInputs(query=query, key=query, value=query, mask=mask)
        return [block_lists.lists_of(inputs, AttentionOptions(scale=1.0), (128, 128), by=by) for by in ("query", "key")]

    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lists, mask)))
    assert size <= 12 * 131072


def visited(mask: Any, blocks: tuple[int, int], by: str) -> np.ndarray:
    """Which blocks the lists of a call with this mask visit: bool [queries, keys]."""
    query = jax.ShapeDtypeStruct((1, 512, 2, D), jnp.float32)
    inputs = AttentionInputs(query=query, key=query, value=query, mask=mask)
    lists = block_lists.lists_of(inputs, AttentionOptions(scale=1.0), blocks, by=by)
    found = np.zeros((512 // blocks[0], 512 // blocks[1]), bool)
    found = found if by == "query" else found.T
    for row in range(len(found)):  # an axis of length 1 is of all blocks
        indices, counts = (x[0, 0, min(row, x.shape[2] - 1)] for x in (lists.indices, lists.counts))
        found[row, indices[: counts[1]]] = True
    return found if by == "query" else found.T


@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("name", ["window", "cells", "keys"])
def test_only_live_blocks_are_visited(name, by):
    cells = RANDOM.random((8, 8)) < 0.3
    keys = np.isin(np.arange(512) // 64, [1, 4, 5]) & (RANDOM.random(512) < 0.5)
    mask = {
        "window": CAUSAL & masks.sliding_window(70, 0) | masks.prefix(3),
        "cells": masks.block_sparse(cells, 64),
        "keys": masks.dense(keys[None]),
    }
    blocks = 32, 64
    kept = np.asarray(mask[name].to_dense(512, 512))[0, 0]
    want = kept.reshape(512 // 32, 32, 512 // 64, 64).any(axis=(1, 3))
    given = jnp.asarray(keys)[None, None, None] if name == "keys" else mask[name]
    np.testing.assert_array_equal(visited(given, blocks, by), want)


def test_masks_of_positions_need_no_bits():
    """Lists of 131,072 tokens take at most 64 MiB, where bits of the partial blocks would take gigabytes."""
    mask = CAUSAL & masks.segments(np.zeros((1, 131072), np.int32)) | masks.prefix(16)
    query = jax.ShapeDtypeStruct((1, 131072, 16, 128), jnp.bfloat16)

    def lists(mask):
        inputs = AttentionInputs(query=query, key=query, value=query, mask=mask)
        return [block_lists.lists_of(inputs, AttentionOptions(scale=1.0), (128, 128), by=by) for by in ("query", "key")]

    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lists, mask)))
    assert size <= 64 << 20


@pytest.mark.parametrize("name", tiers.cases(["documents", "heads", "keys"], {"documents", "heads"}))
def test_prepared_lists(name):
    mask = MASKS[name] if isinstance(MASKS[name], masks.Mask) else masks.dense(MASKS[name])
    arrays = normal(B, T, H, D, seed=0), normal(B, S, KV_HEADS, D, seed=1)
    with on_device("a100"):
        prepared = prepare_mask(mask, *arrays)
    assert len(prepared.lists) == 3
    sorts = lambda mask: str(
        jax.make_jaxpr(jax.grad(lambda q: flash_attention(q, arrays[1], arrays[1], mask=mask).sum()))(arrays[0])
    ).count(" sort[")
    with on_device("a100"):
        assert sorts(mask) > 0
        assert sorts(prepared) == 0
    got, want = results("triton", prepared), results("xla", mask)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rms_error(x, y) < 5e-6


@pytest.mark.parametrize(
    ("mask", "is_descending"),
    [
        (CAUSAL | masks.prefix(4), True),
        (CAUSAL & masks.segments(*IDS) | masks.prefix(16), True),
        (~CAUSAL, False),
        (masks.sliding_window(5, 0) | masks.prefix(3), False),
    ],
)
def test_queries_with_the_most_keys_go_first(mask, is_descending):
    query, key = (jax.ShapeDtypeStruct((B, n, H, D), jnp.float32) for n in (T, S))
    inputs = AttentionInputs(query=query, key=key, value=key, mask=mask)
    lists = lambda: TracedCall.listed(inputs, AttentionOptions(scale=1.0), (32, 32), True, by="query")[1:]
    call = TracedCall.of(inputs, AttentionOptions(scale=1.0), 32, 32, True)
    given, found = jax.eval_shape(lists)
    programs = QueryPrograms(call, given, (None, None, None), lists=found)
    blocks = [programs.q_block(i) for i in range(call.q_blocks)]
    assert blocks == sorted(blocks, reverse=is_descending)


@pytest.mark.parametrize("device", ["a100", "a6000", "rtx 4090", "b200", "rtx 5090"])
def test_every_mask_skips_on_this_gpu(device):
    query = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((B, S, KV_HEADS, D), jnp.bfloat16)
    for name, mask in MASKS.items():
        if isinstance(mask, masks.Mask):
            assert explain(flash_attention, query, key, key, mask=mask, device=device).implementation == "triton", name
