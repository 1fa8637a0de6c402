"""quantize_fp8: numbers in 8 bits, with float32 scales."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["quantize_fp8"]


def quantize_fp8(x: Any, axis: int | Sequence[int] | None = None) -> tuple[jax.Array, jax.Array]:
    """Rounds x to float8_e4m3fn. Returns (values, scales), with x ≈ values * scales.

    Equivalent to the following JAX code::

        largest = jnp.abs(x).max(axis)
        scales = where(largest > 0, largest / 448, 1)  # 448 is e4m3's largest number
        values = (x / jnp.expand_dims(scales, axis)).astype(float8_e4m3fn)

    The relative error of a number is at most 2**-4. For a number below 2**-14 of the largest one that shares its scale,
    the absolute error is at most 2**-18 of that largest one.

    Args:
      x: a float array, of any shape.
      axis: the axes whose numbers share a scale; None is all axes. (1, 3) gives each head of x [B, T, H, D] a scale.

    Returns:
      values: float8_e4m3fn, of x's shape. scales: positive float32, of x's shape without `axis`. Numbers that share a
      scale with a NaN or an infinity become NaN.

    Raises:
      TypeError: x is no float array.
      ValueError: x lacks an axis of `axis`, or `axis` has one twice.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433.
    """
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: got {getattr(x, 'dtype', type(x).__name__)}, want a float array")
    axes = tuple(range(x.ndim)) if axis is None else _axes(axis)
    shared = {a % x.ndim for a in axes if -x.ndim <= a < x.ndim}
    if len(shared) != len(axes):
        raise ValueError(f"axis: got {axis}, want different axes of an array of shape {x.shape}")
    x = jnp.asarray(x).astype(jnp.float32)
    largest = jnp.abs(x).max(axes, keepdims=True, initial=0)
    # The least scale is a normal number: its reciprocal is finite.
    tiny, top = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float8_e4m3fn).max)
    scales = jnp.where(largest == 0, 1, jnp.maximum(largest / top, tiny))
    values = jnp.where(jnp.isfinite(scales), x / scales, jnp.nan).astype(jnp.float8_e4m3fn)
    return values, jnp.squeeze(scales, tuple(shared))


def _axes(axis: Any) -> tuple[int, ...]:
    """The axes of an int of any kind, or of a sequence of such."""
    try:
        return (operator.index(axis),) if hasattr(axis, "__index__") else tuple(operator.index(x) for x in axis)
    except TypeError:
        raise TypeError(f"axis: got {axis!r}, want an int or a sequence of ints") from None
