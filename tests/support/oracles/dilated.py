"""Dilated attention by its definition in NumPy: the tokens that each token sees are written out, the gradient by hand.

It uses nothing of the library except the Hilbert curve, which has its own tests.
"""

import math

import numpy as np

from jax_kernels import hilbert_order

# The results of dilated_attention, and the allowed error of each in bfloat16. out is rounded once in a branch and once
# in the merge; the gradients are rounded in each branch.
NAMES = ("out", "lse", "dq", "dk", "dv")
BFLOAT16_BOUNDS = (3e-3, 1e-5, 6e-3, 6e-3, 6e-3)


def segments_of(length, size):
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def in_order(tokens, order):
    """The tokens of a segment in the order to which the dilation applies."""
    tokens = list(tokens)
    return tokens if order is None else [tokens[i] for i in hilbert_order(len(tokens))]


def heads_of_group(num_heads, groups, index):
    small, large = num_heads // groups, num_heads % groups
    start = index * small + min(index, large)
    return range(start, start + small + (index < large))


def sees(
    length, num_heads, *, segment_lengths, dilation_rates, is_causal=False, heads="all", layout="overlap", order=None
):
    """For each branch bool [H, T, T]: whether a token (the second axis) sees another (the third)."""
    branches = list(zip(segment_lengths, dilation_rates, strict=True))
    out = []
    if layout == "partition":
        live, start = np.zeros((num_heads, length, length), bool), 0
        for size, rate in [*branches, (length, 1)]:
            tokens = in_order(range(start, min(start + size, length)), order)
            for phase in range(rate):
                for i in tokens[phase::rate]:
                    live[:, i, tokens[phase::rate]] = True
            start = min(start + size, length)
        out.append(live)
    else:
        for index, (size, rate) in enumerate(branches):
            live = np.zeros((num_heads, length, length), bool)
            for head in range(num_heads):
                if heads == "all":
                    offset = head // math.ceil(num_heads / rate)
                elif head in heads_of_group(num_heads, len(branches), index):
                    offset = index % rate
                else:
                    continue
                for segment in segments_of(length, size):
                    taken = in_order(segment, order)[offset::rate]
                    for i in taken:
                        live[head, i, taken] = True
            out.append(live)
    return [live & np.tri(length, dtype=bool) if is_causal else live for live in out]


def dilated_attention(
    query,
    key,
    value,
    dout,
    dlse,
    *,
    segment_ids=None,
    combine="lse",
    stop_gradient_weights=False,
    scale=None,
    **pattern,
):
    """(out [B, T, H, Dv], lse [B, H, T], dq, dk, dv) in float64."""
    query, key, value, dout, dlse = (np.asarray(x).astype(np.float64) for x in (query, key, value, dout, dlse))
    group = query.shape[2] // key.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * np.einsum("bthd,bshd->bhts", query, k)
    weights, totals = [], []
    for live in sees(query.shape[1], query.shape[2], **pattern):
        live = np.broadcast_to(live, scores.shape)
        if segment_ids is not None:
            ids = np.asarray(segment_ids)
            live = live & (ids[:, None, :, None] == ids[:, None, None, :]) & (ids >= 0)[:, None, :, None]
        weights.append(np.exp(scores) * live)
        totals.append(weights[-1].sum(axis=-1))
    total = sum(totals)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    shares = [x / np.where(total == 0, 1, total) for x in totals]
    factors = [np.full_like(x, 1 / len(totals)) for x in totals] if combine == "mean" else shares
    out, dscores, dv = 0, 0, 0
    outs = []
    for p, t in zip(weights, totals, strict=True):
        p /= np.where(t == 0, 1, t)[..., None]
        outs.append(np.einsum("bhts,bshd->bhtd", p, v))
    dout = dout.swapaxes(1, 2)
    out = sum(f[..., None] * o for f, o in zip(factors, outs, strict=True))
    for p, factor, share, o in zip(weights, factors, shares, outs, strict=True):
        dp = factor[..., None] * np.einsum("bhtd,bshd->bhts", dout, v)
        dtotal = dlse * share
        if combine == "lse" and not stop_gradient_weights:
            dtotal = dtotal + share * (dout * (o - out)).sum(axis=-1)
        dscores = dscores + p * (dp - (p * dp).sum(axis=-1, keepdims=True) + dtotal[..., None])
        dv = dv + np.einsum("bhts,bhtd->bshd", p * factor[..., None], dout)
    sums = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(axis=3)
    dq = scale * np.einsum("bhts,bshd->bthd", dscores, k)
    dk = sums(scale * np.einsum("bhts,bthd->bshd", dscores, query))
    return out.swapaxes(1, 2), lse, dq, dk, sums(dv)
