"""jax-kernels info: the device, the versions, and which implementations of each op can run."""

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jax_kernels import dispatch
from jax_kernels.cli import UserError
from jax_kernels.cli.ops import OPS
from jax_kernels.device import DeviceInfo, device_info

PACKAGES = ("jax-kernels", "jax", "jaxlib", "numpy", "jax-cuda13-plugin", "flax", "torch", "transformers")


def find_device(name: str | None) -> DeviceInfo:
    """The DeviceInfo of the named device, or of this machine's for None. Raises UserError for an unknown name."""
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


def _device_rows(device: DeviceInfo) -> dict[str, str]:
    """The lines of text about a device, as (name, value) pairs in a dict."""
    rows = {"device": device.name, "architecture": device.architecture}
    if device.compute_capability is not None:
        rows["compute capability"] = "{}.{}".format(*device.compute_capability)
        rows["streaming multiprocessors"] = str(device.core_count)
        rows["shared memory per block"] = f"{device.shared_memory_per_block / 1024:g} KiB"
    if device.total_memory_bytes is not None:
        rows["memory"] = f"{device.total_memory_bytes / 1e9:.0f} GB"
    if device.memory_bandwidth is not None:
        rows["memory bandwidth"] = f"{device.memory_bandwidth / 1e9:.0f} GB/s"
    has = {"bfloat16": device.supports_bf16, "float8": device.supports_fp8, "tensor cores": device.has_tensor_cores}
    rows |= {name: "yes" if value else "no" for name, value in has.items()}
    rows["train in"] = device.optimal_dtype
    return rows


def _two_columns(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in rows.items():
        table.add_row(*row)
    return table


def info(
    device: Annotated[str | None, typer.Option(help="A device of any machine: h200, 'rtx 4090', cpu, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the device, the versions, and which implementations of each op can run."""
    described = find_device(device)
    can = abilities(described)
    if as_json:
        report: dict[str, Any] = {"device": dataclasses.asdict(described), "versions": versions(), "ops": can}
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(_two_columns(_device_rows(described)), "")
    console.print(_two_columns({name: version or "not installed" for name, version in versions().items()}), "")
    table = Table("op", "implementation", "can run")
    for op, implementations in can.items():
        for name, reason in implementations.items():
            table.add_row(op, name, "yes" if reason is None else f"no: {reason}")
        table.add_section()
    console.print(table)
