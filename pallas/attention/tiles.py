"""Which blocks a tile of attention visits: the mask as data, for both directions.

A tile's blocks are numbered in the order it visits them: first the partial ones, in which the predicate is
evaluated, then the full ones. `Blocks.at(step)` is the block that a step visits. Dead blocks have no number.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one tile. count: how many are visited; partial: how many of these need the predicate."""

    count: Any
    partial: Any
    at: Callable[[Any], Any]

    def at_least_one(self) -> "Blocks":
        """For a kernel that always visits a block: of a tile without any, block 0, as a partial one."""
        return Blocks(maximum(self.count, 1), maximum(self.partial, 1), lambda step: maximum(self.at(step), 0))


@dataclasses.dataclass(frozen=True)
class Limits:
    """What bounds the keys of a query: query i attends to keys below kv_length, and if causal to those at or
    below q_offset + i. The numbers are Python ints or traced scalars of one batch entry.
    """

    q_offset: Any
    kv_length: Any
    is_causal: bool

    def key_limit(self, q_index: Any) -> Any:
        """The number of keys that query `q_index` may attend to; they are the first ones."""
        if not self.is_causal:
            return self.kv_length
        return _clip(self.q_offset + q_index + 1, 0, self.kv_length)

    def keep(self, shape: tuple[int, int], kv_start: Any, q_start: Any, *, layout: Any, kv_axis: int, may_end: bool):
        """The predicate in a block of keys from kv_start and queries from q_start: bool, in a register layout.

        may_end: the block may reach past kv_length. The scalars are added to the rows, of which a thread has
        few: added to the columns, they would take a register each.
        """
        keys = plgpu.broadcasted_iota(jnp.int32, shape, kv_axis, layout=layout)
        queries = plgpu.broadcasted_iota(jnp.int32, shape, 1 - kv_axis, layout=layout)
        keep = None
        if self.is_causal:
            diagonal = self.q_offset + q_start - kv_start
            keep = keys - diagonal <= queries if kv_axis == 0 else queries + diagonal >= keys
        if may_end:
            ends = keys < self.kv_length - kv_start
            keep = ends if keep is None else keep & ends
        return keep

    def key_blocks(self, q_start: Any, block_q: int, block_kv: int) -> Blocks:
        """The blocks of keys that queries q_start ... q_start + block_q - 1 attend to, right to left."""
        longest = self.key_limit(q_start + block_q - 1)
        shortest = self.key_limit(q_start)
        count = _ceil_div(longest, block_kv)
        return Blocks(count, count - _div(shortest, block_kv), lambda step: count - 1 - step)

    def query_blocks(self, kv_start: Any, block_kv: int, block_q: int, q_length: int) -> Blocks:
        """The blocks of queries that attend to any of keys kv_start ... kv_start + block_kv - 1, left to right."""
        total = -(-q_length // block_q)
        first, full = 0, 0
        if self.is_causal:
            first = _clip(_div(maximum(kv_start - self.q_offset, 0), block_q), 0, total)
            full = _clip(_ceil_div(maximum(kv_start + block_kv - 1 - self.q_offset, 0), block_q), first, total)
        count = _where(kv_start < self.kv_length, total - first, 0)
        # A block that reaches past the last key needs the predicate in every step.
        partial = _where(kv_start + block_kv <= self.kv_length, full - first, count)
        return Blocks(count, minimum(partial, count), lambda step: first + step)


def _static(*values: Any) -> bool:
    return all(isinstance(v, int | bool) for v in values)


def _div(a: Any, b: int) -> Any:
    return a // b if _static(a) else lax.div(a, jnp.int32(b))


def _ceil_div(a: Any, b: int) -> Any:
    return _div(a + (b - 1), b)


def minimum(a: Any, b: Any) -> Any:
    return min(a, b) if _static(a, b) else jnp.minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    return max(a, b) if _static(a, b) else jnp.maximum(a, b)


def _clip(x: Any, low: Any, high: Any) -> Any:
    return minimum(maximum(x, low), high)


def _where(condition: Any, a: Any, b: Any) -> Any:
    if _static(condition):
        return a if condition else b
    return jnp.where(condition, a, b)


def bounds_array(q_offset: Any, kv_lengths: Any, batch: int, kv_length: int) -> jax.Array | None:
    """[B, 2] int32 of (q_offset, keys that count), for a kernel to read; None where both are known when tracing."""
    if isinstance(q_offset, int) and kv_lengths is None:
        return None
    lengths = jnp.full((batch,), kv_length) if kv_lengths is None else jnp.clip(kv_lengths, 0, kv_length)
    return jnp.stack([jnp.broadcast_to(q_offset, (batch,)), lengths], axis=1).astype(jnp.int32)


def limits(bounds_ref: Any, batch_index: Any, q_offset: Any, kv_length: int, *, is_causal: bool) -> Limits:
    """The Limits of a batch entry; bounds_ref is None or holds bounds_array."""
    if bounds_ref is None:
        return Limits(q_offset, kv_length, is_causal)
    return Limits(bounds_ref[batch_index, 0], bounds_ref[batch_index, 1], is_causal)
