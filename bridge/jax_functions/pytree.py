"""Flattens arguments and results to a structure of constants and a flat list of leaves.

Two structures are equal exactly if a function cannot distinguish their constants. 0.0 and -0.0, which are equal, give
different structures, and so do 1, 1.0, True and a member of an IntEnum. The structure of NaN equals itself.
"""

import collections
import dataclasses
import enum
import operator
import types
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from jax_kernels.bridge.jax_functions.argument_checks import type_name, way_out
from jax_kernels.bridge.translate import function_identity
from jax_kernels.masks import Mask

__all__ = ["LEAF", "MASK", "Leaf", "MaskById", "Structure", "flatten", "unflatten"]

type Structure = tuple[Any, ...]  # nested tuples of hashable constants

_LEAF, _MASK = ("leaf",), ("mask",)
LEAF, MASK = _LEAF, _MASK  # the structures of one leaf, and of a Mask
_NO_MASKS: Iterator[Mask] = iter(())


class MaskById(NamedTuple):
    """Represents a Mask by its id() among a call's arguments.

    For code that torch.compile traces, which cannot make a new Mask a constant.
    """

    number: int


class _LeafType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return not (value is None or isinstance(value, tuple | list | dict))


class Leaf(metaclass=_LeafType):
    """A leaf_type for `flatten`: isinstance(x, Leaf) is True unless x is None, a tuple, a list or a dict."""


def flatten(tree: Any, leaves: list[Any], masks: list[Any] | None, leaf_type: type = torch.Tensor) -> Structure:
    """The structure of a tree: nested tuples of hashable constants, with a marker for each leaf and each Mask.

    tree: nested tuples, lists and dicts of leaves, Masks and constants. leaves, masks: lists to which it appends the
    leaves and the Masks, in order; with masks=None a Mask is a constant. leaf_type: the type of the leaves. Raises
    TypeError for a torch.Tensor inside a constant, such as a field of a dataclass. `unflatten` is the inverse.
    """
    if isinstance(tree, leaf_type):
        leaves.append(tree)
        return _LEAF
    if isinstance(tree, dict):
        keys = tuple(_constant(key) for key in tree)
        name = "ordered dict" if isinstance(tree, collections.OrderedDict) else "dict"
        return (name, keys, tuple(flatten(tree[key], leaves, masks, leaf_type) for key in tree))
    if isinstance(tree, tuple | list):
        if masks is not None and type(tree) is MaskById:
            masks.append(tree)
            return _MASK
        kind = type(tree) if hasattr(tree, "_fields") else "list" if isinstance(tree, list) else "tuple"
        return (kind, tuple(flatten(item, leaves, masks, leaf_type) for item in tree))
    if masks is not None and isinstance(tree, Mask):
        masks.append(tree)
        return _MASK
    return _constant(tree)


def _constant(value: Any) -> Structure:
    """The structure of a constant, equal only for constants that no function can tell apart.

    Numbers that torch.compile made symbolic become constants of its graph. Raises TypeError for a torch.fx.Proxy, and
    for a tensor inside the constant.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return ("constant", kind, value)
    # torch.compile and torch.export may make a number symbolic; these lines make it a constant again.
    if kind is int or kind is torch.SymInt:
        return ("constant", int, operator.index(value))
    if kind is torch.SymBool:
        return ("constant", bool, bool(value))
    if kind is float or kind is torch.SymFloat:
        return ("float", float(value).hex())
    if kind is complex:
        return ("complex", value.real.hex(), value.imag.hex())
    if isinstance(value, np.generic):
        return ("numpy", value.dtype, value.tobytes())
    if kind is types.FunctionType and not torch.compiler.is_compiling():
        value = function_identity.canonical_function(value)
    if hint := way_out(value):
        raise TypeError(f"args: got {type_name(value)}, want a torch.Tensor{hint}")
    return ("constant", kind, value, _parts(value))


def _parts(value: Any) -> Hashable:
    """The structures of the parts of a dataclass or frozenset; () for other constants.

    A constant's structure has them because == may ignore them, as for 1 and True. Raises TypeError for a tensor among
    the parts, which would lose its gradient.
    """
    if isinstance(value, enum.Enum):  # torch.compile of torch 2.11 cannot ask whether an Enum is a dataclass
        return ()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return tuple(_part(value, getattr(value, name, None)) for name in names)
    if isinstance(value, frozenset):
        return frozenset(_part(value, item) for item in value)
    return ()


def _part(whole: Any, value: Any) -> Structure:
    """The structure of a part of the constant `whole`. Raises TypeError if it is a tensor, or has one."""
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"args: got a torch.Tensor inside of a {type(whole).__name__}, which is a constant, want it as an "
            "argument, or in a tuple, list or dict"
        )
    if isinstance(value, tuple | list):
        return (type(value), tuple(_part(whole, item) for item in value))
    return _constant(value)


def unflatten(structure: Structure, leaves: Iterator[Any], masks: Iterator[Mask] = _NO_MASKS) -> Any:
    """Rebuilds the tree from the structure that `flatten` returned.

    leaves, masks: iterators of the values for the leaves and Masks, in the order in which `flatten` listed them. Values
    that the tree does not need stay in the iterators.
    """
    kind, *parts = structure
    if kind == "leaf":
        return next(leaves)
    if kind == "constant":
        _, value, *_ = parts
        return value
    if kind == "float":
        (text,) = parts
        return float.fromhex(text)
    if kind == "complex":
        real, imaginary = parts
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if kind == "numpy":
        dtype, data = parts
        (number,) = np.frombuffer(data, dtype)
        return number
    if kind == "mask":
        return next(masks)
    if kind in ("dict", "ordered dict"):
        names, children = parts
        keys = [unflatten(key, leaves) for key in names]
        items = [(key, unflatten(item, leaves, masks)) for key, item in zip(keys, children, strict=True)]
        return dict(items) if kind == "dict" else collections.OrderedDict(items)
    (children,) = parts
    items = [unflatten(item, leaves, masks) for item in children]
    if kind == "list":
        return items
    return tuple(items) if kind == "tuple" else kind(*items)
