"""Integers beyond int32, and positions near its ends. No integer wraps silently, traced or known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import decode_attention, dilated_attention, flash_attention, flash_attention_fp8, masks

B, T, S, H, D = 2, 8, 12, 2, 16
random = np.random.default_rng(0)
QUERY, KEY, VALUE = (jnp.asarray(random.standard_normal((B, n, H, D), np.float32)) for n in (T, S, S))
FP8 = tuple(x.astype(jnp.float8_e4m3fn) for x in (QUERY, KEY, VALUE))
PAGES = jnp.asarray(random.standard_normal((4, 16, H, D), np.float32))
TABLES = np.array([[0, 1], [2, 3]])
xla = functools.partial(flash_attention, QUERY, KEY, VALUE, implementation="xla", return_lse=True)

SELF = {"segment_lengths": (T,), "dilation_rates": (1,)}
WITH_IDS = {
    "flash_attention": ("segment_ids", lambda ids: flash_attention(QUERY, QUERY, QUERY, segment_ids=ids)),
    "pair": ("segment_ids", lambda ids: flash_attention(QUERY, QUERY, QUERY, segment_ids=(ids, ids))),
    "dilated": ("segment_ids", lambda ids: dilated_attention(QUERY, QUERY, QUERY, **SELF, segment_ids=ids)),
    "segments": ("q_ids", lambda ids: masks.segments(ids).to_dense(T, T)),
}
WIDE = [np.uint32, np.int64, np.uint64]
needs_x64 = lambda dtype: np.dtype(dtype).itemsize == 8


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", WITH_IDS)
def test_wide_segment_ids(name, dtype):
    argument, attend = WITH_IDS[name]
    ids = np.arange(T) // 3 * np.ones((B, 1), int)
    wrap = ids.astype(dtype) + dtype(2**32 - 1 if needs_x64(dtype) else 2**31)
    want = attend(ids.astype(np.int32))
    with jax.enable_x64(needs_x64(dtype)):
        for array in (np.asarray, jnp.asarray):
            np.testing.assert_array_equal(attend(array(ids.astype(dtype))), want)
            with pytest.raises(
                ValueError, match=f"{argument}: got values up to 429496729|{argument}: got values up to 2147"
            ):
                attend(array(wrap))
        for traced in (ids.astype(dtype), wrap):  # ids are compared, at any size
            np.testing.assert_allclose(jax.jit(attend)(jnp.asarray(traced)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int16])
def test_narrow_segment_ids_may_be_traced(dtype):
    _, attend = WITH_IDS["flash_attention"]
    ids = jnp.asarray(np.arange(T) // 3 * np.ones((B, 1), int), dtype)
    np.testing.assert_allclose(jax.jit(attend)(ids), attend(ids.astype(jnp.int32)), rtol=1e-5, atol=1e-6)


WITH_LENGTHS = {
    "flash_attention": lambda n: xla(kv_lengths=n)[0],
    "fp8": lambda n: flash_attention_fp8(*FP8, kv_lengths=n, implementation="xla"),
    "decode": lambda n: decode_attention(QUERY, KEY, VALUE, kv_lengths=n),
    "pages": lambda n: decode_attention(QUERY, PAGES, PAGES, kv_lengths=n, block_tables=TABLES),
    "prefix": lambda n: xla(mask=masks.prefix(n))[0],
    "prefix_or": lambda n: xla(mask=masks.prefix(n) | masks.block_sparse(np.zeros((1, 1), bool), 16))[0],
    "global_tokens": lambda n: xla(mask=masks.global_tokens(n))[0],
}


@pytest.mark.parametrize("numbers", [(2**32 + 3, 5), (-(2**32) + 3, 7), (2**31, -(2**40))])
@pytest.mark.parametrize("name", WITH_LENGTHS)
def test_traced_64_bit_lengths(name, numbers):
    attend = WITH_LENGTHS[name]
    want = attend(np.clip(numbers, -5, 100).astype(np.int32))
    with jax.enable_x64(True):
        got = jax.jit(attend)(jnp.asarray(numbers, jnp.int64))
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match="got values up to"):
            attend(jnp.asarray(numbers, jnp.int64))


@pytest.mark.parametrize("name", WITH_LENGTHS)
def test_unsigned_lengths(name):
    attend = WITH_LENGTHS[name]
    got = jax.jit(attend)(jnp.asarray([2**32 - 1, 5], jnp.uint32))
    want = attend(np.array([100, 5], np.int32))
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="got values up to 4294967295"):
        attend(jnp.asarray([2**32 - 1, 5], jnp.uint32))


FAR = [2**31 - 1, 2**31 - 5, 2**30 + 1, -(2**31), -(2**30) - 1]
WITH_OFFSET = {
    "causal": lambda at: xla(is_causal=True, q_offset=at)[0],
    "left": lambda at: xla(window=(2**29 - 1, -1), q_offset=at)[0],
    "right": lambda at: xla(window=(-1, 2**29 - 1), q_offset=at)[0],
    "lists": lambda at: masks.causal().block_lists(T, S, 2, 2, q_offset=at).partial_count,
    "full": lambda at: masks.sliding_window(None, 2**29 - 1).block_lists(T, S, 2, 2, q_offset=at).full_count,
    "dense": lambda at: masks.causal().to_dense(T, S, q_offset=at),
    "mask": lambda at: xla(mask=masks.causal() | masks.block_sparse(np.zeros((1, 1), bool), 16), q_offset=at)[0],
    "fp8": lambda at: flash_attention_fp8(*FP8, is_causal=True, q_offset=at, implementation="xla"),
}


@pytest.mark.parametrize("at", FAR)
@pytest.mark.parametrize("name", WITH_OFFSET)
def test_far_offsets(name, at):
    """The largest static offset. A query at the ends of int32 has the same distances to all keys."""
    attend = WITH_OFFSET[name]
    want = np.asarray(attend(np.sign(at).item() * (2**30 - 1))).astype(np.float32)
    for got in (attend(jnp.int32(at)), jax.jit(attend)(jnp.int32(at)), attend(jnp.full((B,), at, jnp.int32))):
        x = np.asarray(got).astype(np.float32)
        np.testing.assert_allclose(x, np.broadcast_to(want, x.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", WITH_OFFSET)
def test_traced_64_bit_offsets(name):
    attend = WITH_OFFSET[name]
    for at, like in ((2**32 - 3, 2**30 - 1), (-(2**32) + 3, -(2**30) + 1), (2, 2)):
        want = np.asarray(attend(like)).astype(np.float32)
        with jax.enable_x64(True):
            got = jax.jit(attend)(jnp.int64(at))
            np.testing.assert_allclose(np.asarray(got).astype(np.float32), want, rtol=1e-6, atol=1e-6)


def test_static_offset_needs_no_clamp():
    clamps = lambda attend, *given: str(2**30) in str(jax.make_jaxpr(attend)(*given))
    assert not clamps(lambda: xla(is_causal=True, q_offset=3))
    assert clamps(lambda at: xla(is_causal=True, q_offset=at), jnp.int32(3))


def test_wide_page_tables():
    attend = lambda tables: decode_attention(QUERY, PAGES, PAGES, kv_lengths=np.array([20, 30]), block_tables=tables)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(attend(jnp.asarray(TABLES)), attend(TABLES.astype(np.int32)))
        with pytest.raises(ValueError, match="block_tables: got values up to 4294967296"):
            attend(jnp.asarray(TABLES + 2**32 - 3))
        np.testing.assert_allclose(jax.jit(attend)(jnp.asarray(TABLES)), attend(TABLES), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [masks.dense(np.ones((1, 1), bool)), ~masks.dense(np.zeros((1, 1), bool))])
def test_blocks_with_more_than_int32_pairs(mask):
    with pytest.raises(
        ValueError, match=r"block_q, block_kv: got \(65536, 65536\) for .*, want fewer than 2\*\*31 pairs"
    ):
        mask.density(65536, 65536, 65536)
    assert mask.density(65536, 65536, (65536, 16384)) == 1
    assert mask.density(100, 100, 65536) == 1
    assert masks.causal().density(65536, 65536, 65536) == 1
