"""shard_sequence and unshard_sequence: arrays to a layout of ring_attention, and back."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_kernels.ops.ring.layouts import LAYOUTS, Layout

__all__ = ["order_of", "shard_sequence", "unshard_sequence"]


def shard_sequence(x: Any, mesh: Mesh, axis_name: str, *, layout: str = "zigzag", axis: int = 1) -> Any:
    """An array with its tokens in the order of a layout, shared out among the devices of a mesh axis.

    Equivalent to device_put(x[:, order], NamedSharding(mesh, P(None, axis_name))), where order has the tokens of device
    0, then those of device 1, and so on; see ring_attention for the layouts. It may be called under jit.

    Args:
      x: an array, or a tree of arrays, with the tokens along `axis`: a multiple of the devices, and with "zigzag" of
        twice as many.
      mesh: a jax.sharding.Mesh. axis_name: one of its axes.
      layout: "zigzag", "striped" or "contiguous".
      axis: of the tokens.

    Returns:
      The same shapes.

    Raises:
      ValueError: the mesh lacks the axis, the layout is unknown, or the devices do not divide the tokens.
    """
    order = lambda length: _order(mesh, axis_name, layout, length)
    return jax.tree.map(lambda x: _placed(x, order(_tokens(x, axis)), mesh, axis_name, axis), x)


def unshard_sequence(x: Any, mesh: Mesh, axis_name: str, *, layout: str = "zigzag", axis: int = 1) -> Any:
    """The inverse of shard_sequence: the tokens in their order, still shared out. Arguments and errors are the same."""
    order = lambda length: np.argsort(_order(mesh, axis_name, layout, length))
    return jax.tree.map(lambda x: _placed(x, order(_tokens(x, axis)), mesh, axis_name, axis), x)


def _tokens(x: Any, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: got {axis} with an array of shape {x.shape}")
    return x.shape[axis]


def _order(mesh: Mesh, axis_name: str, layout: str, length: int) -> np.ndarray:
    if axis_name not in mesh.shape:
        raise ValueError(f"axis_name: got {axis_name!r}, want an axis of the mesh, one of {tuple(mesh.shape)}")
    return order_of(mesh.shape[axis_name], layout, length)


def order_of(devices: int, layout: str, length: int) -> np.ndarray:
    """The tokens of device 0, then those of device 1, and so on, of `length`; raises what shard_sequence documents."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, want one of {', '.join(map(repr, LAYOUTS))}")
    multiple = devices * (2 if layout == "zigzag" else 1)
    if length % multiple:
        raise ValueError(
            f"x: got {length} tokens for {devices} devices with layout={layout!r}, want a multiple of {multiple}; pad "
            "them, with segment_ids of -1"
        )
    whole = Layout(name=layout, devices=devices, length=length // devices, left=None, right=None)
    return np.concatenate([whole.tokens(device) for device in range(devices)])


def _placed(x: Any, order: np.ndarray, mesh: Mesh, axis_name: str, axis: int) -> Any:
    if not np.array_equal(order, np.arange(len(order))):
        x = _taken(x, order, axis % x.ndim)
    spec: list[Any] = [None] * x.ndim
    spec[axis] = axis_name
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _taken(x: Any, order: np.ndarray, axis: int) -> Any:
    """jnp.take along an axis, which may be shared out on Explicit axes: the result then is, too."""
    sharding = jax.typeof(x).sharding
    if not any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
        return jax.numpy.take(x, order, axis=axis)
    return x.at[(slice(None),) * axis + (order,)].get(out_sharding=sharding)
