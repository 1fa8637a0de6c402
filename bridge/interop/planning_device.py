"""The GPU, or the CPU, that JAX plans for while the bridge calls it."""

import contextlib
import functools
from typing import Any

import torch

from jax_kernels import dispatch
from jax_kernels.bridge.interop import dlpack, fork

__all__ = ["planning_for"]


@functools.cache
def _device_info(device: torch.device) -> Any:
    return dispatch.device_info(dlpack.jax_device(device))


class _Planning:
    """The context of planning_for, without the time that generators take."""

    __slots__ = ("_outside", "_target")

    def __init__(self, target: contextlib.AbstractContextManager[Any]) -> None:
        self._target = target
        self._outside = dlpack.outside_of_traces()

    def __enter__(self) -> None:
        self._outside.__enter__()
        self._target.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._target.__exit__(*error)
        self._outside.__exit__(*error)


def planning_for(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes JAX plan for this device inside the block, whatever its default device is, and trace nothing of outside.

    A meta tensor has the plan of JAX's default device. Raises RuntimeError in a forked process.
    """
    fork.refuse()
    return _Planning(contextlib.nullcontext() if device.type == "meta" else dispatch.on_device(_device_info(device)))
