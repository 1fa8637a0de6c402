"""Calls in chunks: equal to whole calls, with gradients; chosen from a limit; tried again after an error of memory."""

import contextlib
import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import (
    chunks,
    dilated_attention,
    explain,
    flash_attention,
    grouped_gated_matmul,
    grouped_matmul,
    layer_norm,
    matmul,
    memory_limit,
    mlp,
    quantize,
    rms_norm,
)
from jax_kernels.ops.attention import implementations as of_attention
from jax_kernels.ops.dilated import vjp as dilated
from jax_kernels.ops.grouped import implementations as of_grouped
from jax_kernels.ops.grouped.experts import gated_experts
from jax_kernels.ops.matmul import implementations as of_matmul

KEYS = iter(jax.random.split(jax.random.key(0), 40))
NORMAL = lambda *shape: jax.random.normal(next(KEYS), shape)
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 12, 4, 2, 8
QUERY, KEY, VALUE = NORMAL(2, 12, 4, 8), NORMAL(2, 20, 2, 8), NORMAL(2, 20, 2, 8)
BIAS, SINKS = NORMAL(1, 4, 12, 20), NORMAL(4)
OF_OUT, OF_LSE = NORMAL(2, 12, 4, 8), NORMAL(2, 4, 12)
IDS = jnp.arange(20)[None] // jnp.array([[5], [7]])


def loss(options):
    """A loss of out and lse, of (query, key, value, bias, sinks)."""

    def of(query, key, value, bias, sinks):
        out, lse = flash_attention(query, key, value, bias=bias, sinks=sinks, return_lse=True, **options)
        return (out * OF_OUT).sum() + jnp.where(jnp.isfinite(lse), lse * OF_LSE, 0).sum()

    return of


def check(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


OPTIONS = {
    "causal window": {"is_causal": True, "window": (6, 0), "q_offset": 4},
    "offsets": {"is_causal": True, "q_offset": jnp.array([0, 8])},
    "mask": {"mask": jax.random.bernoulli(jax.random.key(1), 0.7, (2, 1, 12, 20))},
    "segments": {"segment_ids": (IDS[:, :12], IDS), "kv_lengths": jnp.array([20, 9])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_in_chunks(name):
    """2 chunks split the batch, 8 also heads and queries: values, and gradients through out and lse."""
    arrays = QUERY, KEY, VALUE, BIAS, SINKS
    step = jax.jit(jax.value_and_grad(loss(OPTIONS[name]), argnums=range(5)))
    want = step(*arrays)
    for count in (2, 8) if name == "causal window" else (8,):
        with chunks.forced(count) as split:
            check(step(*arrays), want)
        assert set(split) == {count}


def test_float32_sums_over_chunks_of_queries():
    """The gradients of key and value of 16 bits are rounded once, as without chunks."""
    arrays = [x.astype(jnp.bfloat16) for x in (QUERY[:1, :, :1], KEY[:1, :, :1], VALUE[:1, :, :1])]
    of = lambda q, k, v: flash_attention(q, k, v).astype(jnp.float32).sum()
    step = jax.jit(jax.grad(of, argnums=(0, 1, 2)))
    exact = jax.grad(of, argnums=(0, 1, 2))(*[x.astype(jnp.float32) for x in arrays])
    error = lambda found: max(
        float(jnp.abs(x.astype(jnp.float32) - y).max()) for x, y in zip(found, exact, strict=True)
    )
    whole = error(step(*arrays))
    with chunks.forced(4):
        assert error(step(*arrays)) <= 1.5 * whole


ROWS, W, UP, DOWN = NORMAL(9, 16), NORMAL(16, 24), NORMAL(16, 24), NORMAL(24, 16)
OF_ROWS = {
    "matmul": lambda x, w, up, down: matmul(x, w, bias=up[0], activation="gelu", residual=x @ up),
    "mlp": lambda x, w, up, down: mlp(x, up, down, w_gate=w, residual=x),
    "rms_norm": lambda x, w, up, down: rms_norm(x, w[:, 0], residual=x)[0],
    "layer_norm": lambda x, w, up, down: layer_norm(x, w[:, 0], w[:, 1]),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_in_chunks(name):
    op, arrays = OF_ROWS[name], (ROWS, W, UP, DOWN)
    of = lambda *arrays: (op(*arrays) ** 2).sum()
    for function in (jax.jit(op), jax.jit(jax.grad(of, argnums=range(4)))):
        want = function(*arrays)
        with chunks.forced(4) as split:
            check(function(*arrays), want)
        assert split


LEADING = {"one entry": (1, 9), "two entries": (2, 5), "three axes": (1, 2, 3)}


@pytest.mark.parametrize("axes", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_of_several_axes_in_chunks(name, axes):
    """A batch of fewer entries than chunks is split along its other axes too."""
    op, arrays = OF_ROWS[name], (NORMAL(*axes, 16), W, UP, DOWN)
    of = lambda *arrays: (op(*arrays) ** 2).sum()
    for function in (jax.jit(op), jax.jit(jax.grad(of, argnums=range(4)))):
        want = function(*arrays)
        with chunks.forced(4) as split:
            got = function(*arrays)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6 * jnp.abs(y).max())  # sums of other orders cancel
        assert max(split) == 4  # matmuls inside a chunk of mlp have fewer rows


def test_as_many_chunks_as_the_limit_requires():
    """Three rows of five each do not make four equal chunks: there are more."""
    x = jnp.arange(15.0).reshape(3, 5)
    need, parts = chunks.Need(kept=0, temporary=0, most=15, axes="rows"), []
    with chunks.forced(4):
        got = chunks.by_rows("op", need, x, lambda of: parts.append(of) or x[of], is_partitioned=False, shape=x.shape)
    np.testing.assert_array_equal(got, x)
    assert len(parts) == 6


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_8_bit_matmuls_are_not_split(scaling):
    """A chunk of rows has other scales of rows and blocks."""
    x, w = (quantize(NORMAL(*shape), scaling=scaling) for shape in ((8, 128), (16, 128)))
    product = lambda: matmul(x, w, transpose_w=True, implementation="xla")
    want = product()
    with chunks.forced(4) as split:
        np.testing.assert_array_equal(product(), want)
    assert not split


def test_the_plan_of_rows_of_several_axes():
    """The call runs in the chunks of its plan."""
    x = jax.ShapeDtypeStruct((1, 9, 16), jnp.float32)
    for op, arguments in ((matmul, (x, W)), (mlp, (x, W, DOWN))):
        with memory_limit(500), chunks.forced(1) as split:
            assert explain(op, *arguments).chunks.startswith("2 chunks of rows")
            split.clear()
            jax.eval_shape(op, *arguments)
        assert max(split) == 2


SIZES = jnp.array([4, 0, 7, 3])
GROUPED_ROWS = NORMAL(18, 16)
GROUPS, GATE = NORMAL(4, 16, 24), NORMAL(4, 16, 24)
EXPERTS_DOWN = NORMAL(4, 24, 16)
OF_GROUPS = {
    "grouped_matmul": lambda x, w, gate, down: grouped_matmul(x, w, SIZES, bias=gate[:, 0], activation="gelu"),
    "gather": lambda x, w, gate, down: grouped_matmul(x, w, SIZES, gather_indices=jnp.arange(17, -1, -1) - 1),
    "gated": lambda x, w, gate, down: grouped_gated_matmul(x, gate, w, SIZES),
    "experts": lambda x, w, gate, down: gated_experts(x, gate, w, down, SIZES),
}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_rows_of_groups_in_chunks(name):
    """5 chunks end inside groups and past the last group; the groups' sizes stay on the device."""
    op, arrays = OF_GROUPS[name], (GROUPED_ROWS, GROUPS, GATE, EXPERTS_DOWN)
    of = lambda *arrays: (op(*arrays) ** 2).sum()
    for function in (jax.jit(op), jax.jit(jax.grad(of, argnums=range(4)))):
        want = function(*arrays)
        with chunks.forced(5) as split:
            check(function(*arrays), want)
        assert max(split) == 5  # matmuls inside a chunk of experts have fewer rows


PATTERNS = {
    "lse": {"segment_lengths": (4, 12), "dilation_rates": (1, 2), "is_causal": True},
    "mean of groups": {
        "segment_lengths": (6, 12),
        "dilation_rates": (1, 3),
        "heads": "groups",
        "combine": "mean",
        "segment_ids": IDS[:, :12],
    },
}
OF_DILATED = QUERY, NORMAL(2, 12, 2, 8), NORMAL(2, 12, 2, 8)


@pytest.mark.parametrize("name", PATTERNS)
def test_dilated_attention_in_chunks(name):
    """2 chunks split the batch, 3 also heads, whose shards take other tokens."""

    def of(*arrays):
        out, lse = dilated_attention(*arrays, **PATTERNS[name], return_lse=True)
        return (out * OF_OUT).sum() + jnp.where(jnp.isfinite(lse), lse * OF_LSE, 0).sum()

    step = jax.jit(jax.value_and_grad(of, argnums=range(3)))
    want = step(*OF_DILATED)
    for count in (2, 3):
        with chunks.forced(count) as split:
            check(step(*OF_DILATED), want)
        assert split[0] == count


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_dilated_attention_is_tried_again(monkeypatch, direction):
    """The call's program fails as a whole, so that the call is split, not its attentions."""
    real, tried = dilated._jitted, []

    def limited(function, call, statics, count, arrays):
        if function is getattr(dilated, f"_{direction}"):
            tried.append(count)
            if count < 4:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
        return real(function, call, statics, count, arrays)

    step = jax.value_and_grad(lambda q: (dilated_attention(q, *OF_DILATED[1:], **PATTERNS["lse"]) * OF_OUT).sum())
    want = step(QUERY)
    monkeypatch.setattr(dilated, "_jitted", limited)
    with pytest.warns(RuntimeWarning) as warned:
        check(step(QUERY), want)
    of = "dilated_attention" if direction == "forward" else "dilated_attention's backward"
    assert [str(x.message) for x in warned][-1] == (
        f"{of}: out of memory for query [2, 12, 4, 8] and key [2, 12, 2, 8] in float32; "
        "the call is tried again in 4 chunks"
    )
    assert tried == [1, 2, 4]


def test_forward_mode_in_chunks():
    of = lambda q: flash_attention(q, KEY, VALUE, is_causal=True)
    want = jax.jvp(of, (QUERY,), (OF_OUT,))
    with chunks.forced(8):
        check(jax.jvp(of, (QUERY,), (OF_OUT,)), want)


def test_a_limit_gives_chunks_and_the_plan_says_so():
    """Scores, weights and cotangents of 2 x 4 x 12 x 20 float32 values take 23 kB."""
    assert explain(flash_attention, QUERY, KEY, VALUE).chunks is None
    want = flash_attention(QUERY, KEY, VALUE)
    with memory_limit(6000):
        plan = explain(flash_attention, QUERY, KEY, VALUE)
        assert plan.chunks == (
            "4 chunks of batch, heads and queries, "
            "because temporary arrays would take 2.3e-05 GB, and may take 6e-06 GB"
        )
        assert f"in {plan.chunks}" in str(plan)
        step = jax.jit(flash_attention)
        check(step(QUERY, KEY, VALUE), want)
        assert step.lower(QUERY, KEY, VALUE).as_text().count("optimization_barrier") >= 3
    with memory_limit(500):
        assert explain(matmul, ROWS, W).chunks.startswith("2 chunks of rows")
        assert explain(grouped_matmul, GROUPED_ROWS, GROUPS, SIZES).chunks.startswith("4 chunks of rows")
        assert explain(mlp, ROWS, UP, DOWN, w_gate=W).chunks.startswith("2 chunks of rows")
    with memory_limit(20000):  # gathered rows, results, and float32 results of both branches take 39 kB
        plan = explain(dilated_attention, *OF_DILATED, **PATTERNS["lse"])
        assert plan.chunks.startswith("2 chunks of batch and heads")
        assert f"in {plan.chunks}" in str(plan)
    with pytest.raises(ValueError, match="size: got 0"), memory_limit(0):
        pass
    for size in ("1GB", True, [4]):
        with pytest.raises(TypeError, match=r"^size: got .*, want a number of bytes"), memory_limit(size):
            pass
    with memory_limit(5e-324):
        assert explain(matmul, ROWS, W).chunks.startswith("9 chunks of rows")
    with memory_limit(jnp.int32(6000)):
        assert chunks.limit() == 6000


OF_ALL = {
    **{name: (op, (ROWS, W, UP, DOWN)) for name, op in OF_ROWS.items()},
    **{name: (op, (GROUPED_ROWS, GROUPS, GATE, EXPERTS_DOWN)) for name, op in OF_GROUPS.items()},
    "attention": (flash_attention, (QUERY, KEY, VALUE)),
    "dilated": (lambda *arrays: dilated_attention(*arrays, **PATTERNS["lse"]), OF_DILATED),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_programs_on_a_host_of_several_devices(monkeypatch, name):
    """XLA may shard the arrays, so that a device's limit says nothing; after an error of memory they are split."""
    monkeypatch.setattr(jax, "device_count", lambda *_: 2)
    op, arrays = OF_ALL[name]
    of = lambda *arrays: jax.vjp(op, *arrays)[0]
    with memory_limit(500), chunks.forced(1) as split:
        jax.eval_shape(of, *arrays)
    assert not split
    with chunks.forced(2) as split:
        jax.eval_shape(of, *arrays)
    assert max(split) == 2


def test_the_devices_memory_is_the_limit():
    """The arrays take 8.6 GB, and float32 arrays of their size 17 GB more, too much for an RTX 4080."""
    query = jax.ShapeDtypeStruct((256, 1024, 64, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((256, 65536, 1, 64), jnp.bfloat16)
    call = lambda device: explain(flash_attention, query, key, key, implementation="cudnn", device=device).chunks
    assert call("4080") is not None
    assert call("h200") is None


@contextlib.contextmanager
def out_of_memory(monkeypatch, table, name, size, direction="forward"):
    """The implementation "xla" raises JAX's error of memory for arrays of more than `size` values."""
    real = table["xla"]

    def limited(inputs, *args, **kwargs):
        if getattr(inputs, name).size > size:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")
        return getattr(real, direction)(inputs, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setitem(table, "xla", dataclasses.replace(real, **{direction: limited}))
        jax.clear_caches()  # traces of the real implementation
        yield
    jax.clear_caches()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_is_tried_again(monkeypatch, direction):
    table = of_attention.IMPLEMENTATIONS
    step = jax.value_and_grad(lambda q: (flash_attention(q, KEY, VALUE, is_causal=True) * OF_OUT).sum())
    want = step(QUERY)
    with out_of_memory(monkeypatch, table, "query", QUERY.size // 4, direction), pytest.warns(RuntimeWarning) as warned:
        check(step(QUERY), want)
    of = "flash_attention" if direction == "forward" else "flash_attention's backward"
    assert [str(x.message) for x in warned][-1] == (
        f"{of}: out of memory for query [2, 12, 4, 8] and key [2, 20, 2, 8] in float32; "
        "the call is tried again in 4 chunks"
    )


def test_a_matmul_is_tried_again(monkeypatch):
    want = matmul(ROWS, W)
    limited = out_of_memory(monkeypatch, of_matmul.IMPLEMENTATIONS, "x", ROWS.size // 2)
    with limited, pytest.warns(RuntimeWarning, match=r"matmul: out of memory for x \[9, 16\] in float32"):
        check(matmul(ROWS, W), want)


def test_a_grouped_matmul_is_tried_again(monkeypatch):
    want = grouped_matmul(GROUPED_ROWS, GROUPS, SIZES)
    limited = out_of_memory(monkeypatch, of_grouped.IMPLEMENTATIONS, "x", GROUPED_ROWS.size // 2)
    with limited, pytest.warns(RuntimeWarning, match=r"grouped_matmul: out of memory for x \[18, 16\] in float32"):
        check(grouped_matmul(GROUPED_ROWS, GROUPS, SIZES), want)


def test_an_error_that_chunks_do_not_mend(monkeypatch):
    with out_of_memory(monkeypatch, of_matmul.IMPLEMENTATIONS, "x", 0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            matmul(ROWS, W)
