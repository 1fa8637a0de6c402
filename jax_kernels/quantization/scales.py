"""The scales of 8-bit arrays: their shapes and checks, and the scales that map an array into a format's range."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.plain_numbers import plain
from jax_kernels.quantization import scale_blocks
from jax_kernels.quantization.scale_blocks import BLOCK

__all__ = [
    "SCALINGS",
    "check_scaling",
    "checked_scale",
    "largest_along",
    "quantization_scale",
    "scale_of",
    "scale_shape",
    "spread_scale",
]

SCALINGS = ("tensor", "row", "block")


def check_scaling(scaling: Any) -> None:
    """Raises ValueError unless scaling is "tensor", "row" or "block"."""
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise ValueError(f"scaling: got {scaling!r}, want 'tensor', 'row' or 'block'")


def scale_shape(shape: tuple[int, ...], scaling: str, axis: int = -1) -> tuple[int, ...]:
    """The shape of the scales of an 8-bit array of this shape: [] for "tensor", without `axis` for "row", blocks for
    "block".

    Blocks have 128 x 128 values of the last two axes.
    """
    if scaling == "tensor":
        return ()
    if scaling == "row":
        at = len(shape) + axis
        return (*shape[:at], *shape[at + 1 :])
    return scale_blocks.counts(shape, _block_sizes(shape))


def checked_scale(name: str, scale: Any, shape: tuple[int, ...]) -> jax.Array:
    """The scale as a float32 array of this shape; a positive Python or NumPy number becomes an array.

    Raises TypeError for another dtype, ValueError for another shape or a number that is not positive. name: the
    argument's name, for errors.
    """
    if getattr(scale, "dtype", None) != jnp.float32:
        scale = plain(scale)
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        if not 0 < scale < float("inf"):
            raise ValueError(f"{name}: got {scale}, want a positive number")
        scale = jnp.float32(scale)
    if getattr(scale, "dtype", None) != jnp.float32:
        raise TypeError(f"{name}: got {getattr(scale, 'dtype', type(scale).__name__)}, want float32")
    if scale.shape != shape:
        raise ValueError(f"{name}: got shape {scale.shape}, want {shape}")
    return scale


def quantization_scale(x: jax.Array, dtype: Any, scaling: str, axis: Any) -> jax.Array:
    """The float32 scales that map x's largest magnitudes to the largest value of `dtype`, in the shape that scaling
    gives.

    axis: for scaling="row", the axis, or a tuple of axes, along which values share a scale.
    """
    return scale_of(_largest(x.astype(jnp.float32), scaling, axis), dtype)


def _largest(x: jax.Array, scaling: str, axis: Any) -> jax.Array:
    """The largest magnitude among the values that share a scale, for each scale: float32 in the scales' shape."""
    if scaling == "tensor":
        return largest_along(x, None)
    if scaling == "row":
        return largest_along(x, axis)
    return scale_blocks.largest(x, _block_sizes(x.shape), largest_along)


def largest_along(x: jax.Array, axis: Any, keepdims: bool = False) -> jax.Array:
    """The largest magnitude along axes (None: all): float32; NaN if a value is NaN, and 0 without values.

    XLA's maximum drops a NaN on CPUs, but not on GPUs.
    """
    largest = lambda x: jnp.abs(x).max(axis, keepdims=keepdims, initial=0)
    on_cpu = lambda x: jnp.where(jnp.isnan(x).any(axis, keepdims=keepdims), jnp.nan, largest(x))
    return jax.lax.platform_dependent(x, cpu=on_cpu, default=largest)


def spread_scale(scale: jax.Array, scaling: str, axis: Any, shape: tuple[int, ...]) -> jax.Array:
    """The scales in a shape that broadcasts to `shape`, the array's."""
    if scaling == "tensor":
        return scale
    if scaling == "row":
        return jnp.expand_dims(scale, axis)
    return scale_blocks.spread(scale, _block_sizes(shape), shape)


def _block_sizes(shape: Sequence[int]) -> list[int]:
    """The length of a block of 128 x 128 values along each axis: 1 for all axes except the last two."""
    return [*[1] * (len(shape) - 2), BLOCK, BLOCK]


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """The scales that map magnitudes up to `largest` to the largest value of dtype; 1 for a magnitude of 0.

    Each scale is a normal number, so that its reciprocal is finite.
    """
    tiny, top = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(dtype).max)
    return jnp.where(largest == 0, 1, jnp.maximum(largest / top, tiny))
