"""The functions of the CUDA driver that a launch chain needs, and Mosaic's compiler, through ctypes."""

import ctypes
import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any

__all__ = [
    "Attribute",
    "Driver",
    "DriverError",
    "DriverMemoryError",
    "LaunchConfig",
    "driver",
    "driver_version",
    "mosaic_library",
]

_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_HANDLE, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_UNSIGNED, _OUT = ctypes.c_uint, ctypes.c_void_p

# Function names with the version suffixes of cuda.h.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (_UNSIGNED,),
    "cuDriverGetVersion": (_OUT,),
    "cuGetErrorName": (_INT, _OUT),
    "cuDeviceGet": (_OUT, _INT),
    "cuDevicePrimaryCtxRetain": (_OUT, _INT),
    "cuCtxGetCurrent": (_OUT,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (_OUT, ctypes.c_char_p),
    "cuModuleUnload": (_HANDLE,),
    "cuModuleGetFunction": (_OUT, _HANDLE, ctypes.c_char_p),
    "cuFuncSetAttribute": (_HANDLE, _INT, _INT),
    "cuFuncGetParamInfo": (_HANDLE, _SIZE, _OUT, _OUT),
    "cuLaunchKernelEx": (_OUT, _HANDLE, _OUT, _OUT),
    "cuMemsetD8Async": (_HANDLE, ctypes.c_ubyte, _SIZE, _HANDLE),
    "cuMemsetD32Async": (_HANDLE, _UNSIGNED, _SIZE, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_HANDLE, _HANDLE, _SIZE, _HANDLE),
    "cuTensorMapEncodeTiled": (_OUT, _INT, _UNSIGNED, _HANDLE, _OUT, _OUT, _OUT, _OUT, _INT, _INT, _INT, _INT),
    "cuThreadExchangeStreamCaptureMode": (_OUT,),
}


class DriverError(RuntimeError):
    """Raised if the CUDA driver or Mosaic's compiler reports an error, or if a kernel has unexpected arguments."""


class DriverMemoryError(DriverError):
    """Raised if the CUDA driver is out of memory."""


class Attribute(ctypes.Structure):
    """The struct CUlaunchAttribute of cuda.h.

    value: 64 bytes as 16 words. The attribute CLUSTER_DIMENSION has the cluster's x, y and z in the first three.
    """

    _fields_ = (("id", _UNSIGNED), ("pad", _UNSIGNED), ("value", _UNSIGNED * 16))


class LaunchConfig(ctypes.Structure):
    """The struct CUlaunchConfig of cuda.h.

    grid: in CTAs. block: in threads. shared: bytes of dynamic shared memory per CTA. count: the number of attributes.
    """

    _fields_ = (
        *((name, _UNSIGNED) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", _UNSIGNED),
    )


class Driver:
    """The CUDA driver. Its functions are attributes with their names in the documentation, and return error codes.

    For example, driver.cuCtxSynchronize() calls the function and returns 0 if it succeeds. library: libcuda, or a
    test's replacement for it.
    """

    def __init__(self, library: Any) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _INT
            setattr(self, name.removesuffix("_v2"), function)
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls the function of this name. Raises DriverError if it returns an error code."""
        self.check(name, getattr(self, name)(*arguments))

    def check(self, name: str, code: int) -> None:
        """Raises DriverError if `code` is an error code, DriverMemoryError for an error of memory.

        name: the function that returned it, for the error's text.
        """
        if code:
            text = ctypes.c_char_p()
            self.cuGetErrorName(code, ctypes.byref(text))  # type: ignore[attr-defined]
            kind = DriverMemoryError if code == _OUT_OF_MEMORY else DriverError
            raise kind(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def handle(self, name: str, *arguments: Any) -> int:
        """Calls the function of this name, and returns the handle that it writes to its first argument.

        arguments: the arguments after the first. Raises DriverError if the call fails.
        """
        found = ctypes.c_void_p()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value or 0

    def context(self, index: int) -> int:
        """The handle of a GPU's primary context, which PyTorch and JAX use too. It lives until the process ends."""
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        return self.handle("cuDevicePrimaryCtxRetain", device.value)

    def load(self, cubin: bytes) -> int:
        """Loads compiled GPU code in the current context. Returns the module's handle."""
        return self.handle("cuModuleLoadData", cubin)

    def function(self, module: int, name: str, sizes: Sequence[int], shared_memory: int) -> int:
        """The handle of the kernel `name` in a loaded module.

        sizes: the bytes of each of its parameters; raises DriverError if it has others. shared_memory: the bytes of
        dynamic shared memory of its launches, which the kernel is then allowed to use.
        """
        function = self.handle("cuModuleGetFunction", module, name.encode())
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        for index, wanted in enumerate(sizes):
            self.call("cuFuncGetParamInfo", function, index, ctypes.byref(offset), ctypes.byref(size))
            if size.value != wanted:
                raise DriverError(f"kernel {name}: argument {index} has {size.value} bytes, want {wanted}")
        if not self.cuFuncGetParamInfo(  # type: ignore[attr-defined]
            function, len(sizes), ctypes.byref(offset), ctypes.byref(size)
        ):
            raise DriverError(f"kernel {name}: got {len(sizes)} arguments, want more")
        if shared_memory > 48 * 1024:
            self.call("cuFuncSetAttribute", function, _SHARED_MEMORY, shared_memory)
        return function

    def tensor_map(
        self,
        address: int,
        *,
        dtype: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
    ) -> bytes:
        """The CUtensorMap of an array at a device address. The other arguments are the fields of chain.TensorMap."""
        whole = ctypes.create_string_buffer(128 + 64)
        start = -ctypes.addressof(whole) % 64
        rank, words = len(sizes), ctypes.c_uint64 * len(sizes)
        halves = ctypes.c_uint32 * rank
        arrays = words(*sizes), words(*strides), halves(*box), halves(*[1] * rank)
        pointers = [ctypes.addressof(x) for x in arrays]
        target = ctypes.addressof(whole) + start
        # Neither interleaved nor with a promotion in L2; elements outside of the array are zeros.
        self.call("cuTensorMapEncodeTiled", target, dtype, rank, address, *pointers, 0, swizzle, 0, 0)
        return whole.raw[start : start + 128]


@functools.cache
def driver() -> Driver:
    """The machine's CUDA driver, loaded once.

    Raises OSError if there is none, and AttributeError if it is older than CUDA 12.4.
    """
    return Driver(ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"))


def driver_version() -> str:
    """The version of CUDA that the machine's driver supports, such as "13000". Raises the errors of `driver`."""
    found = ctypes.c_int()
    driver().call("cuDriverGetVersion", ctypes.byref(found))
    return str(found.value)


@functools.cache
def mosaic_library() -> ctypes.CDLL:
    """The library in JAX's CUDA plugin that has MosaicGpuCompile and MosaicGpuUnload, loaded once.

    Raises ImportError if the plugin for CUDA 12 or 13 is not installed.
    """
    try:
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
    except ImportError:
        plugin = importlib.import_module("jax_plugins.xla_cuda12")
    library = ctypes.CDLL(plugin._get_library_path())
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
    library.MosaicGpuUnload.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    library.MosaicGpuUnload.restype = None
    return library
