"""Masks from scores and by name, against NumPy."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.masks.scores import builders, top_k_selection
from tests.support.cases import tiers
from tests.support.cases.masks import block_status


def largest(scores, k):
    """NumPy's top k: the first of equal scores, never -inf or NaN."""
    scores = np.where(np.isnan(scores), -np.inf, scores.astype(np.float64))
    rank = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1, kind="stable")
    return (rank < k) & (scores > -np.inf)


def scores_of(shape, dtype=np.float32):
    random = np.random.default_rng(0)
    scores = np.round(random.standard_normal(shape), 1).astype(np.float32)  # rounded: there are ties
    scores[random.random(shape) < 0.2] = -np.inf
    scores[..., 0, :] = -np.inf
    scores[..., 1, :2] = np.nan
    return jnp.asarray(scores, dtype)


@pytest.mark.parametrize("k", [1, 4, 19, 20, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_top_k(k, dtype):
    bias = scores_of((2, 3, 10, 20), dtype)
    got = jax.jit(lambda bias: masks.top_k(bias, k))(bias).to_dense(10, 20)
    np.testing.assert_array_equal(got, largest(np.asarray(bias), k))


def test_top_k_among():
    bias = scores_of((20, 20))
    got = masks.top_k(bias, 3, among=masks.causal() & masks.sliding_window(9, 0)).to_dense(20, 20)
    distance = np.arange(20)[:, None] - np.arange(20)
    want = largest(np.where((distance >= 0) & (distance <= 9), bias, -np.inf), 3)
    np.testing.assert_array_equal(got[0, 0], want)
    # One row of bias for all queries.
    got = masks.top_k(bias[5:6], 3).to_dense(20, 20)
    np.testing.assert_array_equal(got[0, 0], np.broadcast_to(largest(np.asarray(bias[5:6]), 3), (20, 20)))
    got = masks.top_k(bias[5:6], 3, among=masks.causal(), q_length=8, q_offset=4).to_dense(8, 20)
    np.testing.assert_array_equal(got[0, 0], largest(np.where(distance[4:12] >= 0, bias[5:6], -np.inf), 3))


AMONG = {
    "causal": (masks.causal(), {}),
    "bottom_right": (masks.causal(), {"q_offset": 60}),
    "offset_of_each": (masks.causal(), {"q_offset": jnp.array([-30, 100])}),
    "window": (masks.sliding_window(70, 3) & masks.prefix(110), {"q_offset": 20}),
    "lengths": (masks.prefix(jnp.array([130, 0])) & masks.causal(), {}),
    "all": (masks.sliding_window(None, None), {}),
    "none": (masks.sliding_window(5, 5), {"q_offset": 500}),
}


@pytest.mark.parametrize(
    ("name", "k"),
    tiers.some_pairs(AMONG, [1, 9, 64, 129], [("lengths", 64), ("none", 1)]),
)
def test_top_k_of_one_row_within_intervals(name, k, monkeypatch):
    """The keys are sorted once, for all queries together."""
    among, arguments = AMONG[name]
    monkeypatch.setattr(builders, "largest", None)
    for batch, heads, keys, dtype in ((2, 3, 130, "float32"), (1, 1, 64, "bfloat16"), (2, 1, 1, "float32")):
        bias = scores_of((batch, heads, 3, keys), dtype)[:, :, 2:]  # with ties, most of them at few values
        bias = bias.at[..., keys // 2 :].set(jnp.round(bias[..., keys // 2 :])).at[..., 0].set(jnp.nan)
        competes = np.asarray(among.to_dense(70, keys, **arguments))
        got = masks.top_k(bias, k, among=among, q_length=70, **arguments).to_dense(70, keys)
        np.testing.assert_array_equal(got, largest(np.where(competes, bias, -np.inf), k))


def test_non_interval_masks():
    bias = scores_of((1, 2, 2, 40))[:, :, 1:]
    for among in (masks.causal() | masks.prefix(3), masks.dilated(3) & masks.causal(), ~masks.causal()):
        got = masks.top_k(bias, 5, among=among, q_length=30).to_dense(30, 40)
        want = largest(np.where(among.to_dense(30, 40), bias, -np.inf), 5)
        np.testing.assert_array_equal(got, want)
        assert top_k_selection.key_intervals(among, 30, 40, 0) is None


def test_threshold():
    bias = scores_of((2, 3, 10, 20))
    np.testing.assert_array_equal(masks.threshold(bias, 0.5).to_dense(10, 20), np.asarray(bias) > 0.5)
    tau = jnp.array([0.1, 0.2, -0.3])[:, None, None]
    np.testing.assert_array_equal(masks.threshold(bias, tau).to_dense(10, 20), np.asarray(bias) > np.asarray(tau))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_threshold_between_16_bit_values(dtype):
    """A threshold that 16 bits would round up to the bias, as a number and as an array."""
    bias = jnp.full((2, 3), 0.3, dtype)
    tau = float(bias[0, 0]) - 1e-5
    for given in (tau, np.float32(tau), jnp.float32(tau)):
        assert masks.threshold(bias, given).to_dense(2, 3).all()
    assert jax.jit(lambda tau: masks.threshold(bias, tau).to_dense(2, 3))(tau).all()


@pytest.mark.slow
def test_ranked():
    """A bias of one row gives a mask of ranks, which equals the mask of its array in every form."""
    bias = jax.random.normal(jax.random.key(0), (2, 3, 1, 40))
    make = lambda bias: masks.top_k(bias, 5, among=masks.causal(), q_length=30, q_offset=8)
    mask = make(bias)
    want = mask.to_dense(30, 40)
    np.testing.assert_array_equal(mask.array, want)
    assert jax.eval_shape(make, bias).array.shape == want.shape
    np.testing.assert_array_equal(mask.elements(*np.ix_(*map(np.arange, want.shape))), want)
    np.testing.assert_array_equal(mask.rows(jnp.array([7, 3]), 40), want[:, :, [7, 3]])
    np.testing.assert_array_equal((mask & masks.prefix(20)).to_dense(30, 40), want & (np.arange(40) < 20))
    for by in ("query", "key"):
        of = lambda mask, by=by: (mask.block_lists(30, 40, 8, 16, by), mask.packed_partial(30, 40, 8, 16, by))
        jax.tree.map(np.testing.assert_array_equal, of(mask), of(masks.dense(want)))
    each = jax.vmap(lambda bias: make(bias).to_dense(30, 40)[0])(bias[:, None])
    np.testing.assert_array_equal(each, want)
    with pytest.raises(ValueError, match="top_k: got 30 queries and 40 keys, want 30 and 41"):
        mask.to_dense(30, 41)


def test_top_k_blocks():
    scores = scores_of((2, 3, 6, 7))
    mask = jax.jit(lambda scores: masks.top_k_blocks(scores, 3, (8, 16)))(scores)
    np.testing.assert_array_equal(mask.blocks, largest(np.asarray(scores), 3))
    lists = mask.block_lists(48, 112, 8, 16)
    assert lists.indices.shape == (2, 3, 6, 3)
    np.testing.assert_array_equal(lists.full_count, largest(np.asarray(scores), 3).sum(-1))
    assert not lists.partial_count.any()


def test_mixture_of_block_attention():
    """A query block's own block, and the best blocks before it: 3 in all."""
    scores = jnp.asarray(np.random.default_rng(1).standard_normal((3, 8, 8)), jnp.float32)
    mask = masks.top_k_blocks(scores, 3, 16, among=masks.causal(), always=masks.sliding_window(0, 0))
    row, column = np.ogrid[:8, :8]
    want = np.where(row == column, np.inf, np.where(column < row, scores, -np.inf))
    np.testing.assert_array_equal(mask.blocks[0], largest(want, 3))
    dense = (mask & masks.causal()).to_dense(128, 128)
    np.testing.assert_array_equal(block_status(np.asarray(dense), 16, 16)[0][0], largest(want, 3))
    assert (mask & masks.causal()).block_lists(128, 128, 16, 16).partial_count.tolist() == [[[1] * 8] * 3]


def test_always_blocks_are_ranked_first():
    """Blocks of 8 queries and 16 keys. `always` also has blocks past the diagonal, which count for nothing."""
    scores, among, always = scores_of((3, 8, 4)), masks.causal(), masks.prefix(1) | masks.sliding_window(0, 20)
    mask = masks.top_k_blocks(scores, 2, (8, 16), among=among, always=always)
    live = [block_status(np.asarray(x.to_dense(64, 64)), 8, 16)[0][0] for x in (among, always)]
    assert (live[1] & ~live[0]).any()
    np.testing.assert_array_equal(
        mask.blocks[0], largest(np.where(live[0], np.where(live[1], np.inf, scores), -np.inf), 2)
    )


def test_pooled_scores():
    random = np.random.default_rng(2)
    query, key = (random.standard_normal(shape).astype(np.float32) for shape in ((2, 20, 4, 8), (2, 37, 2, 8)))
    got = jax.jit(lambda q, k: masks.pooled_scores(q, k, (8, 16)))(query, key)
    want = np.empty((2, 4, 3, 3))
    for h, i, j in np.ndindex(4, 3, 3):
        q, k = query[:, i * 8 : i * 8 + 8, h].mean(axis=1), key[:, j * 16 : j * 16 + 16, h // 2].mean(axis=1)
        want[:, h, i, j] = (q * k).sum(axis=-1) / 8**0.5
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_builders_pass_no_gradient():
    x = jnp.ones((2, 8, 2, 4))

    def loss(x):
        mask = masks.top_k_blocks(masks.pooled_scores(x, x, 4), 1, 4) & masks.top_k(x[0, :, 0] @ x[0, :, 0].T, 3)
        return jnp.where(mask.to_dense(8, 8), x.sum(), 0).sum()

    kept = masks.top_k_blocks(masks.pooled_scores(x, x, 4), 1, 4) & masks.top_k(jnp.ones((8, 8)), 3)
    np.testing.assert_allclose(jax.grad(loss)(x), kept.to_dense(8, 8).sum())


def positions(n):
    return np.arange(n)[:, None], np.arange(n)


def test_presets():
    q, k = positions(32)
    causal, distance = q >= k, q - k
    near = lambda left, right: (distance <= left) & (distance >= -right)
    cells = np.random.default_rng(0).random((4, 4)) < 0.5
    want = {
        "causal": ({}, causal),
        "sliding_window": ({"left": 3, "right": None}, distance <= 3),
        "dilated": ({"rate": 3}, distance % 3 == 0),
        "block_sparse": ({"blocks": cells, "block_size": 8}, cells.repeat(8, 0).repeat(8, 1)),
        "global_local": ({"n": 2, "left": 4}, near(4, 4) | (q < 2) | (k < 2)),
        "prefix_lm": ({"n": 5}, causal | (k < 5)),
        "attention_sinks": ({"left": 6, "n": 2}, causal & (near(6, 0) | (k < 2))),
        "strided": ({"stride": 5}, causal & (near(5, 0) | (distance % 5 == 0))),
        "longformer": ({"window": 8, "n": 1}, near(4, 4) | (q < 1) | (k < 1)),
    }
    for name, (options, dense) in want.items():
        np.testing.assert_array_equal(masks.preset(name, **options).to_dense(32, 32)[0, 0], dense, err_msg=name)
    dilated = masks.preset("longformer", window=7, rate=2).to_dense(32, 32)[0, 0]
    np.testing.assert_array_equal(dilated, near(6, 6) & (distance % 2 == 0))


def test_bigbird():
    options = {"q_length": 100, "kv_length": 128, "block_size": 8, "heads": 3, "random_blocks": 2}
    mask = masks.preset("bigbird", **options)
    row, column = np.ogrid[:13, :16]
    fixed = (abs(row - column) <= 1) | (row < 1) | (column < 1)
    blocks = np.asarray(mask.blocks[0])
    assert blocks[:, fixed].all()
    np.testing.assert_array_equal((blocks & ~fixed).sum(-1), np.broadcast_to(np.minimum(2, (~fixed).sum(-1)), (3, 13)))
    assert (blocks[0] != blocks[1]).any()
    np.testing.assert_array_equal(blocks, masks.preset("bigbird", **options).blocks[0])
    assert (blocks != np.asarray(masks.preset("bigbird", **options, seed=1).blocks[0])).any()


BAD = {
    "k": (lambda: masks.top_k(jnp.ones((4, 4)), 0), ValueError, "k: got 0, want an int of at least 1"),
    "bias_dtype": (
        lambda: masks.top_k(np.ones((4, 4)), 1),
        TypeError,
        "bias: got dtype float64, want an array, bfloat16",
    ),
    "bias_bool": (lambda: masks.threshold(np.ones((4, 4), bool), 1), TypeError, "bias: got dtype bool, want an array"),
    "bias_rank": (lambda: masks.threshold(jnp.ones(4), 1), ValueError, "bias: got shape (4,), want [batch, heads"),
    "bias_foreign": (
        lambda: masks.top_k(types.SimpleNamespace(dtype="torch.float32", shape=(4, 4)), 1),
        TypeError,
        "bias: got SimpleNamespace, want an array, of JAX or NumPy",
    ),
    "bias_list": (lambda: masks.top_k([[1.0]], 1), TypeError, "bias: got list, want an array"),
    "tau": (lambda: masks.threshold(jnp.ones((4, 4)), "1"), TypeError, "tau: got str, want a number or an array"),
    "tau_shape": (
        lambda: masks.threshold(jnp.ones((4, 4)), jnp.ones(3)),
        ValueError,
        "tau: got shape (3,), want a shape that broadcasts to bias's shape (1, 1, 4, 4)",
    ),
    "q_length_none": (
        lambda: masks.top_k(jnp.ones((1, 4)), 1, among=masks.causal()),
        ValueError,
        "q_length: got None with `among` and a bias of one row, want the number of queries",
    ),
    "q_length": (
        lambda: masks.top_k(jnp.ones((3, 4)), 1, among=masks.causal(), q_length=4),
        ValueError,
        "q_length: got 4, want the 3 rows of bias, or None",
    ),
    "among": (lambda: masks.top_k(jnp.ones((4, 4)), 1, among=np.ones((4, 4))), TypeError, "among: got ndarray, want a"),
    "always": (
        lambda: masks.top_k_blocks(jnp.ones((4, 4)), 1, 8, always="local"),
        TypeError,
        "always: got str, want a Mask",
    ),
    "block_size": (lambda: masks.top_k_blocks(jnp.ones((4, 4)), 1, 0), ValueError, "block_size: got 0, want an int"),
    "query_rank": (
        lambda: masks.pooled_scores(jnp.ones((4, 4)), jnp.ones((4, 4)), 2),
        ValueError,
        "query: got shape (4, 4), want [batch, length, heads, head_dim]",
    ),
    "key_heads": (
        lambda: masks.pooled_scores(jnp.ones((1, 4, 4, 2)), jnp.ones((1, 4, 3, 2)), 2),
        ValueError,
        "key: got shape (1, 4, 3, 2), want query's batch and head_dim and a divisor of its heads: (1, 4, 4, 2)",
    ),
    "preset": (lambda: masks.preset("ring"), ValueError, "name: got 'ring', want one of 'attention_sinks', 'bigbird'"),
    "preset_type": (
        lambda: masks.preset(["causal"]),
        TypeError,
        "name: got list, want a str, one of 'attention_sinks', 'bigbird'",
    ),
    "preset_option": (
        lambda: masks.preset("dilated", n=3),
        TypeError,
        "options: got n for 'dilated', want (rate): ",
    ),
    "preset_value": (lambda: masks.preset("dilated", rate=0), ValueError, "rate: got 0, want an int of at least 1"),
    "longformer": (
        lambda: masks.preset("longformer", window=1),
        ValueError,
        "window: got 1, want an int of at least 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("keys", "k"), [(100, 7), (257, 256), (64, 1), (300, 100)])
def test_top_k_by_search(dtype, keys, k, monkeypatch):
    """The search in unsorted scores gives the same keys: with ties, both zeros, infinities and short rows."""
    x = np.random.default_rng(0).standard_normal((2, 3, 6, keys))
    x[0] = np.round(x[0])
    x[0, 0, 1, 5] = np.inf
    x[1, 0, :4] = -np.inf
    x[1, 0, 2, 3] = 2
    x[1, 1, 2, : keys // 2] = np.nan
    x[1, 2, 3], x[1, 2, 3, ::2] = 0.0, -0.0
    x = jnp.asarray(x, dtype)
    want = masks.top_k(x, k).to_dense(6, keys)
    searched, search = [], top_k_selection._by_search
    monkeypatch.setattr(top_k_selection, "_by_search", lambda *given: searched.append(1) or search(*given))
    monkeypatch.setattr(top_k_selection, "SEARCH_FROM", 0)
    np.testing.assert_array_equal(masks.top_k(x, k).to_dense(6, keys), want)
    assert len(searched) == (k < keys)


def test_search_handles_rows_shorter_than_k():
    """A row's length may be a symbol, whose relation to k is unknown."""
    bias = jnp.asarray([[1.0, -jnp.inf, 2.0], [-jnp.inf] * 3, [3.0, 3.0, 0.0]])
    got = top_k_selection._by_search(bias, 5, 31)
    np.testing.assert_array_equal(got, [[True, False, True], [False] * 3, [True] * 3])
