"""The chunks in which the "xla" implementation of attention computes: of batch entries, key heads, queries and keys."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.masks import Mask
from jax_kernels.masks.limits import key_lengths

__all__ = ["CHUNK_BYTES", "CPU_CHUNK_BYTES", "Chunk", "Pairs", "Sizes", "added_keys", "chunk_of", "chunk_sizes", "each"]

# Limit of the bytes of a chunk's float32 scores, and of its float32 keys and values.
CHUNK_BYTES = 1 << 28
# The same on a CPU, where a chunk should stay in the cache of a core.
CPU_CHUNK_BYTES = 1 << 21


class Pairs(NamedTuple):
    """The indices of a chunk's scores along each axis: int32 arrays with one axis.

    entries: of batch entries. heads: of query heads. rows: of queries. keys: of keys.
    """

    entries: Any
    heads: Any
    rows: Any
    keys: Any


class Chunk(NamedTuple):
    """The arrays of a chunk, or of the whole call: AttentionInputs with heads in front of lengths. b: its entries.

    Each key head (k) has g query heads; H = k * g. Arrays that a call lacks are None.

    query: [b, k, g, T, D]. key: [b, k, S, D]. value: [b, k, S, Dv]. mask: as in AttentionInputs. bias: [b or 1, H or 1,
    T or 1, S or 1]. key32: the key in float32, for a backward. sinks: [b or 1, H]. q_segment_ids: [b, T].
    kv_segment_ids: [b, S]. kv_lengths, q_offset, valid: [b]. valid: the keys from this index on may hold anything, NaN
    too. lse, delta, lse_lo: [b, H, T]. dout: [b, k, g, T, Dv]. entries, heads, rows, keys: as in Pairs.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    bias: Any
    sinks: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    kv_lengths: Any
    q_offset: Any
    score_mod: Any
    key32: Any
    valid: Any
    lse: Any
    delta: Any
    lse_lo: Any
    dout: Any
    entries: Any
    heads: Any
    rows: Any
    keys: Any

    @property
    def pairs(self) -> Pairs:
        return Pairs(self.entries, self.heads, self.rows, self.keys)


# The axis of batch entries, heads, queries and keys in each array of a Chunk; None where an array lacks the axis.
_AXES: dict[str, tuple[int | None, int | None, int | None, int | None]] = {
    "query": (0, 1, 3, None),
    "key": (0, 1, None, 2),
    "value": (0, 1, None, 2),
    "key32": (0, 1, None, 2),
    "mask": (0, 1, 2, 3),
    "bias": (0, 1, 2, 3),
    "sinks": (0, 1, None, None),
    "q_segment_ids": (0, None, 1, None),
    "kv_segment_ids": (0, None, None, 1),
    "kv_lengths": (0, None, None, None),
    "q_offset": (0, None, None, None),
    "valid": (0, None, None, None),
    "lse": (0, 1, 2, None),
    "delta": (0, 1, 2, None),
    "lse_lo": (0, 1, 2, None),
    "dout": (0, 1, 3, None),
    "entries": (0, None, None, None),
    "heads": (None, 0, None, None),
    "rows": (None, None, 0, None),
    "keys": (None, None, None, 0),
}
LEVELS = ("batch", "heads", "queries")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The chunks of a call. batch, kv_heads, queries, keys: the sizes of a chunk.

    counts: the number of chunks along batch, heads and queries.

    kv_length: all keys of the call. start: the position, relative to the chunk's first query, of the first key that a
    chunk visits; None if a chunk visits all keys.
    """

    batch: Any
    kv_heads: Any
    queries: Any
    keys: Any
    counts: tuple[int, int, int]
    kv_length: Any
    start: int | None


def chunk_sizes(inputs: AttentionInputs, options: AttentionOptions, limit: int) -> Sizes:
    """The sizes of a call's chunks, such that a chunk's scores, and its keys and values, take at most `limit` bytes.

    A chunk has at least one query, and all keys that the query may attend to. Under a window with two sides, a chunk
    visits only keys in the window of its queries. Symbolic sizes of jax.export have no known divisors: such an axis is
    not cut. An axis along which a Mask differs is not cut either.
    """
    batch, length, heads, _ = inputs.query.shape
    kv_length, kv_heads = inputs.key.shape[1:3]
    known = lambda size: max(size, 1) if isinstance(size, int) else 1
    group = max(known(heads) // known(kv_heads), 1)
    width, start, queries = _window_of(inputs, options)
    least = min(known(length), 128, queries)
    row = group * known(width) * 4
    of_keys = known(kv_length) * sum(_widths(inputs)) * 4
    of_head = max(least * row, of_keys if group * known(length) > 4 else 0)
    mask = inputs.mask if isinstance(inputs.mask, Mask) else None
    entries = 1 if start is not None and inputs.q_offset is not None else limit // (of_head * known(kv_heads))
    b = batch if mask is not None and mask.batch > 1 else _divisor(batch, entries)
    k = kv_heads if mask is not None and mask.heads > 1 else _divisor(kv_heads, limit // (of_head * known(b)))
    rows = max(limit // (row * known(b) * known(k)), 1)
    rows = min(rows // 16 * 16 if rows > 16 else rows, queries)
    rows = length if not isinstance(length, int) else max(min(rows, length), 1)
    known_both = lambda size, part: isinstance(size, int) and isinstance(part, int)
    count = lambda size, part: max(-(-size // max(part, 1)), 1) if known_both(size, part) else 1
    counts = (count(batch, b), count(kv_heads, k), count(length, rows))
    return Sizes(
        batch=b,
        kv_heads=k,
        queries=rows,
        keys=_keys_of(kv_length, rows, start, options),
        counts=counts,
        kv_length=kv_length,
        start=start,
    )


def has_few_rows(query: Any) -> bool:
    """Whether a key head has so few queries, [b, k, g, T, D], that the time is for reading keys and values.

    A sum of products then reads them once, in any layout, while a matmul on a CPU first copies them.
    """
    return all(isinstance(size, int) for size in query.shape[2:4]) and query.shape[2] * query.shape[3] <= 4


def _widths(inputs: AttentionInputs) -> list[int]:
    return [x.shape[-1] if isinstance(x.shape[-1], int) else 1 for x in (inputs.key, inputs.value)]


def _window_of(inputs: AttentionInputs, options: AttentionOptions) -> tuple[Any, int | None, int]:
    """(keys of a chunk, start as in Sizes, the most queries of a chunk). All keys, None and 2**30 without a window."""
    length, kv_length = inputs.query.shape[1], inputs.key.shape[1]
    batch = inputs.query.shape[0]
    everything = (kv_length, None, 1 << 30)
    if options.window is None or not all(isinstance(size, int) and size for size in (batch, length, kv_length)):
        return everything
    left, right = options.window
    if options.is_causal:
        right = 0
    if left < 0 or right < 0:
        return everything
    # With as many queries as keys in the window, half of the visited pairs are in the window.
    queries = max(min(-(-(left + right + 1) // 16) * 16, length), min(128, length))
    width = queries + left + right
    return (width, -left, queries) if width < kv_length else everything


def _keys_of(kv_length: Any, rows: Any, start: int | None, options: AttentionOptions) -> Any:
    if start is None or options.window is None:
        return kv_length
    return min(rows + options.window[0] + (0 if options.is_causal else options.window[1]), kv_length)


def _divisor(size: Any, most: int) -> Any:
    """The largest divisor of `size` that is at most `most`, at least 1; `size` itself if it is symbolic or 0."""
    if not isinstance(size, int) or size == 0:
        return size
    return next(part for part in range(max(min(size, most), 1), 0, -1) if size % part == 0)


def chunk_of(inputs: AttentionInputs, **rows: Any) -> Chunk:
    """The whole call as one Chunk, with its lengths still in front of its heads: `heads_in_front` changes that.

    rows: lse, delta and lse_lo, [B, H, T], and dout, [B, T, H, Dv], of a backward.
    """
    (batch, length, heads, _), kv_length = inputs.query.shape, inputs.key.shape[1]
    indices = [jnp.arange(size, dtype=jnp.int32) for size in (batch, heads, length, kv_length)]
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in Chunk._fields if name in AttentionInputs._fields}
    fields |= dict(zip(("entries", "heads", "rows", "keys"), indices, strict=True))
    fields |= {name: rows.get(name) for name in ("lse", "delta", "lse_lo", "dout")}
    return Chunk(**fields, key32=None, valid=key_lengths(inputs))


def heads_in_front(part: Chunk, *, for_backward: bool) -> Chunk:
    """The chunk of chunk_of, or a part of its batch, in the layout that Chunk documents.

    Keys and values past the end of their sequence become 0: a NaN there, times a probability of 0, would be NaN.
    Values, and for the backward key32 and dout, are float32.
    """
    kv_heads, in_front = part.key.shape[2], lambda x: jnp.moveaxis(x, 2, 1)
    key, value = in_front(part.key), in_front(part.value).astype(jnp.float32)
    if part.valid is not None:
        counts = (part.keys < part.valid[:, None])[:, None, :, None]
        key, value = (jnp.where(counts, x, 0) for x in (key, value))
    part = part._replace(query=_grouped(in_front(part.query), kv_heads), key=key, value=value)
    if not for_backward:
        return part
    dout = _grouped(in_front(part.dout), kv_heads).astype(jnp.float32)
    return part._replace(key32=key.astype(jnp.float32), dout=dout)


def lengths_in_front(x: Any) -> Any:
    """[b, k, T, D] or [b, k, g, T, D] -> [b, T, H, D]: the inverse of heads_in_front."""
    return jnp.moveaxis(x.reshape(x.shape[0], math.prod(x.shape[1:-2]), *x.shape[-2:]), 1, 2)


def grouped_scores(x: Any, kv_heads: Any) -> Any:
    """[b, H, T, S] -> [b, k, g, T, S]."""
    return _grouped(x, kv_heads)


def _grouped(x: Any, kv_heads: Any) -> Any:
    """[b, H, T, D] -> [b, k, g, T, D]."""
    parts = x.shape[1] // max(kv_heads, 1) if isinstance(x.shape[1], int) and isinstance(kv_heads, int) else -1
    return x.reshape(x.shape[0], kv_heads, parts, *x.shape[2:])


def each(chunk: Chunk, level: str, count: int, function: Any, zeros: Any = None, add: Any = None) -> tuple[Any, Any]:
    """(stacked, sums) over the chunks along one level: "batch", "heads" or "queries".

    function(part) returns (stacked, sums) of a chunk. Stacked results have a leading axis of chunks. count: the number
    of chunks. zeros(): the initial sums. add(sums, more): adds a chunk's sums. None: jnp.add, and a single chunk needs
    no zeros. Queries that pad the last chunk have index 0, and an lse of infinity: their probabilities are 0 in a
    backward.
    """
    if count == 1:
        stacked, sums = function(chunk)
        return jax.tree.map(lambda x: x[None], stacked), sums if add is None else add(zeros(), sums)
    split = {}
    for name, axes in _AXES.items():
        x, axis = getattr(chunk, name), axes[LEVELS.index(level)]
        if x is not None and not isinstance(x, Mask) and axis is not None and x.shape[axis] != 1:
            split[name] = _split(x, count, axis, fill=jnp.inf if name == "lse" else 0)

    def one(carry: Any, arrays: Any) -> Any:
        axis_of = lambda name: (_AXES[name][LEVELS.index(level)] or 0,)
        whole = lambda name, x: x if x.ndim == getattr(chunk, name).ndim else jnp.expand_dims(x, axis_of(name))
        stacked, sums = function(chunk._replace(**{name: whole(name, x) for name, x in arrays.items()}))
        return add(carry, sums) if add else jax.tree.map(jnp.add, carry, sums), stacked

    sums, stacked = lax.scan(one, () if zeros is None else zeros(), split)
    return stacked, sums


def _split(x: Any, count: int, axis: int, fill: Any) -> Any:
    """[..., n, ...] -> [count, ..., n / count, ...], padded at the end with `fill`.

    An axis of length n / count = 1 is left out: XLA copies an array to which an axis of length 1 is added.
    """
    if x.shape[axis] == count:
        return jnp.moveaxis(x, axis, 0)
    part = -(-x.shape[axis] // count)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, part * count - x.shape[axis])
    if pad[axis][1]:
        x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, part, *x.shape[axis + 1 :]), axis, 0)


def join(x: Any, axis: int, length: Any) -> Any:
    """[count, ..., part, ...] -> [..., length, ...]: the inverse of a split along `axis`, without the padding."""
    if x.shape[0] == 1:
        return x[0]
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis) if x.shape[axis] != length else x


def in_window(chunk: Chunk, sizes: Sizes, offset: Any) -> tuple[Chunk, Any]:
    """(the chunk with only the keys that it visits, index of the first of these keys; 0 without a window).

    offset: the position of query 0, an int or [1] int32.
    """
    if sizes.start is None:
        return chunk, 0
    last = sizes.kv_length - sizes.keys
    first = jnp.clip(jnp.asarray(offset, jnp.int32).reshape(()) + chunk.rows[0] + sizes.start, 0, last)
    visited = {}
    for name, axes in _AXES.items():
        x, axis = getattr(chunk, name), axes[3]
        if x is not None and not isinstance(x, Mask) and axis is not None and x.shape[axis] != 1:
            visited[name] = lax.dynamic_slice_in_dim(x, first, sizes.keys, axis)
    return chunk._replace(**visited), first


def added_keys(x: Any, part: Any, first: Any, axis: int) -> Any:
    """x with `part` added at the keys from index `first` on, along `axis`."""
    if part.shape[axis] == x.shape[axis]:
        return x + part
    own = lax.dynamic_slice_in_dim(x, first, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, own + part, first, axis)
