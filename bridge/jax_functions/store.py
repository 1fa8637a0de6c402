"""Values by name. PyTorch's operators take texts, so they find functions, programs and dynamic calls by a name.

There is one Store for each of these kinds. It says which values stay alive:

| value | the store keeps it | after that |
|---|---|---|
| a function given to from_jax | until the process ends | |
| a function that forward mode made | among the MOST last used | is found while a program holds it |
| a program | among the MOST last used | is found while an object holds it, such as a call for its backward |
| a program whose name is in a graph | among the MOST last used | is built again: its record stays |
| a dynamic call whose name is not a text | among the MOST last used | its graph raises RuntimeError |
"""

import collections
import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

from jax_kernels.bridge.interop.keyed_cache import unique_name

__all__ = ["MOST", "Named", "Store", "clear"]

MOST = 1024  # values of a store


class Named[Value](NamedTuple):
    """A value, and the name by which its store finds it."""

    name: str
    value: Value


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class _Record[Value]:
    """The entry of a name in a store.

    key: the value's key. build: a function of the name that returns the value, also again after it was dropped.
    is_pinned: whether the record stays when the value is dropped.
    """

    key: Hashable
    build: Callable[[str], Value]
    is_pinned: bool = False


class Store[Value]:
    """Values of one kind. Each is built once for its key, under a new name. len(store): the number of kept values."""

    def __init__(self) -> None:
        self.kept: collections.OrderedDict[str, Value] = collections.OrderedDict()  # the last used at the end
        self._records: dict[str, _Record[Value]] = {}
        self._names: dict[Hashable, str] = {}  # by key
        self._alive: weakref.WeakValueDictionary[str, Value] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # held while a value is built; kept values are found without waiting for it
        _ALL.append(self)

    def __len__(self) -> int:
        return len(self.kept)

    def add(self, stem: str, value: Value) -> str:
        """Keeps a value until the process ends. Returns its new name, which begins with `stem`."""
        name = unique_name(stem)
        self._restored(name, _Record(key=name, build=lambda _: value, is_pinned=True))
        return name

    def get(self, key: Hashable, stem: str, build: Callable[[str], Value]) -> Named[Value]:
        """The value of a key. A missing value is build(name), for a new name that begins with `stem`.

        If several threads ask for a new key at once, one builds the value and the others wait.
        """
        name = self._names.get(key)
        value = None if name is None else self.find(name)
        if name is not None and value is not None:
            return Named(name, value)
        with self._lock:
            name = self._names.get(key) or unique_name(stem)
            record = self._records.get(name) or _Record(key=key, build=build)
            return Named(name, self._restored(name, record))

    def find(self, name: str) -> Value | None:
        """The value of a name. A dropped value whose record stays is built again. None if the value is gone."""
        value = self.kept.get(name)
        if value is None:
            record = self._records.get(name)
            return self._alive.get(name) if record is None else self._restored(name, record)
        if self._lock.acquire(blocking=False):
            with contextlib.suppress(KeyError):  # another thread has dropped it
                self.kept.move_to_end(name)
            self._lock.release()
        return value

    def pin(self, name: str) -> None:
        """Keeps the record of a name until the process ends, unless its value is gone."""
        with self._lock:
            record, value = self._records.get(name), self._alive.get(name)
            if record is None and value is not None:  # another object holds it
                record = self._records[name] = _Record(key=name, build=lambda _: value)
            if record is not None:
                record.is_pinned = True

    def is_pinned(self, name: str) -> bool:
        record = self._records.get(name)
        return record is not None and record.is_pinned

    def names(self) -> list[str]:
        """The names whose values the store keeps or can build again."""
        return list(self._records)

    def alive(self) -> dict[str, Value]:
        """The values that this store or another object holds, by name, if they can be referenced weakly."""
        references = self._alive.valuerefs()  # a copy: other threads may add values
        return {found.key: value for found in references if (value := found()) is not None}

    def clear(self) -> None:
        """Drops all values, and the records that are not pinned."""
        with self._lock:
            for name in list(self.kept):
                self._drop(name)

    def renew_lock(self) -> None:
        """Replaces the lock, which another thread may have held when this process was forked."""
        self._lock = threading.RLock()

    def _restored(self, name: str, record: _Record[Value]) -> Value:
        """The value of a record, built if it was dropped, and kept as the last used value."""
        with self._lock:
            value = self.kept.get(name)
            value = self._alive.get(name) if value is None else value
            value = record.build(name) if value is None else value
            self._records[name] = record
            self._names.setdefault(record.key, name)
            self.kept[name] = value
            self.kept.move_to_end(name)
            with contextlib.suppress(TypeError):  # a function without weak references
                self._alive[name] = value
            while len(self.kept) > MOST:
                self._drop(next(iter(self.kept)))
            return value

    def _drop(self, name: str) -> None:
        """Drops a kept value, and its record unless that is pinned."""
        del self.kept[name]
        record = self._records[name]
        if not record.is_pinned:
            del self._records[name]
            if self._names.get(record.key) == name:
                del self._names[record.key]


_ALL: list[Store] = []


def clear() -> None:
    """Drops the values of all stores that are not pinned. Pinned values are built again when they are found."""
    for store in _ALL:
        store.clear()


def _renew_locks() -> None:
    """Runs in a child process after a fork. So a call in the child raises fork.refuse's error, and does not wait."""
    for store in _ALL:
        store.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
