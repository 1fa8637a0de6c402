"""Block ranges: the blocks that a work tile of attention visits, computed from the limits of the keys.

A BlockRange numbers the visited blocks in the order of the visits: `BlockRange.at(step)` is the index of the block that
a step visits. A kernel evaluates the predicate (`Limits.keep`) in partial blocks only. Dead blocks are not visited. The
forward visits blocks of keys for a block of queries, the backward also blocks of queries for a block of keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, first_position
from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.mosaic.layouts import RegisterLayout


@dataclasses.dataclass(frozen=True)
class BlockRange:
    """The blocks that one work tile visits, in order: steps 0 ... count - 1, where step i visits block at(i).

    partial: how many of the visited blocks are partial. They come first, except `last` of them, which come at the end.
    """

    count: Index
    partial: Index
    at: Callable[[Index], Index]
    last: Index = 0

    def is_partial(self, step: Index) -> bool | jax.Array:
        """Whether a step's block is partial, so that its scores need the predicate."""
        if isinstance(self.last, int) and self.last == 0:
            return step < self.partial
        return (step < self.partial - self.last) | (step >= self.count - self.last)

    def at_least_one(self) -> "BlockRange":
        """The range for a kernel that always visits a block: an empty range visits block 0, as a partial block."""
        at = lambda step: maximum(self.at(step), 0)
        return BlockRange(maximum(self.count, 1), maximum(self.partial, 1), at, self.last)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a query's keys in one batch entry.

    Query i has position q_offset + i and attends to keys below kv_length. If causal, these keys end at its position
    (inclusive). A window (left, right) limits them to position - left ... position + right (both inclusive); -1 means
    no limit on that side. Queries before first_query, a multiple of the kernel's block_q, attend to no key. Lengths and
    offsets are Python ints or traced int32 scalars.
    """

    q_offset: Index
    kv_length: Index
    is_causal: bool
    window: tuple[int, int] | None = None
    first_query: Index = 0

    def of_queries(self, q_start: Index) -> "Limits":
        """The Limits of the block of queries that starts at q_start.

        If the block lies before first_query, kv_length is 0: its queries have no keys.
        """
        if _static(self.first_query):
            return self
        kv_length = jnp.where(q_start < self.first_query, 0, self.kv_length)
        return dataclasses.replace(self, kv_length=kv_length, first_query=0)

    @property
    def left(self) -> int:
        """The number of keys before its position that a query may attend to; -1: no limit."""
        return -1 if self.window is None else self.window[0]

    @property
    def right(self) -> int:
        """The number of keys after its position that a query may attend to, 0 if causal; -1: no limit."""
        if self.is_causal:
            return 0
        return -1 if self.window is None else self.window[1]

    def key_limit(self, q_index: Index) -> Index:
        """The end (exclusive) of the keys that query `q_index`, an index in the array, may attend to.

        first_query is not applied: of_queries(...) applies it to a block of queries.
        """
        if self.right < 0:
            return self.kv_length
        return _clip(self.q_offset + q_index + (self.right + 1), 0, self.kv_length)

    def key_start(self, q_index: Index) -> Index:
        """The first key that query `q_index`, an index in the array, may attend to."""
        if self.left < 0:
            return 0
        return _clip(self.q_offset + q_index - self.left, 0, self.kv_length)

    def keys_within(
        self, first: jax.Array, end: jax.Array, q_start: Index, layout: RegisterLayout
    ) -> tuple[jax.Array, jax.Array]:
        """(first, end) of the keys of queries q_start, q_start + 1 ..., restricted to the limits.

        first, end: int32, one value per query, in a register layout. If no key is left, end is at most first.
        first_query is not applied.
        """
        position = lambda: self.q_offset + q_start + plgpu.broadcasted_iota(jnp.int32, first.shape, 0, layout=layout)
        if self.left >= 0:
            first = jnp.maximum(first, position() - self.left)
        if self.right >= 0:
            end = jnp.minimum(end, position() + (self.right + 1))
        return first, end if isinstance(self.kv_length, int) else jnp.minimum(end, self.kv_length)

    def queries_within(
        self, first: jax.Array, end: jax.Array, kv_start: Index, layout: RegisterLayout
    ) -> tuple[jax.Array, jax.Array]:
        """(first, end) of the queries of keys kv_start, kv_start + 1 ..., restricted to the limits.

        first, end: int32, one value per key, in a register layout. If no query is left, end is at most first.
        first_query is not applied.
        """
        key = lambda: kv_start + plgpu.broadcasted_iota(jnp.int32, first.shape, 0, layout=layout)
        if self.right >= 0:
            first = jnp.maximum(first, key() - (self.q_offset + self.right))
        if self.left >= 0:
            end = jnp.minimum(end, key() + (self.left + 1 - self.q_offset))
        return first, end if isinstance(self.kv_length, int) else jnp.where(key() < self.kv_length, end, first)

    def keep(
        self,
        shape: tuple[int, ...],
        kv_start: Index,
        q_start: Index,
        *,
        layout: RegisterLayout,
        kv_axis: int,
        may_end: bool,
        ids=None,
    ):
        """Which pairs of a block the limits keep: bool of this shape, in a register layout.

        kv_start, q_start: the first key and the first query. kv_axis: the axis of `shape` along which keys lie.
        may_end: whether the block may reach past kv_length. ids: None, or the segment ids (of the rows, of the
        columns), which must be equal for a pair to be kept. At least one of a causal limit, a window, may_end and ids
        is needed.

        The scalars are added to the rows, because a thread has few rows: sums for the columns would take a register
        each.
        """
        # If the width is a power of two, a thread finds its column by a shift, otherwise by a division.
        wide = shape[0], pl.next_power_of_2(shape[1])
        rows, columns = (plgpu.broadcasted_iota(jnp.int32, wide, axis, layout=layout) for axis in (0, 1))
        if wide != shape:
            rows, columns = rows[:, : shape[1]], columns[:, : shape[1]]
        # A column index is a part of the thread's own plus a constant. The own part is subtracted from the rows, so
        # that a thread compares them with the constant.
        mine, constant = columns & 7, columns & ~7
        diagonal = self.q_offset + q_start - kv_start
        left_diagonal = diagonal - self.left
        if self.left >= 0 and self.right >= 0:
            # Opaque: otherwise LLVM fuses the two comparisons into one with a value per column, in a register each.
            left_diagonal = lax.optimization_barrier(jnp.int32(left_diagonal))
        parts = []
        if kv_axis == 1:  # rows are queries
            if self.right >= 0:
                position = rows + diagonal - mine
                parts.append((position + self.right if self.right else position) >= constant)
            if self.left >= 0:
                parts.append(rows + left_diagonal - mine <= constant)
        else:
            if self.right >= 0:
                position = rows - diagonal - mine
                parts.append((position - self.right if self.right else position) <= constant)
            if self.left >= 0:
                parts.append(rows - left_diagonal - mine >= constant)
        if may_end:
            left = self.kv_length - kv_start
            parts.append(rows < left if kv_axis == 0 else left - mine > constant)
        if ids is not None:
            parts.append(lax.broadcast_in_dim(ids[0], shape, [0]) == lax.broadcast_in_dim(ids[1], shape, [1]))
        return functools.reduce(lambda a, b: a & b, parts)

    def keep_all(self, block_kv: int) -> bool:
        """Whether tracing knows that every query attends to every key, and that the keys are whole blocks."""
        length = self.kv_length
        return self.left < 0 and self.right < 0 and isinstance(length, int) and length % block_kv == 0

    def key_blocks(
        self, q_start: Index, block_q: int, block_kv: int, among: "Among | None" = None, *, in_order=False
    ) -> BlockRange:
        """The blocks of keys that queries q_start ... q_start + block_q - 1 attend to, right to left.

        among: the only blocks that may be visited or full, e.g. because of segments; None: no such restriction.
        in_order: strictly right to left. Otherwise the partial blocks of the left end come before the full blocks, so
        that all partial blocks come first.
        """
        q_end = q_start + block_q - 1
        longest, shortest = self.key_limit(q_end), self.key_limit(q_start)
        first: Index = 0
        last = _ceil_div(longest, block_kv)
        if self.left >= 0:
            first = _div(self.key_start(q_start), block_kv)
            last = _where(self.key_start(q_start) < longest, last, first)
        full_end = _div(shortest, block_kv)
        if self.left < 0 and among is None:
            return BlockRange(last, last - full_end, lambda step: last - 1 - step)
        full_start = _ceil_div(self.key_start(q_end), block_kv)
        if among is not None:
            first, full_start, full_end, last = among.within(first, full_start, full_end, last)
        full_start = _clip(full_start, first, last)
        return _partial_at_both_ends(first, full_start, full_end, last, descending=True, in_order=in_order)

    def query_blocks(
        self,
        kv_start: Index,
        block_kv: int,
        block_q: int,
        q_length: int,
        among: "Among | None" = None,
        *,
        predicate_at_end: bool = True,
        in_order: bool = False,
    ) -> BlockRange:
        """The blocks of queries that attend to any of keys kv_start ... kv_start + block_kv - 1.

        among: the only blocks that may be visited or full, e.g. because of segments; None: no such restriction.
        in_order: strictly left to right. Otherwise the partial blocks of both ends come first.

        predicate_at_end: if the block of keys reaches past kv_length, all its blocks of queries are partial. False is
        for a kernel that drops the sums of keys past kv_length and that, if kv_length is known when tracing, asks only
        for blocks with keys.
        """
        total = -(-q_length // block_q)
        kv_end = kv_start + block_kv - 1
        first: Index = 0
        full_start: Index = 0
        last: Index = total
        full_end: Index = total
        if self.right >= 0:
            offset = self.q_offset + self.right if self.right else self.q_offset
            first = _clip(_div(maximum(kv_start - offset, 0), block_q), 0, total)
            full_start = _clip(_ceil_div(maximum(kv_end - offset, 0), block_q), first, total)
        if self.left >= 0:
            end = self.left + 1 - self.q_offset  # query k + end is the first query past the window of key k
            last = _clip(_ceil_div(maximum(minimum(kv_end, self.kv_length - 1) + end, 0), block_q), first, total)
            full_start = minimum(full_start, last)
            full_end = _clip(_div(maximum(kv_start + end, 0), block_q), full_start, last)
        if not _static(self.first_query):
            first = minimum(maximum(first, _div(self.first_query, block_q)), last)
            full_start = maximum(full_start, first)
        if self.left < 0 and among is None:
            blocks = BlockRange(last - first, full_start - first, lambda step: first + step)
        else:
            if among is not None:
                first, full_start, full_end, last = among.within(first, full_start, full_end, last)
                full_start = _clip(full_start, first, last)
            blocks = _partial_at_both_ends(first, full_start, full_end, last, descending=False, in_order=in_order)
        count, partial = blocks.count, blocks.partial
        if predicate_at_end or not isinstance(self.kv_length, int):
            count = _where(kv_start < self.kv_length, count, 0)
            partial = minimum(partial, count)
        if predicate_at_end:
            partial = _where(kv_start + block_kv <= self.kv_length, partial, count)
        return BlockRange(count, partial, blocks.at, blocks.last)


class Among(NamedTuple):
    """Blocks to which a BlockRange is restricted: first ... end - 1. Blocks full_first ... full_end - 1 are full unless
    Limits mask a pair of them; by default there are none, so that every block is partial.
    """

    first: Index
    end: Index
    full_first: Index = 0
    full_end: Index = 0

    def within(
        self, first: Index, full_start: Index, full_end: Index, last: Index
    ) -> tuple[Index, Index, Index, Index]:
        """The given bounds restricted to these blocks, as (first, full_start, full_end, last).

        The given bounds are blocks first ... last - 1; blocks full_start ... full_end - 1 are full under Limits alone.
        """
        first = maximum(first, self.first)
        last = maximum(minimum(last, self.end), first)
        if isinstance(self.full_end, int) and self.full_end == 0:
            return first, first, 0, last
        return first, maximum(full_start, self.full_first), minimum(full_end, self.full_end), last


def _partial_at_both_ends(
    first: Index, full_start: Index, full_end: Index, last: Index, *, descending: bool, in_order: bool
) -> BlockRange:
    """The BlockRange of blocks first ... last - 1, where blocks full_start ... full_end - 1 (none if empty) are full.

    descending: from last - 1 down. in_order: visits strictly in this order; otherwise all partial blocks come first.
    """
    if isinstance(full_end, int) and full_end == 0:  # no block is full
        count = last - first
        return BlockRange(count, count, lambda step: last - 1 - step if descending else first + step)
    full_end = _clip(full_end, full_start, last)
    before, after, count = full_start - first, last - full_end, last - first
    partial = before + after
    # Unless in_order: partial blocks of the near end, partial blocks of the far end, full blocks.
    near, far = (after, before) if descending else (before, after)
    if in_order:  # fewer values stay in registers
        return BlockRange(count, partial, lambda step: last - 1 - step if descending else first + step, far)

    def at(step):
        skipped = _where(step < near, 0, _where(step < partial, count - partial, -far))
        return last - 1 - step - skipped if descending else first + step + skipped

    return BlockRange(count, partial, at)


def _static(*values: Index) -> bool:
    return all(isinstance(v, int | bool) for v in values)


def _div(a: Index, b: int) -> Index:
    return a // b if _static(a) else lax.div(a, jnp.int32(b))


def _ceil_div(a: Index, b: int) -> Index:
    return _div(a + (b - 1), b)


def minimum(a: Index, b: Index) -> Index:
    return min(a, b) if _static(a, b) else jnp.minimum(a, b)


def maximum(a: Index, b: Index) -> Index:
    return max(a, b) if _static(a, b) else jnp.maximum(a, b)


def _clip(x: Index, low: Index, high: Index) -> Index:
    return minimum(maximum(x, low), high)


def _where(condition: bool | jax.Array, a: Index, b: Index) -> Index:
    if _static(condition):
        return a if condition else b
    if _static(a, b):  # two weak constants would not lower through Triton
        a, b = jnp.int32(a), jnp.int32(b)
    return jnp.where(condition, a, b)


def bounds_array(inputs: AttentionInputs, options: AttentionOptions) -> Int32[Array, "B columns"] | None:
    """The limits of each batch entry that tracing does not know, as an int32 array for a kernel; None if it knows all.

    Columns: the position of query 0, and the number of keys that count, 0 ... S. With inputs.reach a third column: the
    index of the first query that has keys. The array has all columns, even if tracing does not know one of them only.
    """
    q_offset, kv_lengths = first_position(inputs, options), inputs.kv_lengths
    batch, kv_length = inputs.key.shape[:2]
    if isinstance(q_offset, int) and kv_lengths is None and inputs.reach is None:
        return None
    lengths = jnp.full((batch,), kv_length) if kv_lengths is None else jnp.clip(kv_lengths, 0, kv_length)
    numbers = [jnp.broadcast_to(q_offset, (batch,)), lengths]
    if inputs.reach is not None:
        numbers = [numbers[0], jnp.minimum(lengths, inputs.reach[:, 1]), inputs.reach[:, 0]]
    return jnp.stack(numbers, axis=1).astype(jnp.int32)


def limits(
    bounds_ref: Ref | None,
    batch_index: Index,
    q_offset: int | None,
    kv_length: Index,
    *,
    is_causal: bool,
    window: tuple[int, int] | None = None,
) -> Limits:
    """The limits of the keys of batch entry batch_index, for use inside a kernel.

    bounds_ref: int32 [B, 2 or 3] in memory: for each batch entry q_offset, kv_length and first_query. If it is None,
    the arguments q_offset and kv_length hold for all batch entries; otherwise they are not used.
    """
    if bounds_ref is None:
        return Limits(cast(int, q_offset), kv_length, is_causal, window)
    first_query = bounds_ref[batch_index, 2] if bounds_ref.shape[1] > 2 else 0
    return Limits(bounds_ref[batch_index, 0], bounds_ref[batch_index, 1], is_causal, window, first_query)


# Ids of queries and of keys that equal no other id.
NO_QUERY, NO_KEY = -1, -2
NOT_SORTED = 2**31 - 1  # the end of a span where ids are not sorted


def segment_arrays(
    q_ids: Int32[Array, "B T"], kv_ids: Int32[Array, "B S"]
) -> tuple[Int32[Array, "B T"], Int32[Array, "B S"]]:
    """The segment ids, with negative ids replaced: by -1 for queries, by -2 for keys, so that they equal no other id.

    A query may attend to a key if and only if their ids in the results are equal.
    """
    return jnp.where(q_ids < 0, NO_QUERY, q_ids), jnp.where(kv_ids < 0, NO_KEY, kv_ids)


def segment_ranges(
    ids: Int32[Array, "B T"], block: int, other_ids: Int32[Array, "B S"], other_block: int
) -> Int32[Array, "B blocks 4"]:
    """For each block of `ids`, the range of blocks of `other_ids` that it may attend to: (first, end, full_first,
    full_end).

    The results are the fields of Among; both ends are exclusive. ids, other_ids: segment ids of queries and of keys, or
    the reverse; block, other_block: the block sizes. Two blocks meet if the ranges of their ids overlap. If the ids are
    not sorted, the range first ... end - 1 also holds blocks that do not meet. Blocks full_first ... full_end - 1 are
    the first consecutive blocks whose ids all equal the single id of the block itself; the range is empty if there are
    none.
    """
    low, high, only = _extremes(ids, block)
    other_low, other_high, other_only = _extremes(other_ids, other_block)
    meet = (low[:, :, None] <= other_high[:, None]) & (other_low[:, None] <= high[:, :, None])
    first = jnp.argmax(meet, axis=-1)
    end = jnp.where(meet.any(axis=-1), meet.shape[-1] - jnp.argmax(meet[..., ::-1], axis=-1), first)
    full = (only[:, :, None] == other_only[:, None]) & (only >= 0)[:, :, None]
    full_first = jnp.where(full.any(axis=-1), jnp.argmax(full, axis=-1), end)
    past = ~full & (jnp.arange(full.shape[-1]) >= full_first[..., None])
    full_end = jnp.where(past.any(axis=-1), jnp.argmax(past, axis=-1), full.shape[-1])
    return jnp.stack([first, end, full_first, jnp.maximum(full_end, full_first)], axis=-1).astype(jnp.int32)


def segment_spans(ids: Int32[Array, "B T"], other_ids: Int32[Array, "B S"]) -> Int32[Array, "B 2 T"]:
    """For each id, (first, end) of the equal ids of the other side, which are consecutive if other_ids is sorted.

    An id below 0 has (0, 0). other_ids is sorted if its ids from 0 on ascend, and ids below 0 come last. In batch
    entries with other_ids that are not sorted, or hold the largest int32, all results are (0, NOT_SORTED).
    """
    keys = jnp.where(other_ids < 0, NOT_SORTED, other_ids)
    is_sorted = (keys[:, :-1] <= keys[:, 1:]).all(axis=1) & (other_ids != NOT_SORTED).all(axis=1)
    below = lambda side: jax.vmap(functools.partial(jnp.searchsorted, side=side, method="scan_unrolled"))(keys, ids)
    spans = jnp.where(ids[:, None] < 0, 0, jnp.stack([below("left"), below("right")], axis=1))
    return jnp.where(is_sorted[:, None, None], spans, jnp.array([[0], [NOT_SORTED]])).astype(jnp.int32)


def among(ranges_ref: Ref, batch_index: Index, block: Index) -> Among:
    """The blocks of the other side (keys for a block of queries) that a block may attend to because of segments.

    ranges_ref: int32 [B, blocks, 4] in memory, as segment_ranges returns it: first, end, full_first and full_end of
    each block. block: the index of the block.
    """
    return Among(*(ranges_ref[batch_index, block, i] for i in range(4)))


def _extremes(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the lowest id, the highest id, the only id) of each block, counting ids >= 0: three int32 [B, blocks].

    The only id is -1 if a block has several ids. A block without an id >= 0 has a lowest id above all ids and a highest
    id below all ids >= 0, so that it meets no block.
    """
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), constant_values=-1)
    ids = ids.reshape(ids.shape[0], -1, block)
    highest = ids.max(axis=-1)
    only = jnp.where(ids.min(axis=-1) == highest, highest, -1)
    return jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids).min(axis=-1), highest, only
