"""Block arithmetic: finds the blocks in which a mask can keep a pair, without evaluating pairs.

A mask is a sum of products: it keeps a pair if all literals of at least one conjunction keep the pair. `live` finds
the blocks that hold a kept pair. The complement is a sum of products too; a block is full if the complement is not
live there.

The literals of a conjunction are intersected before blocks are judged. This makes the answer exact
- for any number of literals that keep an interval of keys for every query (limits of the distance, of keys and of
  queries, segments in which each id has one run of keys);
- for any number of literals that only look at the distance;
- for one set of cells without other literals, or if every block lies in one cell.
A conjunction of several kinds is live in a block if each kind is live there: a dead block may be called live, and
hence partial.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

RUN = 128  # values of a running sum that a thread can cheaply add up again
# A product of sums with more terms than this is not multiplied out.
_MOST_TERMS = 64


@dataclasses.dataclass(frozen=True)
class Grid:
    """The division of a call's queries and keys into blocks: `rows` blocks of queries by `columns` blocks of keys.

    q_length, kv_length: of the call. block_q, block_kv: of a block. offset: [B or 1] int32, the position of query 0.
    static_offset: its value if known when tracing, else None. results: the values that the method once has computed, by
    function.
    """

    q_length: int
    kv_length: int
    block_q: int
    block_kv: int
    offset: Any
    static_offset: int | None
    results: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(lengths: tuple[int, int], blocks: tuple[int, int], offset: Any, static_offset: int | None) -> "Grid":
        return Grid(*lengths, *blocks, offset, static_offset)

    @property
    def rows(self) -> int:
        return -(-self.q_length // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.kv_length // self.block_kv)

    @property
    def positions(self) -> jax.Array:
        """The positions of the queries, offset + index: int32 [B or 1, T]."""
        return self.offset[:, None] + jnp.arange(self.q_length, dtype=jnp.int32)

    def edges(self, axis: int) -> tuple[jax.Array, jax.Array]:
        """(first, last) index in each block of queries (axis 0) or keys (axis 1), inclusive: int32 [rows] or [columns]
        each.
        """
        count, block, length = (
            (self.rows, self.block_q, self.q_length),
            (self.columns, self.block_kv, self.kv_length),
        )[axis]
        first = jnp.arange(count, dtype=jnp.int32) * block
        return first, jnp.minimum(first + (block - 1), length - 1)

    def once(self, function: Callable[["Grid"], Any]) -> Any:
        """Returns function(grid), computed at the first call only: a program without repeated code compiles faster."""
        if function not in self.results:
            self.results[function] = function(self)
        return self.results[function]

    def area(self) -> jax.Array:
        """The number of pairs in each block: int32 [rows, columns]. Blocks at the end may be smaller."""
        (q_first, q_last), (k_first, k_last) = self.edges(0), self.edges(1)
        return (q_last - q_first + 1)[:, None] * (k_last - k_first + 1)


@dataclasses.dataclass(frozen=True)
class Literal:
    """A predicate of a query and a key, in at least one of three forms that block arithmetic uses.

    interval(grid): (start, end) of the keys that each query keeps, end exclusive, int32 broadcastable to [B or 1, T].
    distance(d): bool, whether a query keeps the key d positions before it, for int32 d; a Band has this form too.
    cells(grid): bool [B or 1, H or 1, rows, columns], whether each block is live.

    The other fields are bounds, used for the lengths of block lists. low, high: low <= key - position <= high, None for
    no limit. keys, queries: (start, end) of the key indices and of the query positions that it can keep, end exclusive.
    rate: at most one of `rate` successive distances is kept. cell_width(grid, by): the most live blocks that the cells
    leave in a list for each block of queries (by="query") or of keys (by="key").

    varies(grid): an upper bound on the blocks of a batch entry and head in which the literal keeps some pairs and drops
    others; None if there is no bound.
    """

    interval: Callable[[Grid], tuple[Any, Any]] | None = None
    distance: Callable[[Any], Any] | None = None
    cells: Callable[[Grid], Any] | None = None
    low: int | None = None
    high: int | None = None
    keys: tuple[int | None, int | None] = (None, None)
    queries: tuple[int | None, int | None] = (None, None)
    rate: int = 1
    cell_width: Callable[[Grid, str], int] | None = None
    varies: Callable[[Grid], int] | None = None


Conjunction = tuple[Literal, ...]
Terms = tuple[Conjunction, ...]


def band(low: int | None, high: int | None) -> Literal:
    """The literal low <= key - position <= high, for the key's index and the query's position; None is no limit."""

    def interval(grid: Grid) -> tuple[Any, Any]:
        start = 0 if low is None else grid.positions + low
        end = grid.kv_length if high is None else grid.positions + (high + 1)
        return start, end

    def distance(d: Any) -> Any:
        keep = jnp.ones_like(d, bool)
        keep = keep if low is None else keep & (-d >= low)
        return keep if high is None else keep & (-d <= high)

    def varies(grid: Grid) -> int:
        # The blocks that hold the first key past a limit, for all rows of a block of queries except the last row.
        edges = ([] if low is None else [low]) + ([] if high is None else [high + 1])
        step, offset = math.gcd(grid.block_q, grid.block_kv), grid.static_offset
        each = lambda edge: touched(grid.block_q - 1, grid.block_kv, step, None if offset is None else offset + edge)
        return grid.rows * sum(map(each, edges))

    return Literal(interval, distance, low=low, high=high, varies=varies)


def product(factors: list[Terms]) -> Terms:
    """The terms of an intersection of masks. factors: the terms (sums of products of literals) of each mask.

    If multiplying out gives more than _MOST_TERMS terms, each mask becomes one literal, which is live in the mask's
    live blocks.
    """
    if math.prod(map(len, factors)) <= _MOST_TERMS:
        return functools.reduce(lambda a, b: tuple(x + y for x in a for y in b), factors)
    # Each part becomes one literal: a block is live if all parts are live there.
    opaque = lambda terms: Literal(
        cells=functools.partial(live, terms), cell_width=lambda grid, by: width(terms, grid, by)
    )
    return (tuple(opaque(terms) for terms in factors),)


def live(terms: Terms, grid: Grid) -> jax.Array:
    """Whether each block may hold a kept pair: bool [B or 1, H or 1, rows, columns]. False is certain."""
    is_interval = lambda literals: all(x.interval is not None for x in literals)
    intervals = [literals for literals in terms if is_interval(literals)]
    parts = [_live_mixed(literals, grid) for literals in terms if not is_interval(literals)]
    if intervals:
        parts.append(_live_by_interval(intervals, grid))
    if not parts:
        return jnp.zeros((1, 1, grid.rows, grid.columns), bool)
    return functools.reduce(operator.or_, parts)


def _live_mixed(literals: Conjunction, grid: Grid) -> jax.Array:
    """Whether each block may hold a pair that a conjunction keeps: bool [B or 1, H or 1, rows, columns].

    It is for conjunctions with a literal that is no interval. A block is live if each of three kinds of literals,
    judged apart, leaves it live: the cells, all intervals together, and the distances. False is certain.
    """
    parts = [literal.cells(grid) for literal in literals if literal.cells is not None]
    intervals = tuple(literal for literal in literals if literal.interval is not None)
    if intervals:
        parts.append(_live_by_interval([intervals], grid))
    if any(literal.distance is not None and literal.interval is None for literal in literals):
        parts.append(_live_by_distance([x.distance for x in literals if x.distance is not None], grid))
    return functools.reduce(operator.and_, parts, jnp.ones((1, 1, grid.rows, grid.columns), bool))


def interval_of(literals: Conjunction, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """(start, end) of the keys that all literals with an interval keep for each query, end exclusive.

    int32, broadcastable to [B or 1, T]. Literals without an interval are ignored. The interval is empty if start >=
    end.
    """
    intervals = [x.interval(grid) for x in literals if x.interval is not None]
    start = functools.reduce(jnp.maximum, (start for start, _ in intervals), jnp.int32(0))
    return start, functools.reduce(jnp.minimum, (end for _, end in intervals), jnp.int32(grid.kv_length))


def _live_by_interval(terms: list[Conjunction], grid: Grid) -> jax.Array:
    """Whether each block holds a pair that some conjunction keeps: bool [B or 1, 1, rows, columns]. All literals are
    intervals.

    One pass over the queries, not over queries times blocks: for each row of blocks, it counts +1 at the first block of
    keys of each interval and -1 after the last. The running sum is the number of queries that reach each block of keys.
    """
    starts, ends = zip(*(interval_of(literals, grid) for literals in terms), strict=True)
    shape = jnp.broadcast_shapes(*(x.shape for x in (*starts, *ends)), (1, grid.q_length))
    start, end = (jnp.concatenate([jnp.broadcast_to(x, shape) for x in xs], axis=1) for xs in (starts, ends))
    some = start < end
    block = jnp.int32(grid.block_kv)
    first, last = lax.div(jnp.where(some, start, 0), block), lax.div(jnp.where(some, end, block) - 1, block)
    batch = lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
    row = jnp.tile(jnp.arange(grid.q_length, dtype=jnp.int32) // grid.block_q, 2 * len(terms))
    column = jnp.concatenate([first, last + 1], axis=1)
    count = some.astype(jnp.int32)
    changes = jnp.zeros((shape[0], grid.rows, grid.columns + 1), jnp.int32)
    changes = changes.at[batch, row, column].add(
        jnp.concatenate([count, -count], axis=1), mode="promise_in_bounds", wrap_negative_indices=False
    )
    return (running_sums(changes) > 0)[:, None, :, :-1]


def _live_by_distance(predicates: list[Callable[[Any], Any]], grid: Grid) -> jax.Array:
    """Whether each block holds a pair whose distance satisfies all predicates: bool [B or 1, 1, rows, columns].

    predicates: each maps an int32 array of distances (position of the query minus the key) to bool. A block holds all
    distances between its two extreme corners, so running sums over the distances suffice.
    """
    differences = jnp.arange(grid.q_length + grid.kv_length - 1, dtype=jnp.int32) - (grid.kv_length - 1)
    distances = grid.offset[:, None] + differences
    keep = functools.reduce(operator.and_, [predicate(distances) for predicate in predicates])
    before = jnp.pad(running_sums(keep), ((0, 0), (1, 0)))
    (q_first, q_last), (k_first, k_last) = grid.edges(0), grid.edges(1)
    low = q_first[:, None] - k_last + (grid.kv_length - 1)
    high = q_last[:, None] - k_first + (grid.kv_length - 1)
    return (before[:, high + 1] > before[:, low])[:, None]


def width(terms: Terms, grid: Grid, by: str) -> int:
    """An upper bound on the live blocks of one list, at least 1. by="query": lists of key blocks; by="key": of query
    blocks.
    """
    most = grid.columns if by == "query" else grid.rows
    return max(1, min(most, sum(_conjunction_width(literals, grid, by) for literals in terms)))


def most_partial(terms: Terms, grid: Grid) -> int:
    """An upper bound on the partial blocks of one batch entry and head.

    It sums, over all literals, the blocks in which the literal keeps some pairs and drops others, and the blocks that
    reach past the last key. It is at most the total length of the block lists.
    """
    literals = {id(literal): literal for conjunction in terms for literal in conjunction}.values()
    blocks = min(grid.rows * width(terms, grid, "query"), grid.columns * width(terms, grid, "key"))
    past_end = grid.rows if grid.kv_length % grid.block_kv else 0
    return min(blocks, past_end + sum(blocks if x.varies is None else x.varies(grid) for x in literals))


def _given(numbers: Iterable[int | None]) -> list[int]:
    """The numbers that are not None."""
    return [x for x in numbers if x is not None]


def _conjunction_width(literals: Conjunction, grid: Grid, by: str) -> int:
    """An upper bound on the live blocks of a conjunction in one list. by: "query" or "key", the side of the lists.

    In the code, `along` is the side of the lists and `across` the side of their entries.
    """
    sides = [(grid.q_length, grid.block_q), (grid.kv_length, grid.block_kv)]
    low = max(_given(x.low for x in literals), default=None)
    high = min(_given(x.high for x in literals), default=None)
    shift = grid.static_offset
    limits = [x.keys for x in literals]
    before = 0
    if by == "key":
        sides.reverse()
        low, high = (None if x is None else -x for x in (high, low))
        # If the offset is known, limits of positions give limits of indices.
        limits, before = ([], 0) if shift is None else ([x.queries for x in literals], shift)
        shift = None if shift is None else -shift
    (along_length, along), (length, across) = sides
    first = max([0, *(start - before for start in _given(start for start, _ in limits))])
    last = min([length, *(end - before for end in _given(end for _, end in limits))]) - 1
    if shift is not None:
        first = first if low is None else max(first, shift + low)
        last = last if high is None else min(last, shift + along_length - 1 + high)
    if last < first:
        return 0
    bounds = [last // across - first // across + 1]
    rate = max(x.rate for x in literals)
    if low is not None and high is not None:
        if high < low:
            return 0
        start = None if shift is None else shift + low
        bounds.append(touched(along + high - low, across, math.gcd(along, across), start))
    if rate > 1:
        distances = length + along - 1 if low is None or high is None else high - low + 1
        each = touched(along, across, math.gcd(along, across, rate), shift)
        bounds.append(-(-distances // rate) * each)
    bounds += [x.cell_width(grid, by) for x in literals if x.cell_width is not None]
    return min(bounds)


def touched(size: int, block: int, step: int, start: int | None) -> int:
    """The most blocks of length `block` that an interval of length `size` touches.

    It starts at `start` plus any multiple of `step`, which divides block; anywhere if start is None.
    """
    into_block = block - 1 if start is None else block - step + start % step
    return (into_block + size - 1) // block + 1


def running_sums(x: jax.Array) -> jax.Array:
    """The inclusive cumulative sums of x [..., n] along the last axis: int32 [..., n]. x: bool or int32.

    XLA makes a long cumsum from nested windows and fuses it into the code that reads the sums. Each read then adds up
    all windows again: a lookup in the sums of 4096 values takes an H200 0.28 ms. Here the sums of runs of RUN values
    are stored in memory, by optimization_barrier.
    """
    length = x.shape[-1]
    if length <= RUN:
        return jnp.cumsum(x, axis=-1, dtype=jnp.int32)
    parts = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % RUN)]).reshape(*x.shape[:-1], -1, RUN)
    total = parts.sum(axis=-1, dtype=jnp.int32)
    before = lax.optimization_barrier(running_sums(total) - total)
    sums = jnp.cumsum(parts, axis=-1, dtype=jnp.int32) + before[..., None]
    return lax.optimization_barrier(sums.reshape(*x.shape[:-1], -1)[..., :length])
