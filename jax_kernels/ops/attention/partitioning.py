"""The axes of an attention's arrays that a mesh may shard: the batch and the heads."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.masks import Mask
from jax_kernels.ops.sharding.partitioning import ArrayAxes, Axis, Shares, is_partitioned, partitioned

__all__ = ["BATCH", "HEADS", "by_heads", "shared_attention"]

WARNING = (
    "query: its tokens are sharded over devices, and each device gathers all of them; use ring_attention inside "
    "jax.shard_map"
)
BATCH, HEADS = "batch", "heads"


def by_heads(heads: int, kv_heads: int) -> tuple[Axis, Axis | None]:
    """(Axis of the query heads, Axis of the key heads), for sharding. The second is None for a single key head.

    A device's query heads are always the heads that its key heads serve.
    """
    return (Axis(HEADS), None) if kv_heads == 1 else (Axis(HEADS, heads // kv_heads), Axis(HEADS))


def shared_attention(function: Callable[..., Any], options: AttentionOptions) -> Callable[..., Any]:
    """Returns the kernel's function with its work sharded over devices under jit, along batch and heads.

    function: takes AttentionInputs and arrays shaped like out or lse, and returns an AttentionResult or
    AttentionGradients. A call with a dquery is not sharded.
    """

    def run(inputs: AttentionInputs, *rest: Any) -> Any:
        if not is_partitioned() or (len(rest) > 3 and rest[3] is not None):  # a dquery to which the kernel adds
            return function(inputs, *rest)
        fields = _fields(inputs)
        of_rest = [fields["lse"] if x.ndim == 3 else fields["query"] for x in jax.tree.leaves(rest)]
        shares = Shares(
            arguments=[*_of_inputs(inputs, fields), *of_rest],
            results=lambda result: _of_results(result, fields),
            lengths=_lengths(inputs, options),
            warning=WARNING,
        )
        return partitioned(function, shares)(inputs, *rest)

    return run


def _fields(inputs: AttentionInputs) -> dict[str, ArrayAxes]:
    """The axes of the fields of AttentionInputs, AttentionResult and AttentionGradients, by the field's name.

    A gradient has the name and the axes of its input. Fields that are missing here, such as score_mod and lists, are
    not sharded. The axes of a mask are an array's; a Mask's own arrays follow from them by `_of_mask`.
    """
    batch, (heads, kv_heads) = Axis(BATCH), by_heads(inputs.query.shape[2], inputs.key.shape[2])
    of_query, of_key = (batch, None, heads, None), (batch, None, kv_heads, None)
    return {
        "query": of_query,
        "out": of_query,
        "key": of_key,
        "value": of_key,
        "q_segment_ids": (batch, None),
        "kv_segment_ids": (batch, None),
        "kv_lengths": (batch,),
        "q_offset": (batch,),
        "sinks": (batch, heads),
        "bias": (batch, heads, None, None),
        "mask": (batch, heads, None, None),
        "lse": (batch, heads, None),
        "lse_lo": (batch, heads, None),
        "reach": (batch, None),
        "key_norms": (batch, kv_heads),
        "earlier_out": of_query,
        "earlier_lse": (batch, heads, None),
    }


def _lengths(inputs: AttentionInputs, options: AttentionOptions) -> dict[str, int]:
    """The lengths of batch and heads, by name; 1 for an axis that must not be sharded.

    An axis must not be sharded if a score_mod reads its index, or if a mask that is not shardable differs along the
    axis. The heads must not be sharded either if the call takes only some heads of its arrays.
    """
    kv_heads = inputs.key.shape[2]
    found = {BATCH: inputs.query.shape[0], HEADS: inputs.query.shape[2] if kv_heads == 1 else kv_heads}
    reads = set() if inputs.score_mod is None else _read(inputs.score_mod)
    if isinstance(inputs.mask, Mask):
        for mask in _parts(inputs.mask):
            if isinstance(mask, Mask) and not mask.is_shardable:
                reads |= {name for name, size in ((BATCH, mask.batch), (HEADS, mask.heads)) if size > 1}
    if (options.query_heads, options.kv_heads) != (None, None):
        reads.add(HEADS)
    return {name: 1 if name in reads else length for name, length in found.items()}


def _of_inputs(inputs: AttentionInputs, fields: Mapping[str, ArrayAxes]) -> list[ArrayAxes]:
    """The axes of each leaf of the inputs, in order. fields: the axes of each field, by name."""
    found: list[ArrayAxes] = []
    for name, x in zip(AttentionInputs._fields, inputs, strict=True):
        if isinstance(x, Mask):
            for mask in _parts(x):
                found += [_of_mask(mask, leaf.shape, fields["mask"]) for leaf in jax.tree.leaves(mask)]
        else:
            found += [_named(fields.get(name), leaf.shape) for leaf in jax.tree.leaves(x)]
    return found


def _of_results(result: Any, fields: Mapping[str, ArrayAxes]) -> list[ArrayAxes]:
    """The axes of each leaf of an AttentionResult or AttentionGradients, in order."""
    pairs = zip(result._fields, result, strict=True)
    return [_named(fields.get(name), leaf.shape) for name, x in pairs for leaf in jax.tree.leaves(x)]


def _named(axes: ArrayAxes | None, shape: tuple[int, ...]) -> ArrayAxes:
    """The axes of an array of this shape: `axes`, but None for an axis of length 1, which is broadcast, not sharded."""
    axes = (None,) * len(shape) if axes is None else axes
    return tuple(None if size == 1 else axis for axis, size in zip(axes, shape, strict=True))


def _parts(mask: Mask) -> list[Any]:
    """The masks without parts of their own that a mask is composed of, in the order of the mask's leaves.

    Arrays of a composed mask itself, such as offsets, are included.
    """
    return jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Mask) and not x.parts)


def _of_mask(mask: Any, shape: tuple[int, ...], axes: ArrayAxes) -> ArrayAxes:
    """The axes along which devices shard one array that a Mask holds, of this shape.

    The first axis is the batch; the second is the heads, if the array has at least three axes. An axis is None if the
    mask has one batch entry or one head. All are None for an array with one value, for an array of a mask that is not
    shardable, and for an array that belongs to a composed mask itself.

    mask: the simple mask that holds the array; the array itself if it belongs to a composed mask. axes: of a dense
    mask.
    """
    if not isinstance(mask, Mask) or not mask.is_shardable or math.prod(shape) == 1:
        return (None,) * len(shape)
    batch = axes[0] if mask.batch > 1 else None
    heads = axes[1] if mask.heads > 1 and len(shape) > 2 else None
    return _named((batch, heads, None, None)[: len(shape)], shape)


def _read(score_mod: Any) -> set[str]:
    """The names, out of BATCH and HEADS, of the indices that a score_mod reads."""
    program = score_mod.program
    used = {id(x) for equation in program.eqns for x in equation.invars} | set(map(id, program.outvars))
    batch, head = program.invars[-4:-2]
    return {name for name, index in ((BATCH, batch), (HEADS, head)) if id(index) in used}
