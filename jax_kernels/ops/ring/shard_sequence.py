"""shard_sequence and unshard_sequence: put arrays into a layout of ring_attention, and back."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_kernels.masks.checks import check_integers, is_array
from jax_kernels.ops.checks import check_known
from jax_kernels.ops.ring.layouts import LAYOUTS, Layout
from jax_kernels.ops.ring.planning.documents import DocumentLayout
from jax_kernels.plain_numbers import plain

__all__ = ["order_for", "order_of", "shard_sequence", "unshard_sequence"]


def shard_sequence[Tree](
    x: Tree, mesh: Mesh, axis_name: str, *, layout: str | DocumentLayout = "zigzag", axis: int = 1
) -> Tree:
    """Returns x with its tokens in the order of a layout, sharded over a mesh axis.

    Equivalent to device_put(x[:, order], NamedSharding(mesh, P(None, axis_name))), where order has the tokens of device
    0, then the tokens of device 1, and so on. ring_attention documents the layouts. May be called under jit. If x is
    already on the mesh, its other axes keep their sharding.

    Args:
      x: an array, or a tree of arrays, with the tokens along `axis`. Their number is a multiple of the number of
        devices, with "zigzag" of twice that number. JAX holds NumPy's int64 as int32 unless jax_enable_x64 is set.
      mesh: a jax.sharding.Mesh. axis_name: one of its axes.
      layout: "zigzag", "striped", "contiguous", or a DocumentLayout. If the rows of its order differ, the first axis of
        x is its batch, and the order of each row is the row's own.
      axis: the axis of the tokens.

    Returns:
      A tree like x, of jax.Arrays with the same shapes.

    Raises:
      TypeError: x has a leaf that is not an array, or mesh is not a mesh.
      ValueError: the mesh lacks the axis, the layout is unknown or is for other sizes, the devices do not divide the
        tokens, or an integer of a NumPy array fits no dtype of JAX.
    """
    axis, order = plain(axis), lambda x, axis: _order(mesh, axis_name, layout, x, axis)
    return jax.tree.map(lambda x: _placed(x, order(x, axis), mesh, axis_name, axis), x)


def unshard_sequence[Tree](
    x: Tree, mesh: Mesh, axis_name: str, *, layout: str | DocumentLayout = "zigzag", axis: int = 1
) -> Tree:
    """Returns x with its tokens in sequence order again, still sharded over the mesh axis: shard_sequence's inverse.

    x has the tokens in the order of the layout. Arguments, shapes and errors are the same as in shard_sequence.
    """
    axis, order = plain(axis), lambda x, axis: np.argsort(_order(mesh, axis_name, layout, x, axis), axis=-1)
    return jax.tree.map(lambda x: _placed(x, order(x, axis), mesh, axis_name, axis), x)


def _check_tokens(x: Any, axis: int) -> None:
    """Raises shard_sequence's errors for x and axis."""
    is_array("x", x, "an array or a tree of arrays")
    check_integers("x", x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: got {axis}, want an axis of x, whose shape is {x.shape}")


def _order(mesh: Mesh, axis_name: str, layout: str | DocumentLayout, x: Any, axis: int) -> np.ndarray:
    """int [length], or [batch, length] if rows have different orders. Raises shard_sequence's errors."""
    _check_tokens(x, axis)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}, want a jax.sharding.Mesh")
    if axis_name not in mesh.shape:
        raise ValueError(f"axis_name: got {axis_name!r}, want an axis of the mesh, one of {tuple(mesh.shape)}")
    return order_for(x, mesh.shape[axis_name], layout, axis)


def order_for(x: Any, devices: int, layout: str | DocumentLayout, axis: int) -> np.ndarray:
    """order_of's order for all tokens of x; int [batch, length] if the rows of a DocumentLayout have different orders.

    x: an array of any framework. Raises the ValueErrors of shard_sequence for the layout.
    """
    if not isinstance(layout, DocumentLayout):
        return order_of(devices, layout, x.shape[axis])
    order, steps = layout.order, layout.steps
    batch, length = order.shape
    if (devices, x.shape[axis]) != (steps.devices, length):
        raise ValueError(
            f"layout: got documents of {length} tokens for {steps.devices} devices, want {x.shape[axis]} tokens for "
            f"{devices} devices"
        )
    if (order == order[0]).all():
        return order[0]
    if axis % x.ndim == 0 or x.shape[0] != batch:
        raise ValueError(
            f"x: got shape {tuple(x.shape)} with axis={axis}, want the {batch} rows of documents along axis 0"
        )
    return order


def order_of(devices: int, layout: str, length: int) -> np.ndarray:
    """int [length]: the positions of the tokens of device 0, then of device 1, and so on.

    length: the tokens of the whole sequence. Raises ValueError for an unknown layout, or if the devices do not divide
    the tokens.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, want one of {', '.join(map(repr, LAYOUTS))}, or a DocumentLayout")
    check_known("x", "length", length, "the order depends on it")
    multiple = devices * (2 if layout == "zigzag" else 1)
    if length % multiple:
        raise ValueError(
            f"x: got {length} tokens for {devices} devices with layout={layout!r}, want a multiple of {multiple}; pad "
            "them, with segment_ids of -1"
        )
    whole = Layout(name=layout, devices=devices, length=length // devices, left=None, right=None)
    return np.concatenate([whole.tokens(device) for device in range(devices)])


def _placed(x: Any, order: np.ndarray, mesh: Mesh, axis_name: str, axis: int) -> Any:
    """x with its tokens in this order along `axis`, sharded over the mesh axis. Its other axes keep their sharding."""
    known: Any = x
    while hasattr(known, "primal"):  # an array under differentiation
        known = known.primal
    is_traced, kind = isinstance(known, jax.core.Tracer), mesh.axis_types[mesh.axis_names.index(axis_name)]
    before = _spec_on(mesh, known)
    if not np.array_equal(order, np.arange(order.shape[-1])):
        x = _taken(x, order, axis % x.ndim)
    if is_traced and kind == AxisType.Auto:
        # Only XLA knows the sharding of the other axes, and device_put would not give it to XLA.
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        spec[axis] = axis_name
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
    spec = [_without(axis_name, names) for names in before]
    spec[axis] = axis_name
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _spec_on(mesh: Mesh, x: Any) -> list[Any]:
    """For each axis of x, the mesh axis or axes that shard it, or None; all None if x is not on this mesh."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    spec: Any = ()
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        have_devices = isinstance(sharding.mesh, Mesh) and isinstance(mesh, Mesh)
        if not have_devices or np.array_equal(sharding.mesh.devices, mesh.devices):
            spec = sharding.spec
    return [*spec, *[None] * (x.ndim - len(spec))]


def _without(axis_name: str, names: Any) -> Any:
    """An entry of a PartitionSpec (a name, a tuple of names, or None) without this axis name; None if none is left."""
    if isinstance(names, tuple):
        return tuple(name for name in names if name != axis_name) or None
    return None if names == axis_name else names


def _taken(x: Any, order: np.ndarray, axis: int) -> Any:
    """jnp.take(x, order, axis), also if x is sharded on Explicit mesh axes. The result has x's sharding then.

    order: int [length], or [batch, length]: for each entry of x's first axis its own order.
    """
    if order.ndim == 2:
        return jax.vmap(lambda row, order: _taken(row, order, axis - 1))(x, order)
    sharding = jax.typeof(x).sharding
    if not any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
        return jax.numpy.take(x, order, axis=axis)
    return x.at[(slice(None),) * axis + (order,)].get(out_sharding=sharding)
