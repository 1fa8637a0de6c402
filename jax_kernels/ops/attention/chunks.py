"""Attention in chunks: of the batch, then of the heads of key, then of the queries."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels import chunks, dispatch
from jax_kernels.chunks import Need
from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionResult
from jax_kernels.masks import Mask
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.reference.attention_chunks import CHUNK_BYTES

__all__ = ["backward_in_chunks", "forward_in_chunks", "need_of_request"]

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of a call: slices of the batch, of the heads of key and of query, and of the queries."""

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice


def _need_of(
    name: str,
    *,
    query: tuple[int, ...],
    key: tuple[int, ...],
    v_head_dim: int,
    itemsize: int,
    mask_bytes: float,
    backward: bool = False,
) -> Need:
    """The Need of a forward, or of a backward, by the implementation `name`.

    query: the shape [B, T, H, D]. key: the shape [B, S, Hkv, D]. mask_bytes: the bytes of the mask array.
    """
    (batch, rows, heads, head_dim), (_, columns, kv_heads, _) = query, key
    of_query = batch * rows * heads * (head_dim + v_head_dim) * itemsize
    of_key = batch * columns * kv_heads * (head_dim + v_head_dim) * itemsize
    if name == "xla":
        temporary = 3.0 * min(
            _FLOAT32 * batch * heads * columns * rows, CHUNK_BYTES
        )  # scores, weights, and their cotangents
    elif name == "cudnn":
        temporary = float(mask_bytes) + _FLOAT32 / itemsize * (of_query + of_key)
    else:  # copies with padded head_dims, the mask's bits, and float32 gradients of query
        pads = name == "mosaic_gpu" and (head_dim % 64 or v_head_dim % 64)
        temporary = (1.0 * (of_query + of_key) if pads else 0.0) + mask_bytes / 8
        temporary += _FLOAT32 * batch * rows * heads * head_dim if backward and name == "mosaic_gpu" else 0
    kept = (2.0 if backward else 1.0) * (of_query + of_key)
    if name == "cudnn":  # its causal mask starts at position 0
        return Need(kept=kept, temporary=temporary, most=batch * kv_heads, axes="batch and heads")
    return Need(kept=kept, temporary=temporary, most=batch * kv_heads * rows, axes="batch, heads and queries")


def need_of_request(request: Any, name: str) -> Need:
    """The Need of an AttentionRequest by the implementation `name`, for its plan."""
    sizes = (request.batch, request.q_length, request.kv_length, request.heads, request.kv_heads)
    is_whole = not (request.has_mask_object or request.has_lists or request.has_score_mod)
    if not is_whole or not all(isinstance(size, int) and size > 0 for size in sizes):
        return Need(kept=0, temporary=0, most=1, axes="")
    return _need_of(
        name,
        query=(request.batch, request.q_length, request.heads, request.head_dim),
        key=(request.batch, request.kv_length, request.kv_heads, request.head_dim),
        v_head_dim=request.v_head_dim,
        itemsize=request.bits // 8,
        mask_bytes=0 if request.mask_shape is None else float(math.prod(request.mask_shape)),
    )


def _need(call: Any, inputs: AttentionInputs, *, backward: bool = False) -> Need:
    mask = inputs.mask
    rest = inputs[AttentionInputs._fields.index("score_mod") :]
    whole = call.options.query_heads is None and call.options.kv_heads is None and all(x is None for x in rest)
    sizes = (*inputs.query.shape, *inputs.key.shape)
    is_splittable = whole and all(isinstance(size, int) and size > 0 for size in sizes)
    if not is_splittable or isinstance(mask, Mask):
        return Need(kept=0, temporary=0, most=1, axes="")
    return _need_of(
        call.implementation,
        query=inputs.query.shape,
        key=inputs.key.shape,
        v_head_dim=inputs.value.shape[-1],
        itemsize=inputs.query.dtype.itemsize,
        mask_bytes=0 if mask is None else float(math.prod(mask.shape)),
        backward=backward,
    )


def _pieces(inputs: AttentionInputs, count: int) -> Iterator[_Piece]:
    """At least `count` pieces, or as many as there can be."""
    batch, rows, heads, _ = inputs.query.shape
    kv_heads = inputs.key.shape[2]
    of_batch = chunks.slices(batch, count)
    of_heads = chunks.slices(kv_heads, -(-count // len(of_batch)))
    of_rows = chunks.slices(rows, -(-count // (len(of_batch) * len(of_heads))))
    group = heads // kv_heads
    for entries in of_batch:
        for kv in of_heads:
            for part in of_rows:
                of_query = slice(kv.start * group, kv.stop * group)
                yield _Piece(batch=entries, kv_heads=kv, heads=of_query, rows=part)


# By field of AttentionInputs, the slices of a _Piece along its axes.
_AXES = {
    "query": ("batch", "rows", "heads"),
    "key": ("batch", None, "kv_heads"),
    "value": ("batch", None, "kv_heads"),
    "mask": ("batch", "heads", "rows"),
    "bias": ("batch", "heads", "rows"),
    "sinks": ("batch", "heads"),
    "q_segment_ids": ("batch", "rows"),
    "kv_segment_ids": ("batch",),
    "kv_lengths": ("batch",),
    "q_offset": ("batch",),
}
_OF_OUT, _OF_LSE = ("batch", "rows", "heads"), ("batch", "heads", "rows")


def _cut(x: Any, axes: Sequence[str | None], piece: _Piece) -> Any:
    """The part of an array; an axis of length 1 that the piece's slice does not index stays."""
    if x is None:
        return None
    whole = slice(None)
    of_axis = lambda size, name: whole if name is None or size == 1 else getattr(piece, name)
    return x[tuple(of_axis(size, name) for size, name in zip(x.shape, axes, strict=False))]


def _part(call: Any, inputs: AttentionInputs, piece: _Piece) -> tuple[Any, AttentionInputs]:
    """(call, inputs) of a piece. q_offset becomes the position of the piece's first query."""
    part = inputs._replace(**{name: _cut(getattr(inputs, name), axes, piece) for name, axes in _AXES.items()})
    if piece.rows.start == 0:
        return call, part
    if part.q_offset is not None:
        return call, part._replace(q_offset=part.q_offset + piece.rows.start)
    options = dataclasses.replace(call.options, q_offset=call.options.q_offset + piece.rows.start)
    return dataclasses.replace(call, options=options), part


def _sizes(inputs: AttentionInputs) -> str:
    return f"query {list(inputs.query.shape)} and key {list(inputs.key.shape)} in {inputs.query.dtype}"


def _count(need: Need, inputs: AttentionInputs) -> int:
    is_of_all_devices = is_partitioned() and isinstance(inputs.query, jax.core.Tracer)
    return chunks.count_of(need, dispatch.target_device(inputs.query), is_of_all_devices)


def _joined(parts: Sequence[Any], pieces: Sequence[_Piece], axes: Sequence[str | None], shape: Any, dtype: Any) -> Any:
    """The array of the parts, each added at its piece's indices. An axis that a piece does not index is summed over.

    The sums are in float32. shape: of the joined array.
    """
    whole = slice(None)
    total = jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32) if _is_summed(pieces, axes, shape) else dtype)
    for part, piece in zip(parts, pieces, strict=True):
        named = zip(shape, axes, strict=False)
        at = tuple(whole if name is None or size == 1 else getattr(piece, name) for size, name in named)
        total = total.at[at].add(part.astype(total.dtype))
    return total.astype(dtype)


def _is_summed(pieces: Sequence[_Piece], axes: Sequence[str | None], shape: Sequence[int]) -> bool:
    """Whether several pieces add to the same part of an array."""
    named = [name for size, name in zip(shape, axes, strict=False) if name is not None and size > 1]
    ranges = {tuple((getattr(piece, name).start, getattr(piece, name).stop) for name in named) for piece in pieces}
    return len(ranges) < len(pieces)


def tried_again[Result](op: str, call: Any, inputs: AttentionInputs, run: Callable[[], Result]) -> Result:
    """run(), or if it runs out of memory, run() with more chunks. op: the name in the warning."""
    return chunks.retried(op, _sizes(inputs), run, _need(call, inputs).most)


def forward_in_chunks(
    forward: Callable[[Any, AttentionInputs], AttentionResult], call: Any, inputs: AttentionInputs
) -> AttentionResult:
    """forward(call, inputs), in chunks if the memory requires it."""
    count = _count(_need(call, inputs), inputs)
    if count == 1:
        return forward(call, inputs)
    pieces = list(_pieces(inputs, count))
    parts = chunks.in_turn(lambda part: forward(*part), [_part(call, inputs, piece) for piece in pieces])
    batch, rows, heads, _ = inputs.query.shape

    def of_rows(name: str) -> jax.Array | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else _joined(found, pieces, _OF_LSE, (batch, heads, rows), jnp.float32)

    shape = (batch, rows, heads, inputs.value.shape[-1])
    out = _joined([x.out for x in parts], pieces, _OF_OUT, shape, parts[0].out.dtype)
    return AttentionResult(out=out, lse=of_rows("lse"), lse_lo=of_rows("lse_lo"))


def backward_in_chunks(
    backward: Callable[..., AttentionGradients],
    call: Any,
    inputs: AttentionInputs,
    result: AttentionResult,
    dout: Any,
    dlse: Any,
) -> AttentionGradients:
    """backward(call, inputs, result, dout, dlse), in chunks if the memory requires it. Sums over chunks are float32."""
    count = _count(_need(call, inputs, backward=True), inputs)
    if count == 1:
        return backward(call, inputs, result, dout, dlse)
    pieces = list(_pieces(inputs, count))
    options = call.options
    if len({piece.rows.start for piece in pieces}) > 1:  # chunks of queries add to the gradients of key and value
        options = dataclasses.replace(options, float32_gradients=True)
    of_pieces = dataclasses.replace(call, options=options)

    def of_piece(piece: _Piece) -> tuple[Any, ...]:
        of_result = AttentionResult(
            out=_cut(result.out, _OF_OUT, piece),
            lse=_cut(result.lse, _OF_LSE, piece),
            lse_lo=_cut(result.lse_lo, _OF_LSE, piece),
        )
        return (
            *_part(of_pieces, inputs, piece),
            of_result,
            _cut(dout, _OF_OUT, piece),
            _cut(dlse, _OF_LSE, piece),
        )

    parts = chunks.in_turn(lambda part: backward(*part), [of_piece(piece) for piece in pieces])
    found = {}
    for name in ("query", "key", "value", "bias", "sinks"):
        of_parts = [getattr(part, name) for part in parts]
        if of_parts[0] is not None:
            x = getattr(inputs, name)
            is_wide = call.options.float32_gradients or name in ("bias", "sinks")
            dtype = of_parts[0].dtype if is_wide else x.dtype
            found[name] = _joined(of_parts, pieces, _AXES[name], x.shape, dtype)
    return AttentionGradients(**found)
