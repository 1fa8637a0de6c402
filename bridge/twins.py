"""Functions that are made anew for each call, as a lambda among a call's arguments is: they share one plan.

Two functions are twins if they have the same code and all that the code can read is the same: defaults, what they close
over, and the globals that the code names. Where one of these is more than a number, a text, a tuple of them, or a part
of JAX, NumPy or the standard library, and where a function calls itself, a function is like itself alone.
"""

import types
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["first_of"]

_MOST = 1024
_FIRST: dict[Any, types.FunctionType] = {}
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("jax", "jaxlib", "numpy", "math", "operator", "functools", "builtins")


class _UnknownError(Exception):
    """A function reads something that may differ without showing."""


def first_of(function: Any) -> Any:
    """The first function that was seen of the function's twins; the function itself where it is the first."""
    try:
        key = _key(function)
    except _UnknownError:
        return function
    first = _FIRST.setdefault(key, function)
    while len(_FIRST) > _MOST:
        _FIRST.pop(next(iter(_FIRST)), None)
    return first


def _key(function: Any, outer: tuple[Any, ...] = ()) -> Any:
    """The value that all twins of a function share. outer: the functions that are being looked at."""
    if function.__dict__ or function in outer:
        raise _UnknownError
    outer = *outer, function
    try:
        closed = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # an empty cell
        raise _UnknownError from None
    own = function.__globals__
    names = dict.fromkeys(name for name in _names(function.__code__) if name in own)
    return (
        *(function.__code__, id(own), function.__module__, function.__qualname__),
        *(_known(closed, outer), _known(function.__defaults__ or (), outer)),
        _known(tuple(sorted((function.__kwdefaults__ or {}).items())), outer),
        tuple((name, _known(own[name], outer)) for name in names),
    )


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of the code's globals, and of its attributes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _known(value: Any, outer: tuple[Any, ...]) -> Any:
    """The value in a form whose equality is that of the values."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if kind in _NUMBERS:
        return kind, value
    if kind is tuple:
        return tuple(_known(item, outer) for item in value)
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    home = value.__name__ if kind is types.ModuleType else getattr(value, "__module__", None)
    if isinstance(home, str) and home.split(".")[0] in _LIBRARIES and (callable(value) or kind is types.ModuleType):
        return kind, id(value)
    if kind is types.FunctionType:
        return _key(value, outer)
    raise _UnknownError
