"""Writes files that are whole at any moment, and lists the files of a folder."""

import contextlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

__all__ = ["files_below", "write_whole"]


def write_whole(path: Path, data: str | bytes, *, mode: int | None = None) -> None:
    """Writes a file so that readers see the old content or all of the new: it writes a temporary file, then renames it.

    The temporary file is in the same folder. A symbolic link stays, and its target is replaced. A device or a pipe is
    written to directly. mode: of the new file, such as 0o600; None for the umask's. Raises OSError, and leaves no
    temporary file.
    """
    data = data.encode() if isinstance(data, str) else data
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}_{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            if mode is not None:
                temporary.chmod(mode)  # before it has data
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def files_below(folder: Path, *, skip: Collection[str] = ()) -> list[Path]:
    """The files in a folder and its subfolders that are not hidden, sorted by their paths relative to the folder.

    skip: names of subfolders to leave out, at any depth. Links to folders are not followed. Raises OSError, with the
    subfolder as its filename, if a subfolder cannot be read.
    """

    def raise_it(error: OSError) -> NoReturn:
        raise error

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=raise_it):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder))
