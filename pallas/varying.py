"""Kernels inside jax.shard_map: their results vary over every mesh axis that one of their inputs varies over.

With its default check_vma=True, shard_map takes a result for the same on all devices unless its type says otherwise:
a forgotten sum over the mesh would then give the values of one device.
"""

from typing import Any

import jax
from jax.sharding import ManualAxisType

from jax_kernels.tracing.manual_axes import varying_axes

__all__ = ["result_types"]


def result_types(shapes: Any, *inputs: Any) -> Any:
    """jax.ShapeDtypeStructs of a kernel's results, typed as varying over what its inputs vary over."""
    axes = varying_axes(*inputs)
    if not axes:
        return shapes
    of_type = ManualAxisType(varying=axes)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=of_type), shapes)
