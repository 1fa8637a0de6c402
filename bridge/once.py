"""Values that a process makes once by key, in whatever thread, and names that no other process gives."""

import functools
import itertools
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["fresh_name", "once"]


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """A functools.cache for threads: where several ask for a value at once, one makes it and the others wait."""
    made: dict[Any, Any] = {}
    locks: dict[Any, threading.RLock] = {}

    @functools.cache  # its own lookup is the fast one; a miss may come from several threads
    @functools.wraps(make)
    def get(*key: Any) -> Any:
        # The process is part of the key, as a fork copies the locks that other threads hold.
        own = os.getpid(), key
        with locks.setdefault(own, threading.RLock()):
            if key not in made:
                made[key] = make(*key)
            locks.pop(own, None)
            return made[key]

    return get


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
