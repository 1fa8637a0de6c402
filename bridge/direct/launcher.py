"""Launches a chain on PyTorch's current stream. PyTorch owns the outputs and the workspace.

A chain is loaded once per device. Loading prepares everything for a launch except the stream and the addresses of the
tensors; one call of struct writes these addresses to a _Block, which is host memory that one launch uses at a time.
"""

import contextlib
import ctypes
import math
import operator
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jaxlib
import torch

from jax_kernels.bridge.direct.chain import (
    Array,
    BufferSlice,
    Bytes,
    Copy,
    Fill,
    Kernel,
    LaunchChain,
    MosaicKernel,
    MosaicLaunch,
    Parameter,
    Step,
    TensorMap,
    TensorMaps,
)
from jax_kernels.bridge.direct.mosaic_launch import MAP_BYTES
from jax_kernels.bridge.interop import dlpack, memory, torch_internals
from jax_kernels.bridge.interop.cuda_driver import (
    CLUSTER_DIMENSION,
    Attribute,
    Driver,
    DriverError,
    DriverMemoryError,
    LaunchConfig,
    driver,
    mosaic_library,
)

__all__ = ["Allocator", "LoadedChain", "unload_dropped"]

_ALIGNMENT = 16  # bytes: XLA and the tensor memory accelerator require it of inputs
_MAP_ALIGNMENT = 64  # bytes: of a tensor map in host memory
_MAP_ADDRESSES = (1 << 40, (1 << 41) + (1 << 20))  # invented, to find the bytes of a tensor map that have the address
_address = torch.Tensor.data_ptr
_MOSAIC_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
# From jaxlib 0.12 on: the compiled kernel, the function, the stream, the addresses, the GPU's index.
_MOSAIC_LAUNCH_OF_KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
)
_TAKES_KERNEL = tuple(map(int, jaxlib.__version__.split(".")[:2])) >= (0, 12)


class Allocator(NamedTuple):
    """The functions of PyTorch that a launch needs. Tests replace them.

    empty(shape, strides, dtype): a new tensor on the current GPU, without values. device(): the current GPU's index.
    on(device): a context in which `device` is current. stream(index): the handle of the current stream of a GPU.
    is_capturing(): whether a CUDA graph is being captured on the current stream of the current device.
    """

    empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
    device: Callable[[], int]
    on: Callable[[torch.device], contextlib.AbstractContextManager[None]]
    stream: Callable[[int], int]
    is_capturing: Callable[[], bool]


def torch_allocator() -> Allocator:
    """The Allocator of PyTorch itself."""
    return Allocator(
        empty=torch_internals.empty_on_gpu,
        device=torch._C._cuda_getDevice,
        on=torch.cuda.device,
        stream=torch_internals.stream_handle,
        is_capturing=torch._C._cuda_isCurrentStreamCapturing,
    )


class _Mosaic(NamedTuple):
    """A Mosaic kernel that Mosaic has compiled in this process.

    handle: the argument of MosaicGpuUnload. launch(function, stream, address): launches the kernel. function: a value
    that Mosaic returned for this argument. address: host address of an array with the kernel's device addresses.
    """

    handle: "ctypes._Pointer[ctypes.c_void_p]"
    function: int
    launch: Callable[[int, int, int], None]


class _Ready(NamedTuple):
    """The loaded kernel of a step. The fields are empty for a fill or a copy.

    function: the CUDA driver's handle of a Kernel or a MosaicLaunch. mosaic: a MosaicKernel that Mosaic compiled, as
    its launch is not known. tails: of a MosaicLaunch, the bytes behind the address of each tensor map.
    """

    function: int | None = None
    mosaic: _Mosaic | None = None
    tails: tuple[bytes, ...] = ()


class _Resources:
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


_DROPPED: list[_Resources] = []


# Keeps the chains of captured graphs alive: a graph may read their constants and launch their kernels at any time.
_CAPTURED: list["LoadedChain"] = []


def _drop(resources: _Resources) -> None:
    """Queues the resources of a garbage-collected chain for unload_dropped."""
    _DROPPED.append(resources)


def unload_dropped() -> None:
    """Unloads the kernels of LoadedChains that were garbage-collected.

    It waits until their devices have finished all work, so it is called only before a compilation or when caches are
    cleared.
    """
    while _DROPPED:
        _DROPPED.pop().close()


class _Block:
    """The host memory that one launch of a chain uses, prepared once.

    memory: the words of all steps, see _words. keep: arrays of pointers to the kernels' parameters, and parameters that
    are the same in every launch. configs: the kernels' launch configurations. stream: the stream in these
    configurations. calls: functions of the stream, to call in order; a result other than 0 or None is an error code.
    current: receives the thread's current CUDA context.
    """

    def __init__(self, loaded: "LoadedChain") -> None:
        whole = ctypes.create_string_buffer(loaded.bytes + _MAP_ALIGNMENT)
        start = -ctypes.addressof(whole) % _MAP_ALIGNMENT
        self.memory = (ctypes.c_char * max(1, loaded.bytes)).from_buffer(whole, start)
        base = ctypes.addressof(self.memory)
        self.stream: int | None = None
        self.current = ctypes.c_void_p()
        self.current_pointer = ctypes.byref(self.current)
        self.configs: list[LaunchConfig] = []
        self.keep: list[ctypes.Array[Any]] = []
        self.calls: list[Callable[[int], int | None]] = []
        for step, ready, offset in zip(loaded.chain.steps, loaded.ready, loaded.offsets, strict=True):
            self._add(step, ready, base + offset, loaded)

    def _add(self, step: Step, ready: _Ready, address: int, loaded: "LoadedChain") -> None:
        """Adds a step's calls to `calls`.

        ready: the step's loaded kernel. address: the host address, inside `memory`, of the step's first word.
        """
        driver: Any = loaded.driver
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

    def _add_kernel(self, step: Kernel | MosaicLaunch, ready: _Ready, pointers: list[int], driver: Any) -> None:
        """Adds the launch of a kernel. pointers: the host addresses of its parameters."""
        array, config = (ctypes.c_void_p * len(pointers))(*pointers), _config(step)
        self.keep.append(array)
        self.configs.append(config)
        launch = driver.cuLaunchKernelEx
        given = ctypes.addressof(config), ready.function, ctypes.addressof(array), None
        self.calls.append(lambda stream: launch(*given))

    def _pointers(self, launch: MosaicLaunch, ready: _Ready, address: int) -> list[int]:
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


def _config(step: Kernel | MosaicLaunch) -> LaunchConfig:
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


def _words(step: Step, ready: _Ready) -> list[BufferSlice | bytes]:
    """The words that a launch writes to host memory for a step, in order: device addresses, and ends of tensor maps."""
    match step:
        case Kernel():
            return [*step.zeroed, *step.arguments]
        case MosaicKernel() if ready.mosaic is not None:
            return [*step.arguments]
        case MosaicKernel():
            maps = [x.source for x in _maps(step.launch)]
            plain = [] if step.launch is None else [x for x in step.launch.parameters if isinstance(x, BufferSlice)]
            return [word for pair in zip(maps, ready.tails, strict=True) for word in pair] + plain
        case Fill():
            return [step.target]
        case Copy():
            return [step.target, step.source]
    raise TypeError(f"got a step of type {type(step).__name__}")


def _maps(launch: MosaicLaunch | None) -> list[TensorMap]:
    """The tensor maps of a launch's parameters, in order."""
    parameters = () if launch is None else launch.parameters
    return [x for parameter in parameters if isinstance(parameter, TensorMaps) for x in parameter.maps]


def _facts(array: Array) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """(shape, strides, dtype) of a contiguous PyTorch tensor for an array; strides count elements."""
    strides = [math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape))]
    return array.shape, tuple(strides), getattr(torch, array.dtype)


class LoadedChain:
    """A chain whose kernels are loaded on one device. Calling it with its input tensors returns its output tensors.

    It takes one tensor for each of the chain's inputs, and returns the outputs as new tensors; the work runs on
    PyTorch's current stream. The tensors must be contiguous, on the device, and have the chain's shapes and dtypes;
    this is not checked. A tensor that is not aligned to 16 bytes is copied. Several threads may call it at once. Its
    kernels are unloaded some time after its deletion. A call that a CUDA graph captures keeps it loaded until the
    process ends. Raises DriverError if the CUDA driver reports an error.

    by_jax: a function from the input tensors to the outputs, which is called if a launch runs out of memory. Without
    it, and while a CUDA graph is being captured, such a launch raises torch.OutOfMemoryError or DriverMemoryError.
    """

    def __init__(
        self,
        chain: LaunchChain,
        device: torch.device,
        *,
        cuda: Driver | None = None,
        mosaic: Callable[[], ctypes.CDLL] = mosaic_library,
        allocator: Allocator | None = None,
        by_jax: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> None:
        self.chain = chain
        self._by_jax = by_jax
        self.device = device
        self.driver = cuda or driver()
        self.allocator = allocator or torch_allocator()
        self.context = self.driver.context(device.index)
        resources = _Resources(self.driver, self.context, device.index, mosaic)
        self._resources = resources
        self.driver.call("cuCtxPushCurrent", self.context)
        try:
            self.ready = [_load(step, resources) for step in chain.steps]
        except BaseException:
            _drop(resources)
            raise
        finally:
            self.driver.handle("cuCtxPopCurrent")
        weakref.finalize(self, _drop, resources).atexit = False
        self._index = device.index
        self._outputs = [_facts(x) for x in chain.outputs]
        self._workspace = ((chain.workspace,), (1,), torch.uint8) if chain.workspace else None
        values = [torch.frombuffer(bytearray(x.value), dtype=torch.uint8) for x in chain.constants]
        self._values = [value.to(device) for value in values]
        tails = [x for ready in self.ready for x in ready.tails]
        self._constants: list[Any] = [*(value.data_ptr() for value in self._values), *tails]
        self._order_words()
        self._blocks: list[_Block] = [_Block(self)]

    def _order_words(self) -> None:
        """Prepares how a launch computes the steps' words from the buffers' addresses.

        A launch lists the addresses of the chain's buffers, the ends of its tensor maps, then each distinct address
        inside a buffer (_inner). _ordered selects the steps' words from this list, and _pack writes them to a _Block.
        offsets: of each step's first word in a _Block. bytes: of all words.
        """
        chain = self.chain
        tails = len(chain.inputs) + len(chain.outputs) + 1 + len(chain.constants)
        words = [_words(step, ready) for step, ready in zip(chain.steps, self.ready, strict=True)]
        slices = [x for of_step in words for x in of_step if isinstance(x, BufferSlice)]
        inner = list(dict.fromkeys((x.buffer, x.offset) for x in slices if x.offset))
        first = tails + sum(len(ready.tails) for ready in self.ready)
        known = {(buffer, 0): buffer for buffer in range(tails)} | {x: first + at for at, x in enumerate(inner)}
        order, form = [], "="
        self.offsets: list[int] = []
        for of_step, ready in zip(words, self.ready, strict=True):
            if ready.tails:
                form += f"{-struct.calcsize(form) % _MAP_ALIGNMENT}x"
            self.offsets.append(struct.calcsize(form))
            for word in of_step:
                if isinstance(word, bytes):
                    order.append(tails)
                    tails += 1
                    form += f"{len(word)}s"
                else:
                    order.append(known[word.buffer, word.offset])
                    form += "Q"
        self._inner = inner
        self._ordered: Callable[[list[Any]], Sequence[Any]] = (
            operator.itemgetter(*order) if len(order) > 1 else lambda addresses: [addresses[order[0]]]
        )
        self.bytes = struct.calcsize(form)
        self._pack = struct.Struct(form).pack_into

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        allocator, index = self.allocator, self._index
        if allocator.device() != index:
            with allocator.on(self.device):
                return self(*tensors)
        addresses = [*map(_address, tensors)]
        for address in addresses:
            if address % _ALIGNMENT:
                return self(*map(dlpack.readable, tensors))
        try:
            empty = allocator.empty
            outputs = [empty(*facts) for facts in self._outputs]
            addresses += map(_address, outputs)
            if self._workspace is None:
                addresses.append(0)
            else:
                workspace = empty(*self._workspace)  # PyTorch reuses it only for later work of this stream
                addresses.append(_address(workspace))
            addresses += self._constants
            if self._inner:
                addresses += [addresses[buffer] + offset for buffer, offset in self._inner]
            if not self._resources.is_captured and allocator.is_capturing():
                self._resources.is_captured = True
                _CAPTURED.append(self)
            self._launch(self._ordered(addresses), allocator.stream(index))
            return outputs
        except (torch.OutOfMemoryError, DriverMemoryError) as error:
            if self._by_jax is None or allocator.is_capturing():
                raise
            memory.free_locals(error)
        outputs, workspace = [], None  # makes room
        return self._by_jax(tensors)

    def _launch(self, words: Sequence[Any], stream: int) -> None:
        """Launches all steps on a stream of this device. words: of the steps, in order."""
        driver: Any = self.driver
        try:
            block = self._blocks.pop()
        except IndexError:
            block = _Block(self)
        try:
            self._pack(block.memory, 0, *words)
            if block.stream != stream:
                for config in block.configs:
                    config.stream = stream
                block.stream = stream
            driver.cuCtxGetCurrent(block.current_pointer)
            if block.current.value == self.context:
                for call in block.calls:
                    if code := call(stream):
                        driver.check("a launch", code)
            else:
                driver.call("cuCtxPushCurrent", self.context)
                try:
                    _run(driver, block, stream)
                finally:
                    driver.handle("cuCtxPopCurrent")
        finally:
            self._blocks.append(block)


def _run(driver: Driver, block: _Block, stream: int) -> None:
    for call in block.calls:
        if code := call(stream):
            driver.check("a launch", code)


def _load(step: Step, resources: _Resources) -> _Ready:
    """Loads a step's kernel in the current CUDA context, and adds it to `resources`, which unload it.

    Raises DriverError if the driver or Mosaic fails.
    """
    if isinstance(step, Kernel):
        return _Ready(function=_function(step, [8] * len(step.arguments), resources))
    if not isinstance(step, MosaicKernel):
        return _Ready()
    if step.launch is not None:
        with contextlib.suppress(DriverError):  # then Mosaic compiles the kernel
            tails = tuple(_tail(x, resources.driver) for x in _maps(step.launch))
            sizes = [_parameter_bytes(x) for x in step.launch.parameters]
            return _Ready(function=_function(step.launch, sizes, resources), tails=tails)
    compiled = resources.mosaic_library().MosaicGpuCompile(step.module, len(step.module))
    if not compiled:
        raise DriverError(f"Mosaic failed to compile kernel {step.name}")
    resources.mosaic.append(compiled)
    launch = _mosaic_launch(compiled, resources.device)
    return _Ready(mosaic=_Mosaic(handle=compiled, function=compiled[0] or 0, launch=launch))


def _mosaic_launch(compiled: "ctypes._Pointer[ctypes.c_void_p]", device: int) -> Callable[[int, int, int], None]:
    """The function `launch` of a _Mosaic. compiled: the result of MosaicGpuCompile. device: the GPU's index."""
    if not _TAKES_KERNEL:
        return _MOSAIC_LAUNCH(compiled[1])
    launch, kernel = _MOSAIC_LAUNCH_OF_KERNEL(compiled[1]), compiled[2]
    return lambda function, stream, address: launch(kernel, function, stream, address, device)


def _function(step: Kernel | MosaicLaunch, sizes: list[int], resources: _Resources) -> int:
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
