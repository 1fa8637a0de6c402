"""Values that a process makes once by key, in whatever thread, and names that no other process gives."""

import functools
import itertools
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

from jax_kernels.bridge.interop.bounded_dict import drop_oldest

__all__ = ["clear", "fresh_name", "once"]


_MOST = 1024  # values of a function


class _Once:
    """A functools.lru_cache for threads: where several ask for a value at once, one makes it and the others wait."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._made: dict[Any, Any] = {}
        self._locks: dict[Any, threading.RLock] = {}
        # Its own lookup is the fast one; a miss may come from several threads.
        self._get = functools.lru_cache(_MOST)(self._made_once)
        self.__wrapped__ = make

    def __call__(self, *key: Any) -> Any:
        return self._get(*key)

    def __len__(self) -> int:
        return self._get.cache_info().currsize

    def clear(self) -> None:
        self._get.cache_clear()
        self._made.clear()

    def _made_once(self, *key: Any) -> Any:
        # The process is part of the key, as a fork copies the locks that other threads hold.
        own = os.getpid(), key
        with self._locks.setdefault(own, threading.RLock()):
            if key not in self._made:
                self._made[key] = self._make(*key)
            self._locks.pop(own, None)
            value = self._made[key]
            drop_oldest(self._made, _MOST)
            return value


_ALL: list[_Once] = []


def once(make: Callable[..., Any]) -> _Once:
    """The function, which makes a value once for a key, and forgets those that were not asked for lately."""
    made = _Once(make)
    _ALL.append(made)
    return made


def clear() -> None:
    """Forgets all values of all functions."""
    for made in _ALL:
        made.clear()


_NUMBERS = itertools.count(1)
_PROCESS = secrets.token_hex(8)


def fresh_name(stem: str) -> str:
    """A name that begins with the stem and is given once. Other processes, also forked ones, give other names."""
    return f"{stem}_{next(_NUMBERS)}_{_PROCESS}"


def _renew() -> None:
    global _PROCESS
    _PROCESS = secrets.token_hex(8)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
