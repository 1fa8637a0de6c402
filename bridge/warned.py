"""Warnings that a process gives once."""

import warnings

import torch

__all__ = ["warn_once"]

_GIVEN: set[str] = set()


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Warns, unless this message was given before. A compiled function warns when it is traced."""
    if message not in _GIVEN:
        _GIVEN.add(message)
        warnings.warn(message, stacklevel=3)
