"""jax-kernels info: the device, the versions, and which implementations of each op can run."""

import dataclasses
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Column, Table

from jax_kernels import dispatch
from jax_kernels.cli import UserError
from jax_kernels.cli.ops import OPS
from jax_kernels.cli.outputs import json_text, print_table
from jax_kernels.device import DeviceInfo, device_info

GB = 10**9
PACKAGES = ("jax-kernels", "jax", "jaxlib", "numpy", "jax-cuda13-plugin", "flax", "torch", "transformers")


def find_device(name: str | None) -> DeviceInfo:
    """The DeviceInfo of the named device, or of this machine's for None.

    Raises UserError for an unknown name, and the error of JAX if it has no device of the platforms in JAX_PLATFORMS.
    """
    if name is None:
        jax.local_devices()  # raises, where device_info would describe a CPU
    try:
        return device_info(name)
    except ValueError as error:
        raise UserError(f"--{error}") from None


def versions(packages: Iterable[str] | None = None) -> dict[str, str | None]:
    """The versions of Python and of packages, by name, without importing them; None if a package is not installed.

    packages: None is PACKAGES.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES if packages is None else packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def abilities(device: DeviceInfo) -> dict[str, dict[str, str | None]]:
    """For each op, its implementations by name: None if one can run a typical call on the device, else the reason in
    words.
    """
    sixteen_bits = "bfloat16" if device.supports_bf16 else "float16"
    found: dict[str, dict[str, str | None]] = {}
    for name, op in OPS.items():
        found[name] = {}
        for implementation in op.implementations:
            try:
                with dispatch.on_device(device):
                    op.plan(sixteen_bits, implementation)
            except NotImplementedError as error:
                found[name][implementation] = dispatch.reason_against(error)
            else:
                found[name][implementation] = None
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    """A GPU of this machine as nvidia-smi reports it. free_bytes, total_bytes: of its memory."""

    name: str
    driver: str
    free_bytes: int
    total_bytes: int


def installed_gpus() -> list[InstalledGpu]:
    """The GPUs of this machine, also GPUs that JAX does not see; [] without nvidia-smi or a GPU.

    Call it before JAX starts, which reserves most of the free memory.
    """
    query = "--query-gpu=name,driver_version,memory.free,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.count(",") == 3]
    as_bytes = lambda mib: int(mib) << 20 if mib.isdigit() else 0  # "[N/A]" on some integrated GPUs
    return [
        InstalledGpu(name=name, driver=driver, free_bytes=as_bytes(free), total_bytes=as_bytes(total))
        for name, driver, free, total in rows
    ]


def _gpu_rows(gpus: Sequence[InstalledGpu]) -> dict[str, str]:
    """The lines of text about this machine's GPUs: the driver, their number, and the free memory of each."""
    if not gpus:
        return {"driver": "no NVIDIA driver"}
    free = ", ".join(f"{gpu.free_bytes / GB:.1f} of {gpu.total_bytes / GB:.0f}" for gpu in gpus)
    seen = jax.device_count() if jax.default_backend() != "cpu" else 0
    return {
        "driver": ", ".join(dict.fromkeys(gpu.driver for gpu in gpus)),
        "GPUs": f"{len(gpus)}, JAX sees {seen}",
        "free memory": f"{free} GB, by nvidia-smi",
    }


def _device_rows(device: DeviceInfo) -> dict[str, str]:
    """The lines of text about a device, as (name, value) pairs in a dict."""
    rows = {"device": device.name, "architecture": device.architecture}
    if device.compute_capability is not None:
        rows["architecture"] += ", compute capability {}.{}".format(*device.compute_capability)
        shared = f"{device.shared_memory_per_block / 1024:g} KiB of shared memory a block"
        rows["SMs"] = f"{device.core_count}, {shared}"
    if device.total_memory_bytes is not None:
        rows["memory"] = f"{device.total_memory_bytes / GB:.0f} GB"
        if device.memory_bandwidth is None:  # a GPU without a data sheet here
            rows["memory"] += " that XLA may allocate"
        else:
            rows["memory"] += f", {device.memory_bandwidth / GB:.0f} GB/s, by the data sheet"
    has = {"bfloat16": device.supports_bf16, "float8": device.supports_fp8, "tensor cores": device.has_tensor_cores}
    rows["has"] = ", ".join(name for name, value in has.items() if value)
    rows["train in"] = device.optimal_dtype
    return rows


def _two_columns(rows: dict[str, str]) -> Table:
    table = Table(Column(overflow="fold"), Column(overflow="fold"), show_header=False, box=None, pad_edge=False)
    for row in rows.items():
        table.add_row(*row)
    return table


def _ops_table(can: dict[str, dict[str, str | None]]) -> Table:
    """A row for each op, a column for each implementation: whether it can run."""
    names = list(dict.fromkeys(name for implementations in can.values() for name in implementations))
    table = Table("op", *names, box=None, pad_edge=False, header_style="bold")
    for op, of_op in can.items():
        cells = ["" if name not in of_op else "no" if of_op[name] else "yes" for name in names]
        table.add_row(op, *cells)
    return table


def _reasons_table(can: dict[str, dict[str, str | None]]) -> Table:
    """A row for each op and implementation, with the reason why it cannot run."""
    table = Table(*(Column(name, overflow="fold") for name in ("op", "implementation", "can run")))
    for op, implementations in can.items():
        for name, reason in implementations.items():
            table.add_row(op, name, "yes" if reason is None else f"no: {reason}")
        table.add_section()
    return table


def info(
    device: Annotated[str | None, typer.Option(help="A device of any machine: h200, 'rtx 4090', cpu, ...")] = None,
    reasons: Annotated[bool, typer.Option("--reasons", help="Show why an implementation cannot run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the device, the versions, and which implementations of each op can run."""
    gpus = installed_gpus() if device is None else []
    described = find_device(device)
    can = abilities(described)
    if as_json:
        report: dict[str, Any] = {"device": dataclasses.asdict(described), "versions": versions(), "ops": can}
        report |= {} if device is not None else {"gpus": [dataclasses.asdict(gpu) for gpu in gpus]}
        print(json_text(report))
        return
    console = Console()
    of_machine = _gpu_rows(gpus) if device is None else {}
    of_packages = {name: version or "not installed" for name, version in versions().items()}
    both = Table.grid(padding=(0, 4))
    both.add_row(_two_columns(_device_rows(described) | of_machine), _two_columns(of_packages))
    console.print(both, "")
    if reasons:
        console.print(_reasons_table(can))
        return
    print_table(_ops_table(can))
    if any(x for implementations in can.values() for x in implementations.values()):
        console.print("jax-kernels info --reasons shows why an implementation cannot run.")
