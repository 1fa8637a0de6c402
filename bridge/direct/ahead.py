"""Compiles the Mosaic kernels of a chain in threads, before it is certain that the chain is needed.

A chain on disk has its Mosaic kernels as MLIR, which Mosaic compiles in each process. To know that a chain on disk is
the chain of a function, JAX lowers the function, in Python. Both take most of a process's first call, so they run at
the same time: the kernels of the chain that the function had in an earlier process are compiled while JAX lowers it.
"""

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jax_kernels.bridge.direct.chain import LaunchChain, MosaicKernel
from jax_kernels.bridge.interop.cuda_driver import Driver

__all__ = ["CompiledAhead"]

_MOST_THREADS = 4

type Handle = ctypes._Pointer[ctypes.c_void_p]


class CompiledAhead:
    """The Mosaic kernels of a chain, which threads compile in a CUDA context from its creation on.

    chain: None for no kernels. context: the CUDA driver's handle. library: has MosaicGpuCompile and MosaicGpuUnload.
    """

    def __init__(self, chain: LaunchChain | None, driver: Driver, context: int, library: Callable[[], Any]) -> None:
        steps = () if chain is None else chain.steps
        modules = list(dict.fromkeys(step.module for step in steps if isinstance(step, MosaicKernel)))
        self._driver, self._context, self._library = driver, context, library
        self._compiled: dict[bytes, Future[Handle]] = {}
        if modules:
            pool = ThreadPoolExecutor(min(_MOST_THREADS, len(modules)), thread_name_prefix="jax_kernels_mosaic")
            self._compiled = {module: pool.submit(self._compile, module) for module in modules}
            pool.shutdown(wait=False)

    def take(self, module: bytes) -> Handle | None:
        """Mosaic's handle of a compiled kernel, which the caller unloads; None if the caller has to compile it.

        Waits for a thread that compiles it. A second call for a module returns None.
        """
        future = self._compiled.pop(module, None)
        if future is None:
            return None
        with contextlib.suppress(Exception):  # the caller compiles it again, and gets the error
            return future.result() or None
        return None

    def close(self) -> None:
        """Unloads the kernels that were not taken; a kernel whose compilation has begun, when it ends."""
        while self._compiled:
            _, future = self._compiled.popitem()
            if not future.cancel():
                future.add_done_callback(self._unload)

    def _compile(self, module: bytes) -> Any:
        self._driver.call("cuCtxPushCurrent", self._context)
        try:
            return self._library().MosaicGpuCompile(module, len(module))
        finally:
            self._driver.handle("cuCtxPopCurrent")

    def _unload(self, future: Future[Handle]) -> None:
        """Unloads a kernel that no stream has launched, so that nothing has to be waited for."""
        if future.exception() is not None or not (handle := future.result()):
            return
        self._driver.call("cuCtxPushCurrent", self._context)
        try:
            self._library().MosaicGpuUnload(handle)
        finally:
            self._driver.handle("cuCtxPopCurrent")
