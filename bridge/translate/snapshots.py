"""Functions as they are now: copies that later changes of the values which a function reads do not reach.

Calls and programs are cached by a function's snapshot, so that a changed function is traced again.
"""

import copy
import types
from collections.abc import Hashable
from typing import Any

import torch

from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.translate import captures, function_identity

__all__ = ["key_of", "snapshot"]

_MOST = 1024
_FIRST: dict[Hashable, Any] = {}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LIBRARIES = ("torch", "jax")  # whose functions read no values of the caller's
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def key_of(function: Any) -> Any:
    """The value by which a call with this function is cached: its snapshot.

    In code that torch.compile traces, and for a name or None, it is the argument itself.
    """
    if function is None or isinstance(function, str) or torch.compiler.is_compiling():
        return function
    return snapshot(function)


def snapshot(function: Any) -> Any:
    """A function with the values that `function` reads now: numbers, text, and lists, dicts and objects with them.

    Snapshots are one object while these values are equal, and another one after a change. It is the function itself if
    the values cannot be compared, or if it reads tensors. function: a function, a method, a partial, a module, or an
    object that can be called.
    """
    if isinstance(function, types.FunctionType):
        if function.__closure__ is None and function_identity.library_of(function) in _LIBRARIES:
            return function
        try:
            function_identity.function_key(function)
        except function_identity.UncomparableFunctionError:
            pass
        else:
            return function_identity.canonical_function(function)
    try:
        key, made = _of_module(function) if isinstance(function, torch.nn.Module) else _of_values(function)
        found = _FIRST.get(key)
    except (function_identity.UncomparableFunctionError, TypeError):
        return function
    if found is None:
        found = _FIRST.setdefault(key, copy.deepcopy(made) if isinstance(made, torch.nn.Module) else made)
        drop_oldest(_FIRST, _MOST)
    return found


def _of_values(function: Any) -> tuple[Hashable, Any]:
    """(a key of the values that a function, method, partial or object reads now, a copy with these values).

    Raises UncomparableFunctionError if there is no key.
    """
    root = captures.root_of(function)
    if root is None:
        raise function_identity.UncomparableFunctionError
    made = captures.copied(root, lambda x, path: x)
    return function_identity.function_key(made, is_copy=True), made


def _of_module(module: torch.nn.Module) -> tuple[Hashable, torch.nn.Module]:
    """(a key of the module's class, settings and hooks now, the module).

    Settings are numbers, text and the like in attributes of the module and of its submodules. A module of a class
    that is not PyTorch's counts as itself. Raises UncomparableFunctionError for a module with parameters or buffers.
    """
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        raise function_identity.UncomparableFunctionError
    parts: list[Hashable] = []
    for name, part in module.named_modules(remove_duplicate=False):
        own = vars(part)
        settings = [(key, type(x), repr(x)) for key, x in own.items() if type(x) in _PLAIN]
        hooks = [tuple(own[key].values()) for key in _HOOKS]
        is_plain = type(part).__module__.startswith("torch.nn.modules.") and "forward" not in own
        parts.append((name, type(part), None if is_plain else part, *settings, *hooks))
    return tuple(parts), module
