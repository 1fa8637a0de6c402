"""Kernels inside jax.shard_map: their results vary over every mesh axis that one of their inputs varies over.

With its default check_vma=True, shard_map takes a result for the same on all devices unless its type says otherwise:
a forgotten sum over the mesh would then give the values of one device.
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import ManualAxisType

__all__ = ["as_varying", "result_types", "varying_axes"]


def varying_axes(*trees: Any) -> frozenset[str]:
    """The mesh axes that any array of the trees varies over; none outside of shard_map."""
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))


def as_varying(tree: Any, axes: frozenset[str]) -> Any:
    """The same arrays, typed as varying over these mesh axes too."""

    def vary(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree


def result_types(shapes: Any, *inputs: Any) -> Any:
    """jax.ShapeDtypeStructs of a kernel's results, typed as varying over what its inputs vary over."""
    axes = varying_axes(*inputs)
    if not axes:
        return shapes
    of_type = ManualAxisType(varying=axes)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=of_type), shapes)
