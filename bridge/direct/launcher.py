"""Launches a chain on PyTorch's current stream. PyTorch owns the outputs and the workspace.

A chain is loaded once per device. Loading prepares everything for a launch except the stream and the addresses of the
tensors; one call of struct writes these addresses to a LaunchBlock, host memory that one launch uses at a time.
"""

import contextlib
import ctypes
import math
import operator
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.direct.chain import Array, BufferSlice, LaunchChain
from jax_kernels.bridge.direct.launch_block import MAP_ALIGNMENT, LaunchBlock, words_of
from jax_kernels.bridge.direct.loaded_kernels import KernelResources, drop, load_kernel
from jax_kernels.bridge.interop import dlpack, memory, torch_internals
from jax_kernels.bridge.interop.cuda_driver import (
    Driver,
    DriverMemoryError,
    driver,
    mosaic_library,
)

__all__ = ["Allocator", "LoadedChain", "torch_allocator"]

_ALIGNMENT = 16  # bytes: XLA and the tensor memory accelerator require it of inputs
_address = torch.Tensor.data_ptr


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


def _facts(array: Array) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """(shape, strides, dtype) of a contiguous PyTorch tensor for an array; strides count elements."""
    strides = [math.prod(array.shape[axis + 1 :]) for axis in range(len(array.shape))]
    return array.shape, tuple(strides), getattr(torch, array.dtype)


# Keeps the chains of captured graphs alive: a graph may read their constants and launch their kernels at any time.
_CAPTURED: list["LoadedChain"] = []


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
        resources = KernelResources(self.driver, self.context, device.index, mosaic)
        self._resources = resources
        self.driver.call("cuCtxPushCurrent", self.context)
        try:
            self.ready = [load_kernel(step, resources) for step in chain.steps]
        except BaseException:
            drop(resources)
            raise
        finally:
            self.driver.handle("cuCtxPopCurrent")
        weakref.finalize(self, drop, resources).atexit = False
        self._index = device.index
        self._outputs = [_facts(x) for x in chain.outputs]
        self._workspace = ((chain.workspace,), (1,), torch.uint8) if chain.workspace else None
        values = [torch.frombuffer(bytearray(x.value), dtype=torch.uint8) for x in chain.constants]
        self._values = [value.to(device) for value in values]
        tails = [x for ready in self.ready for x in ready.tails]
        self._constants: list[Any] = [*(value.data_ptr() for value in self._values), *tails]
        self._order_words()
        self._blocks: list[LaunchBlock] = [self._new_block()]

    def _order_words(self) -> None:
        """Prepares how a launch computes the steps' words from the buffers' addresses.

        A launch lists the addresses of the chain's buffers, the ends of its tensor maps, then each distinct address
        inside a buffer (_inner). _ordered selects the steps' words from it, and _pack writes them to a LaunchBlock.
        offsets: of each step's first word in a LaunchBlock. bytes: of all words.
        """
        chain = self.chain
        tails = len(chain.inputs) + len(chain.outputs) + 1 + len(chain.constants)
        words = [words_of(step, ready) for step, ready in zip(chain.steps, self.ready, strict=True)]
        slices = [x for of_step in words for x in of_step if isinstance(x, BufferSlice)]
        inner = list(dict.fromkeys((x.buffer, x.offset) for x in slices if x.offset))
        first = tails + sum(len(ready.tails) for ready in self.ready)
        known = {(buffer, 0): buffer for buffer in range(tails)} | {x: first + at for at, x in enumerate(inner)}
        order, form = [], "="
        self.offsets: list[int] = []
        for of_step, ready in zip(words, self.ready, strict=True):
            if ready.tails:
                form += f"{-struct.calcsize(form) % MAP_ALIGNMENT}x"
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

    def _new_block(self) -> LaunchBlock:
        return LaunchBlock(self.chain.steps, self.ready, self.offsets, self.bytes, self.driver)

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
            block = self._new_block()
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


def _run(driver: Driver, block: LaunchBlock, stream: int) -> None:
    for call in block.calls:
        if code := call(stream):
            driver.check("a launch", code)
