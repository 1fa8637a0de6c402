"""Warnings that a process issues once."""

import re
import warnings

from jax_kernels.bridge.interop import torch_internals

__all__ = ["warn_once"]

_GIVEN: set[str] = set()
_NUMBER = re.compile(r"\d[\d.e+-]*")


@torch_internals.constant_in_graph
def warn_once(message: str) -> None:
    """Warns, unless this message was issued before, with the same or other numbers.

    A compiled function warns during its trace.
    """
    if message in _GIVEN:
        return
    text = _NUMBER.sub("", message)
    if all(_NUMBER.sub("", given) != text for given in _GIVEN):
        _GIVEN.add(message)
        warnings.warn(message, stacklevel=4)  # the caller of the function that calls fallback.warn
