"""DeviceInfo: the abilities of a GPU, read from the device, or found by name to plan for a GPU of another machine."""

import dataclasses
import re
from typing import Any

import jax

from jax_kernels import device_rates
from jax_kernels.pallas import block_specs
from jax_kernels.spelling import did_you_mean

__all__ = ["ARCHITECTURES", "DeviceInfo", "device_info", "device_names"]

GB = 10**9
TERA = 10**12
GIB = 1 << 30
KIB = 1 << 10


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The architecture of GPUs with one compute capability.

    name: as in "Hopper". shared_memory_per_block: the most bytes of shared memory that one CTA may ask for. gpu: the
    GPU for which tests compile the block specs of this compute capability; None if it has no block specs.
    """

    name: str
    shared_memory_per_block: int
    gpu: str | None = None


# By compute capability (CUDA C++ Programming Guide, technical specifications). One that is not here counts as the
# newest one below it.
ARCHITECTURES = {
    (6, 0): Architecture("Pascal", 48 * KIB),
    (6, 1): Architecture("Pascal", 48 * KIB),
    (7, 0): Architecture("Volta", 96 * KIB),
    (7, 5): Architecture("Turing", 64 * KIB),
    (8, 0): Architecture("Ampere", 163 * KIB, gpu="a100"),
    (8, 6): Architecture("Ampere", 99 * KIB, gpu="a6000"),
    (8, 7): Architecture("Ampere", 163 * KIB),
    (8, 9): Architecture("Ada", 99 * KIB, gpu="rtx4090"),
    (9, 0): Architecture("Hopper", 227 * KIB, gpu="h200"),
    (10, 0): Architecture("Blackwell", 227 * KIB, gpu="b200"),
    (10, 3): Architecture("Blackwell", 227 * KIB),
    (11, 0): Architecture("Blackwell", 227 * KIB),
    (12, 0): Architecture("Blackwell", 99 * KIB, gpu="rtx pro 6000"),
    (12, 1): Architecture("Blackwell", 99 * KIB),
}


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """A GPU by its data sheet.

    name: as the driver gives it. core_count: SMs. memory: bytes. bandwidth: of the memory, bytes per second. also:
    other names that device_info accepts.
    """

    name: str
    compute_capability: tuple[int, int]
    core_count: int
    memory: int
    bandwidth: int
    also: tuple[str, ...] = ()


# From the vendor's data sheets. Names are compared by their words (see _words), so "h100 80gb" is the first
# H100 here; `also` holds names with other words for the same data, the shortest first.
_GPUS = (
    _Gpu("NVIDIA GB300", (10, 3), 152, 288 * GB, 8000 * GB),
    _Gpu("NVIDIA B300", (10, 3), 148, 288 * GB, 8000 * GB),
    _Gpu("NVIDIA GB200", (10, 0), 152, 186 * GB, 8000 * GB),
    _Gpu("NVIDIA B200", (10, 0), 148, 180 * GB, 8000 * GB),
    _Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        (12, 0),
        188,
        96 * GIB,
        1792 * GB,
        also=(
            "pro 6000",
            "pro 6000 blackwell",
            "pro 6000 blackwell server edition",
            "pro 6000 blackwell max-q workstation edition",
        ),
    ),
    _Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 32 * GIB, 1792 * GB),
    _Gpu("NVIDIA GeForce RTX 5080", (12, 0), 84, 16 * GIB, 960 * GB),
    _Gpu("NVIDIA GH200 480GB", (9, 0), 132, 96 * GB, 4000 * GB, also=("gh200", "gh200 96gb")),
    _Gpu("NVIDIA GH200 144G HBM3e", (9, 0), 132, 144 * GB, 4900 * GB),
    _Gpu("NVIDIA H200", (9, 0), 132, 141 * GB, 4800 * GB, also=("h200 141gb", "h200 nvl")),
    _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * GB, 3350 * GB, also=("h100",)),
    _Gpu("NVIDIA H100 PCIe", (9, 0), 114, 80 * GB, 2000 * GB, also=("h100 80gb pcie",)),
    _Gpu("NVIDIA H100 NVL", (9, 0), 132, 94 * GB, 3900 * GB, also=("h100 94gb nvl",)),
    _Gpu("NVIDIA H800", (9, 0), 132, 80 * GB, 3350 * GB, also=("h800 80gb",)),
    _Gpu("NVIDIA H20", (9, 0), 78, 96 * GB, 4000 * GB, also=("h20 96gb",)),
    _Gpu("NVIDIA L40S", (8, 9), 142, 48 * GB, 864 * GB),
    _Gpu("NVIDIA L40", (8, 9), 142, 48 * GB, 864 * GB),
    _Gpu("NVIDIA L4", (8, 9), 58, 24 * GB, 300 * GB),
    _Gpu("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 48 * GIB, 960 * GB),
    _Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * GIB, 1008 * GB),
    _Gpu("NVIDIA GeForce RTX 4080", (8, 9), 76, 16 * GIB, 717 * GB),
    _Gpu("NVIDIA GeForce RTX 4070", (8, 9), 46, 12 * GIB, 504 * GB),
    _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * GB, 2039 * GB, also=("a100",)),
    _Gpu("NVIDIA A100 80GB PCIe", (8, 0), 108, 80 * GB, 1935 * GB, also=("a100 pcie",)),
    _Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40 * GB, 1555 * GB, also=("a100 40gb pcie",)),
    _Gpu("NVIDIA A800-SXM4-80GB", (8, 0), 108, 80 * GB, 2039 * GB, also=("a800",)),
    _Gpu("NVIDIA A30", (8, 0), 56, 24 * GB, 933 * GB),
    _Gpu("NVIDIA A40", (8, 6), 84, 48 * GB, 696 * GB),
    _Gpu("NVIDIA A10G", (8, 6), 80, 24 * GB, 600 * GB),
    _Gpu("NVIDIA A10", (8, 6), 72, 24 * GB, 600 * GB),
    _Gpu("NVIDIA RTX A6000", (8, 6), 84, 48 * GIB, 768 * GB),
    _Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 24 * GIB, 936 * GB),
    _Gpu("NVIDIA GeForce RTX 3080", (8, 6), 68, 10 * GIB, 760 * GB),
    _Gpu("NVIDIA GeForce RTX 3060", (8, 6), 28, 12 * GIB, 360 * GB),
    _Gpu("Tesla T4", (7, 5), 40, 16 * GB, 320 * GB),
    _Gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 11 * GIB, 616 * GB),
    _Gpu("NVIDIA GeForce RTX 2080", (7, 5), 46, 8 * GIB, 448 * GB),
    _Gpu("NVIDIA GeForce RTX 2060", (7, 5), 30, 6 * GIB, 336 * GB),
    _Gpu("Tesla V100-SXM2-16GB", (7, 0), 80, 16 * GB, 900 * GB, also=("v100", "v100 16gb pcie")),
    _Gpu("Tesla V100-SXM2-32GB", (7, 0), 80, 32 * GB, 900 * GB, also=("v100 32gb pcie",)),
    _Gpu("Tesla P100-PCIE-16GB", (6, 0), 56, 16 * GB, 732 * GB, also=("p100", "p100 16gb")),
    _Gpu("NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 11 * GIB, 484 * GB),
    _Gpu("NVIDIA GeForce GTX 1080", (6, 1), 20, 8 * GIB, 320 * GB),
)


def _words(name: str) -> list[str]:
    """The words of a GPU's name that distinguish it: not its maker, series, socket or kind of memory.

    Every other word counts: an "RTX 4090 Laptop GPU" and a MIG slice of an A100 are not the GPUs of this table.
    """
    name = re.sub(r"nvidia|geforce|quadro|tesla|[rg]tx|generation", " ", name.lower())
    return [word for word in re.findall(r"\w+", name) if not re.fullmatch(r"sxm\d?|hbm\de?", word)]


_BY_WORDS = {frozenset(_words(name)): gpu for gpu in _GPUS for name in (gpu.name, *gpu.also)}


def _find(name: str) -> _Gpu | None:
    return _BY_WORDS.get(frozenset(_words(name)))


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """A device and its abilities, for which calls are planned.

    name: as the driver gives it. architecture: "Hopper", "Ada", ...; "CPU" without a GPU.
    compute_capability: (major, minor), None without a GPU. total_memory_bytes: from the data sheet; for a GPU that is
    not listed, the bytes that XLA may allocate; None for a CPU. core_count: the number of SMs, or 1 for a CPU.
    shared_memory_per_block: the most bytes of shared memory that one CTA may ask for, 0 for a CPU. memory_bandwidth:
    bytes per second from the data sheet, None if unknown. optimal_dtype: the name of the dtype to train in.
    implementations: the attention implementations that this device has, in the order in which they are tried.
    matmul_flops, float32_flops: FLOP/s from the data sheet, without sparsity: of matmuls of 16 bits with sums in
    float32, and of float32 without tensor cores; None if unknown.
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
    matmul_flops: int | None = None
    float32_flops: int | None = None

    def flops(self, arithmetic: str) -> float | None:
        """FLOP/s of matmuls from the data sheet, without sparsity; None if unknown.

        arithmetic: "bfloat16", "float16", "tf32", "fp8", or "float32" for exact products, which use no tensor cores.
        """
        if arithmetic == "float32" or (arithmetic == "bfloat16" and not self.supports_bf16):
            return self.float32_flops
        if self.matmul_flops is None:
            return None
        return self.matmul_flops * {"tf32": 0.5, "fp8": 2 if self.supports_fp8 else 1}.get(arithmetic, 1)

    @property
    def total_memory_gb(self) -> float | None:
        """The memory in units of 10**9 bytes; None for a CPU, and for a GPU of unknown memory."""
        return None if self.total_memory_bytes is None else self.total_memory_bytes / GB


CPU = DeviceInfo("CPU", "CPU", None, None, 1, 0, None, True, False, False, "float32", ("xla",))


def _describe(
    name: str,
    capability: tuple[int, int],
    memory: int | None,
    cores: int,
    bandwidth: int | None,
    shared_memory: int | None = None,
    rates: tuple[float, float] | None = None,
) -> DeviceInfo:
    """The DeviceInfo of an NVIDIA GPU. memory, bandwidth: bytes and bytes per second, or None if unknown. cores: SMs.

    rates: TFLOP/s of matmuls and of float32, as in device_rates.TFLOPS, or None if unknown.

    shared_memory: bytes that one CTA may ask for; None takes the architecture's.
    """
    known = ARCHITECTURES[max((c for c in ARCHITECTURES if c <= capability), default=min(ARCHITECTURES))]
    implementations, _ = block_specs.attention_order(capability)
    bf16 = capability >= (8, 0)
    tensor_cores = capability >= (7, 0)
    return DeviceInfo(
        name=name,
        architecture=known.name,
        compute_capability=capability,
        total_memory_bytes=memory,
        core_count=cores,
        shared_memory_per_block=shared_memory or known.shared_memory_per_block,
        memory_bandwidth=bandwidth,
        supports_bf16=bf16,
        supports_fp8=capability >= (8, 9),
        has_tensor_cores=tensor_cores,
        optimal_dtype="bfloat16" if bf16 else "float16" if tensor_cores else "float32",
        implementations=implementations,
        matmul_flops=None if rates is None else round(rates[0] * TERA),
        float32_flops=None if rates is None else round(rates[1] * TERA),
    )


def device_names() -> tuple[str, ...]:
    """The names that device_info and explain take: "cpu", and a short one for each GPU ("h200", "a100", "4090")."""
    shortest = (min((" ".join(_words(name)) for name in (gpu.name, *gpu.also)), key=len) for gpu in _GPUS)
    return ("cpu", *shortest)


def _named(name: str) -> DeviceInfo:
    """The DeviceInfo of "cpu" or of a GPU by its name. Raises ValueError for an unknown name."""
    if name.strip().lower() == "cpu":
        return CPU
    gpu = _find(name)
    if gpu is None:
        _, *names = device_names()
        hint = did_you_mean(" ".join(_words(name)), device_names())
        raise ValueError(f"device: got {name!r}, want cpu or the name of a GPU: {', '.join(names)}{hint}")
    return _describe(
        gpu.name,
        gpu.compute_capability,
        gpu.memory,
        gpu.core_count,
        gpu.bandwidth,
        rates=device_rates.TFLOPS[gpu.name],
    )


def _real(device: Any) -> DeviceInfo:
    """The DeviceInfo of a jax.Device. Raises TypeError if it is something else.

    A device that is neither a CPU nor NVIDIA's is described as a CPU, since only "xla" serves it, but with its own name
    and with its platform as the architecture.
    """
    if not hasattr(device, "platform"):
        raise TypeError(f"device: got {type(device).__name__}, want a jax.Device, a name or None")
    if device.platform == "cpu":
        return CPU
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if capability is None:  # not NVIDIA's: XLA serves it
        return dataclasses.replace(CPU, name=device.device_kind, architecture=device.platform.upper())
    major, minor = (int(part) for part in capability.groups())
    gpu = _find(device.device_kind)
    memory = gpu.memory if gpu else (device.memory_stats() or {}).get("bytes_limit")
    return _describe(
        device.device_kind,
        (major, minor),
        memory,
        getattr(device, "core_count", None) or (gpu.core_count if gpu else 1),
        gpu.bandwidth if gpu else None,
        getattr(device, "shared_memory_per_block_optin", None),
        device_rates.TFLOPS[gpu.name] if gpu else None,
    )


def _default_device() -> Any:
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def device_info(device: "str | jax.Device | DeviceInfo | None" = None) -> DeviceInfo:
    """The DeviceInfo of a device, which need not be present.

    device: a `jax.Device`; None for JAX's default device; or a name, to plan without the GPU. The name may be the
    driver's ("NVIDIA A100-SXM4-80GB") or a short one of device_names ("a100", "4090", "cpu"). A machine without a GPU
    is described as a CPU, without an error.

    Raises ValueError for a name that is not known, and TypeError for anything else.
    """
    if isinstance(device, DeviceInfo):
        return device
    if isinstance(device, str):
        return _named(device)
    if device is not None:
        return _real(device)
    try:
        return _real(_default_device())
    except RuntimeError:  # no backend could start: plan for the CPU
        return CPU
