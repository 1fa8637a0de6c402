"""Sums along an axis, in the form in which a GPU takes them fastest."""

import jax
import jax.numpy as jnp
from jax import lax

RUN = 128  # members whose sums a thread may as well add up anew


def running_sums(x: jax.Array) -> jax.Array:
    """cumsum along the last axis, int32.

    XLA makes a long cumsum of windows within windows, and fuses it into what reads it, which adds up all of them for
    each number that it reads: a lookup in the sums of 4096 then takes an H200 0.28 ms. Here the sums of runs stand in
    memory.
    """
    length = x.shape[-1]
    if length <= RUN:
        return jnp.cumsum(x, axis=-1, dtype=jnp.int32)
    parts = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % RUN)]).reshape(*x.shape[:-1], -1, RUN)
    total = parts.sum(axis=-1, dtype=jnp.int32)
    before = lax.optimization_barrier(running_sums(total) - total)
    sums = jnp.cumsum(parts, axis=-1, dtype=jnp.int32) + before[..., None]
    return lax.optimization_barrier(sums.reshape(*x.shape[:-1], -1)[..., :length])
