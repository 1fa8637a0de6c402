"""The changes that a call makes to the Variables of a module."""

from typing import Any

import jax
from flax import nnx

__all__ = ["changed_state", "held_arrays", "refuse_changes"]


def held_arrays(state: Any) -> dict[Any, list[Any]]:
    """The arrays of each Variable of an nnx.State, by path. nnx.merge puts the Variables themselves into the module, so
    read the arrays before the module is called.
    """
    return {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(state)}


def changed_state(module: nnx.Module, before: dict[Any, list[Any]]) -> nnx.State:
    """The Variables of the module that hold other arrays than in `before`, or that are not in it.

    Such Variables are the key counts of nnx.Dropout, the statistics of nnx.BatchNorm, AmaxHistories, and the values
    that nnx.capture collects.

    before: the module's held_arrays before the call. Arrays are compared by identity.
    """

    def is_changed(path: Any, variable: Any) -> bool:
        old, new = before.get(path), jax.tree.leaves(variable)
        return old is None or len(old) != len(new) or any(x is not y for x, y in zip(old, new, strict=True))

    after = nnx.to_flat_state(nnx.state(module))
    return nnx.from_flat_state([(path, variable) for path, variable in after if is_changed(path, variable)])


def refuse_changes(changes: nnx.State, got: str, want: str) -> None:
    """Raises NotImplementedError, which names a changed Variable, unless there are no changes.

    changes: from changed_state. got, want: the mesh that cannot return them, and a mesh that can, for the error.
    """
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(changes)]
    if names:
        raise NotImplementedError(f"mesh: got {got} with a module that changes its state ({names[0]}), want {want}")
