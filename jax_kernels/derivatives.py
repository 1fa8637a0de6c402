"""Clear errors in place of derivatives that would be lost, or that nothing has a rule for."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["NO_SECOND", "without_derivative"]

NO_SECOND = (
    "gradients of gradients: kernels have none. Products, mlp and norms have them with implementation='xla', attention "
    "has none"
)


def without_derivative[Tree](tree: Tree, told: str) -> Tree:
    """The same arrays, of which a derivative raises NotImplementedError(told). Other leaves stay as they are."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    for place, array in zip(places, _same(told)(*(leaves[place] for place in places)), strict=True):
        leaves[place] = array
    return jax.tree.unflatten(structure, leaves)


@functools.cache
def _same(told: str) -> Callable[..., tuple[jax.Array, ...]]:
    @jax.custom_jvp
    def same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return arrays

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(told)

    return same
