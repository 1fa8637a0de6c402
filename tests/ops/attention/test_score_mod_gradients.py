"""The gradients of a score_mod's arrays by live blocks, against the gradients by all pairs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention import vjp as attention
from jax_kernels.ops.attention.flash_attention import prepare
from jax_kernels.reference import attention as reference
from jax_kernels.reference import attention_chunks, chunked_attention, score_mod_gradients
from jax_kernels.testing import rms_error
from tests.support.cases import tiers
from tests.support.cases.masks import CASES, B, H, S, T
from tests.support.cases.score_mods import alibi

pytestmark = pytest.mark.usefixtures("no_interpret")

jit = lambda f: jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})
random = np.random.default_rng(5)
normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
QUERY, KEY, VALUE, DOUT, DLSE = (
    normal(*shape) for shape in ((B, T, H, 16), (B, S, 1, 16), (B, S, 1, 8), (B, T, H, 8), (B, H, T))
)


def relative(score, b, h, q, k, table):
    return score + table[q - k + S]


def relative_of_each(score, b, h, q, k, tables, rows, columns, few, ids):
    """Look-ups by differences: of each entry and head, in few buckets, of integers; also by q and by k."""
    score = score * (1 + tables[b, h, q - k + S] / 4) + rows[h, q] * columns[b, k] + few[jnp.abs(k - q) // 32, h]
    return jnp.where(ids[k - q + T] > 14, score / 2, score)


def of_all(score, b, h, q, k, slopes, rows, table, ids):
    """Nonlinear, with every index and an integer array, and with -inf at some pairs and in whole rows."""
    score = 3 * jnp.tanh(score / 3) * (1 + slopes[h]) * jnp.exp(table[h, jnp.clip(q - k + 8, 0, 16)]) + rows[b, q]
    return jnp.where((ids[q] == 2) | ((q + k) % 5 == 0), -jnp.inf, score)


CLOSED = {
    alibi: {"slopes": normal(H) / 8},
    relative: {"table": normal(T + S)},
    relative_of_each: {"tables": normal(B, H, T + S), "rows": normal(H, T), "columns": normal(B, S)}
    | {"few": normal(6, H), "ids": np.arange(T + S) % 17},
    of_all: {"slopes": normal(H), "rows": normal(B, T), "table": normal(H, 17) / 2, "ids": np.arange(T) % 17},
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 queries and keys, a few at a time. The last chunk reaches past the last block."""
    monkeypatch.setattr(score_mod_gradients, "BLOCK", 16)
    monkeypatch.setattr(attention_chunks, "CHUNK_BYTES", 5 * 4 * 16 * 16 * H)


def both_ways(mod, closed=None, dtype=jnp.float32, arrays=(QUERY, KEY, VALUE, DOUT, DLSE), **arguments):
    """(by live blocks, by all pairs): the gradients of the mod's arrays, None for integers."""
    closed = {name: jnp.asarray(x) for name, x in (closed or CLOSED[mod]).items()}

    def run(query, key, value, dout, dlse, closed, arguments):
        call, inputs = prepare(
            FlashArguments(
                query=query,
                key=key,
                value=value,
                score_mod=lambda *given: mod(*given, **closed),
                implementation="xla",
                **arguments,
            )
        )
        out, lse, _ = attention.attention_forward(call, inputs)
        given = (inputs, call.options, *reference.row_terms(out, lse, dout, dlse), dout)
        by_pairs = chunked_attention.backward(*given).score_mod
        return score_mod_gradients.array_gradients(*given).arrays, by_pairs.arrays

    *given, dlse = arrays
    given = [jnp.asarray(x, dtype) for x in given]
    static = {name: x for name, x in arguments.items() if isinstance(x, int | float | tuple)}
    traced = {name: x for name, x in arguments.items() if name not in static}
    return jit(lambda *given: run(*given[:-1], static | given[-1]))(*given, dlse, closed, traced)


def check(got, want, bound=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        assert np.asarray(w).any()
        assert rms_error(g, w) < bound


TOP_K = masks.top_k(normal(B, 1, T, S), 9) & masks.causal()
ARGUMENTS = {
    "causal_and_segments": (alibi, {"mask": CASES["causal_packed"].mask}),  # this mask becomes arguments
    "lists_of_each_entry": (of_all, {"mask": CASES["everything_packed"].mask}),
    "lists_of_each_entry_and_head": (relative, {"mask": CASES["block_sparse"].mask, "is_causal": True}),
    "lists_of_each_head": (of_all, {"mask": CASES["block_sparse_odd"].mask | CASES["dense_of_queries"].mask}),
    "relative_of_each": (relative_of_each, {"mask": CASES["block_sparse"].mask, "kv_lengths": np.array([S, 11])}),
    "relative_of_all": (relative_of_each, {"mask": CASES["strided"].mask}),
    "relative_of_each_head": (relative_of_each, {"mask": CASES["block_sparse_odd"].mask, "is_causal": True}),
    "relative_without_mask": (relative_of_each, {}),
    "lists_of_all": (relative, {"mask": CASES["strided"].mask, "q_offset": jnp.array([7, -20], jnp.int32)}),
    "dense": (alibi, {"mask": CASES["dense"].mask | masks.prefix(2)}),
    "top_k": (of_all, {"mask": TOP_K}),
    "array": (relative, {"mask": np.tri(T, S, dtype=bool)}),
    "no_mask": (alibi, {}),
    "all_arguments": (
        of_all,
        {
            "mask": CASES["longformer"].mask,
            "window": (30, 8),
            "kv_lengths": np.array([S, 11], np.int32),
            "segment_ids": (np.arange(T)[None].repeat(B, 0) // 30, np.arange(S)[None].repeat(B, 0) // 30),
            "q_offset": 4,
            "bias": jnp.where(random.random((B, 1, 1, S)) < 0.2, -jnp.inf, normal(B, 1, 1, S)),
            "sinks": normal(H),
            "scale": -0.3,
        },
    ),
}


@pytest.mark.parametrize("name", tiers.cases(ARGUMENTS, set(list(ARGUMENTS)[::3])))
def test_against_all_pairs(name, small_blocks):
    mod, arguments = ARGUMENTS[name]
    check(*both_ways(mod, **arguments))


def test_grouped_heads_with_a_mask_per_head(small_blocks):
    """Two heads of query for each head of key, with different lists."""
    arrays = (normal(1, 40, 4, 8), normal(1, 40, 2, 8), normal(1, 40, 2, 8), normal(1, 40, 4, 8), normal(1, 4, 40))
    mask = masks.block_sparse(random.random((4, 3, 3)) < 0.7, 16)
    check(*both_ways(alibi, {"slopes": normal(4) / 8}, arrays=arrays, mask=mask))


def test_whole_blocks():
    """Blocks of the default size, which reach past the ends of the lengths; in 16 bits."""
    got, want = both_ways(of_all, dtype=jnp.bfloat16, mask=CASES["strided"].mask)
    check(got, want, 1e-5)


def test_relative_reads_sum_along_diagonals():
    """No scatter of all pairs. The lengths are no multiples of whole blocks."""
    got, want = both_ways(relative_of_each, mask=CASES["strided"].mask)
    check(got, want)

    def run(query, table):
        mod = lambda score, b, h, q, k: score + table[jnp.abs(q - k) // 32]
        call, inputs = prepare(
            FlashArguments(
                query=query, key=query, value=query, score_mod=mod, mask=masks.dilated(3), implementation="xla"
            )
        )
        terms = jnp.ones((1, 1, 640))
        return score_mod_gradients.array_gradients(inputs, call.options, terms, terms, query).arrays

    program = str(jax.make_jaxpr(run)(jnp.ones((1, 640, 1, 16)), jnp.ones(20)))
    added = re.findall(r"(f32\[[\d,]*\]) = scatter-add", program)
    assert added == ["f32[20]"]


def test_no_live_blocks(small_blocks):
    got, want = both_ways(of_all, mask=CASES["nothing"].mask)
    for x in jax.tree.leaves((got, want)):
        assert not np.asarray(x).any()


def test_dead_blocks_are_not_visited(small_blocks):
    """The derivative in dead blocks would be NaN."""
    cells = (np.arange(4)[:, None] + np.arange(3)) % 2 == 0
    is_live = np.repeat(np.repeat(cells, 16, axis=0)[:T], 16, axis=1)[:, :S]

    def mod(score, b, h, q, k, slopes, live):
        return score + slopes[h] * jnp.sqrt(live[q, k])

    closed = {"slopes": normal(H), "live": np.where(is_live, 1, -1).astype(np.float32)}
    got, want = both_ways(mod, closed, mask=masks.block_sparse(cells, 16))
    assert np.isfinite(got[0]).all()
    assert np.isnan(want[0]).all()


def test_memory_is_one_chunk(monkeypatch):
    """The memory is of two blocks of 16 by 16, for any mask, not of all pairs."""
    monkeypatch.setattr(score_mod_gradients, "BLOCK", 16)
    monkeypatch.setattr(attention_chunks, "CHUNK_BYTES", 2 * 4 * 16 * 16)
    query = jnp.ones((1, 256, 1, 16))
    mask = masks.causal() | masks.prefix(3)

    def run(query, table):
        mod = lambda score, b, h, q, k: score + table[jnp.abs(q - k)]
        given = {"key": query, "value": query, "mask": mask, "score_mod": mod, "implementation": "xla"}
        call, inputs = prepare(FlashArguments(query=query, **given))
        terms = jnp.ones((1, 1, 256))
        return score_mod_gradients.array_gradients(inputs, call.options, terms, terms, query).arrays

    text = jax.jit(run).lower(query, jnp.ones(256)).as_text()
    assert "2x1x1x16x16x" in text
    assert "256x256x" not in text


@pytest.mark.parametrize("empty", ["query", "key"])
def test_no_pairs_pass_no_gradient(empty):
    """Without queries, or without keys, the gradients of a mod's arrays are zeros of their shapes."""
    slopes = jnp.asarray(normal(H))
    mod = lambda score, b, h, q, k: alibi(score, b, h, q, k, slopes)
    call, inputs = prepare(FlashArguments(query=QUERY, key=KEY, value=VALUE, score_mod=mod, implementation="xla"))
    names = ("query",) if empty == "query" else ("key", "value")
    inputs = inputs._replace(**{name: getattr(inputs, name)[:, :0] for name in names})
    length = 0 if empty == "query" else T
    rows = jnp.full((B, H, length), -jnp.inf), jnp.zeros((B, H, length))
    found = score_mod_gradients.array_gradients(inputs, call.options, *rows, jnp.asarray(DOUT)[:, :length])
    (got,) = jax.tree.leaves(found.arrays)
    np.testing.assert_array_equal(got, np.zeros(H))


@pytest.mark.parametrize("mod", [alibi, relative])
def test_very_low_rows(mod):
    """Their lse is -1e9 in float32. lse_lo, the rest that lse loses, is the logarithm of their number of keys."""
    closed = {name: jnp.asarray(x) for name, x in CLOSED[mod].items()}
    low = jnp.where(jnp.arange(T) % 3 == 0, jnp.float32(-1e9), 0)

    def run(closed):
        lowered = lambda score, b, h, q, k: mod(score, b, h, q, k, **closed) + low[q]
        call, inputs = prepare(
            FlashArguments(query=QUERY, key=KEY, value=VALUE, score_mod=lowered, implementation="xla", is_causal=True)
        )
        out, lse, lse_lo = attention.attention_forward(call, inputs)
        given = (inputs, call.options, *reference.row_terms(out, lse, DOUT, DLSE), jnp.asarray(DOUT), lse_lo)
        return (
            score_mod_gradients.array_gradients(*given).arrays,
            chunked_attention.backward(*given).score_mod.arrays,
            lse_lo,
        )

    got, want, lse_lo = jit(run)(closed)
    assert np.abs(lse_lo[..., 3::3]).max() > 1
    check(got, want)
