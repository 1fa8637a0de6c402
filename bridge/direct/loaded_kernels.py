"""Loads the kernels of a launch chain in the CUDA context of a device, and unloads them."""

import contextlib
import ctypes
from collections.abc import Callable
from typing import NamedTuple

import jaxlib

from jax_kernels.bridge.direct.chain import (
    Bytes,
    Kernel,
    Launch,
    MosaicKernel,
    MosaicLaunch,
    Parameter,
    Step,
    TensorMap,
    TensorMaps,
)
from jax_kernels.bridge.direct.mosaic_launch import MAP_BYTES
from jax_kernels.bridge.interop.cuda_driver import Driver, DriverError

__all__ = ["KernelResources", "LoadedKernel", "drop", "load_kernel", "tensor_maps", "unload_dropped"]

_MAP_ADDRESSES = (1 << 40, (1 << 41) + (1 << 20))  # invented, to find the bytes of a tensor map that have the address
_MOSAIC_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
# From jaxlib 0.12 on: the compiled kernel, the function, the stream, the addresses, the GPU's index.
_MOSAIC_LAUNCH_OF_KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
)
_TAKES_KERNEL = tuple(map(int, jaxlib.__version__.split(".")[:2])) >= (0, 12)


class _Mosaic(NamedTuple):
    """A Mosaic kernel that Mosaic has compiled in this process.

    handle: the argument of MosaicGpuUnload. launch(function, stream, address): launches the kernel. function: a value
    that Mosaic returned for this argument. address: host address of an array with the kernel's device addresses.
    """

    handle: "ctypes._Pointer[ctypes.c_void_p]"
    function: int
    launch: Callable[[int, int, int], None]


class LoadedKernel(NamedTuple):
    """The loaded kernel of a step. The fields are empty for a fill or a copy.

    function: the CUDA driver's handle of a Kernel or a MosaicLaunch. mosaic: a MosaicKernel that Mosaic compiled, as
    its launch is not known. tails: of a MosaicLaunch, the bytes behind the address of each tensor map.
    """

    function: int | None = None
    mosaic: _Mosaic | None = None
    tails: tuple[bytes, ...] = ()


class KernelResources:
    """The loaded modules and Mosaic kernels of a chain, in the CUDA context of one device. `close` unloads them.

    device: the GPU's index. is_captured: whether a CUDA graph has captured a launch of the chain.
    """

    def __init__(self, driver: Driver, context: int, device: int, mosaic: Callable[[], ctypes.CDLL]) -> None:
        self.driver = driver
        self.device = device
        self.context = context
        self.mosaic_library = mosaic
        self.modules: list[int] = []
        self.mosaic: list[ctypes._Pointer[ctypes.c_void_p]] = []
        self.is_captured = False

    def close(self) -> None:
        """Waits until the device has finished all its work, then unloads the modules and Mosaic kernels."""
        driver = self.driver
        driver.call("cuCtxPushCurrent", self.context)
        try:
            driver.call("cuCtxSynchronize")
            while self.modules:
                driver.call("cuModuleUnload", self.modules.pop())
            while self.mosaic:
                self.mosaic_library().MosaicGpuUnload(self.mosaic.pop())
        finally:
            driver.handle("cuCtxPopCurrent")


_DROPPED: list[KernelResources] = []


def drop(resources: KernelResources) -> None:
    """Queues the resources of a garbage-collected chain for unload_dropped."""
    _DROPPED.append(resources)


def unload_dropped() -> None:
    """Unloads the kernels of LoadedChains that were garbage-collected.

    It waits until their devices have finished all work, so it is called only before a compilation or when caches are
    cleared.
    """
    while _DROPPED:
        _DROPPED.pop().close()


def tensor_maps(launch: MosaicLaunch | None) -> list[TensorMap]:
    """The tensor maps of a launch's parameters, in order."""
    parameters = () if launch is None else launch.parameters
    return [x for parameter in parameters if isinstance(parameter, TensorMaps) for x in parameter.maps]


def load_kernel(step: Step, resources: KernelResources) -> LoadedKernel:
    """Loads a step's kernel in the current CUDA context, and adds it to `resources`, which unload it.

    Raises DriverError if the driver or Mosaic fails.
    """
    if isinstance(step, Kernel):
        return LoadedKernel(function=_function(step, [8] * len(step.arguments), resources))
    if not isinstance(step, MosaicKernel):
        return LoadedKernel()
    if step.launch is not None:
        with contextlib.suppress(DriverError):  # then Mosaic compiles the kernel
            tails = tuple(_tail(x, resources.driver) for x in tensor_maps(step.launch))
            sizes = [_parameter_bytes(x) for x in step.launch.parameters]
            return LoadedKernel(function=_function(step.launch, sizes, resources), tails=tails)
    compiled = resources.mosaic_library().MosaicGpuCompile(step.module, len(step.module))
    if not compiled:
        raise DriverError(f"Mosaic failed to compile kernel {step.name}")
    resources.mosaic.append(compiled)
    launch = _mosaic_launch(compiled, resources.device)
    return LoadedKernel(mosaic=_Mosaic(handle=compiled, function=compiled[0] or 0, launch=launch))


def _mosaic_launch(compiled: "ctypes._Pointer[ctypes.c_void_p]", device: int) -> Callable[[int, int, int], None]:
    """The function `launch` of a _Mosaic. compiled: the result of MosaicGpuCompile. device: the GPU's index."""
    if not _TAKES_KERNEL:
        return _MOSAIC_LAUNCH(compiled[1])
    launch, kernel = _MOSAIC_LAUNCH_OF_KERNEL(compiled[1]), compiled[2]
    return lambda function, stream, address: launch(kernel, function, stream, address, device)


def _function(step: Launch, sizes: list[int], resources: KernelResources) -> int:
    """The handle of a kernel, after its module was loaded. sizes: the bytes of its parameters, which are checked."""
    module = resources.driver.load(step.cubin)
    resources.modules.append(module)
    return resources.driver.function(module, step.name, sizes, step.shared_memory)


def _parameter_bytes(parameter: Parameter) -> int:
    match parameter:
        case TensorMaps():
            return MAP_BYTES * len(parameter.maps)
        case Bytes():
            return len(parameter.value)
    return 8


def _tail(tensor_map: TensorMap, driver: Driver) -> bytes:
    """The bytes of a tensor map behind the array's address, which are equal for all addresses.

    Raises DriverError if the driver does not write the address to the first 8 bytes, and to no others.
    """
    encoded = [
        driver.tensor_map(
            address,
            dtype=tensor_map.dtype,
            sizes=tensor_map.sizes,
            strides=tensor_map.strides,
            box=tensor_map.box,
            swizzle=tensor_map.swizzle,
        )
        for address in _MAP_ADDRESSES
    ]
    found = {(int.from_bytes(x[:8], "little") - at, x[8:]) for x, at in zip(encoded, _MAP_ADDRESSES, strict=True)}
    if len(found) != 1 or next(iter(found))[0]:
        raise DriverError("a tensor map does not begin with its address")
    return encoded[0][8:]
