"""What attention's tests share: the definition, written out in NumPy. It has nothing of the library but the case."""

import numpy as np
import pytest

from jax_kernels.testing import AttentionResults


def live(case):
    """Which keys each query of an AttentionCase may attend to: bool [B, H, T, S]."""
    arguments = case.arguments
    live = np.ones((case.batch, case.heads, case.q_length, case.kv_length), bool)
    left, right = (case.window,) * 2 if isinstance(case.window, int) else case.window or (-1, -1)
    for b in range(case.batch):
        offset = case.q_offset if isinstance(case.q_offset, int) else case.q_offset[b]
        distance = np.arange(case.kv_length) - (np.arange(case.q_length)[:, None] + offset)
        if case.is_causal:
            live[b] &= distance <= 0
        if left >= 0:
            live[b] &= distance >= -left
        if right >= 0:
            live[b] &= distance <= right
        if case.kv_lengths is not None:
            live[b] &= np.arange(case.kv_length) < case.kv_lengths[b]
        if arguments["segment_ids"] is not None:
            q_ids, kv_ids = (ids[b] for ids in arguments["segment_ids"])
            live[b] &= (q_ids[:, None] == kv_ids) & (q_ids >= 0)[:, None]
    if arguments["mask"] is not None:
        mask = arguments["mask"]
        if case.pattern is not None:  # tests/masks holds to_dense to definitions in NumPy
            mask = np.asarray(mask.to_dense(case.q_length, case.kv_length, q_offset=arguments["q_offset"]))
        live &= mask
    if arguments["bias"] is not None:
        live &= np.asarray(arguments["bias"]).astype(np.float64) > -np.inf
    return live


def attention(case, query, key, value, dout, dlse):
    """AttentionResults of an AttentionCase in float64."""
    query, key, value, dout, dlse = (np.asarray(x).astype(np.float64) for x in (query, key, value, dout, dlse))
    group, keep = case.heads // case.kv_heads, live(case)
    k, v = (np.repeat(x, group, axis=2) for x in (key, value))
    scale, bias, sinks = case.head_dim**-0.5, case.arguments["bias"], case.arguments["sinks"]
    scores = scale * np.einsum("bthd,bshd->bhts", query, k)
    slope = np.ones_like(scores)
    if case.softcap is not None:
        tanh = np.tanh(scores / case.softcap)
        scores, slope = case.softcap * tanh, 1 - tanh**2
    if bias is not None:
        scores = scores + np.where(keep, np.asarray(bias).astype(np.float64), 0)
    weights = np.exp(scores) * keep
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        share = np.exp(sinks.astype(np.float64))[:, None, None]
        total, share = total + share, share / (total + share)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0])
    weights /= np.where(total == 0, 1, total)
    out = np.einsum("bhts,bshd->bthd", weights, v)
    dweights = np.einsum("bthd,bshd->bhts", dout, v)
    delta = (weights * dweights).sum(axis=-1) - dlse
    dscores = weights * (dweights - delta[..., None])
    dbias = dsinks = None
    if bias is not None:
        dbias = dscores.sum(tuple(axis for axis in range(4) if bias.shape[axis] == 1), keepdims=True)
    if sinks is not None:
        dsinks = -(share[..., 0] * delta).sum((0, 2))
    dscores = dscores * slope * scale
    sums = lambda x: x.reshape(*key.shape[:3], group, -1).sum(axis=3)
    dq = np.einsum("bhts,bshd->bthd", dscores, k)
    dk = sums(np.einsum("bhts,bthd->bshd", dscores, query))
    dv = sums(np.einsum("bhts,bthd->bshd", weights, dout))
    return AttentionResults(out, lse, dq, dk, dv, dbias, dsinks)


@pytest.fixture(scope="session")
def numpy_attention():
    return attention


@pytest.fixture(scope="session")
def check_dead():
    """Checks that queries without a key and keys without a query have exact zeros, and lse = -inf or the sink."""

    def check(case, got):
        keep = live(case)
        queries = ~keep.any(axis=3)
        keys = ~keep.reshape(case.batch, case.kv_heads, -1, case.kv_length).any(axis=2).swapaxes(1, 2)
        rows = queries.swapaxes(1, 2)
        for name, dead in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            assert not np.asarray(got[name])[dead].any(), f"{name} is not 0 where nothing attends"
        if "lse" in got and not case.sinks:
            np.testing.assert_array_equal(np.isneginf(got["lse"]), queries)
        elif "lse" in got:
            sinks = np.broadcast_to(case.arguments["sinks"][:, None], queries.shape)
            np.testing.assert_allclose(np.asarray(got["lse"])[queries], sinks[queries], rtol=1e-6)
        if case.bias == "bhts":
            assert not np.asarray(got["dbias"])[~keep].any(), "dbias is not 0 where nothing attends"

    return check
