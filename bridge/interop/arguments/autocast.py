"""PyTorch's autocast on any device, also on the meta device, for which PyTorch's own functions raise."""

import contextlib

import torch

__all__ = ["autocast_dtype", "cast_dtype", "under_autocast", "without_autocast"]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts on this device; None if autocast is off there, and on the meta device."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def cast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which autocast hands a tensor to an op: its own for float64 and integers, which are never cast."""
    dtype = autocast_dtype(x.device)
    return x.dtype if dtype is None or x.dtype == torch.float64 or not x.is_floating_point() else dtype


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    """The tensor in cast_dtype(x): the same tensor without autocast."""
    return x.to(cast_dtype(x))


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context manager inside which autocast is off on this device."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
