"""Files that are whole at any moment: a process that is killed, or a full disk, leaves the file before."""

import contextlib
import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes a file beside its place and renames it once it is on the disk. A symbolic link keeps its target's place.

    A device or a pipe is written to as it is. Raises OSError, and leaves no file of its own.
    """
    data = data.encode() if isinstance(data, str) else data
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
