"""Masks of calls without queries, keys, batch entries or heads."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks

# (batch, heads, queries, keys)
SIZES = [(2, 4, 0, 3), (2, 4, 3, 0), (2, 4, 0, 0), (0, 4, 3, 5), (2, 0, 3, 5)]


def masks_of(batch, heads, queries, keys):
    ids = lambda *shape: jnp.zeros(shape, jnp.int32)
    scores, rows, columns = jnp.ones((batch, heads, queries, keys)), -(-queries // 2), -(-keys // 2)
    cells = jnp.ones((batch, heads, rows, columns))
    q_ids, kv_ids = ids(batch, queries), ids(batch, keys)
    return {
        "causal": masks.causal(),
        "sliding_window": masks.sliding_window(2, 1),
        "prefix": masks.prefix(ids(batch)),
        "global_tokens": masks.global_tokens(1),
        "dilated": masks.dilated(2),
        "segments": masks.segments(q_ids, kv_ids),
        "block_sparse": masks.block_sparse(cells > 0, 2),
        "dense": masks.dense(scores),
        "function": masks.from_function(lambda b, h, q, k: q >= k + b + h, batch=batch, heads=heads),
        "lookup": masks.from_function(lambda b, h, q, k, x, y: x[b, q] == y[b, k], q_ids, kv_ids, batch=batch),
        "captured": masks.from_function(lambda b, h, q, k: q_ids[b, q] == kv_ids[b, k], batch=batch),
        "top_k": masks.top_k(scores, 2),
        "ranked": masks.top_k(jnp.ones((1, keys)), 2, among=masks.causal(), q_length=queries),
        "among": masks.top_k(scores, 2, among=masks.causal() & masks.prefix(2)),
        "threshold": masks.threshold(scores, jnp.zeros((heads, 1, 1))),
        "top_k_blocks": masks.top_k_blocks(cells, 2, 2, among=masks.sliding_window(2, 0), always=masks.prefix(1)),
        "bigbird": masks.preset("bigbird", q_length=queries, kv_length=keys, block_size=2),
        "longformer": masks.preset("longformer", window=4, n=1),
        "composed": masks.segments(q_ids, kv_ids) & ~masks.causal() | masks.dense(scores),
    }


@pytest.mark.parametrize("sizes", SIZES)
def test_every_mask(sizes):
    batch, heads, queries, keys = sizes
    for name, mask in masks_of(*sizes).items():
        dense = mask.to_dense(queries, keys)
        want = (1 if mask.batch == 1 else batch, 1 if mask.heads == 1 else heads, queries, keys)
        assert (dense.shape, dense.dtype) == (want, bool), name
        if 0 not in want:
            continue
        assert mask.density(queries, keys, 2) == 0, name
        for by, blocks in (("query", -(-queries // 2)), ("key", -(-keys // 2))):
            lists = mask.block_lists(queries, keys, 2, 2, by)
            assert lists.full_count.shape == (*want[:2], blocks), name
            assert not np.asarray(lists.full_count + lists.partial_count).any(), name
            words = mask.packed_partial(queries, keys, 2, 2, by).words
            assert (words.shape, np.asarray(words).any()) == ((1, 1, 2), False), name


def test_pooled_scores():
    for queries, keys in ((0, 5), (5, 0), (0, 0)):
        scores = masks.pooled_scores(jnp.ones((2, queries, 4, 16)), jnp.ones((2, keys, 2, 16)), 4)
        assert scores.shape == (2, 4, -(-queries // 4), -(-keys // 4))
    assert masks.pooled_scores(jnp.ones((0, 5, 4, 16)), jnp.ones((0, 6, 2, 16)), 4).shape == (0, 4, 2, 2)
    assert masks.pooled_scores(jnp.ones((1, 5, 0, 16)), jnp.ones((1, 6, 0, 16)), 4).shape == (1, 0, 2, 2)


def test_errors():
    for function in (lambda b, h, q, k, x: unknown, lambda b, h, q, k: q >= k):  # noqa: F821
        with pytest.raises(TypeError, match=r"function: raised (NameError|TypeError) when traced"):
            masks.from_function(function, jnp.zeros((0,)))
    with pytest.raises(ValueError, match="q_length, kv_length: got 0 and 3, want at least 1 for a picture"):
        masks.causal().plot("unused.png", 0, 3, 2)
