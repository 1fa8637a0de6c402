"""The device for which calls are planned: the device of their arrays, or a named device that the machine may lack."""

import contextlib
import contextvars
import functools
from typing import Any

import jax

from jax_kernels.device import DeviceInfo, device_info

__all__ = ["has_target", "on_device", "target_device"]

_TARGET: contextvars.ContextVar[DeviceInfo | None] = contextvars.ContextVar("jax_kernels_target", default=None)


class _Target:
    """The context manager that on_device returns: calls inside it are planned for one device.

    It is no generator: the bridge enters it in each call, and a generator takes longer.
    """

    __slots__ = ("_info", "_token")

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info

    def __enter__(self) -> DeviceInfo:
        self._token = _TARGET.set(self._info)
        return self._info

    def __exit__(self, *_: object) -> None:
        _TARGET.reset(self._token)


def on_device(device: "DeviceInfo | jax.Device | str") -> contextlib.AbstractContextManager[DeviceInfo]:
    """A context manager: calls inside it are planned for this device, whatever devices the machine has.

    It is for ahead-of-time compiles and the bridge. It yields the DeviceInfo.
    """
    return _Target(device if isinstance(device, DeviceInfo) else device_info(device))


def has_target() -> bool:
    """Whether on_device selects a device now, as it does in every call of the bridge."""
    return _TARGET.get() is not None


def target_device(*arrays: Any) -> DeviceInfo:
    """The device for which a call is planned: on_device's, else the first concrete array's, else JAX's default device.

    For traced arrays, JAX knows a device if they are on a mesh, or if jax.set_mesh or a shard_map has a mesh: a mesh
    of CPU devices is a CPU, even on a machine with a GPU.
    """
    target = _TARGET.get()
    if target is not None:
        return target
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return _info(next(iter(array.devices())))
    meshes = [jax.typeof(array).sharding.mesh for array in arrays if isinstance(array, jax.core.Tracer)]
    if any(_is_of_cpus(mesh) for mesh in (*meshes, jax.sharding.get_abstract_mesh())):
        return device_info("cpu")
    default = jax.config.jax_default_device
    if isinstance(default, str):
        default = jax.devices(default)[0]
    return device_info() if default is None else _info(default)


def _is_of_cpus(mesh: Any) -> bool:
    return mesh.abstract_device is not None and mesh.abstract_device.device_kind == "cpu"


@functools.cache
def _info(device: Any) -> DeviceInfo:
    return device_info(device)
