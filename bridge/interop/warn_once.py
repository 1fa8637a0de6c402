"""Warnings that a process issues once."""

import re
import warnings

from jax_kernels.bridge.interop import torch_internals

__all__ = ["warn_once"]

_GIVEN: set[str] = set()
_NUMBER = re.compile(r"\d[\d.e+-]*")


@torch_internals.constant_in_graph
def warn_once(message: str) -> None:
    """Issues a UserWarning, unless this message was issued before in this process, with the same or other numbers.

    A function that torch.compile compiles warns during its trace, not when it runs.
    """
    if message in _GIVEN:
        return
    text = _NUMBER.sub("", message)
    if all(_NUMBER.sub("", given) != text for given in _GIVEN):
        _GIVEN.add(message)
        warnings.warn(message, stacklevel=4)  # the caller of the function that calls fallback.warn
