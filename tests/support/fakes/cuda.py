"""A CUDA driver that runs nothing: it records its calls and the values behind their pointers."""

import contextlib
import ctypes
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.direct.launcher import Allocator
from jax_kernels.bridge.interop.cuda_driver import _SIGNATURES, Driver, LaunchConfig

CONTEXT = 0xC0
STREAM = 0x5


class Launch(NamedTuple):
    """A kernel launch. cluster: its dimensions, or None. arguments: an int of 8 bytes, or another number of bytes."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    shared_memory: int
    stream: int
    arguments: list[int | bytes]


class _Function:
    """A function of the library: callable, and with ctypes' attributes."""

    def __init__(self, call: Any) -> None:
        self.argtypes: Any = None
        self.restype: Any = None
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        for x, kind in zip(arguments, self.argtypes, strict=True):
            if not isinstance(kind, type) or kind is ctypes.c_void_p:
                continue
            kind(x) if isinstance(x, int) else None  # raises if the value has another type
        return self._call(*arguments) or 0


def write(pointer: Any, value: int) -> None:
    pointer._obj.value = value


class FakeCuda:
    """The library of `Driver`. calls: (name, arguments) of each call that changes state; a launch is a Launch.

    counts: the number of arguments of each kernel, or the bytes of each argument. fails: names of functions that return
    an error.
    """

    def __init__(self, counts: "dict[str, int | list[int]] | None" = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.counts = counts or {}
        self.fails: set[str] = set()
        self.maps: list[Any] = []
        self.stack = [CONTEXT]
        self.names: dict[int, str] = {}
        self._handles = itertools.count(0x100)
        for name in _SIGNATURES:
            call = getattr(self, f"_{name.removesuffix('_v2')}")
            setattr(
                self, name, _Function(lambda *arguments, name=name, call=call: self._guarded(name, call, arguments))
            )

    @property
    def driver(self) -> Driver:
        return Driver(self)

    def _guarded(self, name: str, call: Any, arguments: Any) -> int:
        return 700 if name in self.fails else call(*arguments)

    def _cuInit(self, flags):
        pass

    def _cuDriverGetVersion(self, out):
        write(out, 13000)

    def _cuGetErrorName(self, code, out):
        write(out, b"CUDA_ERROR_ILLEGAL_ADDRESS")

    def _cuDeviceGet(self, out, index):
        write(out, index)

    def _cuDevicePrimaryCtxRetain(self, out, device):
        write(out, CONTEXT + device)

    def _cuCtxGetCurrent(self, out):
        write(out, self.stack[-1] if self.stack else None)

    def _cuCtxPushCurrent(self, context):
        self.stack.append(context)

    def _cuCtxPopCurrent(self, out):
        write(out, self.stack.pop())

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        pass

    def _cuCtxSynchronize(self):
        self.calls.append(("synchronize", self.stack[-1]))

    def _cuModuleLoadData(self, out, cubin):
        handle = next(self._handles)
        self.calls.append(("load", (handle, cubin, self.stack[-1])))
        write(out, handle)

    def _cuModuleUnload(self, module):
        self.calls.append(("unload", module))

    def _cuModuleGetFunction(self, out, module, name):
        handle = next(self._handles)
        self.names[handle] = name.decode()
        write(out, handle)

    def _cuFuncGetParamInfo(self, function, index, offset, size):
        sizes = self._sizes(function)
        if index >= len(sizes):
            return 1
        write(size, sizes[index])

    def _sizes(self, function):
        found = self.counts[self.names[function]]
        return [8] * found if isinstance(found, int) else found

    def _cuTensorMapEncodeTiled(self, target, dtype, rank, address, *others):
        """Writes the address, then a digest of all other values, as a driver writes them in a form of its own."""
        assert target % 64 == 0
        sizes, strides, box, steps, interleave, swizzle, promotion, fill = others
        read = lambda kind, at, count: list((kind * count).from_address(at))
        values = (
            *(dtype, read(ctypes.c_uint64, sizes, rank), read(ctypes.c_uint64, strides, rank - 1)),
            *(read(ctypes.c_uint32, box, rank), read(ctypes.c_uint32, steps, rank), interleave, swizzle),
            *(promotion, fill),
        )
        self.maps.append(values)
        tail = hashlib.sha512(repr(values).encode()).digest() * 2
        ctypes.memmove(target, address.to_bytes(8, "little") + tail[:120], 128)

    def _cuFuncSetAttribute(self, function, attribute, value):
        self.calls.append(("attribute", (self.names[function], attribute, value)))

    def _cuLaunchKernelEx(self, pointer, function, parameters, extra):
        assert extra is None
        config = LaunchConfig.from_address(pointer)
        cluster = None
        if config.count:
            attribute = config.attributes[0]
            assert (config.count, attribute.id) == (1, 4)
            cluster = tuple(attribute.value[:3])
        sizes = self._sizes(function)
        pointers = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        given = [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)]
        launch = Launch(
            function=self.names[function],
            grid=(config.grid_x, config.grid_y, config.grid_z),
            block=(config.block_x, config.block_y, config.block_z),
            cluster=cluster,
            shared_memory=config.shared,
            stream=config.stream or 0,
            arguments=[int.from_bytes(x, "little") if len(x) == 8 else x for x in given],
        )
        self.calls.append(("launch", launch))

    def _cuMemsetD8Async(self, target, value, count, stream):
        self.calls.append(("fill bytes", (target, value, count, stream)))

    def _cuMemsetD32Async(self, target, value, count, stream):
        self.calls.append(("fill", (target, value, count, stream)))

    def _cuMemcpyDtoDAsync(self, target, source, count, stream):
        self.calls.append(("copy", (target, source, count, stream)))


_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class FakeMosaic:
    """The library that compiles Mosaic kernels. calls: ("launch", (function, stream, addresses)), ("unload", handle).

    count: the number of addresses that a kernel takes.
    """

    def __init__(self, count: int) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.modules: list[bytes] = []
        self.count = count
        self._launch = _LAUNCH(self._record)

    def _record(self, function, stream, addresses):
        values = list((ctypes.c_uint64 * self.count).from_address(addresses))
        self.calls.append(("launch", (function, stream or 0, values)))

    def MosaicGpuCompile(self, module: bytes, size: int) -> Any:
        assert len(module) == size
        self.modules.append(module)
        return (ctypes.c_void_p * 2)(0xF00, ctypes.cast(self._launch, ctypes.c_void_p).value)

    def MosaicGpuUnload(self, handle: Any) -> None:
        self.calls.append(("unload", handle[0]))


class Memory:
    """A CPU allocator for a GPU's chain. It keeps the tensors that it allocates. stream: the current stream."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.stream = STREAM
        self.is_capturing = False
        self.device = 0

    def empty(self, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        self.tensors.append(torch.empty_strided(shape, strides, dtype=dtype))
        return self.tensors[-1]

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    @property
    def allocator(self) -> Allocator:
        return Allocator(
            empty=self.empty,
            device=lambda: self.device,
            on=self.on,
            stream=lambda index: self.stream,
            is_capturing=lambda: self.is_capturing,
        )
