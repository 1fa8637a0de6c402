"""The largest values of each row, or of each query's interval of a row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kernels.masks import checks
from jax_kernels.masks.block_arithmetic import Grid, interval_of
from jax_kernels.masks.mask import Mask

# From this number of scores on, a search finds each row's smallest marked score, in about fifteen passes over 16-bit
# scores. A sort of [1, 16, 4096, 4096] takes an H200 37 ms.
SEARCH_FROM = 1 << 22
SEARCH_BITS = 2  # bits found in one pass
BUCKET = 64  # ranks that share one count for each query
WORD = 32  # bits


def largest(x: jax.Array, k: int) -> jax.Array:
    """Marks the k largest values of each row: bool, shaped like x.

    Among equal values the first are marked; -inf and NaN are never marked.
    """
    return _largest(x, k, SEARCH_FROM)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _largest(x: jax.Array, k: int, search_from: int) -> jax.Array:
    """Marks as `largest` does. Arrays of search_from values or more are searched, others sorted."""
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    is_known = isinstance(x.shape[-1], int)  # False for jax.export's symbolic sizes, which may be large
    if is_known and k >= x.shape[-1]:
        return x > -jnp.inf
    if not isinstance(x.size, int) or x.size >= search_from:
        return _by_search(x, k, x.shape[-1].bit_length() if is_known else 31)
    least = lax.top_k(x, k)[0][..., -1:]
    above, equal = x > least, (x == least) & (x > -jnp.inf)
    left = k - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= left))


def _by_search(x: jax.Array, k: int, length_bits: int) -> jax.Array:
    """Marks the k largest values of each row, as `largest` does, by a search over bits: bool, shaped like x.

    x has no NaN. It needs no sort and no running sum. length_bits: the bits of a row's length.
    """
    bits, order = 8 * x.dtype.itemsize, _in_order(x)
    least = _most_with(lambda least: (order >= least).sum(axis=-1, keepdims=True, dtype=jnp.int32) >= k, x, bits)
    some = x > -jnp.inf
    above, equal = (order > least) & some, (order == least) & some  # in a row of fewer than k, least is 0
    left = k - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    # Marks the first `left` equal keys: `end` is the largest index that at most `left` equal keys precede.
    place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    before = lambda end: (equal & (place < end)).sum(axis=-1, keepdims=True, dtype=jnp.int32) <= left
    end = _most_with(lambda end: before(end.astype(jnp.int32)), x, length_bits)
    return above | (equal & (place < end.astype(jnp.int32)))


def _most_with(holds: Any, x: jax.Array, bits: int) -> jax.Array:
    """For each row, the largest integer n below 2**bits for which holds(n) is true: uint32 [..., 1].

    holds: a function of uint32 [..., 1], a candidate for each row, that returns bool [..., 1]. It is true for 0, and
    once it is false for a number, it is false for all larger numbers. x: gives the shape [..., n] of the rows.
    """
    number = jnp.zeros((*x.shape[:-1], 1), jnp.uint32)
    for low in reversed(range(0, bits, SEARCH_BITS)):
        found = number
        for digit in range(1, 1 << min(SEARCH_BITS, bits - low)):  # one pass: the candidates are independent
            candidate = number | jnp.uint32(digit << low)
            found = jnp.where(holds(candidate), candidate, found)
        number = found
    return number


def _in_order(x: jax.Array) -> jax.Array:
    """Maps floats to uint32 numbers of the same order, shaped like x. x has no NaN; -0.0 counts as 0.0."""
    bits = 8 * x.dtype.itemsize
    raw = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.dtype(f"uint{bits}"))  # -0.0 counts as 0.0
    top = jnp.asarray(1 << (bits - 1), raw.dtype)
    return jnp.where(raw >= top, ~raw, raw | top).astype(jnp.uint32)


def key_intervals(mask: Mask, q_length: int, kv_length: int, q_offset: Any) -> tuple[jax.Array, jax.Array] | None:
    """(start, end) of the keys that each query keeps, end exclusive, each int32 [B or 1, q_length].

    None if the mask is not made of causal, sliding_window and prefix masks joined by `&`, since the keys may then not
    form an interval, or if kv_length is a symbolic size of jax.export. q_offset: the position of query 0.
    """
    if not isinstance(kv_length, int):
        return None
    mask = mask.unprepared
    if not all(part.keeps_intervals for part in mask.factors):
        return None
    static_offset, offset = checks.offset(q_offset)
    grid = Grid.of((q_length, kv_length), (q_length, kv_length), offset, static_offset)
    [literals] = mask.terms(False)
    start, end = interval_of(literals, grid)
    shape = jnp.broadcast_shapes(start.shape, end.shape, (1, q_length))
    return tuple(jnp.broadcast_to(jnp.clip(x, 0, kv_length), shape) for x in (start, end))  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnums=1, inline=True)
def largest_between(x: jax.Array, k: int, start: jax.Array, end: jax.Array) -> tuple[jax.Array, ...]:
    """The fields (rank, last, start, end) of the Ranked mask of the k largest keys in each query's interval.

    x: [B or 1, H or 1, S], the keys' scores; among equal scores the first keys are kept, -inf and NaN never. start,
    end: int32 [B or 1, T], the interval of keys, end exclusive, from 0 to S.

    The keys are sorted once, not for each query. For each bucket of BUCKET successive ranks, the keys of the bucket
    before an interval's two ends are counted. These counts give the bucket of a query's k-th key; a search within the
    bucket gives the key.
    """
    is_one = x.shape[0] == 1 and start.shape[0] == 1
    own = lambda array: 0 if is_one or array.shape[0] != 1 else None
    given = [array[0] if own(array) is None else array for array in (x, start, end)]
    return jax.vmap(functools.partial(_between, k), [own(array) for array in (x, start, end)])(*given)


def _between(k: int, x: jax.Array, start: jax.Array, end: jax.Array) -> tuple[jax.Array, ...]:
    """The fields (rank, last, start, end) of a Ranked mask, for one batch entry, without its axis of batch.

    It keeps the k largest keys from start to end - 1 of each query. x: [H, S], the keys' scores. start, end: int32 [T],
    returned as they are. rank: int32 [H, S], last: int32 [H, T].
    """
    heads, length = x.shape
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    _, order = lax.sort((~_in_order(x), index), num_keys=1, is_stable=True)
    _, rank = lax.sort((order, index), num_keys=1)
    buckets = -(-length // BUCKET)
    ends = (jnp.arange(buckets, dtype=jnp.int32) + 1) * BUCKET
    before = jnp.pad(_sums(rank[..., None] < ends), ((0, 0), (1, 0), (0, 0)))
    count = before[:, end] - before[:, start]  # [H, T, buckets]: the number of ranks below each bucket's end
    bucket = (count < k).sum(axis=-1, dtype=jnp.int32)
    members = jnp.pad(order, ((0, 0), (0, -length % BUCKET + BUCKET)), constant_values=length)
    members = members.reshape(heads, buckets + 1, BUCKET)[jnp.arange(heads)[:, None], bucket]
    inside = (members >= start[:, None]) & (members < end[:, None])
    below = jnp.where(count < k, count, 0).max(axis=-1, keepdims=True)
    place = (below + _counts_up_to(inside) < k).sum(axis=-1, dtype=jnp.int32)
    # An interval with fewer than k keys keeps all of them.
    last = jnp.where(bucket == buckets, length, bucket * BUCKET + place)
    some = (x > -jnp.inf).sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return rank, jnp.minimum(last, some - 1), start, end


def _sums(x: jax.Array) -> jax.Array:
    """Inclusive running counts of True along axis n of bool [..., n, m]: float32 of the same shape.

    The sums are matmuls with triangles of BUCKET rows, which run on tensor cores.
    """
    n = x.shape[-2]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -n % BUCKET), (0, 0)])
    # Tensor cores take zeros and ones in bfloat16; the float32 sums are exact.
    parts = x.reshape(*x.shape[:-2], -1, BUCKET, x.shape[-1]).astype(jnp.bfloat16)
    triangle = jnp.tri(BUCKET, dtype=jnp.bfloat16)
    within = jnp.einsum("ij,...jm->...im", triangle, parts, preferred_element_type=jnp.float32)
    total = within[..., -1, :]
    sums = within + (jnp.cumsum(total, axis=-2) - total)[..., None, :]
    return sums.reshape(x.shape)[..., :n, :]


def _counts_up_to(x: jax.Array) -> jax.Array:
    """Inclusive running counts of True along the last axis of bool [..., BUCKET]: int32 of the same shape.

    Bits are packed into words, and the set bits of each word up to the entry are counted.
    """
    words = x.reshape(*x.shape[:-1], -1, WORD).astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)
    words = lax.optimization_barrier(words.sum(axis=-1, dtype=jnp.uint32))  # made once, not for each bit of a BUCKET
    place, first = np.arange(BUCKET)[:, None], np.arange(0, BUCKET, WORD)
    up_to = (1 << np.clip(place + 1 - first, 0, WORD)) - 1
    return lax.population_count(words[..., None, :] & up_to.astype(np.uint32)).sum(axis=-1, dtype=jnp.int32)
