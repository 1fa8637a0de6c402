"""PyTorch's autocast on any device, also on the meta device, for which PyTorch's own functions raise."""

import contextlib

import torch

__all__ = ["autocast_dtype", "without_autocast"]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts on this device; None if autocast is off there, and on the meta device."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context manager inside which autocast is off on this device."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
