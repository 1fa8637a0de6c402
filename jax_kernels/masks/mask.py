"""Mask: the keys that each query may attend to, as an expression of simple masks."""

import dataclasses
import functools
import math
import operator
import os
from typing import Any, ClassVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.masks import checks
from jax_kernels.masks.block_arithmetic import Grid, Literal, Terms, product
from jax_kernels.masks.block_lists import BlockLists, PackedBlocks, block_lists, block_status, counts, packed_partial
from jax_kernels.masks.restriction import Piece, keeps_none
from jax_kernels.tracing.promotion import under_defaults


def static(**kwargs: Any) -> Any:
    """A dataclass field of a mask that is part of the pytree's structure. kwargs: as for dataclasses.field."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(static,))
def node[T](kind: type[T]) -> type[T]:
    """A class decorator: the class becomes a frozen dataclass and a pytree, whose leaves are the fields not `static`.

    The constructor checks no fields, since JAX also makes objects with placeholders in them.
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False, repr=False)(kind))


class Mask:
    """The keys that each query may attend to. Masks compose with `&`, `|` and `~`.

    A mask is a pytree: its arrays are leaves, all else is hashable structure. So it may pass through jit, vmap, scan
    and shard_map. Query i of a call has index i and position q_offset + i; key j has index and position j.
    causal, sliding_window, prefix, global_tokens, dilated and from_function look at the query's position;
    segments, block_sparse and dense hold arrays of the call, whose row i belongs to query i.

    Two masks are equal if they have the same structure and the same array objects.
    """

    # The precedence of the operator in a mask's text, in Python's order: | is 0, & is 1, ~ is 2.
    _binds = 3
    # Whether each query keeps an interval of keys, which the literals' intervals give exactly.
    keeps_intervals = False
    # Whether a shard of the batch entries, or of the heads, is a mask of the same shard of each array. The first axis
    # of each array is then the batch, and the second axis of an array with more than two axes is the heads.
    is_shardable = False

    @property
    def batch(self) -> int:
        """The number of batch entries with their own mask; 1 if all have the same mask."""
        return 1

    @property
    def heads(self) -> int:
        """The number of query heads with their own mask; 1 if all have the same mask."""
        return 1

    @property
    def parts(self) -> "tuple[Mask, ...]":
        """The masks that this mask is composed of; none for a simple mask."""
        return ()

    @property
    def factors(self) -> "tuple[Mask, ...]":
        """The masks that `&` joins in this mask; the mask alone if it is no intersection."""
        return (self,)

    @property
    def unprepared(self) -> "Mask":
        """The mask without block lists: a PreparedMask's own mask, else this mask itself."""
        return self

    @property
    def is_evaluated(self) -> bool:
        """Whether the live blocks are found by evaluating all pairs, not by arithmetic on blocks, with `terms`."""
        return type(self).terms is Mask.terms

    @property
    def is_arithmetic(self) -> bool:
        """Whether a kernel can evaluate `elements`: by arithmetic, and one look-up for each query and for each key.

        For other masks a kernel reads bits.
        """
        return False

    @property
    def is_of_keys(self) -> bool:
        """Whether every query keeps the same keys. False also where it is not known."""
        return False

    @property
    def keeps_more_later(self) -> bool:
        """Whether later queries keep more keys, as in a causal mask. False also where it is not known."""
        return False

    @property
    def is_restrictable(self) -> bool:
        """Whether block arithmetic can judge the mask's `restricted`. Otherwise a piece's pairs are evaluated."""
        return type(self).restricted is not Mask.restricted

    @property
    def is_valid(self) -> Any:
        """A traced bool: False if a traced float array with values other than 0 and 1 was given as a mask. None
        otherwise.

        Known arrays are checked when the mask is made, so that there is nothing left to check.
        """
        return None

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        """Raises ValueError if an array of the mask does not fit a call of these lengths."""

    def terms(self, negated: bool) -> Terms:
        """The mask, or if `negated` its complement, as a sum of products of literals, for arithmetic on blocks.

        A pair is kept if all literals of at least one of the inner tuples keep it. By default, block arithmetic can
        judge no block.
        """
        return ((Literal(cells=lambda grid: jnp.ones((1, 1, grid.rows, grid.columns), bool)),),)

    def restricted(self, piece: Piece) -> "Mask":
        """The mask of a piece's queries and keys, for block arithmetic only: its `terms` take the piece's indices.

        By default, block arithmetic can judge no block.
        """
        return Unjudged()

    def of_heads(self, first: Any, count: int) -> "Mask":
        """The mask of the `count` query heads from head `first` on, which may be traced: its per-head arrays sliced.

        Raises NotImplementedError if the mask differs between heads and its class does not define this method.
        """
        if self.heads == 1:
            return self
        raise NotImplementedError(f"mask: got {type(self).__name__}, whose heads cannot be sharded")

    def keeps_none(self, queries: range, keys: range) -> bool:
        """Whether it is certain without evaluating pairs that no query at `queries` keeps a key at `keys`.

        queries, keys: positions in the whole sequence. False may also mean that it is not known. The limits of windows,
        prefixes, global tokens and dilation count, and cells that are known when tracing.
        """
        return all(keeps_none(literals, queries, keys) for literals in self.terms(False))

    def block_counts(self, grid: Grid) -> jax.Array:
        """The number of pairs that each block of the grid keeps: int32 [B or 1, H or 1, rows, columns]."""
        return counts(self, grid)

    def elements(self, b: Any, h: Any, q_index: Any, k_index: Any, *, q_offset: Any = 0) -> jax.Array:
        """Whether each pair is kept: bool, of the arguments' joint shape or a shape that broadcasts to it.

        b, h, q_index, k_index: int32 that broadcast with each other: batch entry, query head, index of the query
        and of the key, all in range. q_offset: int32 that broadcasts with them, the position of query 0. The code is
        traceable jnp code. Masks of arrays look up the arrays' entries; masks of positions, such as causal(), need only
        arithmetic. A kernel can call this only for a mask whose arrays the kernel can index.
        """
        raise NotImplementedError

    @under_defaults
    def rows(self, q_index: jax.Array | np.ndarray, kv_length: int, *, q_offset: Any = 0) -> jax.Array:
        """The mask of some queries and all keys: bool [B or 1, H or 1, len(q_index), kv_length].

        q_index: int32 [n], the queries' indices, in range. q_offset: the position of query 0, an int, a scalar or [B or
        1] int32.
        """
        _, offset = checks.offset(q_offset)
        batch = checks.joint("q_offset", [self.batch, offset.shape[0]], "batch entries")
        b = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
        h = jnp.arange(self.heads, dtype=jnp.int32)[:, None, None]
        q, k = jnp.asarray(q_index, jnp.int32)[:, None], jnp.arange(kv_length, dtype=jnp.int32)
        keep = self.elements(b, h, q, k, q_offset=offset.reshape(-1, 1, 1, 1))
        shape = (batch, self.heads, q.shape[0], kv_length)
        return jnp.broadcast_to(keep, shape)

    @under_defaults
    def to_dense(self, q_length: int, kv_length: int, *, q_offset: Any = 0) -> jax.Array:
        """The mask as an array: bool [B or 1, H or 1, q_length, kv_length], True where a query may attend.

        q_offset: the position of query 0, an int, or int32, a scalar or [B].
        """
        q_length, kv_length = checks.lengths(q_length, kv_length)
        self.check_lengths(q_length, kv_length)
        offsets = checks.offset(q_offset)[1].shape[0]
        batch = checks.joint("q_offset", [self.batch, offsets], "batch entries")
        if 0 in (batch, self.heads, q_length, kv_length):  # an array of the mask may have no entry to look up
            return jnp.zeros((batch, self.heads, q_length, kv_length), bool)
        # From a NumPy array of all indices, a mask sees that it needs no lookup in its array.
        return self.rows(np.arange(q_length, dtype=np.int32), kv_length, q_offset=q_offset)

    @under_defaults
    def block_lists(
        self, q_length: int, kv_length: int, block_q: int, block_kv: int, by: str = "query", *, q_offset: Any = 0
    ) -> BlockLists:
        """The live blocks as BlockLists, which separate full from partial blocks.

        by="query": for every block of block_q queries, its blocks of block_kv keys; by="key": for every block of
        keys, its blocks of queries. q_offset: the position of query 0, an int, or int32, a scalar or [B].

        A block is full if all its queries keep all its keys. A block that reaches past the last key is never full;
        queries past the last query do not count. The static width of the lists is an upper bound on a list's live
        blocks, from the mask's structure: (window + block) / block for a sliding window, all blocks for an array. A
        block of a mask that holds a dense array or a function must have fewer than 2**31 pairs.

        Masks that hold a dense array or a function are evaluated chunk by chunk, and their lists are exact. Block
        arithmetic judges all other masks, in time and memory of queries + blocks of queries x blocks of keys. Its
        lists are exact for compositions of

        - causal, sliding_window, prefix, global_tokens, and segments in which each id has one run of keys;
        - causal, sliding_window and dilated;
        - block_sparse without other masks, or with any of these if each block lies within one cell.

        For other masks, such as dilated with segments, a dead or a full block may be called partial. A partial block
        is never called dead or full.
        """
        if by not in ("query", "key"):
            raise ValueError(f"by: got {by!r}, want 'query' or 'key'")
        return block_lists(self, **self._call(q_length, kv_length, (block_q, block_kv), q_offset), by=by)

    @under_defaults
    def packed_partial(
        self, q_length: int, kv_length: int, block_q: int, block_kv: int, by: str = "query", *, q_offset: Any = 0
    ) -> PackedBlocks:
        """The pairs of the partial blocks that block_lists finds for the same arguments, one bit for each pair.

        There is an entry for each partial block, and one more. Under a trace the number of partial blocks is not known,
        and there is an entry for each block that could be partial. These are a few for each block of queries and keys,
        if the mask is made of causal, sliding_window, prefix, global_tokens, and block_sparse masks whose cells hold
        whole blocks; otherwise the lists' width is the only limit.
        """
        if by not in ("query", "key"):
            raise ValueError(f"by: got {by!r}, want 'query' or 'key'")
        return packed_partial(self, **self._call(q_length, kv_length, (block_q, block_kv), q_offset), by=by)

    @under_defaults
    def density(self, q_length: int, kv_length: int, block: int | tuple[int, int], *, q_offset: Any = 0) -> jax.Array:
        """The fraction of blocks that are live, a float32 scalar, over batch and heads; 0 if there is no block.

        block: the size of a block, an int or (queries, keys). q_offset: the position of query 0, an int, or int32, a
        scalar or [B].
        """
        alive, _ = self._status(q_length, kv_length, block, q_offset)
        return jnp.mean(alive, dtype=jnp.float32) if alive.size else jnp.zeros((), jnp.float32)

    def plot(
        self,
        path: str | os.PathLike[str],
        q_length: int,
        kv_length: int,
        block: int | tuple[int, int],
        *,
        q_offset: Any = 0,
        b: int = 0,
        h: int = 0,
    ) -> None:
        """Writes a picture of the dead, partial and full blocks of one batch entry and head to `path`. Needs
        matplotlib.

        block: the size of a block, an int or (queries, keys). q_offset: the position of query 0. b, h: the indices of
        the batch entry and of the query head. The suffix of `path` sets the format, as in matplotlib.
        """
        from jax_kernels.masks.plots import plot_blocks

        if 0 in checks.lengths(q_length, kv_length):
            raise ValueError(f"q_length, kv_length: got {q_length} and {kv_length}, want at least 1 for a picture")
        alive, full = self._status(q_length, kv_length, block, q_offset)
        for name, index, size in (("b", b, alive.shape[0]), ("h", h, alive.shape[1])):
            if not checks.is_int(index) or not (0 <= index < size or size == 1):
                raise ValueError(f"{name}: got {index!r}, want an int from 0 to {size - 1}")
        b, h = (0 if size == 1 else index for index, size in zip((b, h), alive.shape, strict=False))
        plot_blocks(path, alive[b, h], full[b, h], title=repr(self), block=checks.block_pair("block", block))

    def _status(self, q_length, kv_length, block, q_offset):
        """(live, full), whether each block keeps some pair, and all: bool [B or 1, H or 1, rows, columns] each."""
        return block_status(self, **self._call(q_length, kv_length, checks.block_pair("block", block), q_offset))

    def _call(self, q_length, kv_length, blocks, q_offset) -> dict[str, Any]:
        """The checked arguments of a call, as keyword arguments for the functions of block_lists.py.

        blocks: (queries, keys) of a block. Raises ValueError if the mask does not fit the call.
        """
        lengths = checks.lengths(q_length, kv_length)
        blocks = tuple(checks.integer(name, x, 1) for name, x in zip(("block_q", "block_kv"), blocks, strict=True))
        self.check_lengths(*lengths)
        pairs = math.prod(min(length, block) for length, block in zip(lengths, blocks, strict=True))
        if self.is_evaluated and pairs > checks.INT32[1]:
            want = "fewer than 2**31 pairs in a block of a mask that holds a dense array or a function"
            raise ValueError(f"block_q, block_kv: got {blocks} for {lengths} queries and keys, want {want}")
        static_offset, offset = checks.offset(q_offset)
        checks.joint("q_offset", [self.batch, offset.shape[0]], "batch entries")
        return {"offset": offset, "lengths": lengths, "blocks": blocks, "static_offset": static_offset}

    def __and__(self, other: "Mask") -> "Mask":
        return _joined(And, self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _joined(Or, self, other)

    # Handle an array or a constant on the left. __array_ufunc__ makes NumPy arrays call these methods.
    __rand__ = __and__
    __ror__ = __or__
    __array_ufunc__ = None

    def __invert__(self) -> "Mask":
        mask = self.unprepared
        return mask.mask if isinstance(mask, Not) else Not(mask)

    def __bool__(self) -> bool:
        raise TypeError("a Mask has no truth value: compose masks with &, | and ~, not with and, or and not")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        mine, theirs = (jax.tree.flatten(mask) for mask in (self, other))
        return mine[1:] == theirs[1:] and all(map(operator.is_, mine[0], theirs[0]))

    def __hash__(self) -> int:
        leaves, structure = jax.tree.flatten(self)
        return hash((structure, *map(id, leaves)))

    def _text_within(self, binds: int) -> str:
        return f"({self!r})" if self._binds < binds else repr(self)


def _joined(kind: Any, *masks: Any) -> Any:
    """The And or Or (`kind`) of two masks; block lists of PreparedMasks are dropped.

    Raises TypeError if the second is no Mask, ValueError if their numbers of batch entries or heads differ.

    Parts that are of the same kind are merged, so that a & b & c is one And of three masks.
    """
    operation = kind._sign
    if not isinstance(masks[1], Mask):
        got = f"{type(masks[1]).__name__} and a Mask"
        raise TypeError(f"{operation}: got {got}, want another Mask; masks.dense makes a Mask of a bool array")
    masks = tuple(mask.unprepared for mask in masks)
    parts = [part for mask in masks for part in (mask.masks if isinstance(mask, kind) else (mask,))]
    for what in ("batch", "heads"):
        checks.joint(operation, [getattr(x, what) for x in parts], what)
    return kind(tuple(parts))


def all_valid(*masks: Mask) -> Any:
    """Whether all masks are valid: the conjunction of their is_valid, a traced bool, or None if all are None."""
    found = [x for x in (mask.is_valid for mask in masks) if x is not None]
    return functools.reduce(operator.and_, found) if found else None


class Composite(Mask):
    """A base class of masks that are made of other masks: of the field `mask`, if they do not define `parts`."""

    mask: Mask

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    @property
    def is_valid(self) -> Any:
        return all_valid(*self.parts)

    @property
    def batch(self) -> int:
        return checks.joint("mask", [mask.batch for mask in self.parts], "batch entries")

    @property
    def heads(self) -> int:
        return checks.joint("mask", [mask.heads for mask in self.parts], "heads")

    @property
    def is_evaluated(self) -> bool:
        return any(mask.is_evaluated for mask in self.parts)

    @property
    def is_arithmetic(self) -> bool:
        return all(mask.is_arithmetic for mask in self.parts)

    @property
    def is_of_keys(self) -> bool:
        return all(mask.is_of_keys for mask in self.parts)

    @property
    def is_restrictable(self) -> bool:
        return super().is_restrictable and all(mask.is_restrictable for mask in self.parts)

    def check_lengths(self, q_length, kv_length):
        for mask in self.parts:
            mask.check_lengths(q_length, kv_length)


def _sum(masks, negated):
    """The terms of the union of masks, or with negated=True of the union of their complements."""
    return tuple(conjunction for mask in masks for conjunction in mask.terms(negated))


def _product(masks, negated):
    """The terms of the intersection of masks, or with negated=True of the intersection of their complements."""
    return product([mask.terms(negated) for mask in masks])


@node
class _Joined(Composite):
    """A base class of And and Or. _join: the operator, which joins arrays too. _sign: its text."""

    masks: tuple[Mask, ...]
    _join: ClassVar[Any]
    _sign: ClassVar[str]

    @property
    def parts(self):
        return self.masks

    @property
    def keeps_more_later(self) -> bool:
        return any(mask.keeps_more_later for mask in self.masks)

    def restricted(self, piece):
        return type(self)(tuple(mask.restricted(piece) for mask in self.masks))

    def of_heads(self, first, count):
        return type(self)(tuple(mask.of_heads(first, count) for mask in self.masks))

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        parts = (mask.elements(b, h, q_index, k_index, q_offset=q_offset) for mask in self.masks)
        return functools.reduce(self._join, parts)

    def rows(self, q_index, kv_length, *, q_offset=0):
        return functools.reduce(self._join, (x.rows(q_index, kv_length, q_offset=q_offset) for x in self.masks))

    def __repr__(self) -> str:
        return f" {self._sign} ".join(mask._text_within(self._binds) for mask in self.masks)


@node
class And(_Joined):
    """The intersection of masks: keeps the pairs that all of them keep."""

    _binds, _sign, _join = 1, "&", operator.and_

    @property
    def factors(self):
        return self.masks

    def terms(self, negated):
        return (_sum if negated else _product)(self.masks, negated)

    def keeps_none(self, queries, keys):
        return any(mask.keeps_none(queries, keys) for mask in self.masks) or super().keeps_none(queries, keys)


@node
class Or(_Joined):
    """The union of masks: keeps the pairs that at least one of them keeps."""

    _binds, _sign, _join = 0, "|", operator.or_

    def terms(self, negated):
        return (_product if negated else _sum)(self.masks, negated)

    def keeps_none(self, queries, keys):
        return all(mask.keeps_none(queries, keys) for mask in self.masks)


@node
class Not(Composite):
    """The complement of a mask: keeps the pairs that it drops."""

    mask: Mask
    _binds = 2

    def terms(self, negated):
        return self.mask.terms(not negated)

    def restricted(self, piece):
        return Not(self.mask.restricted(piece))

    def of_heads(self, first, count):
        return Not(self.mask.of_heads(first, count))

    def block_counts(self, grid):
        return grid.area() - self.mask.block_counts(grid)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        return ~self.mask.elements(b, h, q_index, k_index, q_offset=q_offset)

    def rows(self, q_index, kv_length, *, q_offset=0):
        return ~self.mask.rows(q_index, kv_length, q_offset=q_offset)

    def __repr__(self) -> str:
        return f"~{self.mask._text_within(2)}"


@node
class Unjudged(Mask):
    """A restricted mask that block arithmetic cannot judge: every block may be live, in the mask and its complement."""
