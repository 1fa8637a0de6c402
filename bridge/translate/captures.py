"""Values that a function reads in addition to its arguments, with the path from the function to each value.

A path is a tuple of steps (kind, key), such as (("cell", 0), ("attribute", "bias")): the attribute `bias` of the value
in the function's first closure cell. `reached` lists the kinds.

The function's code names the values: cells, defaults, globals, items of tuples, lists and dicts, arguments of partials,
and the attributes of objects. So `module.bias` is found, and a tensor that a function in PyTorch's and_masks reads.
"""

import dataclasses
import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.translate import function_identity

__all__ = ["Path", "Root", "Standin", "copied", "reached", "root_of", "text_of"]

type Path = tuple[tuple[str, Any], ...]
type Root = types.FunctionType | types.MethodType | functools.partial | Callable[..., torch.Tensor]
type Values = dict[str, Any]  # attributes or globals, by name
type Replace = Callable[[Any, Path], Any]

_LIBRARIES = ("torch", "jax", "jaxlib", "numpy")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.BuiltinFunctionType, torch.dtype, torch.device)
# An object with one of these methods may be read in other ways than by its attributes.
_PROTOCOLS = ("__getitem__", "__call__", "__len__", "__iter__", "__contains__", "__index__", "__float__", "__add__")


def reached(function: Any, path: Path) -> Any:
    """The value at this path from the function. torch.compile can trace this code.

    Raises AttributeError, IndexError, KeyError, TypeError or ValueError if the path leads to nothing.
    """
    for kind, key in path:
        if kind == "cell":
            function = function.__closure__[key].cell_contents
        elif kind == "default":
            function = function.__defaults__[key]
        elif kind == "keyword default":
            function = function.__kwdefaults__[key]
        elif kind == "global":
            function = function.__globals__[key]
        elif kind == "item":
            function = function[key]
        elif kind == "argument":
            function = function.args[key]
        elif kind == "keyword":
            function = function.keywords[key]
        else:
            function = getattr(function, key)
    return function


def text_of(function: Any, path: Path) -> str:
    """The text by which the function's code names the value at this path, such as "module.bias" or "tables[0]"."""
    text = ""
    for kind, key in path:
        if kind == "cell":
            text = function.__code__.co_freevars[key]
        elif kind == "default":
            named = function.__code__.co_varnames[: function.__code__.co_argcount]
            text = named[len(named) - len(function.__defaults__) + key]
        elif kind in ("keyword default", "keyword", "global"):
            text = key
        elif kind == "argument":
            text = f"argument {key}"
        elif kind == "item":
            text = f"{text}[{key!r}]"
        elif key not in ("func", "__func__"):
            text = "self" if key == "__self__" else f"{text}.{key}" if text else key
        function = reached(function, ((kind, key),))
    return text


def root_of(function: Any) -> Root | None:
    """The function, partial or method that a call of `function` runs: paths begin there.

    For a module it is its forward, for another object its __call__. None for types, for None, and for objects whose
    code is not in Python or is part of PyTorch, JAX or NumPy.
    """
    if isinstance(function, types.FunctionType | types.MethodType | functools.partial):
        return function
    if torch.compiler.is_compiling() or function is None or isinstance(function, type):
        return None
    if isinstance(function, torch.nn.Module):
        return None if _is_of_library(type(function)) else function.forward
    call = inspect.getattr_static(type(function), "__call__", None)
    if not isinstance(call, types.FunctionType) or _is_of_library(type(function)):
        return None
    return types.MethodType(call, function)


class Standin:
    """Replaces an object, in a copy of a function that reads its attributes; some attributes have other values.

    of: the object, which is not kept alive if it can be referenced weakly. read: the attributes with new values, by
    name; other attributes are looked up in the object. is_whole: whether `read` has all attributes that the function
    reads; False if the function reads a property.
    """

    def __init__(self, of: Any, read: Values) -> None:
        try:
            self._reference: Callable[[], Any] = weakref.ref(of)
        except TypeError:
            self._reference = lambda: of
        self._type = type(of)
        self._read = read
        self._is_looked_at = False
        self.is_whole = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        read = object.__getattribute__(self, "_read")
        return read[name] if name in read else getattr(object.__getattribute__(self, "_reference")(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._reference()(*args, **kwargs)

    def filled(self, read: Values) -> "Standin":
        """A Standin of the same object, with other values for its attributes (read)."""
        return Standin(self._reference(), read)

    def twins_key(self, known: Callable[[Any], Hashable]) -> Hashable:
        """A key that is equal for two Standins if the objects' types and the attributes in `read` are equal.

        known: returns the key of an attribute's value. Raises UncomparableFunctionError if the attributes contain this
        Standin, or if the function reads a property.
        """
        if self._is_looked_at or not self.is_whole:  # it reads itself or a property
            raise function_identity.UncomparableFunctionError
        self._is_looked_at = True
        try:
            parts = [(name, known(x.__func__ if self._is_own(x) else x)) for name, x in self._read.items()]
        finally:
            self._is_looked_at = False
        return self._type, tuple(parts)

    def _is_own(self, x: Any) -> bool:
        """Whether x is a method of this Standin."""
        return isinstance(x, types.MethodType) and x.__self__ is self


def copied(function: Any, replace: Replace) -> Any:
    """A copy of the function that reads other values. A plain function is returned itself if no value differs.

    replace: function (value, path) that returns the new value, or the same value to keep it. It is called for each
    tensor, number and other plain value that the function can read, with the path from the function to the value, and
    for values of other types, such as sets. Tuples, lists, dicts and objects on the paths are copied too, so later
    changes of them do not reach the copy.
    """
    return _Copier(replace).of(function, (), ())


@dataclasses.dataclass(frozen=True)
class _Copier:
    """Makes one copy for `copied`.

    replace: function (value, path) that returns the new value. found: by the id of the original, copies of functions
    and objects, also unfinished ones, for values that contain themselves.
    """

    replace: Replace
    found: dict[int, Any] = dataclasses.field(default_factory=dict)

    def of(self, x: Any, path: Path, names: tuple[str, ...]) -> Any:
        """The value that the copied function reads instead of x. path: from the copied function to x.

        It is replace(x, path) for a tensor, number or other plain value, and for a value of another type, such as a
        set. For a function, method, partial, tuple, list or dict it is a copy in which such values are replaced, or a
        function itself if none differs. An object that is read by its attributes becomes a Standin, with copies of some
        attributes, which looks up the others in the object.

        names: the names of all attributes that the code which reads x reads. If x is an object, only these attributes
        are copied, and the attributes that the methods among them read.
        """
        kind = type(x)
        if isinstance(x, torch.Tensor | function_identity.Placeholder | type) or kind in _PLAIN:
            return self.replace(x, path)
        if id(x) in self.found:
            return self.found[id(x)]
        if kind is types.FunctionType:
            return self._function(x, path)
        if kind is types.MethodType:
            return self._method(x, path, names)
        if kind is functools.partial:
            return self._partial(x, path, names)
        if isinstance(x, tuple | list):
            items = [self.of(item, (*path, ("item", i)), names) for i, item in enumerate(x)]
            return kind(*items) if hasattr(x, "_fields") else kind(items) if kind in (tuple, list) else x
        if kind is Standin:
            return self._standin(x, path)
        if kind is dict:
            return {key: self.of(item, (*path, ("item", key)), names) for key, item in x.items()}
        if _has_attributes(x):
            return self._object(x, path, names)
        return self.replace(x, path)

    def _function(self, function: types.FunctionType, path: Path) -> types.FunctionType:
        """The copy of a function, with copies of its cells, defaults and globals; the function itself if none differs.

        Functions of PyTorch without a closure, and functions of JAX and NumPy, are not copied.
        """
        home = function_identity.library_of(function)
        if home in _LIBRARIES and (home != "torch" or not function.__closure__):
            return function
        self.found[id(function)] = function  # for a function that reads itself
        names = attributes_of(function.__code__)
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # an empty cell
            return function
        own = function.__globals__
        read = {} if home == "torch" else {x: own[x] for x in function_identity.names_of(function.__code__) if x in own}
        defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
        of = lambda step, key, x: self.of(x, (*path, (step, key)), names)
        new_cells = [of("cell", index, x) for index, x in enumerate(cells)]
        new_defaults = [of("default", index, x) for index, x in enumerate(defaults)]
        new_by_name = {key: of("keyword default", key, x) for key, x in by_name.items()}
        new_read = {key: of("global", key, x) for key, x in read.items()}
        before = (*cells, *defaults, *by_name.values(), *read.values())
        after = (*new_cells, *new_defaults, *new_by_name.values(), *new_read.values())
        if all(x is y for x, y in zip(before, after, strict=True)):
            return function
        copy = types.FunctionType(
            function.__code__,
            own if home == "torch" else _globals(own, new_read),
            function.__name__,
            tuple(new_defaults) or None,
            tuple(types.CellType(x) for x in new_cells),
        )
        copy.__kwdefaults__, copy.__qualname__ = new_by_name or None, function.__qualname__
        copy.__module__ = function.__module__
        self.found[id(function)] = copy
        return copy

    def _method(self, method: types.MethodType, path: Path, names: tuple[str, ...]) -> types.MethodType:
        function = method.__func__
        if not isinstance(function, types.FunctionType) or isinstance(method.__self__, type):
            return method
        of_owner = (*path, ("attribute", "__self__")), (*names, *attributes_of(function.__code__))
        # __call__ reads its own object by attributes.
        is_call = function is inspect.getattr_static(type(method.__self__), "__call__", None)
        is_read = is_call and id(method.__self__) not in self.found and _has_attributes(method.__self__, is_called=True)
        owner = (self._object if is_read else self.of)(method.__self__, *of_owner)
        return types.MethodType(self.of(function, (*path, ("attribute", "__func__")), names), owner)

    def _partial(self, partial: functools.partial, path: Path, names: tuple[str, ...]) -> functools.partial:
        keywords = {key: self.of(x, (*path, ("keyword", key)), names) for key, x in partial.keywords.items()}
        args = [self.of(x, (*path, ("argument", i)), names) for i, x in enumerate(partial.args)]
        return functools.partial(self.of(partial.func, (*path, ("attribute", "func")), names), *args, **keywords)

    def _standin(self, x: Standin, path: Path) -> Standin:
        read: Values = {}
        self.found[id(x)] = made = x.filled(read)
        read |= {name: self.of(value, path, ()) for name, value in x._read.items()}
        return made

    def _object(self, x: Any, path: Path, names: tuple[str, ...]) -> Standin:
        """A Standin for an object, with copies of the attributes in `names`, and of the attributes its methods read."""
        read: Values = {}
        self.found[id(x)] = made = Standin(x, read)
        waiting = list(dict.fromkeys(names))
        while waiting:
            name = waiting.pop(0)
            longer = (*path, ("attribute", name))
            if name in read or (value := _attribute(x, name)) is _NOTHING:
                continue
            if value is _PROPERTY:
                made.is_whole = False
                continue
            if not isinstance(value, _Method):
                read[name] = self.of(value, longer, names)
            elif not _is_of_library(value.function):
                waiting += attributes_of(value.function.__code__)
                function = self.of(value.function, (*longer, ("attribute", "__func__")), names)
                read[name] = types.MethodType(function, made)
        del self.found[id(x)]  # other code may name other attributes
        return made


def _globals(own: Values, read: Values) -> Values:
    """The globals for a copied function: only the values that it reads, builtins, and the module's name."""
    return {**read, "__builtins__": own.get("__builtins__"), "__name__": own.get("__name__")}


@functools.lru_cache(1024)
def attributes_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of the attributes, of any object, that the code and its nested functions read, each once."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in attributes_of(x)]
    own = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    return tuple(dict.fromkeys([*own, *inner]))


_NOTHING, _PROPERTY = object(), object()


class _Method(NamedTuple):
    """A method of an object, represented by the function in the object's class."""

    function: types.FunctionType


def _attribute(x: Any, name: str) -> Any:
    """The value of an attribute of x, read without running code of x.

    Returns a _Method for a method, _PROPERTY for a property or another descriptor, and _NOTHING if there is no such
    attribute.
    """
    if isinstance(x, torch.nn.Module):
        for kept in (x._parameters, x._buffers, x._modules):
            if name in kept:
                return kept[name]
    value = inspect.getattr_static(x, name, _NOTHING)
    if isinstance(value, types.MemberDescriptorType):  # of __slots__
        return getattr(x, name, _NOTHING)
    if name in getattr(x, "__dict__", {}):
        return value
    if isinstance(value, types.FunctionType):
        return _Method(value)
    return _PROPERTY if value is not _NOTHING and hasattr(type(value), "__get__") else value


def _is_of_library(x: Any) -> bool:
    """Whether a class or function is part of PyTorch, JAX or NumPy."""
    return function_identity.library_of(x) in _LIBRARIES


def _has_attributes(x: Any, *, is_called: bool = False) -> bool:
    """Whether code reads an object by its attributes only, so that a Standin can replace it. Judged by its type.

    True for PyTorch's modules, dataclasses, and plain objects without operators; False for an object of PyTorch, JAX,
    NumPy or the builtins, and for one with __eq__, __call__, __getitem__ or the like. Python's modules count by their
    names: True, except for PyTorch, JAX, NumPy and a few of the standard library, such as math. is_called: whether the
    code is the object's own __call__, which does not count then.
    """
    if isinstance(x, types.ModuleType):
        return x.__name__.split(".")[0] not in (*_LIBRARIES, *_STANDARD)
    if isinstance(x, torch.nn.Module) or dataclasses.is_dataclass(x):
        return True
    kind = type(x)
    if _is_of_library(kind) or kind.__eq__ is not object.__eq__ or kind.__module__ == "builtins":
        return False
    protocols = [name for name in _PROTOCOLS if name != "__call__" or not is_called]
    return not any(name in vars(base) for base in kind.__mro__ for name in protocols)


_STANDARD = ("math", "operator", "functools", "builtins", "itertools")
