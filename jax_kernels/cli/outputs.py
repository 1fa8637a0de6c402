"""The output of commands: tables, and the files that options such as --json name."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from jax_kernels.cli import UserError, WriteError
from jax_kernels.files import write_whole

__all__ = ["check_output", "json_text", "print_table", "write_output"]


def check_output(option: str, path: Path | None) -> None:
    """Raises UserError if `path` is no file in a folder that exists, and WriteError if it cannot be written.

    option: whose value is `path`; None for `path` means that the option was left out. The check leaves no file behind.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{option}: got {str(path)!r}, want a file in a folder that exists")
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise WriteError(f"{option}: {path} cannot be written ({error.strerror or error})") from error


def write_output(option: str, path: Path, text: str) -> None:
    """Writes the file of an option. Raises WriteError."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise WriteError(f"{option}: {path} cannot be written ({error.strerror or error})") from error


def json_text(report: Any, indent: int = 2) -> str:
    """A report as JSON. NaN and the infinities, which JSON lacks, become null."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: finite(y) for name, y in x.items()}
        if isinstance(x, list | tuple):
            return [finite(y) for y in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(report), indent=indent, allow_nan=False)


def print_table(table: Table) -> None:
    """Prints a table in its full width, in a file, in a narrow window or in a dumb terminal: no cell is cut off."""
    console = Console()
    width = max(console.width, Measurement.get(console, console.options.update(width=10**4), table).maximum)
    Console(width=width, height=console.height).print(table)  # a dumb terminal takes a width only with a height
