"""Masks by name: well-known patterns, made of the simple masks."""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kernels.masks import checks
from jax_kernels.masks.arrays import block_sparse
from jax_kernels.masks.mask import Mask
from jax_kernels.masks.positions import causal, dilated, global_tokens, prefix, sliding_window
from jax_kernels.plain_numbers import plain
from jax_kernels.spelling import did_you_mean


def prefix_lm(n: Any) -> Mask:
    """Causal attention in which all queries also attend to the first n keys. n: int or int32 [B].

    Raffel et al. (2019), arXiv:1910.10683.
    """
    return causal() | prefix(n)


def global_local(n: Any, left: int, right: int | None = None) -> Mask:
    """A window and n global tokens, which attend to all tokens and to which all tokens attend.

    left, right: the tokens of the window before and after the query; right None is as wide as left. n: int or int32
    [B].
    """
    return global_tokens(n) | sliding_window(left, left if right is None else right)


def longformer(window: int, n: Any = 0, rate: int = 1) -> Mask:
    """A window of window // 2 tokens on each side of the query, and the first n tokens as global tokens.

    rate: with a rate above 1, the window has as many tokens, but only every rate-th one, so it reaches rate times as
    far. window is at least 2. Beltagy et al. (2020), arXiv:2004.05150.
    """
    side = checks.integer("window", window, 2) // 2 * checks.integer("rate", rate, 1)
    local = sliding_window(side, side)
    return (local & dilated(rate) if rate > 1 else local) | global_tokens(n)


def bigbird(
    q_length: int,
    kv_length: int,
    block_size: int,
    window_blocks: int = 3,
    global_blocks: int = 1,
    random_blocks: int = 3,
    heads: int = 1,
    seed: int = 0,
) -> Mask:
    """A block_sparse mask of window, global and random blocks of block_size queries by block_size keys.

    window_blocks: blocks of keys around the diagonal for each block of queries. global_blocks: the first blocks of
    queries keep all keys, and all queries keep the first blocks of keys. random_blocks: further blocks of keys for each
    block of queries of each head, drawn by NumPy from the seed, or fewer if fewer are left. heads: the number of heads
    with patterns of their own; 1 gives all heads the same. Zaheer et al. (2020), arXiv:2007.14062.
    """
    q_length, kv_length = checks.lengths(q_length, kv_length)
    block_size, heads = checks.integer("block_size", block_size, 1), checks.integer("heads", heads, 1)
    window_blocks = checks.integer("window_blocks", window_blocks, 1)
    global_blocks, random_blocks = (
        checks.integer(name, x, 0) for name, x in (("global_blocks", global_blocks), ("random_blocks", random_blocks))
    )
    row, column = np.ogrid[: -(-q_length // block_size), : -(-kv_length // block_size)]
    first = row - window_blocks // 2
    keep = ((first <= column) & (column < first + window_blocks)) | (row < global_blocks) | (column < global_blocks)
    order = np.where(keep, np.inf, np.random.default_rng(plain(seed)).random((heads, *keep.shape)))
    rank = order.argsort(axis=-1).argsort(axis=-1)
    return block_sparse(jnp.asarray(keep | (rank < random_blocks)), block_size)


def strided(stride: int) -> Mask:
    """Causal attention to the query, the `stride` tokens before it, and every stride-th token before these.

    Child et al. (2019), arXiv:1904.10509.
    """
    stride = checks.integer("stride", stride, 1)
    return causal() & (sliding_window(stride, 0) | dilated(stride))


def attention_sinks(left: int, n: Any = 4) -> Mask:
    """Causal attention to the query, the `left` tokens before it, and the first n tokens. n: int or int32 [B].

    Xiao et al., "StreamingLLM" (2023), arXiv:2309.17453.
    """
    return causal() & (sliding_window(left, 0) | prefix(n))


PRESETS: dict[str, Callable[..., Mask]] = {
    "attention_sinks": attention_sinks,
    "bigbird": bigbird,
    "block_sparse": block_sparse,
    "causal": causal,
    "dilated": dilated,
    "global_local": global_local,
    "longformer": longformer,
    "prefix_lm": prefix_lm,
    "sliding_window": sliding_window,
    "strided": strided,
}


def preset(name: str, **options: Any) -> Mask:
    """A mask by its name in the literature. The options are the arguments of the function of this name.

    "causal"(), "sliding_window"(left, right), "dilated"(rate), "block_sparse"(blocks, block_size),
    "global_local"(n, left, right), "prefix_lm"(n), "attention_sinks"(left, n), "strided"(stride),
    "longformer"(window, n, rate), "bigbird"(q_length, kv_length, block_size, window_blocks, global_blocks,
    random_blocks, heads, seed). Raises ValueError for another name, TypeError for options that the function lacks.
    """
    names = ", ".join(map(repr, PRESETS))
    if not isinstance(name, str):
        raise TypeError(f"name: got {type(name).__name__}, want a str, one of {names}")
    if name not in PRESETS:
        raise ValueError(f"name: got {name!r}, want one of {names}{did_you_mean(name, PRESETS)}")
    signature = inspect.signature(PRESETS[name])
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(str(x).partition(":")[0] for x in signature.parameters.values())
        raise TypeError(f"options: got {', '.join(options) or 'none'} for {name!r}, want ({takes}): {error}") from None
    return PRESETS[name](**options)
