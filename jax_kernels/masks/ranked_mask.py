"""The mask that top_k makes of one score per key. It holds values of each key and of each query, not of each pair."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import checks
from jax_kernels.masks.arrays import DenseMask, with_batch
from jax_kernels.masks.mask import node
from jax_kernels.masks.restriction import of_heads


@node
class Ranked(DenseMask):
    """Keeps for each query the keys j with start <= j < end whose rank is at most the query's `last`.

    rank: int32 [B or 1, H or 1, S], the rank of each key among all keys, from 0 (largest score) to S - 1. last: int32
    [B or 1, H or 1, T], the largest rank that each query keeps; -1 for none. start, end: int32 [B or 1, T].
    """

    rank: Any
    last: Any
    start: Any
    end: Any

    @property
    def batch(self) -> int:
        return self.rank.shape[0]

    @property
    def heads(self) -> int:
        return self.rank.shape[1]

    @property
    def array(self):
        """The mask pair by pair: bool [B or 1, H or 1, T, S]. A ShapeDtypeStruct if a field is one."""
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self)):
            return jax.eval_shape(_array, self)
        return _array(self)

    def check_lengths(self, q_length, kv_length):
        lengths = self.last.shape[2], self.rank.shape[2]
        if lengths != (q_length, kv_length):
            raise ValueError(f"top_k: got {lengths[0]} queries and {lengths[1]} keys, want {q_length} and {kv_length}")

    def of_heads(self, first, count):
        own = {name: of_heads(getattr(self, name), first, count) for name in ("rank", "last")}
        return dataclasses.replace(self, **own)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        b, h = 0 if self.batch == 1 else b, 0 if self.heads == 1 else h
        queries = self.last[b, h, q_index], self.start[b, q_index], self.end[b, q_index]
        return is_kept(k_index, self.rank[b, h, k_index], *queries)

    def rows(self, q_index, kv_length, *, q_offset=0):
        _, offset = checks.offset(q_offset)
        start, end = (x[:, None, q_index, None] for x in (self.start, self.end))
        keys = jnp.arange(kv_length, dtype=jnp.int32)
        keep = is_kept(keys, self.rank[:, :, None], self.last[:, :, q_index, None], start, end)
        return with_batch(keep, offset)

    def __repr__(self) -> str:
        return f"top_k({', '.join(map(checks.array_text, (self.rank, self.last)))})"


def is_kept(key: Any, rank: Any, last: Any, start: Any, end: Any) -> Any:
    """Whether each pair is kept: bool, in the joint shape of the arguments, which broadcast with each other.

    key, rank: the index of the key, and its rank. last, start, end: of the query, as in the fields of Ranked: it keeps
    the keys from start to end - 1 whose rank is at most last.
    """
    return (rank <= last) & (start <= key) & (key < end)


@jax.jit
def _array(mask: Ranked) -> jax.Array:
    return mask.rows(slice(None), mask.rank.shape[2])
