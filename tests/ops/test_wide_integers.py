"""Integer arguments of every dtype. Traced integers are narrowed to int32; different ids stay different."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import decode_attention, dilated_attention, flash_attention, masks, ring_attention
from jax_kernels.masks import checks
from jax_kernels.models.training.losses import linear_cross_entropy
from jax_kernels.models.training.packing import packed

FAR = 1 << 32
# Ids that a cast to int32 would make equal or negative, and the same documents with small ids.
WIDE = np.array([[5, 5, 5 + FAR, 5 + FAR, 1 << 31, -1 - FAR, FAR - 1, 2 - FAR]])
SMALL = np.array([[0, 0, 1, 1, 2, -1, 3, -1]], np.int32)
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
X = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 8)), jnp.float32)


def _ring(ids):
    mesh = jax.make_mesh((1,), ("sequence",), (jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "sequence")
    call = lambda x, ids: ring_attention(x, x, x, axis_name="sequence", segment_ids=ids)
    return jax.shard_map(call, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(X, ids)


OPS = {
    "flash": lambda ids: flash_attention(X, X, X, segment_ids=ids),
    "pair": lambda ids: flash_attention(X, X[:, :5], X[:, :5], segment_ids=(ids, ids[:, :5])),
    "mask": lambda ids: flash_attention(X, X, X, mask=masks.segments(ids[0], ids) & masks.causal()),
    "dilated": lambda ids: dilated_attention(X, X, X, segment_lengths=[4], dilation_rates=[1], segment_ids=ids),
    "ring": _ring,
    "packed": lambda ids: packed(ids, X[..., 0, 0]).positions,
}


@pytest.mark.parametrize("op", OPS)
def test_traced_64_bit_ids(op):
    with jax.enable_x64(True):
        got = jax.jit(OPS[op])(WIDE)
        assert_close(got, jax.jit(OPS[op])(SMALL))
        if op in ("flash", "mask"):
            assert_close(jax.vmap(OPS[op])(jnp.asarray(WIDE)[None])[0], got)
        if op == "ring":  # in a shard_map ids are never known
            return
        with pytest.raises(ValueError, match=r"(segment_ids|q_ids): got values up to \d+, want int32"):
            OPS[op](WIDE)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32"])
def test_traced_ids_of_other_dtypes(dtype):
    most = np.iinfo(dtype).max
    ids = np.array([[0, 0, most, most, 1, 1, most - 1, 1]], dtype)
    want = flash_attention(X, X, X, segment_ids=np.array([[0, 0, 3, 3, 1, 1, 2, 1]], np.int32))
    for call in (OPS["flash"], OPS["mask"]):
        got = jax.jit(call)(ids)
        same = want if call is OPS["flash"] else jax.jit(call)(np.array([[0, 0, 3, 3, 1, 1, 2, 1]], np.int32))
        assert_close(got, same)


def test_mixed_id_dtypes():
    kv_ids = np.array([[5, 2, -3, 6, 5]], np.int32)
    attend = lambda q_ids, kv_ids: flash_attention(X, X[:, :5], X[:, :5], segment_ids=(q_ids, kv_ids))
    q_ids = np.array([[5, 5, 2, 2, 0, 0, 1 << 31, 7]], np.uint32)
    want = attend(np.array([[5, 5, 2, 2, 0, 0, 8, 7]], np.int32), kv_ids)
    assert_close(jax.jit(attend)(q_ids, kv_ids), want)
    with jax.enable_x64(True):
        assert_close(jax.jit(attend)(q_ids.astype(np.int64) + FAR * (q_ids > 8), kv_ids), want)


def test_shards_compare_ids():
    """Across two devices, equal ids stay equal and different ids stay different, as within one array."""
    ids = np.array([[[9, 9, FAR + 9, -1]], [[FAR + 9, 3, 9, 3]]])
    with jax.enable_x64(True):
        narrow = lambda x: checks.ids(("ids",), (x,), "ids", axis_name="devices")[0]
        got = jax.vmap(narrow, axis_name="devices")(ids)
    assert got.dtype == jnp.int32
    known = ids.ravel()
    alike = (known[:, None] == known) & (known >= 0)
    found = np.asarray(got).ravel()
    np.testing.assert_array_equal((found[:, None] == found) & (found >= 0), alike)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint8", "int16"])
def test_block_tables(dtype):
    key = jnp.asarray(np.random.default_rng(1).standard_normal((3, 16, 2, 8)), jnp.float32)
    attend = lambda tables, lengths: decode_attention(X[:, :1], key, key, kv_lengths=lengths, block_tables=tables)
    want = attend(np.array([[2, 0]], np.int32), np.array([20], np.int32))
    with jax.enable_x64(dtype == "int64"):
        got = jax.jit(attend)(np.array([[2, 0]], dtype), np.array([20], dtype))
    assert_close(got, want)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint8", "int16"])
def test_targets(dtype):
    """Ids beyond int32 are outside of the vocabulary, on the same side as before."""
    w = jnp.asarray(np.random.default_rng(2).standard_normal((8, 300)), jnp.float32)
    loss = functools.partial(linear_cross_entropy, X[0, :4, 0], w)
    with jax.enable_x64(dtype == "int64"):
        got = jax.jit(loss)(np.array([3, 0, 7, 120], dtype))
        np.testing.assert_allclose(got, loss(np.array([3, 0, 7, 120], np.int32)), rtol=1e-6)
        if dtype == "int64":
            got = jax.jit(loss)(np.array([5 + FAR, 5 - FAR, -1, 1 << 31]))
            np.testing.assert_array_equal(got, [np.nan, 0, 0, np.nan])
