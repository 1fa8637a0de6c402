"""Dilated attention in chunks: of the batch, then of the heads of key, each by a call of its own."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels import chunks, dispatch
from jax_kernels.chunks import Need
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.dilated.branches import BranchCall
from jax_kernels.ops.dilated.partitioning import ARGUMENTS, RESULTS
from jax_kernels.ops.sharding.partitioning import is_partitioned

__all__ = ["Sizes", "count_of", "in_chunks", "need_of"]

_FLOAT32 = 4

_HEADS_AXIS = {"query": 2, "key": 2, "lse": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a call: of query [batch, length, heads, head_dim], and of key and value. itemsize: of query."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int

    @classmethod
    def of_arrays(cls, arrays: Sequence[Any]) -> "Sizes":
        """The sizes of (query, key, value, ...)."""
        query, key, value, *_ = arrays
        batch, length, heads, head_dim = query.shape
        return cls(
            batch=batch,
            length=length,
            heads=heads,
            kv_heads=key.shape[2],
            head_dim=head_dim,
            v_head_dim=value.shape[3],
            itemsize=query.dtype.itemsize,
        )

    @classmethod
    def of_request(cls, request: AttentionRequest) -> "Sizes":
        return cls(
            batch=request.batch,
            length=request.q_length,
            heads=request.heads,
            kv_heads=request.kv_heads,
            head_dim=request.head_dim,
            v_head_dim=request.v_head_dim,
            itemsize=request.bits // 8,
        )

    @property
    def most(self) -> int:
        """The largest number of chunks. A single head of key is not split."""
        return self.batch * self.kv_heads

    @property
    def per_row(self) -> int:
        """The values of a token in query, key, value and out."""
        return (self.heads + self.kv_heads) * (self.head_dim + self.v_head_dim)


def need_of(
    attentions: Sequence[BranchCall],
    sizes: Sizes,
    *,
    branches: int,
    by_passes: bool,
    has_float32_out: bool,
    backward: bool = False,
) -> Need:
    """The memory of a forward, or of a backward, without the temporary arrays of one attention inside.

    branches: their number. by_passes: whether kernels merge the attentions' results. has_float32_out: whether the
    attentions return float32.
    """
    numbers = all(isinstance(size, int) and size > 0 for size in dataclasses.astuple(sizes))
    if not numbers or not attentions or any(views.span is not None for views in attentions):
        return Need(kept=0, temporary=0, most=1, axes="")
    temporary = 0.0
    for views in attentions:
        rows = views.entries(sizes.batch, sizes.heads) * views.rows
        of_key = views.kv_heads * (sizes.head_dim + sizes.v_head_dim) * sizes.itemsize
        of_query, of_out = views.heads * sizes.head_dim * sizes.itemsize, views.heads * sizes.v_head_dim
        gathered = 0 if views.is_strided else of_query + of_key
        if backward:  # the cotangent of out, the gradients, and float32 row terms
            gathered += 0 if views.is_strided else of_out * sizes.itemsize
            results = of_query + of_key + 2 * views.heads * _FLOAT32
        else:
            results = of_out * (_FLOAT32 if has_float32_out else sizes.itemsize) + views.heads * _FLOAT32
        temporary += 1.0 * rows * (gathered + results)
    tokens = 1.0 * sizes.batch * sizes.length
    if not by_passes:  # float32 arrays of all tokens, for each branch
        of_all = sizes.per_row - (sizes.heads * sizes.v_head_dim) if backward else sizes.heads * sizes.v_head_dim
        temporary += _FLOAT32 * branches * tokens * of_all
    kept = (2.0 if backward else 1.0) * tokens * sizes.per_row * sizes.itemsize
    return Need(kept=kept, temporary=temporary, most=sizes.most, axes="batch and heads")


def count_of(need: Need, arrays: Sequence[Any]) -> int:
    """The number of chunks of a call. The device is read from the first array."""
    is_of_all_devices = is_partitioned() and isinstance(arrays[0], jax.core.Tracer)
    return chunks.count_of(need, dispatch.target_device(arrays[0]), is_of_all_devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of a call: a slice of the batch, and shard `index` of the heads, of `count` shards."""

    batch: slice
    index: int
    count: int

    def cut(self, x: jax.Array, kind: str) -> jax.Array:
        """The part of an array of this kind."""
        x, axis = x[self.batch], _HEADS_AXIS.get(kind)
        if axis is None or self.count == 1:
            return x
        size = x.shape[axis] // self.count
        return jax.lax.slice_in_dim(x, self.index * size, (self.index + 1) * size, axis=axis)


def _pieces(sizes: Sizes, count: int) -> Iterator[list[_Piece]]:
    """For each slice of the batch, the pieces of all heads: at least `count` pieces in all, or as many as possible."""
    of_batch = chunks.slices(sizes.batch, count)
    least = -(-count // len(of_batch))
    shards = next(n for n in range(min(least, sizes.kv_heads), sizes.kv_heads + 1) if sizes.kv_heads % n == 0)
    for entries in of_batch:
        yield [_Piece(batch=entries, index=i, count=shards) for i in range(shards)]


def in_chunks(
    function: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]], call: Any, arrays: tuple[Any, ...], count: int
) -> tuple[Any, ...]:
    """function(call, arrays) of a DilatedCall, in at least `count` chunks, or as many as there can be.

    arrays: of the kinds ARGUMENTS; None for an absent array. The results have the kinds RESULTS.
    """
    groups = list(_pieces(Sizes.of_arrays(arrays), count))
    parts = []
    for piece in [piece for group in groups for piece in group]:
        of_piece = call if piece.count == 1 else call.of_heads(piece.index, piece.count)
        cut = [None if x is None else piece.cut(x, kind) for x, kind in zip(arrays, ARGUMENTS, strict=False)]
        parts.append((of_piece, tuple(cut)))
    found = iter(chunks.in_turn(lambda part: function(*part), parts))
    of_groups = [[next(found) for _ in group] for group in groups]
    kinds = RESULTS[len(of_groups[0][0])]
    joined = [
        [jnp.concatenate([x[i] for x in results], axis=_HEADS_AXIS[kind]) for i, kind in enumerate(kinds)]
        for results in of_groups
    ]
    return tuple(jnp.concatenate(of_batch) for of_batch in zip(*joined, strict=True))
