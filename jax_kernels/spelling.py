"""A hint for misspelt names in errors."""

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: "; did you mean 'causal'?", or "" if no known name is near."""
    if not isinstance(name, str):
        return ""
    folded = {x.casefold(): x for x in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""
