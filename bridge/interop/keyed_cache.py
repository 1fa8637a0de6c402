"""Caches of values that a process computes once per key, in any thread, and names that are unique over processes."""

import functools
import itertools
import os
import secrets
import threading
from collections.abc import Callable

from jax_kernels.bridge.interop.bounded_dict import drop_oldest

__all__ = ["clear", "memoize", "unique_name"]


_MOST = 1024  # values per function


class _Once[*Key, Value]:
    """A functools.lru_cache for threads: if several threads ask for a key at once, one computes and the others wait."""

    def __init__(self, make: Callable[[*Key], Value]) -> None:
        self._make = make
        self._made: dict[tuple[*Key], Value] = {}
        self._locks: dict[tuple[int, tuple[*Key]], threading.RLock] = {}
        # lru_cache makes look-ups fast. Several threads may miss at once, so _made_once locks.
        self._get = functools.lru_cache(_MOST)(self._made_once)
        self.__wrapped__ = make

    def __call__(self, *key: *Key) -> Value:
        return self._get(*key)

    def __len__(self) -> int:
        return self._get.cache_info().currsize

    def clear(self) -> None:
        self._get.cache_clear()
        self._made.clear()

    def _made_once(self, *key: *Key) -> Value:
        # The process id is part of the lock's key, because a fork copies locks that other threads hold.
        own = os.getpid(), key
        with self._locks.setdefault(own, threading.RLock()):
            if key not in self._made:
                self._made[key] = self._make(*key)
            self._locks.pop(own, None)
            value = self._made[key]
            drop_oldest(self._made, _MOST)
            return value


_ALL: list[_Once] = []


def memoize[*Key, Value](make: Callable[[*Key], Value]) -> _Once[*Key, Value]:
    """Decorates a function so that it computes a value once per key, with a least-recently-used cache."""
    made = _Once(make)
    _ALL.append(made)
    return made


def clear() -> None:
    """Forgets all values of all functions."""
    for made in _ALL:
        made.clear()


_NUMBERS = itertools.count(1)
_PROCESS = secrets.token_hex(8)


def unique_name(stem: str) -> str:
    """A new name that begins with the stem. No other call returns it, in this process, a forked one or another."""
    return f"{stem}_{next(_NUMBERS)}_{_PROCESS}"


def _renew() -> None:
    global _PROCESS
    _PROCESS = secrets.token_hex(8)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
