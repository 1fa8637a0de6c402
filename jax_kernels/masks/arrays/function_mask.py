"""Masks of an elementwise predicate in jnp code."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import checks
from jax_kernels.masks.mask import Mask, node, static


def from_function(
    function: Callable[..., Any], *arrays: jax.Array, batch: int | None = None, heads: int | None = None
) -> Mask:
    """A mask of any elementwise predicate function(b, h, q, k, *arrays) -> bool, in traceable jnp code.

    b, h, k: int32 indices of the batch entry, the query head and the key; q: int32, the query's position, q_offset + i.
    They broadcast with each other, and the result has their joint shape, or a shape that broadcasts to it. So the
    function may compare, select and look up (`ids[b, q] == ids[b, k]`), but not reduce, sort or reshape.
    arrays: the arrays that the function looks up; they are leaves of the mask. Arrays that the function captures must
    not be traced. batch, heads: the number of batch entries and heads that the function distinguishes; None if it does
    not use b, or h. If an array for a look-up is empty, the function is not called: the mask keeps no pair.

    jit compiles again for a mask of another function object: define the function once, not for each call.

    Under a trace, a kernel's lists hold bits for every block: gigabytes at 131,072 queries and keys. To avoid this,
    intersect the mask with a mask that bounds it, such as a sliding_window; or call prepare_mask outside of jit, which
    holds bits only for the blocks that exist.
    """
    if not callable(function):
        raise TypeError(f"function: got {type(function).__name__}, want a function (b, h, q, k) -> bool")
    sizes = [None if x is None else checks.integer(name, x, 0) for name, x in (("batch", batch), ("heads", heads))]
    leaves = tuple(checks.array("arrays", x, "arrays") for x in arrays)
    checks.elementwise(function, leaves, *sizes)
    return Function(leaves, function, *(1 if size is None else size for size in sizes))


@node
class Function(Mask):
    """A mask of an elementwise predicate function(b, h, q, k, *arrays) -> bool.

    arrays: the arrays that the function looks up. batch_entries, head_count: the number of batch entries and of query
    heads that it distinguishes, 1 for none.
    """

    arrays: tuple[Any, ...]
    function: Callable[..., Any] = static()
    batch_entries: int = static()
    head_count: int = static()

    @property
    def batch(self) -> int:
        return self.batch_entries

    @property
    def heads(self) -> int:
        return self.head_count

    def of_heads(self, first, count):
        if self.heads == 1:
            return self
        arrays = jnp.asarray(first, jnp.int32), *self.arrays
        return Function(arrays, _OfHeads(self.function), self.batch_entries, count)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        int32 = functools.partial(jnp.asarray, dtype=jnp.int32)
        q = int32(q_offset) + int32(q_index)
        return self.function(int32(b), int32(h), q, int32(k_index), *self.arrays)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"from_function({', '.join([name, *map(checks.array_text, self.arrays)])})"


@dataclasses.dataclass(frozen=True)
class _OfHeads:
    """A predicate for from_function that adds an offset to the head's index before it calls `function`.

    The offset, the index of the first head, is the first of the mask's arrays.
    """

    function: Any

    def __call__(self, b: Any, h: Any, q: Any, k: Any, first: Any, *arrays: Any) -> Any:
        return self.function(b, h + first, q, k, *arrays)
