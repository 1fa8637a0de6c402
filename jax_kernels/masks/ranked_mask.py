"""Masks of the keys that rank highest. They hold values for each key and each query, not for each pair."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import checks
from jax_kernels.masks.arrays import DenseMask, with_batch
from jax_kernels.masks.mask import node


@node
class Ranked(DenseMask):
    """Keeps for each query the keys from start to end whose rank is at most the query's last rank.

    rank: int32 [B, H, S], of each key. last: int32 [B, H, T]. start, end: int32 [B, T].
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
        """The mask pair by pair: bool [B, H, T, S]."""
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self)):
            return jax.eval_shape(_array, self)
        return _array(self)

    def check_lengths(self, q_length, kv_length):
        lengths = self.last.shape[2], self.rank.shape[2]
        if lengths != (q_length, kv_length):
            raise ValueError(f"top_k: got {lengths[0]} queries and {lengths[1]} keys, want {q_length} and {kv_length}")

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
    """Whether a query with this last rank and interval keeps a key of this rank."""
    return (rank <= last) & (start <= key) & (key < end)


@jax.jit
def _array(mask: Ranked) -> jax.Array:
    return mask.rows(slice(None), mask.rank.shape[2])
