"""Functions that are made anew for each call, as a lambda among a call's arguments is: they share one plan.

Two functions are twins if they have the same code and all that the code can read is the same: defaults, what they close
over, and the globals that the code names. Where one of these is more than a number, a text, a tuple of them, or a part
of JAX, PyTorch, NumPy or the standard library, and where a function calls itself, a function is like itself alone.

What a function reads may change. Programs that were traced before the change are then of no use to functions that are
made after it: a copy of the function stands for the twins that read the new values.
"""

import dis
import functools
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from jax_kernels.bridge.interop.bounded_dict import drop_oldest

__all__ = ["Place", "UnknownError", "first_of", "key_of", "names_of"]

_MOST = 1024
_FIRST: dict[Any, types.FunctionType] = {}
# By function: the key that it was first seen with, None where it had none. Its programs may read the values of then.
_SEEN: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("jax", "jaxlib", "numpy", "math", "operator", "functools", "builtins")
_DYNAMIC = {"globals", "eval", "exec", "vars", "__import__"}  # their users read what no name shows


class UnknownError(Exception):
    """A function reads something that may differ without showing."""


class Place(NamedTuple):
    """A place in a function for an argument of a call. Equal numbers are the same argument."""

    number: int


def first_of(function: Any) -> Any:
    """The first function that was seen of the function's twins; the function itself where it is the first."""
    try:
        key = key_of(function)
    except UnknownError:
        _SEEN.setdefault(function, None)
        return function
    first = _FIRST.get(key)
    if first is None:
        first = _FIRST.setdefault(key, function if _SEEN.setdefault(function, key) == key else _copy(function))
    drop_oldest(_FIRST, _MOST)
    return first


def _copy(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        *(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    )
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__module__ = function.__module__
    return copy


def key_of(function: Any, *, is_copy: bool = False) -> Any:
    """The value that all twins of a function share. Raises UnknownError where it is like itself alone.

    is_copy: whether it is a copy by captures.copied, whose lists, dicts and objects no other code changes.
    """
    return _known(function, (), is_copy) if is_copy else _key(function)


def _key(function: Any, outer: tuple[Any, ...] = (), is_copy: bool = False) -> Any:
    """The value that all twins of a function share. outer: the functions that are being looked at."""
    if function.__dict__ or function in outer:
        raise UnknownError
    outer = *outer, function
    try:
        closed = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # an empty cell
        raise UnknownError from None
    own = function.__globals__
    every = names_of(function.__code__)
    if not _DYNAMIC.isdisjoint(every):
        raise UnknownError
    names = [name for name in every if name in own]
    return (
        *(function.__code__, function.__module__, function.__qualname__),
        *(_known(closed, outer, is_copy), _known(function.__defaults__ or (), outer, is_copy)),
        _known(tuple(sorted((function.__kwdefaults__ or {}).items())), outer, is_copy),
        tuple((name, _known(own[name], outer, is_copy)) for name in names),
    )


@functools.lru_cache(_MOST)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of the globals that the code reads, in the functions inside it too."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in names_of(x)]
    own = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys([*own, *inner]))


def _known(value: Any, outer: tuple[Any, ...], is_copy: bool = False) -> Any:
    """The value in a form whose equality is that of the values."""
    kind = type(value)
    if is_copy and (found := _known_copy(value, outer)) is not None:
        return found
    if kind is float:
        return kind, value.hex()
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if kind in _NUMBERS:
        return kind, value
    if kind is tuple:
        return tuple(_known(item, outer, is_copy) for item in value)
    if kind is Place:
        return kind, value.number
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    if kind in (torch.dtype, torch.device, torch.Size):
        return kind, value
    home = value.__name__ if kind is types.ModuleType else getattr(value, "__module__", None)
    library = home.split(".")[0] if isinstance(home, str) else None
    if library in _LIBRARIES and (callable(value) or kind is types.ModuleType):
        return kind, id(value)
    is_whole = not (is_copy and kind is types.FunctionType and value.__closure__)
    if library == "torch" and is_whole and kind in (types.ModuleType, types.FunctionType, types.BuiltinFunctionType):
        return kind, id(value)
    if kind is types.FunctionType:
        return _key(value, outer, is_copy)
    raise UnknownError


def _known_copy(value: Any, outer: tuple[Any, ...]) -> Any:
    """_known of a part of a copy that other functions may change; None for others."""
    kind = type(value)
    known = lambda x: _known(x, outer, True)
    if kind is list or (hasattr(kind, "_fields") and kind is not Place):
        return kind, tuple(map(known, value))
    if kind is dict:
        return kind, tuple((known(key), known(x)) for key, x in value.items())
    if kind is functools.partial:
        return kind, known(value.func), known(value.args), known(value.keywords)
    if kind is types.MethodType and not isinstance(value.__self__, type):
        return kind, known(value.__func__), known(value.__self__)
    return value.twins_key(known) if hasattr(kind, "twins_key") else None
