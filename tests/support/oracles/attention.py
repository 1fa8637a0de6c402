"""Attention by its definition in NumPy, with a handwritten gradient.

It compiles nothing, since compiling dominates the time of small tests. It uses nothing of the library except the case.
"""

import numpy as np

from jax_kernels.testing import AttentionResults, without_garbage


def live(case):
    """The keys that each query of an AttentionCase may attend to: bool [B, H, T, S]."""
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
        if case.pattern is not None:  # tests/masks checks to_dense against NumPy
            mask = np.asarray(mask.to_dense(case.q_length, case.kv_length, q_offset=arguments["q_offset"]))
        live &= mask
    if arguments["bias"] is not None:
        live &= np.asarray(arguments["bias"]).astype(np.float64) > -np.inf
    return live


def attention(case, query, key, value, dout, dlse, *, keep=None):
    """AttentionResults of an AttentionCase in float64. keep: the keys that each query attends to; None: live(case)."""
    key, value = without_garbage(case, key, value)
    query, key, value, dout, dlse = (np.asarray(x).astype(np.float64) for x in (query, key, value, dout, dlse))
    group, keep = case.heads // case.kv_heads, live(case) if keep is None else keep
    k, v = (np.repeat(x, group, axis=2) for x in (key, value))
    scale, bias, sinks = case.head_dim**-0.5, case.arguments["bias"], case.arguments["sinks"]
    scores = scale * np.einsum("bthd,bshd->bhts", query, k)
    slope = np.ones_like(scores)
    if case.softcap is not None:
        tanh = np.tanh(scores / case.softcap)
        scores, slope = case.softcap * tanh, 1 - tanh**2
    if bias is not None:
        scores = scores + np.where(keep, np.asarray(bias).astype(np.float64), 0)
    highest = np.where(keep, scores, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sinks = sinks.astype(np.float64)[:, None, None]
        highest = np.maximum(highest, sinks)
    highest = np.where(np.isneginf(highest), 0, highest)
    weights = np.exp(np.where(keep, scores - highest, -np.inf))
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        share = np.exp(sinks - highest)
        total = total + share
        share = share / np.where(total == 0, 1, total)  # a sink of -inf counts as no sink
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + highest)[..., 0]
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
