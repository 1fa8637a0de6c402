"""Running sums along an axis, in the form that is fastest on a GPU."""

import jax
import jax.numpy as jnp
from jax import lax

RUN = 128  # values that a thread can cheaply add up again


def running_sums(x: jax.Array) -> jax.Array:
    """The inclusive cumulative sums of x [..., n] along the last axis: int32 [..., n]. x: bool or int32.

    XLA makes a long cumsum from nested windows and fuses it into the code that reads the sums. Each read then adds up
    all windows again: a lookup in the sums of 4096 values takes an H200 0.28 ms. Here the sums of runs of RUN values
    are stored in memory, by optimization_barrier.
    """
    length = x.shape[-1]
    if length <= RUN:
        return jnp.cumsum(x, axis=-1, dtype=jnp.int32)
    parts = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % RUN)]).reshape(*x.shape[:-1], -1, RUN)
    total = parts.sum(axis=-1, dtype=jnp.int32)
    before = lax.optimization_barrier(running_sums(total) - total)
    sums = jnp.cumsum(parts, axis=-1, dtype=jnp.int32) + before[..., None]
    return lax.optimization_barrier(sums.reshape(*x.shape[:-1], -1)[..., :length])
