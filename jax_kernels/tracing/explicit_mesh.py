"""Runs code on Auto axes, for arrays on a mesh with Explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

__all__ = ["explicit_mesh", "on_auto_axes", "with_auto_axes"]


def explicit_mesh(x: Any) -> Any:
    """The abstract mesh of an array if one of its axes is Explicit; otherwise None."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def with_auto_axes(function: Callable[..., Any], arrays: Any, mesh: Any, specs: Any) -> Any:
    """function(arrays), run with the mesh's Explicit axes turned into Auto axes. JAX can differentiate it.

    mesh: has Explicit axes and no Manual ones. specs: a PartitionSpec for the results, or a tree of them that is a
    prefix of the results' tree.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not jax.sharding.get_abstract_mesh().empty:
        return jax.sharding.auto_axes(function, axes=explicit, out_sharding=specs)(arrays)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.auto_axes(function, axes=explicit, out_sharding=specs)(arrays)


def on_auto_axes(function: Callable[..., Any], arrays: Any, specs: Callable[[Any], Any]) -> Any:
    """function(arrays), run with Explicit axes turned into Auto axes, inside a jax.shard_map.

    JAX cannot transpose auto_axes there, so the arrays are resharded before and after. specs: a function from the
    results to their PartitionSpecs, one or a tree that is a prefix of the results' tree.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name: AxisType.Auto for name, kind in kinds if kind == AxisType.Explicit}
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(explicit)):
        results = function(jax.reshard(arrays, jax.sharding.PartitionSpec()))
    return jax.reshard(results, specs(results))
