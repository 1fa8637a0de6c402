"""Dictionaries of a bounded size."""

import contextlib

__all__ = ["drop_oldest"]


def drop_oldest[Key, Value](entries: dict[Key, Value], most: int) -> None:
    """Drops the entries that were added first until at most `most` are left. Several threads may call it at once."""
    while len(entries) > most:
        with contextlib.suppress(StopIteration, RuntimeError):  # another thread changed the dictionary meanwhile
            entries.pop(next(iter(entries)), None)
