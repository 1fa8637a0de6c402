"""The nnx MultiHeadAttention: against a plain evaluation, its rotary embedding, and its key-value cache."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import decode_attention, masks, prepare_mask
from jax_kernels.dispatch import on_device
from jax_kernels.models import (
    DynamicMaskAttention,
    KVCache,
    MultiHeadAttention,
    MultiHeadDilatedAttention,
    rotary_embedding,
)
from jax_kernels.models.layers import attention as models_attention
from tests.support.cases import tiers

WIDTH, BATCH, LENGTH = 32, 2, 11

forward = nnx.jit(lambda attention, x, mask=None: attention(x, mask=mask))
decode = nnx.jit(lambda attention, x, cache: attention(x, cache=cache))


def module(**options):
    return MultiHeadAttention(WIDTH, 4, rngs=nnx.Rngs(0), **options)


def inputs(length=LENGTH, seed=1):
    return jax.random.normal(jax.random.key(seed), (BATCH, length, WIDTH))


def rotate_in_complex(x, theta):
    """Rotary embedding by complex numbers, in float64: x is [B, T, H, D]."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], -1)


def plain(attention, x, mask=True):
    """The module in float64 NumPy."""
    x = np.asarray(x, np.float64)
    project = lambda linear, heads: (x @ np.asarray(linear.kernel[...], np.float64)).reshape(*x.shape[:2], heads, -1)
    q = project(attention.q_proj, attention.num_heads)
    k, v = (project(linear, attention.num_kv_heads) for linear in (attention.k_proj, attention.v_proj))
    if attention.use_rotary:
        q, k = (rotate_in_complex(y, attention.rope_theta) for y in (q, k))
    k, v = (np.repeat(y, attention.num_heads // attention.num_kv_heads, axis=2) for y in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(attention.head_dim)
    keep = np.tril(np.ones(scores.shape[-2:], bool)) if attention.is_causal else True
    scores = np.where(keep & np.asarray(mask), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    return out.reshape(*x.shape[:2], -1) @ np.asarray(attention.out_proj.kernel[...], np.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "head_dim": 10},
        {"use_rotary": False, "is_causal": False, "head_dim": 5},
        {"rope_theta": 100.0, "is_causal": False},
    ],
)
def test_matches_a_plain_evaluation(options):
    attention, x = module(**options), inputs()
    np.testing.assert_allclose(forward(attention, x), plain(attention, x), atol=2e-6)


def test_mask_combines_with_causal():
    attention, x = module(), inputs()
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (BATCH, 1, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    np.testing.assert_allclose(forward(attention, x, mask), plain(attention, x, mask), atol=2e-6)


def test_mask_objects():
    """A call or the module may have a Mask, or both. The Mask's arrays are leaves of the module's state."""
    window, ids = masks.sliding_window(3, 0), jnp.arange(LENGTH) // 6
    some = jax.random.bernoulli(jax.random.key(2), 0.5, (BATCH, 4, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    dense = lambda mask: mask.to_dense(LENGTH, LENGTH)
    x = inputs()
    for attention, mask, want in (
        (module(), window, dense(window)),
        (module(mask=window | masks.prefix(2)), None, dense(window | masks.prefix(2))),
        (module(mask=window), some, dense(window) & some),
        (module(mask=masks.segments(ids), is_causal=False), window, dense(window & masks.segments(ids))),
    ):
        np.testing.assert_allclose(forward(attention, x, mask), plain(attention, x, want), atol=2e-6)


def test_prepared_masks():
    """A prepared Mask's arrays are leaves of the state. Calls of the prepared shapes read them."""
    cells = np.random.default_rng(0).random((3, 3)) < 0.6
    mask = masks.block_sparse(cells, 4) | masks.sliding_window(1, 1)
    query, key = (jax.ShapeDtypeStruct((BATCH, LENGTH, heads, 8), jnp.bfloat16) for heads in (4, 2))
    with on_device("H200"):
        prepared = prepare_mask(mask, query, key, is_causal=True)
    attention = module(num_kv_heads=2, mask=prepared)
    leaves = len(jax.tree.leaves(nnx.state(attention)))
    assert leaves == len(jax.tree.leaves(nnx.state(module(num_kv_heads=2, mask=mask)))) + 2 * 4
    assert attention.mask == prepared
    np.testing.assert_array_equal(forward(attention, inputs()), forward(module(num_kv_heads=2, mask=mask), inputs()))

    for given, sorts in ((prepared, 0), (mask, 2)):  # sorts of blocks and of tiles
        graph, state = nnx.split(module(num_kv_heads=2, mask=given, dtype=jnp.bfloat16))
        with on_device("H200"):
            program = jax.make_jaxpr(lambda state, x, graph=graph: nnx.merge(graph, state)(x))(state, inputs())
        assert str(program).count("= sort[") == sorts


def test_decoding_with_a_mask(monkeypatch):
    """decode_attention takes the module's Mask, joined with a call's array; the queries follow the cached tokens."""
    calls = []
    count = lambda *given, **options: calls.append(options["mask"]) or decode_attention(*given, **options)
    monkeypatch.setattr(models_attention, "decode_attention", count)
    array = (jnp.arange(16) % 5 != 3)[None]
    attention, x = module(mask=masks.sliding_window(2, 0) | masks.prefix(1)), inputs()
    for mask, of_all in ((None, None), (array, array[:, :LENGTH])):
        step = nnx.jit(lambda attention, x, cache, mask=mask: attention(x, mask=mask, cache=cache))
        cache, outs = attention.init_cache(BATCH, 16), []
        for start, end in ((0, 5), (5, 6), (6, LENGTH)):
            out, cache = step(attention, x[:, start:end], cache)
            outs.append(out)
        np.testing.assert_allclose(jnp.concatenate(outs, axis=1), forward(attention, x, of_all), atol=1e-6)
    assert len(calls) == 2 * 2  # traces of chunks of 5 tokens and of 1
    assert all(isinstance(mask, masks.Mask) for mask in calls)


def test_decoding_with_a_mask_array(monkeypatch):
    """decode_attention takes arrays of keys, or of queries and keys, and Masks."""
    calls = []
    count = lambda *given, **options: calls.append(options) or decode_attention(*given, **options)
    monkeypatch.setattr(models_attention, "decode_attention", count)
    step = nnx.jit(lambda attention, x, mask, cache: attention(x, mask=mask, cache=cache))
    attention, x = module(num_kv_heads=2), inputs()
    keep = jax.random.bernoulli(jax.random.key(2), 0.5, (BATCH, 4, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    for mask in (keep, keep[:, :1, 4:5].at[..., 0].set(True)):
        cache, outs = attention.init_cache(BATCH, 16), []
        for start, end in ((0, 6), (6, LENGTH)):
            rows = mask if mask.shape[2] == 1 else mask[:, :, start:end]
            padded = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, 16 - LENGTH)), constant_values=True)
            out, cache = step(attention, x[:, start:end], padded, cache)
            outs.append(out)
        np.testing.assert_allclose(jnp.concatenate(outs, axis=1), plain(attention, x, mask), atol=2e-6)
    assert len(calls) == 4
    new, cache = jnp.zeros((4, 1, WIDTH)), attention.init_cache(4, 16)
    jax.eval_shape(lambda: attention(new, mask=masks.prefix(1), cache=cache))
    with pytest.raises(ValueError, match="mask"):
        jax.eval_shape(lambda: attention(new, mask=jnp.ones((2, 1, 1, 16), bool), cache=cache))
    assert len(calls) == 5


def test_dtype_and_param_dtype():
    attention, x = module(dtype=jnp.bfloat16), inputs()
    out = forward(attention, x)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(attention, nnx.Param))} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(out.astype(jnp.float32), plain(attention, x), atol=2e-2)


def test_rotary_scores_depend_only_on_distance():
    q, k = (jax.random.normal(jax.random.key(i), (1, LENGTH, 2, 16)) for i in range(2))
    scores = lambda shift: jnp.einsum(
        "bthd,bshd->bhts", *(rotary_embedding(x, jnp.arange(LENGTH) + shift) for x in (q, k)), precision="highest"
    )
    np.testing.assert_allclose(scores(0), scores(1000), atol=2e-3)
    assert float(jnp.abs(scores(0) - jnp.einsum("bthd,bshd->bhts", q, k)).max()) > 0.1


def test_rotary_positions_may_differ_by_batch():
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, 2, 16))
    positions = jnp.stack([jnp.arange(LENGTH), jnp.arange(LENGTH) + 3])
    out = rotary_embedding(x, positions)
    np.testing.assert_array_equal(out[1], rotary_embedding(x[1:], positions[1])[0])
    np.testing.assert_array_equal(rotary_embedding(x, jnp.zeros(LENGTH)), x)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("chunks", [(1,) * LENGTH, (5, 1, 3, 2), (LENGTH,)])
def test_decoding_equals_the_full_forward(kv_heads, chunks):
    attention, x = module(num_kv_heads=kv_heads), inputs()
    cache, outs, start = attention.init_cache(BATCH, 16), [], 0
    for length in chunks:
        out, cache = decode(attention, x[:, start : start + length], cache)
        outs.append(out)
        start += length
    assert int(cache.length) == LENGTH
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), forward(attention, x), atol=1e-6)


def test_unfilled_cache_is_masked():
    attention, x = module(is_causal=False), inputs()
    out, cache = decode(attention, x[:, :6], attention.init_cache(BATCH, 16))
    np.testing.assert_allclose(out, plain(attention, x[:, :6]), atol=2e-6)
    out, _ = decode(attention, x[:, 6:], cache)
    np.testing.assert_allclose(out, plain(attention, x)[:, 6:], atol=2e-6)


def test_decode_step_compiles_once():
    attention, x, traces = module(), inputs(), []

    @nnx.jit
    def step(attention, x, cache):
        traces.append(x.shape)
        return attention(x, cache=cache)

    cache = attention.init_cache(BATCH, LENGTH)
    for i in range(LENGTH):
        _, cache = step(attention, x[:, i : i + 1], cache)
    assert traces == [(BATCH, 1, WIDTH)]


def test_cache_keeps_its_dtype_and_values():
    attention, x = module(), inputs()
    empty = attention.init_cache(BATCH, 16, jnp.bfloat16)
    _, cache = decode(attention, x, empty)
    assert cache.key.dtype == cache.value.dtype == jnp.bfloat16
    assert cache.key.shape == (BATCH, 16, 4, 8)
    assert int(empty.length) == 0
    assert not np.asarray(empty.key, np.float32).any()


def test_full_cache_raises():
    attention, x = module(), inputs()
    _, cache = decode(attention, x, attention.init_cache(BATCH, 16))
    with pytest.raises(ValueError, match="cache: got 6 tokens after 11, want at most max_length=16 in all"):
        attention(x[:, :6], cache=cache)
    assert np.isnan(decode(attention, x[:, :6], cache)[0]).all()
    assert np.isfinite(decode(attention, x[:, :5], cache)[0]).all()


def ragged(attention, x, lengths, max_length=16):
    """A cache of the first tokens of each sequence, after a padded prompt whose padding does not count."""
    longest = max(lengths)
    keep = np.arange(longest) < np.asarray(lengths)[:, None]
    prompt = jnp.where(keep[..., None], x[:, :longest], 1e3)
    out, cache = decode(attention, prompt, attention.init_cache(len(lengths), max_length))
    return out, cache.with_length(jnp.array(lengths))


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2, "use_rotary": False}, {"mask": masks.sliding_window(4, 0) | masks.prefix(1)}]
)
@pytest.mark.parametrize("lengths", tiers.cases([(3, 7), (7, 3), (5, 5)], ["(7, 3)"], "lengths"))
def test_ragged_batch(options, lengths):
    """Each sequence of a batch equals the sequence alone, with a cache of one scalar length."""
    attention, x = module(**options), inputs()
    out, cache = ragged(attention, x, lengths)
    alone = []
    for b, length in enumerate(lengths):
        want, own = decode(attention, x[b : b + 1, :length], attention.init_cache(1, 16))
        np.testing.assert_allclose(out[b : b + 1, :length], want, atol=1e-6)
        alone.append(own)
    for tokens in (1, 3):
        new = jnp.stack([x[b, n : n + tokens] for b, n in enumerate(cache.length.tolist())])
        out, cache = decode(attention, new, cache)
        for b in range(BATCH):
            want, alone[b] = decode(attention, new[b : b + 1], alone[b])
            np.testing.assert_allclose(out[b : b + 1], want, atol=1e-6)
    assert cache.length.tolist() == [length + 4 for length in lengths]
    for b, own in enumerate(alone):
        length = int(own.length)
        np.testing.assert_allclose(cache.key[b, :length], own.key[0, :length], atol=1e-6)
        np.testing.assert_allclose(cache.value[b, :length], own.value[0, :length], atol=1e-6)
        full = forward(attention, x[b : b + 1, :length])
        np.testing.assert_allclose(out[b], full[0, -3:], atol=1e-6)


def test_scalar_and_per_sequence_lengths_agree():
    attention, x = module(), inputs()
    _, cache = decode(attention, x[:, :6], attention.init_cache(BATCH, 16))
    assert cache.lengths.tolist() == [6, 6]
    each = cache.with_length(cache.lengths)
    assert (cache.length.shape, each.length.shape) == ((), (BATCH,))
    (want, wanted), (got, given) = (decode(attention, x[:, 6:], c) for c in (cache, each))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(given.key, wanted.key)
    assert given.length.tolist() == [LENGTH, LENGTH]


def test_decode_attention_reads_the_cache():
    attention, x = module(num_kv_heads=2, use_rotary=False), inputs()
    _, cache = ragged(attention, x, (3, 7))
    new = inputs(1, seed=2)
    want, cache = decode(attention, new, cache)
    query = attention.q_proj(new).reshape(BATCH, 1, 4, -1)
    out = decode_attention(query, cache.key, cache.value, kv_lengths=cache.lengths)
    np.testing.assert_allclose(attention.out_proj(out.reshape(BATCH, 1, -1)), want, atol=1e-6)


def test_only_a_sequence_past_the_cache_end_is_nan():
    attention, x = module(), inputs()
    _, cache = ragged(attention, x, (3, 7), max_length=8)
    with pytest.raises(ValueError, match="cache: got 2 tokens after 7, want at most max_length=8 in all"):
        attention(x[:, :2], cache=cache)
    out, _ = decode(attention, x[:, :2], cache)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_bad_lengths_are_named():
    attention = module()
    cache = attention.init_cache(BATCH, 16)
    for length, error, message in [
        (
            jnp.zeros(3, jnp.int32),
            ValueError,
            r"cache: got a length of shape \(3,\), want a scalar or \[batch\] = \(2,\)",
        ),
        (jnp.zeros((2, 1), jnp.int32), ValueError, r"cache: got a length of shape \(2, 1\)"),
        (jnp.zeros(2), TypeError, "cache: got a length of dtype float32, want int32"),
        (jnp.array([3, -1]), ValueError, "cache: got a length of -1, want 0 or more"),
    ]:
        with pytest.raises(error, match=message):
            cache.with_length(length)
        with pytest.raises(error, match=message):
            attention(inputs(), cache=KVCache(cache.key, cache.value, length))
    with pytest.raises(ValueError, match="cache: got a length of 17, want at most max_length=16"):
        cache.with_length([3, 17])
    assert cache.with_length(5).length.dtype == jnp.int32


def test_bad_arguments_are_named():
    for options, message in [
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be positive"),
        ({"head_dim": 300}, "head_dim=300 must be at most 256"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
    ]:
        with pytest.raises(ValueError, match=message):
            module(**options)
    with pytest.raises(TypeError, match=r"mask: got ndarray, want a masks\.Mask or None; pass an array to a call"):
        module(mask=np.ones((LENGTH, LENGTH), bool))
    with pytest.raises(ValueError, match="num_heads=5 must divide model_dim=32"):
        MultiHeadAttention(WIDTH, 5, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"num_heads=4\.0 must be an int"):
        MultiHeadAttention(WIDTH, 4.0, rngs=nnx.Rngs(0))
    attention = module()
    with pytest.raises(ValueError, match=r"x: got shape \(2, 11, 31\), want \[batch, length, 32\]"):
        attention(inputs()[..., :31])
    for arguments, error, message in [
        ((2, 8, jnp.int8), TypeError, "dtype: got int8, want a floating dtype"),
        ((2, -1), ValueError, "max_length: got -1, want 0 or more"),
        ((2, 4.0), TypeError, r"max_length: got 4\.0, want an int"),
        ((True, 4), TypeError, "batch: got True, want an int"),
    ]:
        with pytest.raises(error, match=message):
            attention.init_cache(*arguments)
    cache = attention.init_cache(BATCH + 1, 16)
    with pytest.raises(ValueError, match=r"cache: got key \(3, 16, 4, 8\)"):
        attention(inputs(), cache=cache)
    with pytest.raises(ValueError, match="cache: got key"):
        attention(inputs(), cache=KVCache(cache.key[:BATCH], cache.value[:BATCH, :8], cache.length))
    with pytest.raises(ValueError, match="x: got head_dim 5"):
        rotary_embedding(jnp.zeros((1, 2, 3, 5)), jnp.arange(2))


BAD_OPTIONS = {
    "rope_theta_negative": ({"rope_theta": -1.0}, ValueError, "rope_theta=-1.0 must be positive and finite"),
    "rope_theta_zero": ({"rope_theta": 0}, ValueError, "rope_theta=0 must be positive and finite"),
    "rope_theta_nan": ({"rope_theta": np.nan}, ValueError, "rope_theta=nan must be positive and finite"),
    "rope_theta_text": ({"rope_theta": "x"}, TypeError, "rope_theta='x' must be a number"),
    "use_rotary": ({"use_rotary": "no"}, TypeError, "use_rotary: got str, want a bool"),
    "is_causal": ({"is_causal": "yes"}, TypeError, "is_causal: got str, want a bool"),
    "dtype_float64": ({"dtype": "float64"}, ValueError, "dtype='float64' must be one of float32, bfloat16, float16"),
    "dtype_int8": ({"dtype": "int8"}, ValueError, "dtype='int8' must be one of float32, bfloat16, float16"),
    "dtype_none": ({"dtype": None}, ValueError, "dtype=None must be one of float32, bfloat16, float16"),
    "param_dtype_int32": ({"param_dtype": "int32"}, ValueError, "param_dtype='int32' must be one of float32"),
    "param_dtype_float64": ({"param_dtype": "float64"}, ValueError, "param_dtype='float64' must be one of float32"),
    "implementation": ({"implementation": 3}, TypeError, "implementation: got int, want a name or None"),
    "projection_implementation": (
        {"projection_implementation": 3},
        TypeError,
        "projection_implementation: got int, want a name or None",
    ),
}
MODULES = {
    "plain": MultiHeadAttention,
    "dilated": functools.partial(MultiHeadDilatedAttention, segment_lengths=(4,), dilation_rates=(2,)),
    "dynamic": DynamicMaskAttention,
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
@pytest.mark.parametrize("of", MODULES)
def test_options_are_checked_at_construction(of, name):
    options, error, message = BAD_OPTIONS[name]
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        MODULES[of](WIDTH, 4, rngs=nnx.Rngs(0), **options)


def test_bad_call_mask_is_named_with_the_module_mask():
    attention = module(mask=masks.prefix(3))
    cache = attention.init_cache(BATCH, 16)
    for mask, arguments, message in [
        (jnp.ones((1, 1, LENGTH, 9), bool), {}, "mask: got shape (1, 1, 11, 9), want a shape"),
        (jnp.ones((LENGTH, LENGTH), bool), {"cache": cache}, "mask: got shape (11, 11), want a shape"),
        (jnp.ones(LENGTH, bool), {}, "mask: got shape (11,), want [batch, heads, queries, keys]"),
        (jnp.ones((LENGTH, LENGTH), jnp.int32), {}, "mask: got dtype int32, want bool"),
        ("causal", {}, "mask: got str, want a bool array"),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
            attention(inputs(), mask=mask, **arguments)
    for length in (1, 16):
        attention(inputs(), mask=jnp.ones((1, length), bool), cache=cache)


def test_numpy_scalars_become_python():
    attention = module(rope_theta=np.float32(100), use_rotary=np.bool_(True))
    assert type(attention.rope_theta) is float
    np.testing.assert_array_equal(attention(inputs()), module(rope_theta=100)(inputs()))


def test_64_bit_parameters():
    """64-bit parameters need jax_enable_x64. The ops compute in 32 bits at most, with any setting."""
    with jax.enable_x64(True):
        attention = module(param_dtype="float64")
        assert attention.q_proj.kernel.dtype == jnp.float64
        assert attention(inputs()).dtype == jnp.float32
        with pytest.raises(ValueError, match=r"^dtype='float64' must be one of float32, bfloat16, float16"):
            module(dtype="float64")
