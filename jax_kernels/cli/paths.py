"""The paths that the command line takes."""

from collections.abc import Callable
from pathlib import Path

from jax_kernels.cli import UserError

__all__ = ["path_of"]


def path_of(name: str) -> Callable[[str], Path]:
    """The parser of an option or argument with this name, whose value is a path, for typer.

    The parser raises UserError for an empty text, which pathlib would take for the current folder.
    """

    def path(text: str) -> Path:
        if text == "":
            raise UserError(f"{name}: got '', want a path")
        return Path(text)

    return path
