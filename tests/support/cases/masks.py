"""Masks with independent definitions in NumPy, and the status of the blocks of a dense mask."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kernels import masks
from jax_kernels.masks import Mask

B, H, T, S = 2, 3, 50, 45
BLOCKS = (8, 16)


@dataclasses.dataclass(frozen=True)
class Defined:
    """A mask of T queries and S keys, and the same mask in NumPy: keep(p, k), bool broadcastable to [B, H, T, S].

    p: [B, 1, T, 1], positions of the queries. k: [S]. exact: whether the mask's block status must be exact.
    """

    mask: Mask
    keep: Callable[[Any, Any], Any]
    exact: bool = True

    def __and__(self, other):
        return Defined(
            self.mask & other.mask, lambda p, k: self.keep(p, k) & other.keep(p, k), self.exact & other.exact
        )

    def __or__(self, other):
        return Defined(
            self.mask | other.mask, lambda p, k: self.keep(p, k) | other.keep(p, k), self.exact & other.exact
        )

    def __invert__(self):
        return Defined(~self.mask, lambda p, k: ~self.keep(p, k), self.exact)

    def conservative(self):
        return dataclasses.replace(self, exact=False)

    def dense(self, q_offset=0):
        offset = np.broadcast_to(q_offset, (B,)).reshape(B, 1, 1, 1)
        keep = self.keep(np.arange(T)[:, None] + offset, np.arange(S))
        return np.broadcast_to(keep, (B, H, T, S))


def causal():
    return Defined(masks.causal(), lambda p, k: p >= k)


def window(left, right):
    def keep(p, k):
        after = (p - left <= k) if left is not None and left >= 0 else np.ones_like(p - k, bool)
        return after & (k <= p + right) if right is not None and right >= 0 else after

    return Defined(masks.sliding_window(left, right), keep)


def _per_batch(n):
    return n if isinstance(n, int) else np.reshape(n, (-1, 1, 1, 1))


def _given(n):
    return n if isinstance(n, int) else jnp.asarray(n, jnp.int32)


def prefix(n):
    return Defined(masks.prefix(_given(n)), lambda p, k: (k < _per_batch(n)) & (p == p))


def global_tokens(n):
    return Defined(masks.global_tokens(_given(n)), lambda p, k: (p < _per_batch(n)) | (k < _per_batch(n)))


def dilated(rate):
    return Defined(masks.dilated(rate), lambda p, k: (p - k) % rate == 0)


def ids(seed, batch, length, kind):
    """Segment ids. "packed": in runs, with padding of -1 at the end. "mixed": in any order."""
    random = np.random.default_rng([seed, batch, length])
    if kind == "mixed":
        return random.integers(-1, 3, (batch, length), np.int32)
    borders = np.sort(random.integers(0, length, (batch, 3)), axis=1)
    found = (np.arange(length)[None, :, None] >= borders[:, None]).sum(axis=-1, dtype=np.int32)
    return np.where(found == 3, -1, found).astype(np.int32)


def segments(q_ids, kv_ids):
    def keep(p, k):
        q, kv = q_ids[:, None, :, None], kv_ids[:, None, None, :]
        return (q == kv) & (q >= 0)

    return Defined(masks.segments(q_ids, kv_ids), keep)


def packed(seed=0, batch=B):
    return segments(ids(seed, batch, T, "packed"), ids(seed, B, S, "packed"))


def mixed(seed=0, batch=B):
    return segments(ids(seed, batch, T, "mixed"), ids(seed + 1, B, S, "mixed")).conservative()


def block_sparse(block_q, block_kv, batch=B, heads=H, seed=0):
    """The block status is exact alone; in compositions, if the blocks of the lists lie within the mask's blocks."""
    cells = np.random.default_rng(seed).random((batch, heads, -(-T // block_q), -(-S // block_kv))) < 0.4
    keep = np.repeat(np.repeat(cells, block_q, axis=2)[:, :, :T], block_kv, axis=3)[..., :S]
    return Defined(masks.block_sparse(cells, (block_q, block_kv)), lambda p, k: keep)


def dense(shape=(B, H, T, S), share=0.97, seed=0):
    array = np.random.default_rng(seed).random(shape) < share
    array[..., : min(16, shape[2]), : min(32, shape[3])] = True
    array[..., -20:, -20:] &= shape[2] == 1
    return Defined(masks.dense(array), lambda p, k: array)


def _function(b, h, q, k, table):
    return ((q + b * 7) // 3 * (k // 5 + h) % 4 != 1) & (table[k] > 0) & (q > k - 20)


def function():
    table = (np.arange(S) % 23 != 7).astype(np.int32)
    b, h = np.arange(B).reshape(B, 1, 1, 1), np.arange(H).reshape(H, 1, 1)
    mask = masks.from_function(_function, jnp.asarray(table), batch=B, heads=H)
    return Defined(mask, lambda p, k: _function(b, h, p, k, table))


CASES = {
    "causal": causal(),
    "all": window(None, None),
    "nothing": ~window(None, None),
    "window": window(11, 4),
    "window_of_one": window(0, 0),
    "window_left": window(20, -1),
    "not_window": ~window(9, 6),
    "causal_window": causal() & window(13, None),
    "prefix_of_batch": prefix((5, 40)),
    "prefix_lm": causal() | prefix(20),
    "global": global_tokens(15),
    "longformer": window(6, 6) | global_tokens((3, 17)),
    "not_longformer": ~(window(6, 6) | global_tokens(18)),
    "dilated": dilated(40),
    "strided": causal() & (window(5, 0) | dilated(33)),
    "packed": packed(),
    "causal_packed": causal() & packed(1, batch=1),
    "window_packed": window(10, 3) & packed(2),
    "everything_packed": (causal() | prefix(9)) & (window(19, 2) | global_tokens(2)) & packed(3),
    "not_packed": ~packed(4) & causal(),
    "mixed": causal() & mixed(),
    "dilated_packed": (dilated(24) & packed()).conservative(),
    "block_sparse": block_sparse(*BLOCKS),
    "block_sparse_larger": block_sparse(16, 32, batch=1) & causal(),
    "block_sparse_odd": block_sparse(5, 7, heads=1),
    "not_block_sparse_smaller": ~block_sparse(4, 4, heads=1),
    "block_sparse_packed": (block_sparse(5, 7, heads=1) & packed()).conservative(),
    "dense": dense(),
    "not_dense_of_keys": ~dense((B, 1, 1, S), 0.5),
    "dense_of_queries": dense((1, H, T, 1), 0.7),
    "causal_dense": causal() & dense((1, H, T, S)) & ~packed(),
    "function": function(),
    "function_or_window": function() & prefix(30) | window(3, 3),
}


def block_status(dense, block_q, block_kv):
    """(live, full) of NumPy [B, H, T, S]. A block past the last key is not full; queries past the last do not count."""
    *leading, q_length, kv_length = dense.shape
    rows, columns = -(-q_length // block_q), -(-kv_length // block_kv)

    def blocks(fill_q, fill_kv):
        whole = np.full((*leading, rows * block_q, columns * block_kv), fill_kv)
        whole[..., q_length:, :] = fill_q
        whole[..., :q_length, :kv_length] = dense
        return whole.reshape(*leading, rows, block_q, columns, block_kv)

    past_end = np.arange(1, columns + 1) * block_kv > kv_length
    return blocks(False, False).any((3, 5)), blocks(True, False).all((3, 5)) & ~past_end


def unlist(lists, count):
    """(live, full) of BlockLists, [B or 1, H or 1, blocks, count]. Checks that indices are unique and ascending."""
    indices, full_count, partial_count = (np.asarray(x) for x in lists)
    assert indices.dtype == partial_count.dtype == full_count.dtype == np.int32
    total = partial_count + full_count
    assert total.max() <= indices.shape[-1], "more live blocks than the lists are wide"
    slots = np.arange(indices.shape[-1])
    assert ((indices >= 0) & (indices < count)).all()
    assert not indices[slots >= total[..., None]].any()
    ends_part = slots[1:] == full_count[..., None]
    ascends = (np.diff(indices, axis=-1) > 0) | ends_part | (slots[1:] >= total[..., None])
    assert ascends.all()
    live, full = (np.zeros((*indices.shape[:3], count), bool) for _ in range(2))
    for place in np.ndindex(indices.shape[:3]):
        live[place][indices[place][: total[place]]] = True
        full[place][indices[place][: full_count[place]]] = True
    assert (live.sum(-1) == total).all(), "a list has an index twice"
    return live, full
