"""Runs code on Auto axes, for arrays on a mesh with Explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

__all__ = ["explicit_mesh", "on_auto_axes", "with_auto_axes"]


def explicit_mesh(x: Any) -> Any:
    """The mesh of an array, if the mesh has Explicit axes; otherwise None."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def with_auto_axes(function: Callable[..., Any], arrays: Any, mesh: Any, specs: Any) -> Any:
    """function(arrays) on Auto axes, differentiable, for a mesh without Manual axes.

    specs: the PartitionSpecs of its results, as a tree's prefix.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not jax.sharding.get_abstract_mesh().empty:
        return jax.sharding.auto_axes(function, axes=explicit, out_sharding=specs)(arrays)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.auto_axes(function, axes=explicit, out_sharding=specs)(arrays)


def on_auto_axes(function: Callable[..., Any], arrays: Any, specs: Callable[[Any], Any]) -> Any:
    """function(arrays) on Auto axes, in a jax.shard_map: there JAX cannot transpose auto_axes.

    specs(results): their PartitionSpecs, as a tree's prefix.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name: AxisType.Auto for name, kind in kinds if kind == AxisType.Explicit}
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(explicit)):
        results = function(jax.reshard(arrays, jax.sharding.PartitionSpec()))
    return jax.reshard(results, specs(results))
