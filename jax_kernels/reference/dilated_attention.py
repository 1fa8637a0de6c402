"""Dilated attention in plain jnp, by its definition: an array of tokens times tokens for each head and branch.

It computes in the precision of its inputs. With float64 inputs it is the oracle.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kernels.hilbert import hilbert_order, invert_order
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.reference import attention as reference


def classes(
    length: int,
    num_heads: int,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    heads: str = "all",
    layout: str = "overlap",
    order: str | None = None,
) -> list[np.ndarray]:
    """For each branch, ids int32 [H, T]: a head's tokens with the same id attend to each other; -1 takes no part.

    The arguments are as in jax_kernels.dilated_attention: a branch is a pair of a segment length and a dilation rate.
    """
    branches = list(zip(segment_lengths, dilation_rates, strict=True))
    largest = max([1, *dilation_rates])
    every_head = np.ones((num_heads, 1), np.int32)
    if layout == "partition":
        ids, start = np.zeros(length, np.int32), 0
        for segment, (size, rate) in enumerate([*branches, (length, 1)]):
            size = min(size, length - start)
            ids[start : start + size] = segment * largest + _ranks(size, order) % rate
            start += size
        return [every_head * ids]

    out, tokens = [], np.arange(length)
    groups = np.array_split(np.arange(num_heads), len(branches))
    for index, (size, rate) in enumerate(branches):
        ranks = np.concatenate([_ranks(min(size, length - s), order) for s in range(0, length, size)])
        if heads == "all":
            offsets = np.arange(num_heads) // -(-num_heads // rate)
        else:
            offsets = np.full(num_heads, -1)
            offsets[groups[index]] = index % rate
        taken = ranks % rate == offsets[:, None]
        out.append(np.where(taken, tokens // size, -1).astype(np.int32))
    return out


def _ranks(size: int, order: str | None) -> np.ndarray:
    """The rank of each token of a segment along the curve: int [size]. Tokens with equal rank modulo the rate form a
    class.

    order: None for the order of the sequence, else the order of a Hilbert curve.
    """
    return np.arange(size) if order is None else invert_order(hilbert_order(size))


def dilated_attention(
    query,
    key,
    value,
    segment_ids=None,
    *,
    is_causal: bool = False,
    combine: str = "lse",
    stop_gradient_weights: bool = False,
    scale: float | None = None,
    **pattern,
):
    """(out [B, T, H, Dv], lse [B, H, T]), in the precision of the inputs, at least float32.

    query, key: [B, T, H, D]. value: [B, T, H, Dv]. segment_ids: int32 [B, T], or None. combine: "lse" weights the
    branches by their softmax sums, "mean" equally. pattern: segment_lengths, dilation_rates, heads, layout and order of
    `classes`.
    """
    num_heads = query.shape[2]
    options = AttentionOptions(query.shape[-1] ** -0.5 if scale is None else scale, is_causal=is_causal)
    outs, lses = [], []
    for ids in classes(query.shape[1], num_heads, **pattern):
        mask = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
        inputs = AttentionInputs(
            query, key, value, mask=mask[None], q_segment_ids=segment_ids, kv_segment_ids=segment_ids
        )
        out, lse = reference.attention(inputs, options)
        outs.append(out)
        lses.append(lse)
    out, lse = jnp.stack(outs), jnp.stack(lses)
    alive = ~jnp.isneginf(lse)
    highest = lax.stop_gradient(jnp.max(jnp.where(alive, lse, -jnp.inf), axis=0))
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = jnp.where(alive, jnp.exp(jnp.where(alive, lse - highest, 0)), 0)
    total = weights.sum(axis=0)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    merged_lse = jnp.where(dead, -jnp.inf, jnp.log(total) + highest)
    weights = jnp.full_like(weights, 1 / len(outs)) if combine == "mean" else weights / total
    weights = lax.stop_gradient(weights) if stop_gradient_weights else weights
    return jnp.einsum("nbht,nbthd->bthd", weights, out, precision="highest"), merged_lse


# Jitted, because un-jitted einsums in float64 are slow on a CPU.
oracle = jax.jit(
    dilated_attention,
    static_argnames=(
        *("is_causal", "combine", "stop_gradient_weights", "scale"),
        *("segment_lengths", "dilation_rates", "heads", "layout", "order"),
    ),
)
