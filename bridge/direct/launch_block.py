"""The host memory of a launch: device addresses, tensor maps and parameters of its kernels."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from jax_kernels.bridge.direct.chain import (
    BufferSlice,
    Bytes,
    Copy,
    Fill,
    Kernel,
    Launch,
    MosaicKernel,
    MosaicLaunch,
    Step,
    TensorMaps,
)
from jax_kernels.bridge.direct.loaded_kernels import LoadedKernel, tensor_maps
from jax_kernels.bridge.direct.mosaic_launch import MAP_BYTES
from jax_kernels.bridge.interop.cuda_driver import CLUSTER_DIMENSION, Attribute, LaunchConfig

__all__ = ["MAP_ALIGNMENT", "LaunchBlock", "words_of"]

MAP_ALIGNMENT = 64  # bytes: of a tensor map in host memory


class LaunchBlock:
    """The host memory that one launch of a chain uses, prepared once.

    memory: the words of all steps, see words_of. keep: arrays of pointers to the kernels' parameters, and parameters
    that are the same in every launch. configs: the kernels' launch configurations. stream: the stream in these
    configurations. calls: functions of the stream, to call in order; a result other than 0 or None is an error code.
    current: receives the thread's current CUDA context.
    """

    def __init__(
        self, steps: Sequence[Step], ready: Sequence[LoadedKernel], offsets: Sequence[int], size: int, driver: Any
    ) -> None:
        """steps: of the chain. ready: their kernels. offsets: of the steps' first words. size: bytes of all words."""
        whole = ctypes.create_string_buffer(size + MAP_ALIGNMENT)
        start = -ctypes.addressof(whole) % MAP_ALIGNMENT
        self.memory = (ctypes.c_char * max(1, size)).from_buffer(whole, start)
        base = ctypes.addressof(self.memory)
        self.stream: int | None = None
        self.current = ctypes.c_void_p()
        self.current_pointer = ctypes.byref(self.current)
        self.configs: list[LaunchConfig] = []
        self.keep: list[ctypes.Array[Any]] = []
        self.calls: list[Callable[[int], int | None]] = []
        for step, kernel, offset in zip(steps, ready, offsets, strict=True):
            self._add(step, kernel, base + offset, driver)

    def _add(self, step: Step, ready: LoadedKernel, address: int, driver: Any) -> None:
        """Adds a step's calls to `calls`.

        ready: the step's loaded kernel. address: the host address, inside `memory`, of the step's first word.
        """
        at = lambda index: ctypes.c_uint64.from_address(address + 8 * index)
        match step:
            case Kernel():
                for index, part in enumerate(step.zeroed):
                    self.calls.append(_filler(driver, at(index), part.size, 0))
                first = len(step.zeroed)
                self._add_kernel(step, ready, [address + 8 * (first + i) for i in range(len(step.arguments))], driver)
            case MosaicKernel() if ready.mosaic is not None:
                _, context, mosaic = ready.mosaic
                self.calls.append(lambda stream: mosaic(context, stream, address))
            case MosaicKernel():
                assert step.launch is not None
                self._add_kernel(step.launch, ready, self._pointers(step.launch, ready, address), driver)
            case Fill():
                self.calls.append(_filler(driver, at(0), step.target.size, step.value))
            case Copy():
                copy, target, source, size = driver.cuMemcpyDtoDAsync, at(0), at(1), step.target.size
                self.calls.append(lambda stream: copy(target.value, source.value, size, stream))

    def _add_kernel(self, step: Launch, ready: LoadedKernel, pointers: list[int], driver: Any) -> None:
        """Adds the launch of a kernel. pointers: the host addresses of its parameters."""
        array, config = (ctypes.c_void_p * len(pointers))(*pointers), _config(step)
        self.keep.append(array)
        self.configs.append(config)
        launch = driver.cuLaunchKernelEx
        given = ctypes.addressof(config), ready.function, ctypes.addressof(array), None
        self.calls.append(lambda stream: launch(*given))

    def _pointers(self, launch: MosaicLaunch, ready: LoadedKernel, address: int) -> list[int]:
        """The host addresses of a launch's parameters. address: of its first word."""
        found, of_map, of_slice = [], address, address + MAP_BYTES * len(ready.tails)
        for parameter in launch.parameters:
            match parameter:
                case TensorMaps():
                    found.append(of_map)
                    of_map += MAP_BYTES * len(parameter.maps)
                case BufferSlice():
                    found.append(of_slice)
                    of_slice += 8
                case Bytes():
                    self.keep.append(ctypes.create_string_buffer(parameter.value, len(parameter.value)))
                    found.append(ctypes.addressof(self.keep[-1]))
        return found


def _filler(driver: Any, target: ctypes.c_uint64, size: int, value: int) -> Callable[[int], int]:
    """A function of a stream that fills `size` bytes of device memory, and returns an error code.

    target: contains the device address at the time of the call. value: 32 bits; 0 if size is no multiple of 4.
    """
    if size % 4 == 0:
        words = driver.cuMemsetD32Async
        return lambda stream: words(target.value, value, size // 4, stream)
    bytewise = driver.cuMemsetD8Async
    return lambda stream: bytewise(target.value, 0, size, stream)


def _config(step: Launch) -> LaunchConfig:
    """The launch configuration of a kernel, without the stream."""
    grid, block, cluster = step.grid, step.block, step.cluster
    config = LaunchConfig(
        grid_x=grid.x,
        grid_y=grid.y,
        grid_z=grid.z,
        block_x=block.x,
        block_y=block.y,
        block_z=block.z,
        shared=step.shared_memory,
    )
    if cluster.x * cluster.y * cluster.z > 1:
        attribute = Attribute(id=CLUSTER_DIMENSION)
        attribute.value[:3] = cluster.x, cluster.y, cluster.z
        config.attributes = ctypes.pointer(attribute)
        config.count = 1
    return config


def words_of(step: Step, ready: LoadedKernel) -> list[BufferSlice | bytes]:
    """The words that a launch writes to host memory for a step, in order: device addresses, and ends of tensor maps."""
    match step:
        case Kernel():
            return [*step.zeroed, *step.arguments]
        case MosaicKernel() if ready.mosaic is not None:
            return [*step.arguments]
        case MosaicKernel():
            maps = [x.source for x in tensor_maps(step.launch)]
            plain = [] if step.launch is None else [x for x in step.launch.parameters if isinstance(x, BufferSlice)]
            return [word for pair in zip(maps, ready.tails, strict=True) for word in pair] + plain
        case Fill():
            return [step.target]
        case Copy():
            return [step.target, step.source]
    raise TypeError(f"got a step of type {type(step).__name__}")
