"""The names and signatures of the public API, which tests/public_api.txt records.

    python tests/tools/public_api.py           # prints them
    python tests/tools/public_api.py --write   # after a change that is meant: writes the record

A line is a function, a class with its constructor, or a method or property of a class. Defaults are part of it, types
are not. docs/reference/versions.md tells which changes need a deprecation.
"""

import argparse
import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "public_api.txt"
MODULES = (
    "jax_kernels",
    "jax_kernels.masks",
    "jax_kernels.models",
    "jax_kernels.bridge",
    "jax_kernels.bridge.nn",
    "jax_kernels.bridge.masks",
    "jax_kernels.bridge.huggingface",
    "jax_kernels.bridge.weights",
)


def lines() -> list[str]:
    """The lines of all modules, sorted by module and name."""
    found, paths = [], {}
    for name in MODULES:
        found += _lines_of(importlib.import_module(name), paths)
    return found


def _lines_of(module: Any, paths: dict[type, str]) -> Iterator[str]:
    """The lines of a module. paths: of the classes that have lines; this module's classes are added."""
    for name in sorted(getattr(module, "__all__", None) or dir(module)):
        x, path = getattr(module, name), f"{module.__name__}.{name}"
        if name.startswith("_") or inspect.ismodule(x):
            continue
        if not inspect.isclass(x):
            yield f"{path}{_signature(x) if callable(x) else ''}"
        elif x in paths:
            yield f"class {path} = {paths[x]}"
        else:
            paths[x] = path
            yield f"class {path}{_constructor(x)}"
            yield from (f"{path}.{line}" for line in _members(x, paths))


def _constructor(kind: type) -> str:
    """The signature of a class's constructor; "" if another library defines it."""
    if issubclass(kind, tuple):
        return _signature(kind)
    owner = next(base for base in kind.__mro__ if "__init__" in vars(base))
    return _signature(kind.__init__, skips_self=True) if owner.__module__.startswith("jax_kernels") else ""


def _members(kind: type, paths: dict[type, str]) -> Iterator[str]:
    """The public methods and properties of a class that are neither fields nor a public base's."""
    own = [x for x in kind.__mro__ if x is kind or (x.__module__.startswith("jax_kernels") and x not in paths)]
    names = {name for base in own for name in vars(base)} - set(getattr(kind, "__dataclass_fields__", ()))
    for name in sorted(names):
        if name.startswith("_") and name != "__call__":
            continue
        x = inspect.getattr_static(kind, name, None)
        if isinstance(x, classmethod | staticmethod):
            yield f"{name}{_signature(getattr(kind, name))}"
        elif inspect.isfunction(x):
            yield f"{name}{_signature(x, skips_self=True)}"
        else:
            yield name


def _signature(function: Any, *, skips_self: bool = False) -> str:
    """The parameters with their kinds and defaults, without types."""
    parameters = list(inspect.signature(function).parameters.values())[skips_self:]
    default = lambda x: x.empty if x.default is x.empty else _Default(x.default)
    return str(inspect.Signature([x.replace(annotation=x.empty, default=default(x)) for x in parameters]))


class _Default:
    """A default whose repr is the same in every process: functions and classes by their names."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, enum.Enum):
            return str(self.value)
        if type(self.value) is object:
            return "object()"
        return getattr(self.value, "__name__", None) or repr(self.value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"writes {RECORD.name}")
    text = "\n".join(lines()) + "\n"
    if parser.parse_args().write:
        RECORD.write_text(text)
    else:
        print(text, end="")
