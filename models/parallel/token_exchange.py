"""Exchanges of tokens between the devices along mesh axes, inside jax.shard_map."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.tracing.derivatives import in_both_modes

__all__ = ["after", "exchange_rows", "gather_tokens", "scatter_tokens"]


def scatter_tokens(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over the devices along mesh axes of a device's own rows: [N, D] from x [devices * N, D].

    Row N * i + j of x is row j of device i. Each device's share is sent in x's dtype, by an all-to-all; the sum and the
    result are float32.
    """
    shares = lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    return shares.reshape(lax.axis_size(axes), -1, x.shape[1]).astype(jnp.float32).sum(0)


def _gathered_tokens(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return lax.all_gather(x, axes, tiled=True)


def _gathered_forward(axes: tuple[str, ...], x: jax.Array) -> Any:
    return _gathered_tokens(axes, x), None


def _gathered_backward(axes: tuple[str, ...], _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (scatter_tokens(cotangent, axes).astype(cotangent.dtype),)


_gather_in_both_modes = in_both_modes(_gathered_tokens, _gathered_forward, _gathered_backward)


def gather_tokens(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The rows of all devices along mesh axes, [devices * N, D] from x [N, D]. Its gradient is scatter_tokens.

    An all-to-all can be copies by a GPU's copy engines, which run during kernels; a reduce-scatter occupies SMs.
    """
    return _gather_in_both_modes(axes, x)


def after(first: jax.Array, x: jax.Array) -> jax.Array:
    """x, which XLA computes after the floats of `first`.

    XLA removes an optimization_barrier before it orders collectives. So x depends on a bit of a value of `first`, whose
    half is 0. The derivative is 1 for x and 0 for `first`.
    """
    if first.size == 0:
        return x
    value = lax.stop_gradient(first.reshape(-1)[0]).astype(jnp.float32)
    zero = (lax.bitcast_convert_type(value, jnp.uint32) & 1) >> 1
    return x + zero.astype(x.dtype)


def exchange_rows(rows: jax.Array, capacity: int, sizes: jax.Array, axis: str) -> jax.Array:
    """The rows that a device gets from all devices along a mesh axis, inside jax.shard_map: [capacity, D].

    Rows are sent in the order of the devices that get them, and arrive in the order of the devices that sent them.
    Rows past the last one are 0. The exchange back is exchange_rows of the results, with the transposed sizes.

    On GPUs this is lax.ragged_all_to_all, which sends no padding. XLA has none for CPUs, where each device gathers all
    rows.

    Args:
      rows: [M, D]: first the sizes[i, 0] rows for device 0, then the rows for device 1, and so on, on device i.
      capacity: the largest number of rows that a device may get.
      sizes: int32 [devices, devices], the same on all devices: the rows that device i sends to device j.
      axis: the mesh axis of the devices.
    """
    choose = lambda **branches: lax.platform_dependent(rows, sizes, **branches)
    of_branch = lambda function: lambda rows, sizes: function(rows, capacity, sizes, axis)
    return choose(cpu=of_branch(_gathered), default=of_branch(_ragged))


def _before(x: jax.Array, axis: int = 0) -> jax.Array:
    """The sum of the entries before each entry, along an axis."""
    return jnp.cumsum(x, axis, dtype=jnp.int32) - x


def _ragged(rows: jax.Array, capacity: int, sizes: jax.Array, axis: str) -> jax.Array:
    me = lax.axis_index(axis)
    empty = jnp.zeros((capacity, rows.shape[1]), rows.dtype)
    starts, ends = _before(sizes[me]), _before(sizes)[me]
    return lax.ragged_all_to_all(rows, empty, starts, sizes[me], ends, sizes[:, me], axis_name=axis)


def _gathered(rows: jax.Array, capacity: int, sizes: jax.Array, axis: str) -> Any:
    me = lax.axis_index(axis)
    arriving = sizes[:, me]
    index = lax.iota(jnp.int32, capacity)
    source = jnp.searchsorted(jnp.cumsum(arriving), index, side="right")
    source = jnp.minimum(source, sizes.shape[0] - 1)
    row = _before(sizes, 1)[source, me] + index - _before(arriving)[source]
    found = lax.all_gather(rows, axis).at[source, row].get(mode="fill", fill_value=0)
    return jnp.where((index < arriving.sum())[:, None], found, 0)
