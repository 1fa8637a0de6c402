"""Finds equal functions, so that functions which are created anew for each call, such as lambdas, share one program.

Two functions are twins if they have the same code and the code can read only equal values: defaults, closures, and the
globals that the code names. Each value must be a number, a string, a tuple of these, another function that meets the
same conditions, or a part of JAX, PyTorch, NumPy or the standard library. Otherwise, and if a function calls itself,
the function has no twins.

A value that a function reads may change. A copy with the values of its time represents the function and its twins, so
that a program which is traced again reads the same values, and a function with new values gets another copy.
"""

import dis
import functools
import types
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from jax_kernels.bridge.interop.bounded_dict import drop_oldest

__all__ = ["Placeholder", "UncomparableFunctionError", "canonical_function", "function_key", "library_of", "names_of"]

_MOST = 1024
_FIRST: dict[Hashable, types.FunctionType] = {}
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("jax", "jaxlib", "numpy", "math", "operator", "functools", "builtins")
_DYNAMIC = {"globals", "eval", "exec", "vars", "__import__"}  # code with these names may read any value


class UncomparableFunctionError(Exception):
    """Raised for a function that has no twins, because it reads a value which cannot be compared, or calls itself."""


class Placeholder(NamedTuple):
    """Replaces a tensor inside a copy of a function: the tensor is an argument of the call instead.

    number: the argument's index. Equal numbers mean the same argument.
    """

    number: int


def canonical_function(function: types.FunctionType) -> types.FunctionType:
    """One function for all functions with this code that read equal values, so that equal functions share programs.

    It is a copy, which later changes of these values do not reach. It is the function itself if the code reads only
    parts of libraries, or if the values cannot be compared.
    """
    try:
        key = function_key(function)
    except UncomparableFunctionError:
        return function
    first = _FIRST.get(key)
    if first is None:
        first = _FIRST.setdefault(key, _fixed(function))
    drop_oldest(_FIRST, _MOST)
    return first


def _fixed(value: Any) -> Any:
    """A copy of a function that has a key, and of all functions that it reads, with the values that they read now.

    A tuple gets such copies of its items. The value itself if it is another value, or reads only parts of libraries.
    """
    if type(value) is tuple:
        return tuple(map(_fixed, value))
    if type(value) is not types.FunctionType or library_of(value) in (*_LIBRARIES, "torch"):
        return value
    own = value.__globals__
    read = {name: own[name] for name in names_of(value.__code__) if name in own}
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    defaults, by_name = value.__defaults__, value.__kwdefaults__
    of_libraries = (library_of(x) in (*_LIBRARIES, "torch") for x in (*cells, *read.values()))
    if not defaults and not by_name and all(of_libraries):
        return value
    copy = types.FunctionType(
        value.__code__,
        {name: _fixed(x) for name, x in read.items()} | {name: own.get(name) for name in ("__builtins__", "__name__")},
        value.__name__,
        _fixed(defaults),
        tuple(types.CellType(_fixed(x)) for x in cells),
    )
    copy.__kwdefaults__ = by_name and {name: _fixed(x) for name, x in by_name.items()}
    copy.__qualname__, copy.__module__ = value.__qualname__, value.__module__
    return copy


def library_of(value: Any) -> str | None:
    """The first part of the name of a module, or of the module that defines the value; None without one."""
    if type(value) is types.FunctionType:
        home = value.__globals__.get("__name__")  # functools.wraps copies __module__ from another function
    else:
        home = value.__name__ if type(value) is types.ModuleType else getattr(value, "__module__", None)
    return home.split(".")[0] if isinstance(home, str) else None


def function_key(function: Any, *, is_copy: bool = False) -> Hashable:
    """A key that two functions share exactly if they have the same code and the code can read only equal values.

    is_copy: whether captures.copied returned the function. The key may then cover lists, dicts and objects, which no
    other code can change. Raises UncomparableFunctionError if the function reads a value that cannot be compared.
    """
    return _known(function, (), is_copy) if is_copy else _key(function)


def _key(function: types.FunctionType, outer: tuple[types.FunctionType, ...] = (), is_copy: bool = False) -> Hashable:
    """The key of a Python function: its code, and the keys of the values that the code can read.

    outer: the functions whose keys are being computed, to detect a function that calls itself. is_copy: whether
    captures.copied returned the outermost function. Raises UncomparableFunctionError if there is no key.
    """
    if function.__dict__ or function in outer:
        raise UncomparableFunctionError
    outer = *outer, function
    try:
        closed = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # an empty cell
        raise UncomparableFunctionError from None
    own = function.__globals__
    every = names_of(function.__code__)
    if not _DYNAMIC.isdisjoint(every):
        raise UncomparableFunctionError
    names = [name for name in every if name in own]
    return (
        *(function.__code__, function.__module__, function.__qualname__),
        *(_known(closed, outer, is_copy), _known(function.__defaults__ or (), outer, is_copy)),
        _known(tuple(sorted((function.__kwdefaults__ or {}).items())), outer, is_copy),
        tuple((name, _known(own[name], outer, is_copy)) for name in names),
    )


@functools.lru_cache(_MOST)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of the globals, and perhaps builtins, that the code and its inner functions read, each once."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in names_of(x)]
    own = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys([*own, *inner]))


def _known(value: Any, outer: tuple[types.FunctionType, ...], is_copy: bool = False) -> Hashable:
    """The key of a value that a function can read; equal keys mean equal values.

    outer: the functions whose keys are being computed. is_copy: whether captures.copied made the value, so that no
    other code changes it. Raises UncomparableFunctionError if the value cannot be compared.
    """
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
    if kind is Placeholder:
        return kind, value.number
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    if kind in (torch.dtype, torch.device, torch.Size):
        return kind, value
    library = library_of(value)
    if library in _LIBRARIES and (callable(value) or kind is types.ModuleType):
        return kind, id(value)
    is_whole = not (is_copy and kind is types.FunctionType and value.__closure__)
    if library == "torch" and is_whole and kind in (types.ModuleType, types.FunctionType, types.BuiltinFunctionType):
        return kind, id(value)
    if kind is types.FunctionType:
        return _key(value, outer, is_copy)
    raise UncomparableFunctionError


def _known_copy(value: Any, outer: tuple[types.FunctionType, ...]) -> Hashable:
    """The key of a list, dict, partial, method or object that captures.copied made; None for other values."""
    kind = type(value)
    known = lambda x: _known(x, outer, True)
    if kind is list or (hasattr(kind, "_fields") and kind is not Placeholder):
        return kind, tuple(map(known, value))
    if kind is dict:
        return kind, tuple((known(key), known(x)) for key, x in value.items())
    if kind is functools.partial:
        return kind, known(value.func), known(value.args), known(value.keywords)
    if kind is types.MethodType and not isinstance(value.__self__, type):
        return kind, known(value.__func__), known(value.__self__)
    return value.twins_key(known) if hasattr(kind, "twins_key") else None
