"""The memory of a GPU that PyTorch and JAX share: JAX does not preallocate, and PyTorch frees its cache for JAX."""

import os
import traceback
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import torch
from jax._src import xla_bridge

from jax_kernels import chunks

__all__ = ["MemoryReport", "free_locals", "leave_memory_to_torch", "memory_report", "retry_on_oom"]

# A user who set one of these has decided how the memory is divided.
_SETTINGS = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
)


def leave_memory_to_torch() -> None:
    """Stops JAX from reserving most of a GPU's memory at its start, which would leave too little for PyTorch.

    Sets XLA_PYTHON_CLIENT_PREALLOCATE=false. Issues a RuntimeWarning if JAX's GPU backend has already started. Does
    nothing if an environment variable already sets JAX's preallocation, allocator or share of the memory, such as
    XLA_PYTHON_CLIENT_MEM_FRACTION.
    """
    if any(setting in os.environ for setting in _SETTINGS):
        return
    # No public function lists the backends without starting them.
    backends = getattr(xla_bridge, "_backends", {})
    if not backends:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    elif any(platform in backends for platform in ("cuda", "gpu")):
        warnings.warn(
            "JAX's GPU backend started before jax_kernels.bridge was imported, and has taken three quarters of the "
            "GPU's memory, which PyTorch cannot use. Import jax_kernels.bridge before the first use of JAX, or set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false.",
            RuntimeWarning,
            stacklevel=3,
        )


class MemoryReport(NamedTuple):
    """The use of a GPU's memory, in bytes. str(...) is a text of several lines.

    total, free: the GPU's memory, and its unused part, by the CUDA driver. torch_allocated: in PyTorch's tensors.
    torch_reserved: torch_allocated plus PyTorch's cache for later tensors. jax_in_use: in JAX's arrays. jax_reserved:
    jax_in_use plus the unused part of JAX's pool; None if JAX does not report it. held: the part of jax_in_use that
    the bridge keeps because a PyTorch stream may still read it. other: all other used bytes, such as other processes
    and CUDA itself.
    """

    device: torch.device
    total: int
    free: int
    torch_allocated: int
    torch_reserved: int
    jax_in_use: int
    jax_reserved: int | None
    held: int

    @property
    def other(self) -> int:
        jax_own = self.jax_in_use if self.jax_reserved is None else self.jax_reserved
        return max(0, self.total - self.free - self.torch_reserved - jax_own)

    def __str__(self) -> str:
        size = lambda count: "unknown" if count is None else f"{count / 2**30:.2f} GiB"
        return (
            f"{self.device}: {size(self.free)} of {size(self.total)} free\n"
            f"  PyTorch: {size(self.torch_allocated)} in tensors, {size(self.torch_reserved)} reserved\n"
            f"  JAX: {size(self.jax_in_use)} in arrays, {size(self.jax_reserved)} reserved, {size(self.held)} held for "
            f"PyTorch's streams\n"
            f"  others: {size(self.other)}"
        )


def memory_report(device: torch.device | str | int | None = None) -> MemoryReport:
    """The use of a GPU's memory by PyTorch, JAX and others. device: None is PyTorch's current GPU.

    Raises ValueError if the device is no CUDA GPU or there is no GPU, and RuntimeError if JAX lacks the device.
    """
    from jax_kernels.bridge.interop import dlpack  # late, as it imports JAX's GPU backend

    place = dlpack.torch_device("device", "cuda" if device is None else device)
    if place.type != "cuda":
        raise ValueError(f"device: got {place}, want a CUDA device")
    stats = dlpack.jax_device(place).memory_stats() or {}
    free, total = torch.cuda.mem_get_info(place)
    return MemoryReport(
        device=place,
        total=total,
        free=free,
        torch_allocated=torch.cuda.memory_allocated(place),
        torch_reserved=torch.cuda.memory_reserved(place),
        jax_in_use=stats.get("bytes_in_use", 0),
        jax_reserved=stats.get("pool_bytes"),
        held=dlpack.held_bytes(place),
    )


def retry_on_oom[Result](device: torch.device, call: Callable[[], Result]) -> Result:
    """Returns call(). If JAX is out of memory on a GPU, frees PyTorch's cached memory and calls once more.

    Raises torch.cuda.OutOfMemoryError, with a memory_report in its text, if JAX is out of memory again. On a CPU, and
    for other errors, raises the error of call().
    """
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if device.type != "cuda" or not chunks.is_out_of_memory(error):
            raise
    torch.cuda.synchronize(device)  # memory that is freed in stream order is free afterwards
    torch.cuda.empty_cache()
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if not chunks.is_out_of_memory(error):
            raise
        text = str(error).splitlines()[0]
        raise torch.cuda.OutOfMemoryError(f"JAX is out of memory: {text}\n{memory_report(device)}") from error


def free_locals(error: BaseException) -> None:
    """Frees the local variables of the functions that an error left, such as tensors of the failed call.

    An error keeps these variables alive through its traceback. The traceback keeps its lines.
    """
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
