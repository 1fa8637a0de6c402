"""Calls that run once another module has been imported, so that the bridge need not import it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

_WAITING: dict[str, list[Callable[[], Any]]] = {}  # the functions to call, by the name of the awaited module


def when_imported(module: str, call: Callable[[], None]) -> None:
    """Runs call() once `module` has been imported: at once if it has been, otherwise at the end of its import."""
    found = sys.modules.get(module)
    if found is not None and not getattr(found.__spec__, "_initializing", False):
        call()
        return
    _WAITING.setdefault(module, []).append(call)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    """An import finder for awaited modules: their usual spec, but with a _Loader.

    An awaited module is one for which when_imported has calls to run.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WAITING or fullname in sys.modules:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, fullname)
                return spec
        return None


class _Loader(Loader):
    """Loads a module by its own loader, then runs the calls that wait for the module."""

    def __init__(self, loader: Loader, module: str) -> None:
        self._loader = loader
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for call in _WAITING.pop(self._module, ()):
            call()


_FINDER = _Finder()
