"""Public names of a package: names that are imported when they are first read, and the names that dir() lists."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

__all__ = ["dir_of", "lazy_names"]


def lazy_names(
    package: str,
    names: Mapping[str, Sequence[str]],
    when_imported: Callable[[Any], None] = lambda value: None,
    submodules: Sequence[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions __getattr__ and __dir__ of a package's __init__.py, whose __all__ becomes the public names.

    names: the public names, by the module that has them; a name may also be the module itself. when_imported: called
    with the value of a name before the name is first returned. submodules: names of further modules of the package that
    are imported when they are first read. dir() does not list them before.
    """
    homes = {name: module for module, found in names.items() for name in found}
    scope = vars(sys.modules[package])
    scope.setdefault("__all__", sorted(homes))

    def get(name: str) -> Any:
        if name not in homes:
            if name in submodules:
                return importlib.import_module(f"{package}.{name}")
            # With name and obj, Python's traceback names the attribute that may be meant.
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = importlib.import_module(homes[name])
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        when_imported(value)
        scope[name] = value
        return value

    return get, lambda: sorted({*homes, *(name for name in scope if name.startswith("__"))})


def dir_of(module: str, is_public: Callable[[str], bool] = lambda name: True) -> Callable[[], list[str]]:
    """The function __dir__ of a module that imports its public names: dir() lists neither private names nor modules.

    is_public: False for other names that dir() leaves out.
    """
    scope = vars(sys.modules[module])

    def names() -> list[str]:
        is_listed = lambda name, x: is_public(name) and not name.startswith("_") and not isinstance(x, ModuleType)
        return sorted(name for name, x in scope.items() if name.startswith("__") or is_listed(name, x))

    return names
