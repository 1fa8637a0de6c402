"""Values past kv_lengths are not read: NaN and infinities there change no result and no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import decode_attention, flash_attention, flash_attention_fp8, masks
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.ops.attention.implementations import cudnn
from jax_kernels.reference import attention as reference
from jax_kernels.reference import chunked_attention
from jax_kernels.reference.score_mod_gradients import array_gradients
from jax_kernels.score_mod.trace import trace
from tests.support.cases import tiers

B, T, S, H, HKV, D = 3, 7, 12, 4, 2, 16
LENGTHS = np.array([5, 0, 12], np.int32)
PAST = (np.arange(S) >= LENGTHS[:, None])[..., None, None]
random = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(random.standard_normal(shape, np.float32))
QUERY, KEY, VALUE, DOUT = normal(B, T, H, D), normal(B, S, HKV, D), normal(B, S, HKV, D), normal(B, T, H, D)
GIVEN = {"bias": normal(B, H, T, S), "sinks": normal(H), "table": normal(S)}
BAD = [np.nan, np.inf, -np.inf]

evens = lambda b, h, q, k: k % 2 == 0
CALLS = {
    "lengths": {"kv_lengths": LENGTHS},
    "prefix": {"mask": masks.prefix(LENGTHS)},
    "prefix_causal": {"mask": masks.prefix(LENGTHS) & masks.causal(), "q_offset": 4},
    "prefix_function": {"mask": masks.from_function(evens) & masks.prefix(LENGTHS)},
    "window": {"kv_lengths": LENGTHS, "window": (4, 3), "softcap": 3.0},
    "scale": {"kv_lengths": LENGTHS, "scale": -0.3},
}
EXTRA = {"": (), "bias": ("bias",), "sinks": ("sinks",), "score_mod": ("table",)}


def results(attend, value, *extra):
    """out, lse and the gradients of all arguments, with `value` in key and value past the lengths."""
    key, values = (jnp.where(PAST, value, x) for x in (KEY, VALUE))
    given = {"query": QUERY, "key": key, "value": values} | {name: GIVEN[name] for name in extra}
    (out, lse), vjp = jax.vjp(attend, given)
    return {"out": out, "lse": lse} | vjp((DOUT, jnp.ones_like(lse)))[0]


def check(attend, *extra):
    want = results(attend, 0.0, *extra)
    for value in BAD:
        got = results(attend, value, *extra)
        for name, x in got.items():
            np.testing.assert_array_equal(x, want[name], err_msg=f"{name}, {value}")
        for name in ("key", "value"):
            assert not np.where(PAST, got[name], 0).any()


@pytest.mark.parametrize(("name", "extra"), tiers.pairs(CALLS, EXTRA, ("prefix_causal", "bias")))
def test_flash_attention(name, extra):
    arguments = CALLS[name] | {"return_lse": True, "implementation": "xla"}
    if extra == "score_mod":
        arguments.pop("softcap", None)

    @jax.jit
    def attend(given):
        table = given.pop("table", None)
        mod = None if table is None else lambda score, b, h, q, k: score + table[k]
        return flash_attention(**given, **arguments, score_mod=mod)

    check(lambda given: attend(dict(given)), *EXTRA[extra])


def test_oracle():
    options = AttentionOptions(scale=0.25)
    check(lambda given: reference.oracle(AttentionInputs(**given, kv_lengths=LENGTHS), options))


def test_score_mod_array_gradients_by_blocks():
    table, lengths = GIVEN["table"], jnp.asarray(LENGTHS)

    def gradients(value):
        key, values = (jnp.where(PAST, value, x) for x in (KEY, VALUE))
        mod = trace(lambda score, b, h, q, k: score * table[k])
        inputs = AttentionInputs(QUERY, key, values, kv_lengths=lengths, score_mod=mod)
        options = AttentionOptions(scale=0.25)
        out, lse, lse_lo = chunked_attention.forward(inputs, options, out_dtype=jnp.float32)
        return array_gradients(inputs, options, *reference.row_terms(out, lse, DOUT, None), DOUT, lse_lo).arrays[0]

    for value in BAD:
        np.testing.assert_array_equal(gradients(value), gradients(0.0))


def test_cudnn_gets_zeros(monkeypatch):
    """cuDNN's own kernels multiply the values past the lengths by probabilities of 0."""
    given = []

    def attend(query, key, value, **_):
        given.extend((key, value))
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    key, value = (jnp.where(PAST, np.nan, x) for x in (KEY, VALUE))
    inputs = AttentionInputs(QUERY, key, value, kv_lengths=jnp.asarray(LENGTHS))
    cudnn.forward(inputs, AttentionOptions(scale=0.25), out_dtype=jnp.float32, config=None, interpret=False)
    for x, right in zip(given, (KEY, VALUE), strict=True):
        np.testing.assert_array_equal(x, jnp.where(PAST, 0, right))


@pytest.mark.parametrize("window", [None, 3])
def test_decode_attention(window):
    attend = functools.partial(decode_attention, QUERY, kv_lengths=LENGTHS, window=window, return_lse=True)
    want = attend(KEY, VALUE)
    pages = lambda x: jnp.concatenate([jnp.pad(x, ((0, 0), (0, 4), (0, 0), (0, 0)), constant_values=np.nan)] * 2)
    tables = np.array([[0, 99], [-7, 99], [2, 99]], np.int32)
    for value in BAD:
        key, values = (jnp.where(PAST, value, x) for x in (KEY, VALUE))
        paged = attend(pages(key), pages(values), block_tables=tables)
        for x, y, z in zip(attend(key, values), paged, want, strict=True):
            np.testing.assert_array_equal(x, z)
            np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-6)


def test_flash_attention_fp8():
    eighth = lambda x: x.astype(jnp.float8_e4m3fn)
    attend = functools.partial(flash_attention_fp8, kv_lengths=LENGTHS, return_lse=True, implementation="xla")
    want = attend(*map(eighth, (QUERY, KEY, VALUE)))
    got = attend(eighth(QUERY), *(eighth(jnp.where(PAST, np.nan, x)) for x in (KEY, VALUE)))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
