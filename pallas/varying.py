"""Types of kernels' results inside jax.shard_map: a result varies over each mesh axis that any input varies over.

With its default check_vma=True, shard_map takes a result to be equal on all devices unless its type says that it
varies. Without that type, a missing sum over the mesh would silently return the values of one device.
"""

from typing import Any

import jax
from jax.sharding import ManualAxisType

from jax_kernels.tracing.manual_axes import varying_axes

__all__ = ["result_types"]


def result_types(shapes: Any, *inputs: Any) -> Any:
    """The jax.ShapeDtypeStructs `shapes` of a kernel's results, typed as varying over the mesh axes of its inputs.

    shapes: a tree of them. inputs: the arrays that the kernel reads. A result varies over each mesh axis over which any
    input varies. Outside jax.shard_map, `shapes` is returned unchanged.
    """
    axes = varying_axes(*inputs)
    if not axes:
        return shapes
    of_type = ManualAxisType(varying=axes)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=of_type), shapes)
