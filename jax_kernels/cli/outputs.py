"""The files that an option such as --json names: they are checked before a command's work, and written after it."""

import tempfile
from pathlib import Path

from jax_kernels.cli import UserError, WriteError
from jax_kernels.files import write_whole

__all__ = ["check_output", "write_output"]


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
