"""The check that errors about arguments of wrong types are the library's own."""

import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["check_errors"]


def check_errors(function: Callable[..., Any], given: Mapping[str, Any], wrong: Mapping[str, Any]) -> None:
    """Each argument, with each wrong value in its turn, is taken, or raises an error that names an argument.

    given: the arguments of a call that works. wrong: values, by names for the messages of this check.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    known = re.compile(rf"({'|'.join(names)}|options)\b.*(got|want|raised)", re.DOTALL)
    for name, (kind, x) in itertools.product(names, wrong.items()):
        error = _error_of(function, {**given, name: x})
        assert isinstance(error, TypeError | ValueError | NotImplementedError | None), f"{name}, {kind}: {error!r}"
        assert error is None or known.match(str(error)), f"{name}, {kind}: {error!r}"


def _error_of(function: Callable[..., Any], given: Mapping[str, Any]) -> Exception | None:
    """The error of a call; None for a call that takes its arguments."""
    try:
        function(**given)
    except Exception as error:
        return error
    return None
