"""Masks of floats: zeros and ones are a mask, traced or known. Other values raise, or give NaN if traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import (
    block_sparse_attention,
    decode_attention,
    dynamic_mask_attention,
    explain,
    flash_attention,
    masks,
)
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention.dynamic_mask_attention import keys_of_largest_bias
from jax_kernels.ops.attention.flash_attention import prepare
from tests.support.cases import tiers

B, T, H, HKV, D = 2, 8, 4, 2, 16
KEEP = np.tri(T, dtype=bool)
KEEP[2] = False  # a query without a key
CELLS = KEEP[::2, ::2]
random = np.random.default_rng(0)
QKV = tuple(jnp.asarray(random.standard_normal((B, T, heads, D), np.float32)) for heads in (H, HKV, HKV))
xla = functools.partial(flash_attention, implementation="xla", return_lse=True)
SCORES = jnp.asarray(random.standard_normal((T, T), np.float32))
CELL_SCORES = SCORES[::2, ::2]
of_largest = lambda among: keys_of_largest_bias(SCORES[None, None], T, among, num_heads=H, q_length=T)
chosen = lambda mask: {"among": masks.causal(), "always": masks.dense(mask)}

OPS = {
    "flash_attention": (lambda qkv, mask: xla(*qkv, mask=mask), KEEP),
    "dense": (lambda qkv, mask: xla(*qkv, mask=masks.dense(mask)), KEEP),
    "and": (lambda qkv, mask: xla(*qkv, mask=masks.dense(mask) & masks.causal()), KEEP),
    "or": (lambda qkv, mask: xla(*qkv, mask=masks.dense(mask) | masks.dilated(100)), KEEP),
    "not": (lambda qkv, mask: xla(*qkv, mask=~masks.dense(mask)), KEEP),
    "dynamic": (lambda qkv, mask: dynamic_mask_attention(*qkv, mask, return_lse=True), KEEP),
    "dynamic_kv_heads": (
        lambda qkv, mask: dynamic_mask_attention(*qkv, mask, return_lse=True),
        np.broadcast_to(KEEP, (B, HKV, T, T)),
    ),
    "dynamic_object": (
        lambda qkv, mask: dynamic_mask_attention(*qkv, masks.dense(mask), return_lse=True),
        np.broadcast_to(KEEP, (B, HKV, T, T)),
    ),
    "top_k": (lambda qkv, mask: xla(*qkv, mask=masks.top_k(SCORES, 3, among=masks.dense(mask))), KEEP),
    "top_k_blocks": (lambda qkv, mask: xla(*qkv, mask=masks.top_k_blocks(CELL_SCORES, 2, 2, **chosen(mask))), KEEP),
    "keys_of_all": (
        lambda qkv, mask: dynamic_mask_attention(*qkv, of_largest(masks.dense(mask)), return_lse=True),
        np.broadcast_to(KEEP, (B, HKV, T, T)),
    ),
    "block_sparse": (lambda qkv, mask: block_sparse_attention(*qkv, mask, block_size=2, return_lse=True), CELLS),
}


def results(attend, mask):
    """out, lse, dq, dk, dv."""
    given, vjp = jax.vjp(lambda *qkv: attend(qkv, mask), *QKV)
    return *given, *vjp(jax.tree.map(jnp.ones_like, given))


FLOATS = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize(("name", "dtype"), tiers.pairs(OPS, FLOATS, ("flash_attention", "bfloat16")))
def test_traced_zeros_and_ones_mask(name, dtype):
    attend, keep = OPS[name]
    want = results(attend, jnp.asarray(keep))
    known = results(attend, jnp.asarray(keep, dtype))
    traced = jax.jit(functools.partial(results, attend))(jnp.asarray(keep, dtype))
    for x, y, z in zip(known, traced, want, strict=True):
        np.testing.assert_array_equal(x, z)
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "low"), tiers.pairs(OPS, [-1e9, -jnp.inf, jnp.nan, 0.5], ("flash_attention", -1e9)))
def test_traced_additive_mask_gives_nan(name, low):
    attend, keep = OPS[name]
    mask = jnp.where(keep, 0.0, low)
    for x in jax.jit(functools.partial(results, attend))(mask):
        assert np.isnan(x).all()
    with pytest.raises(ValueError, match="got float32 values other than 0 and 1, want a bool mask"):
        results(attend, mask)


@pytest.mark.parametrize("mask_of", [masks.dense, lambda mask: masks.block_sparse(mask, 1) & masks.causal()])
def test_decode_traced_additive_mask_gives_nan(mask_of):
    decode = lambda mask: decode_attention(*QKV, mask=mask_of(mask), return_lse=True)
    for x, y in zip(jax.jit(decode)(jnp.asarray(KEEP, jnp.float32)), decode(jnp.asarray(KEEP)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    for x in jax.jit(decode)(jnp.where(KEEP, 0.0, -1e9)):
        assert np.isnan(x).all()


def test_vmap_checks_each_mask():
    mask = jnp.stack([jnp.asarray(KEEP, jnp.float32), jnp.where(KEEP, 0.0, -1e9)])
    out, lse = jax.vmap(lambda mask: xla(*QKV, mask=mask))(mask)
    for x in (out, lse):
        assert not np.isnan(x[0]).any()
        assert np.isnan(x[1]).all()


def test_only_traced_floats_are_checked():
    attend = lambda mask: str(jax.make_jaxpr(lambda *qkv: flash_attention(*qkv, mask=mask))(*QKV))
    assert "nan" not in attend(jnp.asarray(KEEP))
    assert "nan" not in attend(jnp.asarray(KEEP, jnp.float32))


def test_plan_takes_a_traced_mask():
    plans = []
    jax.jit(lambda mask: plans.append(explain(flash_attention, *QKV, mask=mask)))(jnp.asarray(KEEP, jnp.float32))
    jax.jit(lambda mask: plans.append(explain(dynamic_mask_attention, *QKV, mask)))(jnp.asarray(KEEP, jnp.float32))
    assert [plan.implementation for plan in plans] == ["xla", "xla"]


def test_traced_floats_without_a_nan_check_raise():
    given = lambda mask: FlashArguments(query=QKV[0], key=QKV[1], value=QKV[2], mask=mask)
    with pytest.raises(TypeError, match="mask: got floats that are traced, want bool: write `mask != 0`"):
        jax.jit(lambda mask: prepare(given(mask))[1].query)(jnp.ones((T, T)))


@pytest.mark.parametrize("mask", [np.ones((), bool), jnp.zeros((), bool)], ids=["keeps", "drops"])
def test_scalar_bool_mask(mask):
    out, lse = xla(*QKV, mask=mask)
    want = xla(*QKV, mask=np.broadcast_to(mask, (T, T)))
    for x, y in zip((out, lse), want, strict=True):
        np.testing.assert_array_equal(x, y)
