"""What GPU this is and what it can do: read off the device, or from a name alone when planning ahead."""

import dataclasses
import re
from typing import Any

import jax

__all__ = ["ARCHITECTURES", "DeviceInfo", "device_info"]

GB = 10**9
GIB = 1 << 30
KIB = 1 << 10

# Compute capability -> architecture. A capability that is not here counts as the newest one below it.
ARCHITECTURES = {
    (6, 0): "Pascal",
    (6, 1): "Pascal",
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 6): "Ampere",
    (8, 7): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
    (10, 3): "Blackwell",
    (11, 0): "Blackwell",
    (12, 0): "Blackwell",
    (12, 1): "Blackwell",
}

# The most shared memory one block may ask for (CUDA C++ Programming Guide, technical specifications).
_SHARED_MEMORY = {
    (6, 0): 48 * KIB,
    (6, 1): 48 * KIB,
    (7, 0): 96 * KIB,
    (7, 5): 64 * KIB,
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (10, 3): 227 * KIB,
    (11, 0): 227 * KIB,
    (12, 0): 99 * KIB,
    (12, 1): 99 * KIB,
}


@dataclasses.dataclass(frozen=True)
class _Known:
    """A GPU by its data sheet. memory in bytes, bandwidth in bytes per second."""

    name: str
    compute_capability: tuple[int, int]
    core_count: int
    memory: int
    bandwidth: int | None


# From the vendor's data sheets; the first row whose every word is in the asked name serves it.
_KNOWN = {
    "gb200": _Known("NVIDIA GB200", (10, 0), 148, 186 * GB, 8000 * GB),
    "gb300": _Known("NVIDIA GB300", (10, 3), 148, 288 * GB, 8000 * GB),
    "b300": _Known("NVIDIA B300", (10, 3), 148, 288 * GB, 8000 * GB),
    "b200": _Known("NVIDIA B200", (10, 0), 148, 180 * GB, 8000 * GB),
    "rtx pro 6000 blackwell": _Known("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 96 * GIB, 1792 * GB),
    "rtx 5090": _Known("NVIDIA GeForce RTX 5090", (12, 0), 170, 32 * GIB, 1792 * GB),
    "rtx 5080": _Known("NVIDIA GeForce RTX 5080", (12, 0), 84, 16 * GIB, 960 * GB),
    "gh200": _Known("NVIDIA GH200", (9, 0), 132, 96 * GB, 4000 * GB),
    "h200": _Known("NVIDIA H200", (9, 0), 132, 141 * GB, 4800 * GB),
    "h100 pcie": _Known("NVIDIA H100 PCIe", (9, 0), 114, 80 * GB, 2000 * GB),
    "h100": _Known("NVIDIA H100", (9, 0), 132, 80 * GB, 3350 * GB),
    "h800": _Known("NVIDIA H800", (9, 0), 132, 80 * GB, 3350 * GB),
    "l40s": _Known("NVIDIA L40S", (8, 9), 142, 48 * GB, 864 * GB),
    "l40": _Known("NVIDIA L40", (8, 9), 142, 48 * GB, 864 * GB),
    "l4": _Known("NVIDIA L4", (8, 9), 58, 24 * GB, 300 * GB),
    "rtx 4090": _Known("NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * GIB, 1008 * GB),
    "rtx 4080": _Known("NVIDIA GeForce RTX 4080", (8, 9), 76, 16 * GIB, 717 * GB),
    "rtx 6000 ada": _Known("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 48 * GIB, 960 * GB),
    "a100 40gb": _Known("NVIDIA A100 40GB", (8, 0), 108, 40 * GB, 1555 * GB),
    "a100": _Known("NVIDIA A100 80GB", (8, 0), 108, 80 * GB, 2039 * GB),
    "a30": _Known("NVIDIA A30", (8, 0), 56, 24 * GB, 933 * GB),
    "a40": _Known("NVIDIA A40", (8, 6), 84, 48 * GB, 696 * GB),
    "a10g": _Known("NVIDIA A10G", (8, 6), 80, 24 * GB, 600 * GB),
    "a10": _Known("NVIDIA A10", (8, 6), 72, 24 * GB, 600 * GB),
    "rtx a6000": _Known("NVIDIA RTX A6000", (8, 6), 84, 48 * GIB, 768 * GB),
    "a6000": _Known("NVIDIA RTX A6000", (8, 6), 84, 48 * GIB, 768 * GB),
    "rtx 3090": _Known("NVIDIA GeForce RTX 3090", (8, 6), 82, 24 * GIB, 936 * GB),
    "rtx 3080": _Known("NVIDIA GeForce RTX 3080", (8, 6), 68, 10 * GIB, 760 * GB),
    "t4": _Known("Tesla T4", (7, 5), 40, 16 * GB, 320 * GB),
    "rtx 2080 ti": _Known("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 11 * GIB, 616 * GB),
    "v100": _Known("Tesla V100", (7, 0), 80, 16 * GB, 900 * GB),
    "p100": _Known("Tesla P100", (6, 0), 56, 16 * GB, 732 * GB),
    "gtx 1080 ti": _Known("NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 11 * GIB, 484 * GB),
}
# A name without its series: "4090" is taken for "rtx 4090".
_SHORT = {key.split()[-1] if key.startswith("rtx 4") or key.startswith(("rtx 3", "rtx 5")) else key: key for key in _KNOWN}


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """A device as the kernels' planner sees it.

    name: as the driver gives it. architecture: "Hopper", "Ada", ...; "CPU" without a GPU.
    compute_capability: (major, minor), None without a GPU. total_memory_bytes: device memory; of a CPU,
    None. core_count: streaming multiprocessors, or 1. shared_memory_per_block: bytes, the most one block
    may have. memory_bandwidth: bytes per second by the data sheet, None where unknown. optimal_dtype: the
    dtype name to train in. implementations: those of attention that can run, the fastest first.
    """

    name: str
    architecture: str
    compute_capability: tuple[int, int] | None
    total_memory_bytes: int | None
    core_count: int
    shared_memory_per_block: int
    memory_bandwidth: int | None
    supports_bf16: bool
    supports_fp8: bool
    has_tensor_cores: bool
    optimal_dtype: str
    implementations: tuple[str, ...]


CPU = DeviceInfo("CPU", "CPU", None, None, 1, 0, None, True, False, False, "float32", ("xla",))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+\d*[a-z]*|\d+[a-z]*", name.lower())


def _find(name: str) -> _Known | None:
    words = _words(name)
    for key, known in _KNOWN.items():
        if all(word in words for word in key.split()):
            return known
    short = _SHORT.get(words[-1]) if words else None
    return _KNOWN[short] if short else None


def _implementations(capability: tuple[int, int]) -> tuple[str, ...]:
    if capability < (8, 0):
        return ("xla",)
    if capability >= (9, 0) and capability < (10, 0):
        return ("mosaic_gpu", "cudnn", "triton", "xla")
    return ("cudnn", "triton", "xla")


def _describe(
    name: str,
    capability: tuple[int, int],
    memory: int | None,
    cores: int,
    bandwidth: int | None,
    shared_memory: int | None = None,
) -> DeviceInfo:
    known = max((c for c in ARCHITECTURES if c <= capability), default=(6, 0))
    bf16 = capability >= (8, 0)
    tensor_cores = capability >= (7, 0)
    return DeviceInfo(
        name=name,
        architecture=ARCHITECTURES[known],
        compute_capability=capability,
        total_memory_bytes=memory,
        core_count=cores,
        shared_memory_per_block=shared_memory or _SHARED_MEMORY[known],
        memory_bandwidth=bandwidth,
        supports_bf16=bf16,
        supports_fp8=capability >= (8, 9),
        has_tensor_cores=tensor_cores,
        optimal_dtype="bfloat16" if bf16 else "float16" if tensor_cores else "float32",
        implementations=_implementations(capability),
    )


def device_info(device: str | Any | None = None) -> DeviceInfo:
    """Describes a device.

    device: a `jax.Device`; a name such as "h200", "NVIDIA A100-SXM4-80GB" or "cpu", for planning without the
    GPU; None for JAX's default device. A machine without a GPU is described as a CPU, without an error.

    Raises ValueError for a name that is not known, and TypeError for anything else.
    """
    if isinstance(device, DeviceInfo):
        return device
    if isinstance(device, str):
        if device.lower() == "cpu":
            return CPU
        known = _find(device)
        if known is None:
            names = ", ".join(sorted(_KNOWN))
            raise ValueError(f"device={device!r} is not a GPU this library knows; want 'cpu' or one of {names}")
        return _describe(known.name, known.compute_capability, known.memory, known.core_count, known.bandwidth)
    if device is None:
        try:
            device = jax.devices()[0]
        except RuntimeError:  # no backend could start: plan for the CPU
            return CPU
    if not hasattr(device, "platform"):
        raise TypeError(f"device: got {type(device).__name__}, want a jax.Device, a name or None")
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or not capability or not re.fullmatch(r"\d+\.\d+", str(capability)):
        return CPU
    major, minor = (int(part) for part in str(capability).split("."))
    known = _find(device.device_kind)
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    memory = (stats or {}).get("bytes_limit") if known is None else known.memory
    return _describe(
        device.device_kind,
        (major, minor),
        memory,
        getattr(device, "core_count", None) or (known.core_count if known else 1),
        known.bandwidth if known else None,
        getattr(device, "shared_memory_per_block_optin", None),
    )
