"""Caches of values that a process computes once per key, in any thread, and names that are unique over processes."""

import functools
import itertools
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

from jax_kernels.bridge.interop.bounded_dict import drop_oldest

__all__ = ["clear", "memoize", "unique_name"]


_MOST = 1024  # values per function
_MISSING = object()


def memoize[*Key, Value](make: Callable[[*Key], Value]) -> Callable[[*Key], Value]:
    """Decorates a function so that it computes its value once for each tuple of arguments, which must be hashable.

    Unlike functools.lru_cache, threads that ask for the same value at once compute it once: the others wait. About
    _MOST values are kept, the last used ones. `clear` forgets them.
    """
    made: dict[tuple[*Key], Value] = {}
    locks: dict[tuple[int, tuple[*Key]], threading.RLock] = {}

    @functools.lru_cache(_MOST)  # makes look-ups fast; several threads may miss at once
    @functools.wraps(make)
    def found(*key: *Key) -> Value:
        # The process id is part of the lock's key, because a fork copies locks that other threads hold.
        own = os.getpid(), key
        with locks.setdefault(own, threading.RLock()):
            value: Any = made.get(key, _MISSING)  # read once: other threads may call `clear` at any time
            if value is _MISSING:
                value = made[key] = make(*key)
                drop_oldest(made, _MOST)
            locks.pop(own, None)
            return value

    _FORGET.extend((found.cache_clear, made.clear))
    return found  # type: ignore[return-value]


_FORGET: list[Callable[[], None]] = []


def clear() -> None:
    """Forgets all values of all functions that `memoize` decorates."""
    for forget in _FORGET:
        forget()


_NUMBERS = itertools.count(1)
_PROCESS = secrets.token_hex(8)


def unique_name(stem: str) -> str:
    """A new name, "STEM_NUMBER_RANDOM". No other call returns the same name, in this process or in another one."""
    return f"{stem}_{next(_NUMBERS)}_{_PROCESS}"


def _renew() -> None:
    """Runs in a child process after a fork, so that its names differ from the parent's."""
    global _PROCESS
    _PROCESS = secrets.token_hex(8)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
