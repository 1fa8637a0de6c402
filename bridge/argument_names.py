"""The names of a call's arguments in errors: those of the function that the user called."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from jax_kernels.bridge.structure import SINGLE, rebuild

__all__ = ["leaf_names", "rename"]


def leaf_names(function: Callable[..., Any], structure: Any) -> list[str]:
    """The name of each tensor of a call, in the order of the leaves: "x", or "x[0]" and "x['a']" inside of containers.

    structure: that of the call's (args, kwargs).
    """
    _, (positional, by_keyword) = structure
    _, given = positional
    _, keys, values = by_keyword
    found: list[str] = []
    for name, part in zip(_positional(function, len(given)), given, strict=True):
        found.extend(_leaves(name, part))
    for key, part in zip(keys, values, strict=True):
        found.extend(_leaves(str(rebuild(key, iter(()))), part))
    return found


def _positional(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first arguments of a function."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        parameters = []
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    rest = next((x.name for x in parameters if x.kind is x.VAR_POSITIONAL), None)
    if rest is None:
        others = [f"tensor argument {index}" for index in range(len(names), count)]
    else:
        others = [f"{rest}[{index}]" for index in range(count - len(names))]
    return [*names, *others][:count]


def _leaves(name: str, structure: Any) -> Iterator[str]:
    """The names of the leaves inside of an argument of this name."""
    if structure == SINGLE:
        yield name
        return
    kind, *parts = structure
    if kind in ("dict", "ordered dict"):
        keys, children = parts
        for key, child in zip(keys, children, strict=True):
            yield from _leaves(f"{name}[{rebuild(key, iter(()))!r}]", child)
    elif kind in ("list", "tuple"):
        (children,) = parts
        for index, child in enumerate(children):
            yield from _leaves(f"{name}[{index}]", child)
    elif isinstance(kind, type):
        (children,) = parts
        for field, child in zip(kind._fields, children, strict=True):  # type: ignore[attr-defined]
            yield from _leaves(f"{name}.{field}", child)


def rename(error: Exception, **names: str) -> None:
    """Gives an error's text the names that the caller's function has, in place of those of the function that raised."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        (text,) = error.args
        for inner, own in names.items():
            text = re.sub(rf"\b{inner}\b", own, text)
        error.args = (text,)
