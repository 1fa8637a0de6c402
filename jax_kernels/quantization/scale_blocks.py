"""The blocks of 128 x 128 values that have one scale, in arrays of any number of axes.

Rows are counted through all outer axes of an array, as if these were one axis. A block of rows is then a box of `sizes`
values along the outer axes. So an array keeps its axes, and the devices of a mesh may shard each axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

__all__ = ["BLOCK", "boxes", "counts", "largest", "sizes_of", "spread"]

BLOCK = 128  # rows and columns that share a scale

Lengths = Sequence[int]


def boxes(outer: Lengths) -> tuple[int, ...]:
    """The outer axes, the last of them merged until each block of rows is a box."""
    axes = list(outer) or [1]
    while len(axes) > 1 and _sizes(axes) is None:
        axes[-2:] = [axes[-2] * axes[-1]]
    return tuple(axes)


def sizes_of(axes: Lengths) -> tuple[int, ...]:
    """The sizes of a block of rows along the axes that boxes() gives."""
    sizes = _sizes(axes)
    assert sizes is not None
    return sizes


def _sizes(axes: Lengths) -> tuple[int, ...] | None:
    """sizes_of; None if a block is no box."""
    is_known = all(isinstance(n, int) for n in axes)
    if is_known and 0 < math.prod(axes) <= BLOCK:
        return tuple(axes)
    sizes, rows = [1] * len(axes), BLOCK
    for i in reversed(range(1, len(axes))):
        if not is_known or axes[i] == 0:
            return None
        if axes[i] % rows == 0:
            sizes[i] = rows
            return tuple(sizes)
        if rows % axes[i]:
            return None
        sizes[i] = axes[i]
        rows //= axes[i]
    return rows, *sizes[1:]


def counts(shape: Lengths, sizes: Lengths) -> tuple[int, ...]:
    """The numbers of blocks along each axis."""
    return tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))


def largest(x: Any, sizes: Lengths, largest_along: Callable[[Any, Any], Any]) -> Any:
    """The largest magnitude of each block of x. largest_along(x, axes): the largest along axes."""
    sizes = [min(size, n) if isinstance(n, int) and n else size for n, size in zip(x.shape, sizes, strict=True)]
    split = counts(x.shape, sizes)
    ends = [(0, count * size - n) for n, size, count in zip(x.shape, sizes, split, strict=True)]
    pairs = [pair for count, size in zip(split, sizes, strict=True) for pair in (count, size)]
    return largest_along(jnp.pad(x, ends).reshape(pairs), tuple(range(1, 2 * x.ndim, 2)))


def spread(scale: Any, sizes: Lengths, shape: Lengths) -> Any:
    """The scales of blocks in a shape that broadcasts to the array's."""
    for axis, size in enumerate(sizes):
        if size != 1 and scale.shape[axis] != 1:
            scale = jnp.repeat(scale, size, axis=axis)
    return scale[tuple(map(slice, shape))]
