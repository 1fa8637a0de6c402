"""Scores of any magnitude of float32, and values at the ends of their dtypes, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import decode_attention, flash_attention, flash_attention_fp8
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.reference import attention as reference

T, S, H = 6, 7, 2
MAGNITUDES = [10.0**n for n in range(2, 13)]
random = np.random.default_rng(0)


def rows(magnitude, head_dim, dtype):
    """query, key and value with rows that are nearly one-hot, or have two largest scores; some are all negative.

    Keys 0 and 1 are equal. They lead where a query's factor is positive; key 6 leads where it is negative.
    """
    numbers = np.array([1, -1, 0.7, -1.3, 0.123, -3.3])
    along = np.array([3, 3, 2, 1.5, 2.5, 1.7, 0.9])
    query, key = np.zeros((1, T, H, head_dim)), np.zeros((1, S, H, head_dim))
    query[..., 0] = magnitude * numbers[:, None]
    key[..., 0] = along[:, None]
    value = random.standard_normal((1, S, H, head_dim))
    return tuple(jnp.asarray(x, dtype) for x in (query, key, value))


def exact(query, key, value, *, bias=0.0, softcap=None, sinks=None, slope=0.0, factor=1.0):
    """(out, lse) in float64. A score becomes score * factor + slope * (k - q) + bias."""
    query, key, value = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    scores = np.einsum("bthd,bshd->bhts", query, key) / np.sqrt(query.shape[-1])
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    distance = np.arange(S) - np.arange(T)[:, None]
    scores = scores * factor + slope * distance + bias
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks[:, None, None])
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + np.exp(sinks[:, None, None] - highest)
    return np.einsum("bhts,bshd->bthd", weights / total, value), (np.log(total) + highest)[..., 0]


def check(got, want, dtype):
    eps = float(jnp.finfo(dtype).eps)
    out, lse = (np.asarray(x).astype(np.float64) for x in got)
    np.testing.assert_allclose(out, want[0], rtol=eps, atol=4 * eps)
    # A score that is a small difference of large terms has the error of these terms.
    of_largest = float(jnp.finfo(jnp.float32).eps) * max(1, np.abs(want[1]).max())
    np.testing.assert_allclose(lse, want[1], rtol=1e-6, atol=of_largest)


BIAS = np.where(np.arange(S) == 4, -np.inf, 0.0).astype(np.float32)


def alibi(slope):
    """The slope is so steep that the last key leads by far."""
    return lambda score, b, h, q, k: score + slope * (k - q)


# The arguments of flash_attention, and of `exact`, for a magnitude.
FEATURES = {
    "plain": (lambda magnitude: {}, lambda magnitude: {}),
    "bias": (lambda magnitude: {"bias": BIAS}, lambda magnitude: {"bias": BIAS}),
    "softcap": (lambda magnitude: {"softcap": 3.0}, lambda magnitude: {"softcap": 3.0}),
    "sinks": (
        lambda magnitude: {"sinks": jnp.stack([0 * magnitude, magnitude])},
        lambda magnitude: {"sinks": np.array([0, magnitude])},
    ),
    "score_mod": (
        lambda magnitude: {"score_mod": lambda score, *_: score * 0.7},
        lambda magnitude: {"factor": np.float32(0.7)},
    ),
    "alibi": (lambda magnitude: {"score_mod": alibi(magnitude / 2)}, lambda magnitude: {"slope": magnitude / 2}),
}


@functools.cache
def attend(feature):
    """flash_attention(query, key, value, magnitude), jitted."""
    arguments = {"return_lse": True, "implementation": "xla"}
    return jax.jit(lambda *x: flash_attention(*x[:3], **FEATURES[feature][0](x[3]), **arguments))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("feature", FEATURES)
def test_magnitudes(feature, head_dim, dtype):
    for magnitude in MAGNITUDES:
        arrays = rows(magnitude, head_dim, dtype)
        check(attend(feature)(*arrays, np.float32(magnitude)), exact(*arrays, **FEATURES[feature][1](magnitude)), dtype)


@pytest.mark.parametrize("magnitude", MAGNITUDES[::5])
def test_high_softcap(magnitude):
    arrays, cap = rows(magnitude, 32, "float32"), {"softcap": 1.3 * magnitude}
    got = jax.jit(functools.partial(flash_attention, **cap, return_lse=True, implementation="xla"))(*arrays)
    check(got, exact(*arrays, **cap), "float32")


@pytest.mark.parametrize("head_dim", [16, 32])
def test_oracle_magnitudes_in_float32(head_dim):
    options = AttentionOptions(scale=head_dim**-0.5)
    for magnitude in MAGNITUDES:
        arrays = rows(magnitude, head_dim, "float32")
        check(reference.oracle(AttentionInputs(*arrays), options), exact(*arrays), "float32")


def test_decode_magnitudes():
    attend = jax.jit(functools.partial(decode_attention, return_lse=True, kv_lengths=np.array([S])))
    for magnitude in MAGNITUDES:
        query, key, value = rows(magnitude, 32, "float32")
        want = exact(query, key, value)
        for row in range(T):
            one = slice(row, row + 1)
            check(attend(query[:, one], key, value), (want[0][:, one], want[1][..., one]), "float32")


def test_fp8_magnitudes():
    query, key, value = (x.astype(jnp.float8_e4m3fn) for x in rows(64, 32, "float32"))
    arguments = {"return_lse": True, "implementation": "xla"}
    attend = jax.jit(lambda *x: flash_attention_fp8(*x[:3], q_scale=x[3], **arguments))
    for magnitude in map(np.float32, MAGNITUDES):
        wide = np.asarray(query).astype(np.float64) * magnitude
        check(attend(query, key, value, jnp.asarray(magnitude)), exact(wide, key, value), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("feature", ["plain", "bias", "sinks", "alibi"])
def test_one_hot_row_gradients(feature, dtype):
    """Each row has one key with probability 1: dv is the sum of dout over these rows, and scores get no gradient."""
    gradients = jax.jit(lambda dout, *x: jax.vjp(lambda *x: attend(feature)(*x)[0], *x)[1](dout)[:3])
    for magnitude in MAGNITUDES[2:]:
        query, key, value = rows(magnitude, 32, dtype)
        key, query = key.at[:, 1].multiply(0.9), jnp.abs(query) if feature == "sinks" else query
        dout = jnp.asarray(random.standard_normal(query.shape), dtype)
        of_feature = magnitude / 100 if feature == "sinks" else magnitude
        dq, dk, dv = gradients(dout, query, key, value, np.float32(of_feature))
        one = np.eye(S)[None, :, None].repeat(H, 2)  # with the identity as value, out is the probabilities
        weights, _ = exact(query, key, one, **FEATURES[feature][1](of_feature))
        want = np.einsum("bths,bthd->bshd", weights, np.asarray(dout).astype(np.float64))
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(dv).astype(np.float64), want, rtol=eps, atol=4 * eps)
        # dP - delta is 0 up to the rounding of out. dq and dk multiply it by the probabilities and by key or query.
        for x, other in ((dq, key), (dk, query)):
            assert np.abs(np.asarray(x).astype(np.float64)).max() <= 32 * eps * np.abs(other.astype(jnp.float32)).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_at_the_dtype_limits(dtype):
    """Each result is a mean of values, and so at most the largest value."""
    query, key, value = (jnp.asarray(random.standard_normal((1, n, H, 16)), dtype) for n in (T, S, S))
    largest = float(jnp.finfo(dtype).max)
    value = jnp.full_like(value, largest)
    out = jax.jit(functools.partial(flash_attention, implementation="xla"))(query, key, value)
    np.testing.assert_allclose(np.asarray(out).astype(np.float64), largest, rtol=4e-3 if dtype == "bfloat16" else 1e-3)


def test_float16_scores_at_the_dtype_limit():
    query, key, value = rows(1, 32, "float16")
    query = jnp.sign(query) * jnp.finfo("float16").max
    key = key.at[..., 0].set(jnp.asarray([65504, 65504, 65472, 1, 2, 3, -65504], "float16")[None, :, None])
    got = jax.jit(functools.partial(flash_attention, return_lse=True, implementation="xla"))(query, key, value)
    check(got, exact(query, key, value), "float16")


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_sink_of_minus_infinity_is_no_sink(implementation, monkeypatch):
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    arrays = tuple(jnp.asarray(random.standard_normal((1, n, H, 16)), jnp.float32) for n in (T, S, S))
    run = lambda sinks: jax.jit(
        lambda *x: jax.vjp(
            lambda *x: flash_attention(
                *x[:3],
                sinks=None if sinks is None else x[3],
                is_causal=True,
                q_offset=-2,
                return_lse=True,
                implementation=implementation,
            ),
            *x,
        )
    )(*arrays, jnp.asarray([0.0, 0.0]) if sinks is None else jnp.asarray(sinks))
    ones = (jnp.ones((1, T, H, 16)), jnp.ones((1, H, T)))
    (want, vjp), (got, got_vjp) = run(None), run([-np.inf, -np.inf])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    gradients, wanted = got_vjp(ones), vjp(ones)
    for x, y in zip(gradients[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(gradients[3], 0)
    out, lse = run([-np.inf, 0.5])[0]
    np.testing.assert_allclose(out[:, :, 0], want[0][:, :, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse[:, 1, :2], 0.5, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-40, 1e-60, -1e-40])
def test_subnormal_scales(scale):
    """The result is the mean of the kept values, as at scale 0."""
    arrays = tuple(jnp.asarray(random.standard_normal((1, n, H, 16)), jnp.float32) for n in (T, S, S))
    attend = lambda scale: jax.jit(
        functools.partial(flash_attention, is_causal=True, scale=scale, return_lse=True, implementation="xla")
    )(*arrays)
    for x, y in zip(attend(scale), attend(0.0), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sink", [-300.0, -np.inf, 80.0])
def test_sink_of_a_row_without_keys(sink):
    arrays = tuple(jnp.asarray(random.standard_normal((1, n, H, 16)), jnp.float32) for n in (T, S, S))
    sinks = jnp.full((H,), sink)
    arguments = {"sinks": sinks, "kv_lengths": np.zeros(1, np.int32), "return_lse": True, "implementation": "xla"}
    out, lse = jax.jit(functools.partial(flash_attention, **arguments))(*arrays)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, sink)


def gradients_of_rounded_scores(scores, sinks, value, dout, dlse):
    """(dscores, dsinks) in float64 of float32 scores [B, H, T, S], and of sinks [H]."""
    scores, sinks, value, dout, dlse = (np.asarray(x).astype(np.float64) for x in (scores, sinks, value, dout, dlse))
    highest = np.maximum(scores.max(-1, keepdims=True), sinks[:, None, None])
    weights, of_sink = np.exp(scores - highest), np.exp(sinks[:, None, None] - highest)
    total = weights.sum(-1, keepdims=True) + of_sink
    weights, of_sink = weights / total, of_sink / total
    dweights = np.einsum("bthd,bshd->bhts", dout, value)
    delta = (weights * dweights).sum(-1, keepdims=True) - dlse[..., None]
    return weights * (dweights - delta), -(of_sink * delta).sum((0, 2, 3))


@pytest.mark.parametrize(("implementation", "lowest"), [("xla", -1e9), ("xla", -3e38), ("triton", -1e9)])
def test_gradients_with_very_low_rows(implementation, lowest, monkeypatch):
    """Gradients of a score_mod's arrays, of sinks and of a bias, with rows whose scores are all very low.

    The scores of such a row round to one float32 value, and so does a low sink: the weights are uniform. The gradients
    must follow these weights, not weights that are recomputed from lse.
    """
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    generator = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(generator.standard_normal(shape), jnp.float32)
    query, key, value, dout = (normal(1, n, H, 16) for n in (T, S, S, T))
    dlse, slopes, sinks = normal(1, H, T), normal(H), jnp.array([lowest, 0.5], jnp.float32)
    low = jnp.where(jnp.arange(T) % 2 == 0, jnp.float32(lowest), 0)
    distance = np.arange(S) - np.arange(T)[:, None]

    def by_mod(query, key, value, slopes, sinks):
        mod = lambda score, b, h, q, k: score + slopes[h] * (k - q) + low[q]
        return flash_attention(
            query, key, value, score_mod=mod, sinks=sinks, return_lse=True, implementation=implementation
        )

    def by_bias(query, key, value, bias, sinks):
        return flash_attention(
            query, key, value, bias=bias, sinks=sinks, return_lse=True, implementation=implementation
        )

    scores = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") / 4
    bias = jnp.broadcast_to(slopes[:, None, None] * distance, (1, H, T, S)) + low[:, None]
    for attend, moved, rounded in (
        (by_mod, slopes, scores + slopes[:, None, None] * distance + low[:, None]),
        (by_bias, bias, scores + bias),
    ):
        gradients = jax.jit(lambda *given, attend=attend: jax.vjp(attend, *given)[1]((dout, dlse)))
        dquery, _, _, dmoved, dsinks = gradients(query, key, value, moved, sinks)
        dscores, want_sinks = gradients_of_rounded_scores(rounded, sinks, value, dout, dlse)
        want = (dscores * distance).sum((0, 2, 3)) if attend is by_mod else dscores
        np.testing.assert_allclose(dmoved, want, rtol=1e-4, atol=2e-5)
        want_query = np.einsum("bhts,bshd->bthd", dscores, np.asarray(key, np.float64)) / 4
        np.testing.assert_allclose(dquery, want_query, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(dsinks, want_sinks, rtol=1e-4, atol=2e-5)
