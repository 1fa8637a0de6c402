"""The chunks of the "xla" implementation: their bytes, the keys that a window visits, and results in any chunks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jax_kernels import flash_attention, masks
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.reference import attention as reference
from jax_kernels.reference import attention_chunks
from jax_kernels.testing import rms_error

LIMITS = {"cpu": attention_chunks.CPU_CHUNK_BYTES, "gpu": attention_chunks.CHUNK_BYTES}


def forward(query, key, value, **arguments):
    return flash_attention(query, key, value, implementation="xla", **arguments)


def backward(query, key, value, dout, **arguments):
    return jax.vjp(functools.partial(forward, **arguments), query, key, value)[1](dout)


def matmul_flops(jaxpr, times=1):
    """The FLOPs of all matmuls of a jaxpr. A loop's body counts once for each of its steps."""
    flops = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            flops += 2 * times * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        steps = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        flops += sum(matmul_flops(inner, steps) for inner in jaxprs_in_params(equation.params))
    return flops


@pytest.mark.parametrize("limit", LIMITS)
def test_bytes_of_large_batches_and_heads(limit, monkeypatch):
    """Arrays of 4 GiB are not copied (compiled only). The backward keeps `out`, from which it computes delta."""
    monkeypatch.setattr(attention_chunks, "CPU_CHUNK_BYTES", LIMITS[limit])
    jax.clear_caches()
    x = jax.ShapeDtypeStruct((64, 4096, 64, 128), jnp.bfloat16)
    temporary = lambda f, *given: jax.jit(f).lower(*given).compile().memory_analysis().temp_size_in_bytes
    array, of_entry = math.prod(x.shape) * 2, 4096 * 64 * 128 * 4
    assert temporary(forward, x, x, x) < 5 * of_entry + 2 * LIMITS[limit]
    assert temporary(backward, x, x, x, x) < array + 8 * of_entry + 4 * LIMITS[limit]


@pytest.mark.parametrize("of", [forward, backward])
def test_windows_visit_their_keys(of):
    """A chunk of queries visits the keys in the window of its queries, whatever the length."""

    def flops(length, window):
        x = jax.ShapeDtypeStruct((2, length, 4, 32), jnp.float32)
        function = functools.partial(of, window=window)
        return matmul_flops(jax.make_jaxpr(function)(*[x] * (3 if of is forward else 4)).jaxpr)

    matmuls = 2 if of is forward else 7
    per_pair = matmuls * 2 * 2 * 4 * 32
    assert flops(1024, None) == per_pair * 1024**2
    assert flops(1024, 63) == per_pair * 1024 * (128 + 2 * 63)
    assert flops(2048, 63) == 2 * flops(1024, 63)
    assert flops(2048, 255) <= per_pair * 2048 * (512 + 2 * 255)


def test_cost_of_windows():
    """XLA counts a loop's body once. One step under a window costs no more than the window's pairs."""
    x = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.float32)
    cost = lambda window: (
        jax.jit(lambda x: forward(x, x, x, is_causal=True, window=window)).lower(x).compile().cost_analysis()["flops"]
    )
    pairs = 128 * (128 + 64)
    assert 4 * 64 * pairs < cost((64, 0)) < 1.2 * 4 * 64 * pairs


T, S = 75, 150
CASES = {
    "plain": {},
    "causal": {"is_causal": True, "q_offset": 60},
    "window": {"window": (9, 5), "q_offset": 3},
    "causal_window": {"window": (9, 0), "q_offset": [40, 3, -4]},
    "lengths": {"kv_lengths": [150, 0, 77], "window": (30, 2)},
    "segments": {"segment_ids": True, "sinks": True},
    "bias": {"bias": (3, 4, T, S), "window": (20, 3), "q_offset": 30},
    "bias_of_keys": {"bias": (1, 1, 1, S), "window": (20, 3), "q_offset": 30},
    "bias_of_heads": {"bias": (1, 4, T, 1), "softcap": 3.0},
    "bias_of_entries": {"bias": (3, 1, 1, S), "is_causal": True},
    "score_mod": {"score_mod": True, "window": (20, 3), "q_offset": 30},
    "mask": {"mask": (3, 1, T, S), "window": (40, 3)},
    "mask_object": {"mask": masks.from_function(lambda b, h, q, k: (q + k) % 3 > 0), "window": (40, 3)},
}


def arguments_of(case, dtype):
    random = np.random.default_rng(0)
    made = dict(case)
    for name in ("bias", "mask"):
        if isinstance(case.get(name), tuple):
            x = random.standard_normal(case[name])
            made[name] = jnp.asarray(x > 0) if name == "mask" else jnp.asarray(x, dtype)
    for name in ("q_offset", "kv_lengths"):
        if isinstance(case.get(name), list):
            made[name] = jnp.asarray(case[name], jnp.int32)
    if "segment_ids" in case:
        made["segment_ids"] = tuple(jnp.asarray(np.sort(random.integers(-1, 4, (3, n))), jnp.int32) for n in (T, S))
    if "sinks" in case:
        made["sinks"] = jnp.asarray(random.standard_normal(4), jnp.float32)
    if "score_mod" in case:
        table = jnp.asarray(random.standard_normal((3, 4, T, S)), jnp.float32)
        made["score_mod"] = lambda score, b, h, q, k: score + table[b, h, q, k]
    return made


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_chunks(name, monkeypatch):
    """Out, lse and all gradients in chunks of 16 queries, one batch entry and one key head equal one chunk's."""
    random = np.random.default_rng(1)
    arrays = [
        jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((3, T, 4, 8), (3, S, 2, 8), (3, S, 2, 5))
    ]
    arguments = arguments_of(CASES[name], jnp.float32)
    bias = arguments.pop("bias", None)

    def loss(query, key, value, bias):
        out, lse = forward(query, key, value, bias=bias, return_lse=True, **arguments)
        return (out * jnp.cos(out)).sum() + jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)).sum(), (out, lse)

    found = []
    for limit in (16 * S * 2 * 4, 1 << 28):
        monkeypatch.setattr(attention_chunks, "CPU_CHUNK_BYTES", limit)
        jax.clear_caches()
        given = range(3 if bias is None else 4)
        found.append(jax.jit(jax.value_and_grad(loss, given, has_aux=True))(*arrays, bias))
    (_, got), got_gradients = found[0]
    (_, want), want_gradients = found[1]
    for x, y in zip((*got, *got_gradients), (*want, *want_gradients), strict=True):
        assert rms_error(x, y) < 1e-6


@pytest.mark.parametrize("name", ["causal", "causal_window", "bias"])
def test_second_derivatives_in_chunks(name, monkeypatch):
    monkeypatch.setattr(attention_chunks, "CPU_CHUNK_BYTES", 64 * S * 4)
    jax.clear_caches()
    random = np.random.default_rng(1)
    x = jnp.asarray(random.standard_normal((3, T, 4, 8)), jnp.float32)
    y = jnp.asarray(random.standard_normal((3, S, 2, 8)), jnp.float32)
    arguments = arguments_of(CASES[name], jnp.float32)
    loss = lambda attend: jax.grad(lambda x: (attend(x) ** 2).sum())
    inner = loss(lambda x: forward(x, y, y, **arguments))
    got = jax.jit(lambda x: jax.jvp(inner, (x,), (jnp.cos(x),))[1])(x)

    def oracle(x):
        keys = {name: arguments[name] for name in ("bias",) if name in arguments}
        offset = arguments.get("q_offset", 0)
        traced = offset if isinstance(offset, jax.Array) else None
        is_causal = arguments.get("is_causal", name == "causal_window")
        options = AttentionOptions(
            scale=8**-0.5,
            is_causal=is_causal,
            window=arguments.get("window"),
            q_offset=None if traced is not None else offset,
        )
        return reference.attention(AttentionInputs(x, y, y, q_offset=traced, **keys), options)[0]

    want = jax.jit(lambda x: jax.jvp(loss(oracle), (x,), (jnp.cos(x),))[1])(x)
    assert rms_error(got, want) < 3e-6


def test_chunks_honour_their_limit():
    x = jnp.zeros((6, 1000, 12, 64), jnp.float32)
    inputs, options = AttentionInputs(x, x[:, :, ::3], x[:, :, ::3]), AttentionOptions(scale=1.0)
    for limit in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28):
        sizes = attention_chunks.chunk_sizes(inputs, options, limit)
        assert sizes.batch * sizes.kv_heads * 3 * sizes.queries * sizes.keys * 4 <= max(limit, 3 * 1000 * 4)
    assert sizes.counts == (1, 1, 2)
