"""Public names of a package that are imported when they are first read."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]], when_imported: Callable[[Any], None] = lambda value: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions __getattr__ and __dir__ of a package's __init__.py.

    names: the public names, by the module that has them; a name may also be the module itself. when_imported: called
    with the value of a name before the name is first returned.
    """
    homes = {name: module for module, found in names.items() for name in found}
    scope = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        when_imported(value)
        scope[name] = value
        return value

    return get, lambda: sorted({*homes, *(name for name in scope if name.startswith("__"))})
