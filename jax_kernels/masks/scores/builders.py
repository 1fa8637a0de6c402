"""Masks made from scores of keys, or from scores of blocks. They are built on the device, also under jit."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.masks import checks
from jax_kernels.masks.arrays import BlockSparse, Dense
from jax_kernels.masks.block_lists import block_status
from jax_kernels.masks.mask import Mask, all_valid
from jax_kernels.masks.ranked_mask import Ranked
from jax_kernels.masks.scores.top_k_selection import key_intervals, largest, largest_between
from jax_kernels.tracing.promotion import under_defaults


@under_defaults
def top_k(
    bias: jax.Array, k: int, *, among: Mask | None = None, q_length: int | None = None, q_offset: Any = 0
) -> Mask:
    """Keeps for every query the k keys with the largest bias.

    Equivalent to the following JAX code, except that the first keys of a tie are kept::

        bias = where(among.to_dense(q_length, S, q_offset=q_offset), bias, -inf)
        keep = (bias >= sort(bias)[..., -k, None]) & (bias > -inf)

    bias: [T or 1, S], [H or 1, ...] or [B or 1, H or 1, T or 1, S], bfloat16, float16 or float32; -inf and NaN are
    never kept. k: at least 1; if fewer keys have a bias above -inf, all these keys are kept. among: the keys that
    compete, such as causal(). q_length: the number of queries, for `among` with a bias of one row. q_offset: the
    position of query 0, for `among`.

    A bias of one row is fastest if `among` is made of causal, sliding_window and prefix masks joined by `&`. Then the
    keys are sorted once, not for each query, and the mask holds their ranks, not a bool for each pair.

    Source: Shi et al., "Trainable Dynamic Mask Sparse Attention" (2025), arXiv:2508.02124.
    """
    bias, k = _scores("bias", bias), checks.integer("k", k, 1)
    if among is None:
        return Dense(largest(bias, k))
    among = _mask("among", among)
    rows = bias.shape[2]
    if q_length is None and rows == 1:
        raise ValueError("q_length: got None with `among` and a bias of one row, want the number of queries")
    q_length = rows if q_length is None else checks.integer("q_length", q_length, 0)
    if rows not in (1, q_length):
        raise ValueError(f"q_length: got {q_length}, want the {rows} rows of bias, or None")
    is_ranked = rows == 1 and 0 not in (q_length, *bias.shape)
    intervals = key_intervals(among, q_length, bias.shape[3], q_offset) if is_ranked else None
    if intervals is not None:
        return Ranked(*largest_between(bias[:, :, 0], k, *intervals))
    keep = among.to_dense(q_length, bias.shape[3], q_offset=q_offset)
    return Dense(largest(jnp.where(keep, bias, -jnp.inf), k), all_valid(among))


@under_defaults
def threshold(bias: jax.Array, tau: float | jax.Array) -> Mask:
    """Keeps the keys with bias > tau, compared in float32, as a dense mask.

    bias: [T or 1, S], [H or 1, ...] or [B or 1, H or 1, T or 1, S], bfloat16, float16 or float32. tau: a number, or
    an array that broadcasts to bias's shape, such as [H, 1, 1].
    """
    bias = _scores("bias", bias)
    if isinstance(tau, bool) or (not isinstance(tau, int | float | jax.Array) and not hasattr(tau, "__array__")):
        raise TypeError(f"tau: got {type(tau).__name__}, want a number or an array")
    shape = jnp.shape(tau)
    if len(shape) > 4 or any(x not in (1, y) for x, y in zip(shape[::-1], bias.shape[::-1], strict=False)):
        raise ValueError(f"tau: got shape {shape}, want a shape that broadcasts to bias's shape {bias.shape}")
    return Dense(bias.astype(jnp.float32) > tau)  # with a 16-bit bias, JAX would round a Python number to 16 bits


@under_defaults
def top_k_blocks(
    scores: jax.Array,
    k: int,
    block_size: int | tuple[int, int],
    *,
    among: Mask | None = None,
    always: Mask | None = None,
) -> Mask:
    """Keeps for every block of queries the k blocks of keys with the largest scores, as a block_sparse mask.

    scores: [rows, columns], [H or 1, ...] or [B or 1, H or 1, rows, columns], bfloat16, float16 or float32, such as
    pooled_scores; -inf and NaN are never kept. k: at least 1; lists by query are k blocks long. block_size: an int,
    or (queries, keys). among: only blocks in which this mask keeps a pair compete. always: blocks of `among` in which
    this mask keeps a pair come first, whatever their score; they count towards k. Both masks are for
    rows * block_size queries, the first at position 0, and columns * block_size keys.

    Equivalent to the following JAX code, except that the first blocks of a tie are kept::

        score = where(block is live in always, inf, scores)
        score = where(block is live in among, score, -inf)
        keep = (score >= sort(score)[..., -k, None]) & (score > -inf)

    Whole blocks are chosen: with among=causal(), the blocks on the diagonal hold later keys too, which
    `top_k_blocks(...) & causal()` masks out. Mixture of block attention is among=causal(), always=sliding_window(0, 0)
    (a query's own block); native sparse attention also keeps always=prefix(n) and a window.

    Source: Lu et al., "MoBA" (2025), arXiv:2502.13189; Yuan et al., "Native Sparse Attention" (2025), arXiv:2502.11089.
    """
    scores, k = _scores("scores", scores), checks.integer("k", k, 1)
    block_q, block_kv = checks.block_pair("block_size", block_size)
    rows, columns = scores.shape[2:]
    size = (rows * block_q, columns * block_kv)
    offset = jnp.zeros((1,), jnp.int32)
    live = lambda mask: block_status(mask, offset, lengths=size, blocks=(block_q, block_kv), static_offset=0)[0]
    if always is not None:
        scores = jnp.where(live(_mask("always", always)), jnp.inf, scores)
    if among is not None:
        scores = jnp.where(live(_mask("among", among)), scores, -jnp.inf)
    is_mask = all_valid(*(mask for mask in (always, among) if mask is not None))
    return BlockSparse(largest(scores, k), block_q, block_kv, min(k, columns), is_mask)


@under_defaults
def pooled_scores(query: jax.Array, key: jax.Array, block_size: int | tuple[int, int]) -> jax.Array:
    """Scores of blocks of queries and keys, from the means of the blocks: float32 [B, H, rows, columns].

    query: [B, T, H, D]. key: [B, S, Hkv, D], Hkv dividing H. Blocks at the end may be shorter. Equivalent to::

        means = lambda x, n: x.reshape(B, -1, n, heads, D).astype(float32).mean(axis=2)
        einsum("bqhd,bkhd->bhqk", means(query, block_size), means(key, block_size)) / sqrt(D)

    Masks pass no gradient to the scores that made them.
    """
    block_q, block_kv = checks.block_pair("block_size", block_size)
    for name, x in (("query", query), ("key", key)):
        if checks.floats(name, x, "an array").ndim != 4:
            raise ValueError(f"{name}: got shape {x.shape}, want [batch, length, heads, head_dim]")

    heads, kv_heads = query.shape[2], key.shape[2]
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or (heads % kv_heads if kv_heads else heads):
        raise ValueError(
            f"key: got shape {key.shape}, want query's batch and head_dim and a divisor of its heads: {query.shape}"
        )

    def means(x, block):
        x = x.astype(jnp.float32)
        length = x.shape[1]
        count = jnp.minimum(jnp.arange(-(-length // block), dtype=jnp.int32) * block + block, length)
        sizes = jnp.diff(count, prepend=0).astype(jnp.float32)
        x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
        return x.reshape(x.shape[0], len(sizes), block, *x.shape[2:]).sum(axis=2) / sizes[:, None, None]

    keys = jnp.repeat(means(key, block_kv), heads // max(kv_heads, 1), axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", means(query, block_q), keys, precision=lax.Precision.HIGHEST)
    return scores / query.shape[3] ** 0.5


def _scores(name: str, x: Any) -> jax.Array:
    """x as float scores [B or 1, H or 1, rows or 1, columns], without a gradient. Raises if it is anything else."""
    x = checks.four_axes(name, checks.floats(name, x, "an array"), "[batch, heads, rows, columns]")
    return lax.stop_gradient(x)


def _mask(name: str, x: Any) -> Mask:
    if not isinstance(x, Mask):
        raise TypeError(f"{name}: got {type(x).__name__}, want a Mask")
    return x
