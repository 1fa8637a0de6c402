"""Dilated attention under jit on several devices: its work is sharded over batch and heads."""

import functools
from typing import Any

from jax_kernels.ops.attention.partitioning import BATCH, HEADS, by_heads
from jax_kernels.ops.planned_op import merged_vmap
from jax_kernels.ops.sharding.partitioning import ArrayAxes, Axis, ByIndex, Shares, is_partitioned, partitioned

__all__ = ["ARGUMENTS", "RESULTS", "shared"]

WARNING = (
    "query: its tokens are sharded over devices, and each device gathers all of them; use "
    "sequence_parallel_dilated_attention inside jax.shard_map"
)

# The kind of each argument of a forward or backward, and of each result, by the number of results: "query", "key" (key
# or value), "ids" or "lse".
ARGUMENTS = "query", "key", "key", "ids", "query", "lse", "query", "lse"
RESULTS = {2: ("query", "lse"), 3: ("query", "key", "key")}


def shared(function: Any, call: Any, *statics: Any) -> Any:
    """arrays -> function(call, *statics, arrays), which XLA's partitioner may shard over batch and heads.

    function: the forward or the backward of a DilatedCall. arrays: a tuple, of query, key and more. A program fixes the
    tokens that each head takes. So, unless all shards of the heads take the same tokens, each shard has a program of
    its own, and a device runs the program of its shard. A vmap is merged into the batch.
    """
    plain = functools.partial(function, call, *statics)
    if not is_partitioned() or not call.attentions or not call.by_kernels or call.has_spans or call.of_heads is None:
        return plain
    of_heads = call.of_heads

    def run(arrays: Any) -> Any:
        query, key = arrays[:2]
        axes = by_heads(query.shape[2], key.shape[2])
        kv_heads = key.shape[2]
        shares = Shares(
            arguments=_axes(arrays, axes, ARGUMENTS),
            results=lambda results: _axes(results, axes, RESULTS[len(results)]),
            lengths={BATCH: query.shape[0], HEADS: query.shape[2] if kv_heads == 1 else kv_heads},
            warning=WARNING,
            by_index=ByIndex(HEADS, of_heads, lambda part, arrays: function(part, *statics, arrays)),
        )
        return partitioned(plain, shares, (function, call, statics), has_rules=True)(arrays)

    return merged_vmap(run)


def _axes(arrays: Any, of_heads: tuple[Axis, Axis | None], names: tuple[str, ...]) -> list[ArrayAxes]:
    """The axes of each array that is not None. of_heads: (query's axis of heads, key's). names: the kind of each array.

    A kind is "query", "key" (key or value), "ids" or "lse".
    """
    heads, kv_heads = of_heads
    batch = Axis(BATCH)
    axes: dict[str, ArrayAxes] = {
        "query": (batch, None, heads, None),
        "key": (batch, None, kv_heads, None),
        "ids": (batch, None),
        "lse": (batch, heads, None),
    }
    return [axes[name] for name, x in zip(names, arrays, strict=False) if x is not None]
