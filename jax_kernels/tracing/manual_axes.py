"""Arrays inside jax.shard_map, typed as varying over axes of the mesh."""

from typing import Any

import jax
from jax import lax

__all__ = ["as_varying", "varying_axes"]


def varying_axes(*trees: Any) -> frozenset[str]:
    """The names of the mesh axes along which any array of the trees differs between devices; none outside of
    shard_map.
    """
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))


def as_varying(tree: Any, axes: frozenset[str]) -> Any:
    """The same arrays, typed as differing between devices along these mesh axes too. Values do not change."""

    def vary(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree
