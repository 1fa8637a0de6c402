"""Selects the GPU or CPU that JAX plans for while the bridge calls JAX."""

import contextlib
import functools
from typing import Any

import torch

from jax_kernels import dispatch
from jax_kernels.bridge.interop import dlpack, fork
from jax_kernels.device import DeviceInfo
from jax_kernels.ops.sharding.partitioning import on_one_device

__all__ = ["planning_on"]


@functools.cache
def _device_info(device: torch.device) -> DeviceInfo:
    """The abilities of a PyTorch device, a CPU or a CUDA GPU, from which ops make their plans."""
    return dispatch.device_info(dlpack.jax_device(device))


class _Planning:
    """The context manager that planning_on returns. It is a class because a generator is slower.

    target: a context manager that selects the device for plans; it is entered after dlpack.outside_of_traces().
    """

    __slots__ = ("_alone", "_outside", "_target")

    def __init__(self, target: contextlib.AbstractContextManager[DeviceInfo | None]) -> None:
        self._target = target
        self._outside = dlpack.outside_of_traces()
        self._alone = on_one_device()

    def __enter__(self) -> None:
        self._outside.__enter__()
        self._target.__enter__()
        self._alone.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._alone.__exit__(*error)
        self._target.__exit__(*error)
        self._outside.__exit__(*error)


def planning_on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context manager inside which this library's ops plan for this device, not for JAX's default device, and for
    arrays on this device alone.

    JAX also computes values inside it, even while it traces an enclosing function. For the meta device, ops plan for
    JAX's default device. Raises RuntimeError in a process that was forked while JAX was running.
    """
    fork.refuse()
    return _Planning(contextlib.nullcontext() if device.type == "meta" else dispatch.on_device(_device_info(device)))
