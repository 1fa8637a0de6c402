"""Plans of ops that run inside jax.shard_map, made inside or outside one."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

__all__ = ["on_axis"]


def on_axis[Result](axis_name: str, plan: Callable[..., Result], arguments: dict[str, Any]) -> Result:
    """The result of plan(**arguments), called inside a jax.shard_map over a mesh axis. Nothing is computed.

    If a shard_map with this axis is around the call, it is used. Else one is traced, over the mesh of jax.set_mesh or
    jax.sharding.use_abstract_mesh. In both cases the arguments are one device's. jax.ShapeDtypeStructs among them
    become traced arrays. plan must not return arrays.

    Raises:
      TypeError: axis_name is no str. ValueError: neither a shard_map nor a mesh has this axis.
    """
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: got {type(axis_name).__name__}, want the name of a mesh axis")
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name: got {axis_name!r}, want an axis of the jax.shard_map around this call, or of the mesh of "
            "jax.set_mesh or jax.sharding.use_abstract_mesh"
        )
    leaves, tree = jax.tree.flatten(arguments)
    is_spec = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    found: list[Result] = []

    def traced(specs: list[Any]) -> None:
        given = iter(specs)
        filled = [next(given) if is_one else x for is_one, x in zip(is_spec, leaves, strict=True)]
        found.append(plan(**jax.tree.unflatten(tree, filled)))

    run: Callable[..., Any] = traced
    if axis_name not in mesh.manual_axes:
        spec = PartitionSpec()
        run = jax.shard_map(traced, in_specs=spec, out_specs=spec, axis_names={axis_name}, check_vma=False)
    jax.eval_shape(run, [x for is_one, x in zip(is_spec, leaves, strict=True) if is_one])
    return found[0]
