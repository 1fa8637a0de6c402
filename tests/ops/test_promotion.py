"""Ops under a caller's strict settings: rank promotion and implicit dtype promotion are errors in the caller's code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import (
    block_sparse_attention,
    decode_attention,
    dilated_attention,
    dynamic_mask_attention,
    flash_attention,
    flash_attention_fp8,
    grouped_matmul,
    masks,
    prepare_mask,
)
from tests.support.cases import tiers

B, T, H, D = 2, 24, 4, 16
RANDOM = np.random.default_rng(0)
QUERY = jnp.asarray(RANDOM.standard_normal((B, T, H, D)), jnp.bfloat16)
KEY = jnp.asarray(RANDOM.standard_normal((B, T, 2, D)), jnp.bfloat16)
BIAS = jnp.asarray(RANDOM.standard_normal((H, T, T)), jnp.bfloat16)
KEEP = np.tri(T, dtype=bool)
LENGTHS = np.array([20, 7], np.int32)
IDS = np.repeat(np.arange(3, dtype=np.int32), 8)[None].repeat(B, axis=0)
EIGHT_BITS = [x.astype(jnp.float8_e4m3fn) for x in (QUERY, KEY, KEY)]
PATTERN = {"segment_lengths": (8, 24), "dilation_rates": (1, 2)}

GRADIENTS = {
    "bias": functools.partial(flash_attention, bias=BIAS, mask=KEEP, sinks=jnp.zeros(H), softcap=3.0),
    "limits": functools.partial(flash_attention, window=(5, 3), segment_ids=IDS, kv_lengths=LENGTHS, q_offset=2),
    "offsets": functools.partial(flash_attention, is_causal=True, q_offset=np.array([3, -2], np.int32)),
    "mask": functools.partial(flash_attention, mask=masks.sliding_window(4, 0) | masks.global_tokens(2)),
    "score_mod": functools.partial(flash_attention, score_mod=lambda s, b, h, q, k: s - 0.1 * jnp.abs(q - k)),
    "dilated": functools.partial(dilated_attention, **PATTERN, is_causal=True, segment_ids=IDS),
    "partition": functools.partial(dilated_attention, **PATTERN, layout="partition", order="hilbert"),
    "dynamic": functools.partial(dynamic_mask_attention, mask=np.ones((B, 2, T, T), bool), bias=BIAS[:2]),
    "blocks": functools.partial(block_sparse_attention, block_mask=np.tri(3, dtype=bool), block_size=8),
}


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def loss(attend, *arrays):
    out = attend(*arrays)
    return out.astype(jnp.float32).sum()


def gradients(name, implementation):
    attend = functools.partial(GRADIENTS[name], implementation=implementation)
    return jax.grad(functools.partial(loss, attend), (0, 1, 2))


@pytest.mark.parametrize("name", tiers.cases(GRADIENTS, {"bias", "limits", "partition", "dynamic"}))
def test_gradients(name):
    found = gradients(name, "xla")(QUERY, KEY, KEY)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


@pytest.mark.parametrize(
    "name", tiers.cases(["limits", "offsets", "score_mod", "dilated", "partition"], {"offsets", "score_mod", "dilated"})
)
def test_gradients_by_kernels(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    assert "pallas_call" in str(jax.make_jaxpr(gradients(name, "triton"))(QUERY, KEY, KEY))


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_grouped_matmul(implementation, monkeypatch):
    """With a vmap, whose rule traces the schedule anew."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    w, bias, sizes = jnp.ones((3, D, 8), jnp.bfloat16), jnp.ones((3, 8)), jnp.asarray([5, 0, 9], jnp.int32)
    options = {"activation": "silu", "implementation": implementation}
    call = lambda x, w, bias: grouped_matmul(x, w, sizes, bias=bias, **options)
    gradient = jax.vmap(jax.grad(functools.partial(loss, call), (0, 1, 2)), (0, None, None))
    program = jax.make_jaxpr(gradient)(QUERY[:, :, 0], w, bias)
    assert ("pallas_call" in str(program)) == (implementation == "triton")


def test_calls_without_gradients():
    assert flash_attention_fp8(*EIGHT_BITS, is_causal=True, kv_lengths=LENGTHS).shape == (B, T, H, D)
    assert decode_attention(QUERY[:, :2], KEY, KEY, kv_lengths=LENGTHS, window=9).shape == (B, 2, H, D)


def test_under_vmap_and_jit():
    attend = jax.jit(jax.vmap(functools.partial(flash_attention, is_causal=True, implementation="xla")))
    assert attend(QUERY[None], KEY[None], KEY[None]).shape == (1, B, T, H, D)


def test_prepared_mask():
    prepared = prepare_mask(masks.sliding_window(4, 0) | masks.global_tokens(2), QUERY, KEY)
    assert flash_attention(QUERY, KEY, KEY, mask=prepared).shape == QUERY.shape


SCORES = jnp.asarray(RANDOM.standard_normal((B, H, T, T)), jnp.float32)
MASKS = {
    "structure": lambda: masks.causal() & masks.sliding_window(4, 0) | masks.prefix(jnp.asarray(LENGTHS)),
    "dilated": lambda: ~masks.dilated(2) | masks.segments(jnp.asarray(IDS)),
    "top_k": lambda: masks.top_k(SCORES, 3, among=masks.causal()),
    "top_k of a row": lambda: masks.top_k(SCORES[:, :, :1], 3, among=masks.causal(), q_length=T),
    "threshold": lambda: masks.threshold(SCORES, 0.5),
    "top_k_blocks": lambda: masks.top_k_blocks(masks.pooled_scores(QUERY, KEY, 8), 2, 8, among=masks.causal()),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask = MASKS[name]()
    keep = mask.to_dense(T, T)
    assert keep.shape[2:] == (T, T)
    lists = mask.block_lists(T, T, block_q=8, block_kv=8)
    assert int(lists.full_count.sum() + lists.partial_count.sum()) > 0
    assert 0 < float(mask.density(T, T, 8).max()) <= 1
