"""Dictionaries of a bounded size."""

import contextlib
from typing import Any

__all__ = ["drop_oldest"]


def drop_oldest(entries: dict[Any, Any], most: int) -> None:
    """Drops the entries that were put in first, until there are no more than so many. Other threads may do so, too."""
    while len(entries) > most:
        with contextlib.suppress(StopIteration, RuntimeError):  # another thread changed the dictionary meanwhile
            entries.pop(next(iter(entries)), None)
