"""Selects the GPU or CPU that JAX plans for while the bridge calls JAX."""

import contextlib
import functools
from typing import Any

import torch

from jax_kernels import dispatch
from jax_kernels.bridge.interop import dlpack, fork
from jax_kernels.device import DeviceInfo

__all__ = ["planning_on"]


@functools.cache
def _device_info(device: torch.device) -> DeviceInfo:
    return dispatch.device_info(dlpack.jax_device(device))


class _Planning:
    """The context manager of planning_on, as a class because a generator is slower."""

    __slots__ = ("_outside", "_target")

    def __init__(self, target: contextlib.AbstractContextManager[DeviceInfo | None]) -> None:
        self._target = target
        self._outside = dlpack.outside_of_traces()

    def __enter__(self) -> None:
        self._outside.__enter__()
        self._target.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._target.__exit__(*error)
        self._outside.__exit__(*error)


def planning_on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes JAX plan for this device, not its default device, inside the block, and outside of enclosing traces.

    For the meta device JAX plans for its default device. Raises RuntimeError in a forked process.
    """
    fork.refuse()
    return _Planning(contextlib.nullcontext() if device.type == "meta" else dispatch.on_device(_device_info(device)))
