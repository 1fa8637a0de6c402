"""Keeps JAX from taking most of the GPU's memory at its first use, as PyTorch shares that memory."""

import os
import warnings

from jax._src import xla_bridge

# A user who set one of these has decided how the memory is divided.
_SETTINGS = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
)


def leave_memory_to_torch() -> None:
    """Turns JAX's preallocation off, or warns where its GPU backend has preallocated already."""
    if any(setting in os.environ for setting in _SETTINGS):
        return
    # There is no public way to ask for the backends without starting them.
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
