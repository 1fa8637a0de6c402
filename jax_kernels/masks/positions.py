"""Masks of positions: arithmetic on the positions of query and key. Their only array is a traced number of tokens."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.masks import checks
from jax_kernels.masks.block_arithmetic import Grid, Literal, band
from jax_kernels.masks.mask import Mask, Or, node, static
from jax_kernels.plain_numbers import plain

# Window limits are below this number, so that their sums with positions fit an int32.
_WIDEST = 1 << 29


def causal() -> Mask:
    """Keeps the keys up to the query: q_offset + i >= j."""
    return Band(None, 0)


def sliding_window(left: int | None, right: int | None) -> Mask:
    """Keeps the keys from `left` positions before the query to `right` after it, both inclusive.

    These are the keys j with p - left <= j <= p + right, where p = q_offset + i, as jax.nn's local_window_size and
    flash-attn's window_size count. None or -1 is no limit on that side: (w, 0) is causal, (None, None) keeps all.

    Source: Beltagy et al., "Longformer" (2020), arXiv:2004.05150.
    """
    left, right = (_side(name, side) for name, side in (("left", left), ("right", right)))
    return Band(None if left is None else -left, right)


def _side(name: str, side: Any) -> int | None:
    """The limit of a window's side as an int, or None for no limit (None or -1). Raises for other values."""
    want, side = "an int from 0 to 2**29, or None or -1 for no limit", plain(side)
    if side is not None and not checks.is_int(side):
        raise TypeError(f"{name}: got {side!r}, want {want}")
    if side is not None and not -1 <= side < _WIDEST:
        raise ValueError(f"{name}: got {side}, want {want}")
    return None if side is None or side == -1 else int(side)


def prefix(n: int | jax.Array) -> Mask:
    """Keeps the keys j < n for every query.

    `causal() | prefix(n)` is the mask of a prefix language model; `& prefix(n)` limits the lengths of the keys.

    n: an int of at least 0, or int32, a scalar or [B], one for each batch entry.
    """
    return Prefix(*_number("n", n))


def global_tokens(n: int | jax.Array) -> Mask:
    """Lets the first n tokens attend to all tokens, and all tokens attend to the first n: p < n or j < n.

    n: an int of at least 0, or int32, a scalar or [B], one for each batch entry.

    Source: Beltagy et al., "Longformer" (2020), arXiv:2004.05150.
    """
    return GlobalTokens(*_number("n", n))


def dilated(rate: int) -> Mask:
    """Keeps the keys at a distance that is a multiple of rate, on both sides: (p - j) % rate == 0.

    rate: an int of at least 1.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers" (2019), arXiv:1904.10509.
    """
    return Dilated(checks.integer("rate", rate, 1))


def _number(name: str, n: Any) -> tuple[int | None, jax.Array | None]:
    """(n, None) for an int n that is known when tracing; (None, int32 [B or 1]) for an array n of shape [] or [B].

    Raises TypeError or ValueError for other values; `name` names the argument.
    """
    if checks.is_int(n):
        return checks.integer(name, n, 0), None
    want = "an int, or an int32 array, a scalar or [batch]"
    n = checks.int32(name, n, want, within=checks.INT32)
    if n.ndim > 1:
        raise ValueError(f"{name}: got shape {n.shape}, want {want}")
    return None, jnp.atleast_1d(n)


@node
class Band(Mask):
    """A mask of low <= j - p <= high for the key j and the query's position p; None is no limit on that side."""

    low: int | None = static()
    high: int | None = static()
    keeps_intervals = True
    is_arithmetic = True

    @property
    def keeps_more_later(self) -> bool:
        return self.low is None and self.high is not None

    @property
    def window(self) -> tuple[int, int] | None:
        """(left, right), the distances that it keeps before and after the query's position; -1 is no limit on a side.

        None if it drops the query's position itself.
        """
        if (self.low or 0) > 0 or (self.high or 0) < 0:
            return None
        return -1 if self.low is None else -self.low, -1 if self.high is None else self.high

    def terms(self, negated):
        if not negated:
            return ((band(self.low, self.high),),)
        below = () if self.low is None else ((band(None, self.low - 1),),)
        return below if self.high is None else (*below, (band(self.high + 1, None),))

    def restricted(self, piece):
        low, high = (None if x is None else x + piece.shift for x in (self.low, self.high))
        low = None if low is None else -(-low // piece.stride)
        return Band(low, None if high is None else high // piece.stride)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        position = q_offset + q_index
        if self.low is None and self.high is None:
            return jnp.ones(jnp.broadcast_shapes(jnp.shape(position), jnp.shape(k_index)), bool)
        before = None if self.low is None else position + self.low <= k_index
        after = None if self.high is None else k_index <= position + self.high
        return after if before is None else before if after is None else before & after

    def __repr__(self) -> str:
        if (self.low, self.high) == (None, 0):
            return "causal()"
        return f"sliding_window({None if self.low is None else -self.low}, {self.high})"


class _Numbered(Mask):
    """A base class of masks of the first n tokens.

    limit: n, if it is known when tracing, else None. limits: otherwise n for each batch entry, int32 [B or 1], else
    None.
    """

    limit: int | None
    limits: Any
    is_shardable = True
    is_arithmetic = True

    @property
    def batch(self) -> int:
        return 1 if self.limits is None else self.limits.shape[0]

    @property
    def per_batch(self) -> jax.Array:
        """The number of tokens, n, as an int32 array [B or 1, 1]."""
        return jnp.asarray(self.limit if self.limits is None else self.limits, jnp.int32).reshape(-1, 1)

    def _at(self, b: Any) -> Any:
        if self.limits is None:
            return self.limit
        return self.limits[0] if self.batch == 1 else self.limits[b]

    def _text(self) -> str:
        return str(self.limit) if self.limits is None else checks.array_text(self.limits)


def _one_column(grid: Grid) -> int:
    """The most partial blocks of a mask that ends at one key: at most one in each row of blocks."""
    return grid.rows


def _one_row(grid: Grid) -> int:
    """The most partial blocks of a mask that ends at one query: at most one in each column of blocks."""
    return grid.columns


@node
class Prefix(_Numbered):
    """A mask that keeps the keys j < n for all queries.

    limit: n as an int if it is known when tracing, else None. limits: None, or n as int32 [B or 1] if limit is None.
    """

    limit: int | None = static()
    limits: Any
    keeps_intervals = True
    is_of_keys = True

    def terms(self, negated):
        if negated:
            after = lambda grid: (self.per_batch, grid.kv_length)
            return ((Literal(interval=after, keys=(self.limit, None), varies=_one_column),),)
        before = lambda grid: (0, self.per_batch)
        return ((Literal(interval=before, keys=(None, self.limit), varies=_one_column),),)

    def restricted(self, piece):
        return Prefix(None, piece.count(self.per_batch[:, 0], piece.k_first))

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        return k_index < self._at(b)

    def __repr__(self) -> str:
        return f"prefix({self._text()})"


@node
class GlobalTokens(_Numbered):
    """A mask that keeps the pairs of a query at a position p < n, and the pairs of a key j < n.

    limit: n as an int if it is known when tracing, else None. limits: None, or n as int32 [B or 1] if limit is None.
    """

    limit: int | None = static()
    limits: Any

    def terms(self, negated):
        first = lambda grid: (0, jnp.where(grid.positions < self.per_batch, grid.kv_length, 0))
        other = lambda grid: (0, jnp.where(grid.positions >= self.per_batch, grid.kv_length, 0))
        (keys,) = Prefix(self.limit, self.limits).terms(negated)
        if negated:
            return ((*keys, Literal(interval=other, queries=(self.limit, None), varies=_one_row)),)
        return (keys, (Literal(interval=first, queries=(None, self.limit), varies=_one_row),))

    def restricted(self, piece):
        limits = self.per_batch[:, 0]
        queries = _FirstQueries(None, piece.count(limits, piece.q_first) + piece.at)
        return Or((queries, Prefix(None, piece.count(limits, piece.k_first))))

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        return (q_offset + q_index < self._at(b)) | (k_index < self._at(b))

    def __repr__(self) -> str:
        return f"global_tokens({self._text()})"


@node
class _FirstQueries(_Numbered):
    """Keeps all keys for the queries before a position: `limit` if known when tracing, else `limits` int32 [B or 1]."""

    limit: int | None = static()
    limits: Any

    def terms(self, negated):
        def keys(grid):
            is_first = grid.positions < self.per_batch
            return 0, jnp.where(is_first != negated, grid.kv_length, 0)

        return ((Literal(interval=keys, varies=_one_row),),)


@node
class Dilated(Mask):
    """A mask that keeps the pairs whose distance, p - j, is a multiple of `rate`."""

    rate: int = static()
    is_arithmetic = True

    def terms(self, negated):
        if negated:
            return ((Literal(distance=lambda d: lax.rem(d, jnp.int32(self.rate)) != 0),),)
        return ((Literal(distance=lambda d: lax.rem(d, jnp.int32(self.rate)) == 0, rate=self.rate),),)

    def restricted(self, piece):
        return _Apart(self.rate, piece.stride, piece.shift)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        return (q_offset + q_index - k_index) % self.rate == 0

    def __repr__(self) -> str:
        return f"dilated({self.rate})"


@node
class _Apart(Mask):
    """Keeps the pairs for which stride * d + shift is a multiple of rate, where d is the query's index minus the key's.

    It is Dilated(rate) for tokens that are `stride` positions apart. The query's index includes the grid's offset.
    """

    rate: int = static()
    stride: int = static()
    shift: int = static()

    def terms(self, negated):
        def distance(d):
            return (lax.rem(d * self.stride + self.shift, jnp.int32(self.rate)) == 0) != negated

        return ((Literal(distance=distance, rate=1 if negated else self.rate // math.gcd(self.rate, self.stride)),),)
