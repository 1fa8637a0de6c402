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
    """The function that `memoize` returns: called with a key, it returns make(*key), computed once per key.

    If several threads ask for a new key at once, one computes and the others wait. It keeps about _MOST values, and
    drops the least recently used.
    """

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
        """make(*key), unless another thread has computed it meanwhile."""
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
    """Decorates a function so that it computes its value once for each tuple of arguments, which must be hashable.

    Unlike functools.lru_cache, threads that ask for the same value at once compute it once. `clear` forgets the values.
    """
    made = _Once(make)
    _ALL.append(made)
    return made


def clear() -> None:
    """Forgets all values of all functions that `memoize` decorates."""
    for made in _ALL:
        made.clear()


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
