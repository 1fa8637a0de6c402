"""The scales of values that a Triton kernel rounds to 8 bits."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

__all__ = ["magnitude_bits", "reciprocal", "scale_of"]


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The magnitudes of float32 values as the bits of float32, int32 in x's shape.

    These bits order like the magnitudes, with NaN above infinity. Triton's maximum of floats would drop a NaN.
    """
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def scale_of(largest: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """(scale, 1 / scale), float32 in the shape of `largest`, for values of up to a largest magnitude.

    A scale is the largest magnitude divided by the largest value of the 8-bit `dtype`; 1 for a magnitude of 0, and at
    least the least normal float32. The reciprocal is NaN if the magnitude is NaN or infinity. largest: int32, the
    magnitudes as magnitude_bits gives them.
    """
    top, tiny = float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).tiny)
    magnitude = lax.bitcast_convert_type(largest, jnp.float32)
    scale = magnitude * (1 / top)
    scale = jnp.where(scale < tiny, tiny, scale)  # a maximum would drop a NaN
    scale = jnp.where(magnitude == 0, 1.0, scale)
    return scale, reciprocal(scale)


def reciprocal(scale: jax.Array) -> jax.Array:
    """1 / scale for each scale. NaN if the scale is infinite or NaN, so that all values that share it become NaN."""
    return jnp.where(scale < jnp.inf, 1 / scale, jnp.nan)
