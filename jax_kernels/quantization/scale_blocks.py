"""Blocks of 128 x 128 values that share a scale, in arrays of any number of axes.

The outer axes of an array (all rows' axes) are counted as if they were one axis of rows. 128 consecutive rows are then
a box of some size along each outer axis, where the sizes of axes allow it. So an array keeps its axes, and the devices
of a mesh may shard each axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

__all__ = ["BLOCK", "boxes", "counts", "largest", "sizes_of", "spread"]

BLOCK = 128  # rows and columns that share a scale

Lengths = Sequence[int]


def boxes(outer: Lengths) -> tuple[int, ...]:
    """The lengths `outer` of an array's row axes, with the last axes merged so that rows can be cut into blocks of 128.

    A block of 128 consecutive rows must be a box: an equal range along each axis, such as 1 x 128 or 2 x 64. As few
    axes as possible are merged. [4, 128] stays, with blocks of 1 x 128; [3, 100] becomes [300], because 128 rows of it
    form no box. [] becomes [1].
    """
    axes = list(outer) or [1]
    while len(axes) > 1 and _sizes(axes) is None:
        axes[-2:] = [axes[-2] * axes[-1]]
    return tuple(axes)


def sizes_of(axes: Lengths) -> tuple[int, ...]:
    """The size of a block of 128 rows along each of these axes. They must be axes that `boxes` returns."""
    sizes = _sizes(axes)
    assert sizes is not None
    return sizes


def _sizes(axes: Lengths) -> tuple[int, ...] | None:
    """The size of a block of 128 consecutive rows along each axis; all rows are one block if they are fewer.

    None if 128 consecutive rows are no box, i.e. not a product of a range along each axis.
    """
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
    """The number of blocks of these sizes along each axis of an array of this shape."""
    return tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))


def largest(x: Any, sizes: Lengths, largest_along: Callable[[Any, Any], Any]) -> Any:
    """The largest magnitude of each block of x, one value for each block along each axis.

    sizes: of a block along each axis. largest_along(x, axes): the function that finds the largest magnitudes along
    axes.
    """
    sizes = [min(size, n) if isinstance(n, int) and n else size for n, size in zip(x.shape, sizes, strict=True)]
    split = counts(x.shape, sizes)
    ends = [(0, count * size - n) for n, size, count in zip(x.shape, sizes, split, strict=True)]
    pairs = [pair for count, size in zip(split, sizes, strict=True) for pair in (count, size)]
    return largest_along(jnp.pad(x, ends).reshape(pairs), tuple(range(1, 2 * x.ndim, 2)))


def spread(scale: Any, sizes: Lengths, shape: Lengths) -> Any:
    """The scales of blocks repeated for the values of each block, in a shape that broadcasts to `shape`, the
    array's.
    """
    for axis, size in enumerate(sizes):
        if size != 1 and scale.shape[axis] != 1:
            scale = jnp.repeat(scale, size, axis=axis)
    return scale[tuple(map(slice, shape))]
