"""Arithmetic with which masks answer for some of a sequence's tokens, or for some heads."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.masks.block_arithmetic import Conjunction

__all__ = ["Piece", "keeps_none", "of_heads", "position_of"]

# Token counts are clamped to this, so that their sums with positions fit an int32.
_MOST_TOKENS = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Some queries and keys of a sequence: query i is at position q_first + stride * i, key j at k_first + stride * j.

    at: the offset of query 0 among the keys, in steps of stride: q_first - k_first is stride * at + shift. lengths:
    (queries, keys) of the piece. units: (of queries, of keys). If stride is 1 and the blocks' sizes divide units,
    q_first and k_first are multiples of units.
    """

    stride: int
    shift: int
    q_first: Any
    k_first: Any
    at: Any
    lengths: tuple[int, int]
    units: tuple[int, int]

    def count(self, limits: Any, first: Any) -> Any:
        """The number of the piece's tokens before each position in `limits`: the position's index, rounded up.

        limits: positions in the whole sequence. first: the position of the piece's first token, q_first or k_first. The
        piece's length is not considered, so the number may be negative or exceed it.
        """
        return -((first - jnp.clip(limits, 0, _MOST_TOKENS)) // self.stride)

    def ids(self, ids: Any, side: int) -> Any:
        """The segment ids of the piece's tokens: int32 [B or 1, length]. side: 0 for queries, 1 for keys.

        ids: of the whole sequence. Tokens whose position is outside of the sequence get arbitrary ids.
        """
        first, length = (self.q_first, self.k_first)[side], self.lengths[side]
        positions = first + self.stride * jnp.arange(length, dtype=jnp.int32)
        return ids[:, jnp.clip(positions, 0, ids.shape[1] - 1)]


def position_of(index: Any, firsts: Any, size: int, stride: int) -> Any:
    """The position in the whole sequence of the token with index `index` in the call; int32, shaped like index.

    firsts: int32 [pieces], the position of each piece's first token. size: the tokens of a piece. stride: the distance
    of neighbours in a piece.
    """
    position = firsts[0] + stride * index
    for piece in range(1, len(firsts)):
        position = jnp.where(index < piece * size, position, firsts[piece] + stride * (index - piece * size))
    return position


def of_heads(array: jax.Array, first: Any, count: int) -> jax.Array:
    """array[:, first : first + count], where `first` may be traced. An array whose axis 1 has size 1 is unchanged."""
    return array if array.shape[1] == 1 else lax.dynamic_slice_in_dim(array, first, count, 1)


def keeps_none(literals: Conjunction, queries: range, keys: range) -> bool:
    """Whether the limits of a conjunction (low, high, keys, queries and rate of its literals) leave no pair of
    positions.
    """
    queries = _within(queries, [x.queries for x in literals])
    keys = _within(keys, [x.keys for x in literals])
    if not queries or not keys:
        return True
    apart = keys[0] - queries[-1], keys[-1] - queries[0]
    least = max([apart[0], *(x.low for x in literals if x.low is not None)])
    most = min([apart[1], *(x.high for x in literals if x.high is not None)])
    least += (apart[0] - least) % queries.step
    rates = [x.rate for x in literals if x.rate > 1]
    period = queries.step * math.lcm(*rates)
    distances = range(least, min(most + 1, least + period), queries.step)
    return all(any(distance % rate for rate in rates) for distance in distances)


def _within(positions: range, limits: list[tuple[int | None, int | None]]) -> range:
    """The positions in `positions` that all limits keep. limits: [start, end) each; None is no limit."""
    low = max([positions.start, *(start for start, _ in limits if start is not None)])
    end = min([positions.stop, *(stop for _, stop in limits if stop is not None)])
    return range(low + (positions.start - low) % positions.step, end, positions.step)
