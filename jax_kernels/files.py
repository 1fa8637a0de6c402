"""Files that are whole at any moment: if a process is killed or the disk is full, the earlier file remains."""

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["write_whole"]


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
