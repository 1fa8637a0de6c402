"""Numbers in 8 bits, with float32 scales."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["quantize_fp8"]


def quantize_fp8(x: Any, axis: int | Sequence[int] | None = None) -> tuple[jax.Array, jax.Array]:
    """x in float8_e4m3fn, and the scales to multiply it by: x ≈ values * scales.

    Equivalent to the following JAX code::

        largest = jnp.abs(x).max(axis)
        scales = where(largest > 0, largest / 448, 1)  # 448 is e4m3's largest number
        values = (x / jnp.expand_dims(scales, axis)).astype(float8_e4m3fn)

    A number comes back with a relative error of 2**-4 at most, unless it is below 2**-14 of the largest one that shares
    its scale; then with an absolute error of 2**-18 of that one at most.

    Args:
      x: a float array, of any shape.
      axis: the axes whose numbers share a scale; None: all of them. For the heads of attention, x [B, T, H, D]: (1, 3).

    Returns:
      values, of x's shape, float8_e4m3fn; scales, float32 and positive, of x's shape without `axis`. What shares a
      scale with a NaN or an infinity becomes NaN.

    Raises:
      TypeError: x is no float array.
      ValueError: axis is none of x's, or there twice.

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
