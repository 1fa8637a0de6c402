"""Argument names for errors: the names in the function that the user called."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jax_kernels.bridge.jax_functions.pytree import LEAF, Structure, unflatten

__all__ = ["constants", "leaf_names", "rename", "under_names"]


def leaf_names(function: Callable[..., Any], structure: Structure) -> list[str]:
    """The name of each tensor of a call, in the order in which `flatten` lists the tensors.

    A name is a parameter of the function, such as "x", or "x[0]" and "x['a']" for tensors in containers. structure:
    `flatten` of the call's (args, kwargs).
    """
    return [name for name, part in _named_parts(function, structure) if part == LEAF]


def constants(function: Callable[..., Any], structure: Structure) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for each constant of a call, except floats, complex numbers and NumPy scalars.

    A name is a parameter of the function, such as "x", or "x[0]" in a container. structure: `flatten` of the call's
    (args, kwargs).
    """
    for name, (kind, *others) in _named_parts(function, structure):
        if kind == "constant":
            _, value, *_ = others
            yield name, value


def _named_parts(function: Callable[..., Any], structure: Structure) -> Iterator[tuple[str, Structure]]:
    """Yields (name, structure) for each tensor, Mask and constant of a call, positional arguments first."""
    _, (positional, by_keyword) = structure
    _, given = positional
    _, keys, values = by_keyword
    for name, part in zip(_positional(function, len(given)), given, strict=True):
        yield from _parts(name, part)
    for key, part in zip(keys, values, strict=True):
        yield from _parts(str(unflatten(key, iter(()))), part)


def _positional(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional arguments of a function.

    Arguments of *args are "args[0]", "args[1]"; a function without a signature has "argument 0", "argument 1".
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        parameters = []
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    rest = next((x.name for x in parameters if x.kind is x.VAR_POSITIONAL), None)
    if rest is None:
        others = [f"argument {index}" for index in range(len(names), count)]
    else:
        others = [f"{rest}[{index}]" for index in range(count - len(names))]
    return [*names, *others][:count]


def _parts(name: str, structure: Structure) -> Iterator[tuple[str, Structure]]:
    """Yields (name, structure) for each tensor, Mask and constant in an argument, also in nested containers.

    name: the argument's name. structure: the argument's structure.
    """
    kind, *parts = structure
    if kind in ("dict", "ordered dict"):
        keys, children = parts
        for key, child in zip(keys, children, strict=True):
            yield from _parts(f"{name}[{unflatten(key, iter(()))!r}]", child)
    elif kind in ("list", "tuple"):
        (children,) = parts
        for index, child in enumerate(children):
            yield from _parts(f"{name}[{index}]", child)
    elif isinstance(kind, type):
        (children,) = parts
        for field, child in zip(kind._fields, children, strict=True):  # type: ignore[attr-defined]
            yield from _parts(f"{name}.{field}", child)
    else:
        yield name, structure


def rename(error: Exception, **names: str) -> None:
    """Changes argument names in an error's text, in the error itself. Errors with other than one text are unchanged.

    names: the name for the caller, by the name in the function that raised: rename(error, q="query").
    """
    if len(error.args) == 1 and isinstance(error.args[0], str):
        (text,) = error.args
        for inner, own in names.items():
            text = re.sub(rf"\b(?<!\d ){inner}\b", own, text)  # not the x of "128 x 128"
        error.args = (text,)


def under_names[Result](names: dict[str, str], function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """function(*args, **kwargs), whose errors get other argument names. names: as in rename."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError, NotImplementedError) as error:
        rename(error, **names)
        raise
