"""Arguments and results as a structure of constants and a flat list of leaves."""

import operator
from collections.abc import Iterator
from typing import Any

import torch

from jax_kernels.bridge import library
from jax_kernels.masks import Mask

__all__ = ["Leaf", "flatten", "rebuild"]

_LEAF, _MASK = ("leaf",), ("mask",)
_NO_MASKS: Iterator[Mask] = iter(())


class _LeafType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return not (value is None or isinstance(value, tuple | list | dict))


class Leaf(metaclass=_LeafType):
    """Anything in a function's result that is not a container."""


def flatten(tree: Any, leaves: list[Any], masks: list[Mask] | None, leaf_type: Any = torch.Tensor) -> tuple[Any, ...]:
    """The structure of a tree as a tuple of constants; its leaves are appended to `leaves`, its Masks to `masks`."""
    if isinstance(tree, leaf_type):
        leaves.append(library.distinct(tree, leaves) if leaf_type is torch.Tensor else tree)
        return _LEAF
    if isinstance(tree, dict):
        return ("dict", tuple(tree), tuple(flatten(tree[key], leaves, masks, leaf_type) for key in tree))
    if isinstance(tree, tuple | list):
        kind = type(tree) if hasattr(tree, "_fields") else "list" if isinstance(tree, list) else "tuple"
        return (kind, tuple(flatten(item, leaves, masks, leaf_type) for item in tree))
    if masks is not None and isinstance(tree, Mask):
        masks.append(tree)
        return _MASK
    # torch.compile may have made a symbol of a number; these make a constant of it again.
    if isinstance(tree, int) and not isinstance(tree, bool):
        tree = operator.index(tree)
    elif isinstance(tree, float):
        tree = float.fromhex(tree.hex())
    # The type's name keeps 1, 1.0 and True apart.
    return ("constant", type(tree).__name__, tree)


def rebuild(structure: tuple[Any, ...], leaves: Iterator[Any], masks: Iterator[Mask] = _NO_MASKS) -> Any:
    """The tree, of the leaves and Masks in flatten's order."""
    kind = structure[0]
    if kind == "leaf":
        return next(leaves)
    if kind == "constant":
        return structure[2]
    if kind == "mask":
        return next(masks)
    if kind == "dict":
        return {key: rebuild(item, leaves, masks) for key, item in zip(structure[1], structure[2], strict=True)}
    items = [rebuild(item, leaves, masks) for item in structure[1]]
    if kind == "list":
        return items
    return tuple(items) if kind == "tuple" else kind(*items)
