"""Errors of the machine in one line: no device, too little memory, a file or an output that cannot be used."""

import errno
import os
import traceback

__all__ = ["in_one_line"]

# By command, a way to need less memory.
_LESS = {
    "train": "try a smaller --batch-size, a larger --accumulate or --remat all",
    "demo": "try a smaller --batch-size or --seq-len",
    "eval": "try a smaller --batch-size or --seq-len",
    "generate": "try fewer --tokens",
    "explain": "try smaller sizes",
}
_UNUSABLE = {errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS}  # of a path; Python has no class of errors for them
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}


def in_one_line(error: BaseException, command: str | None) -> str | None:
    """The error in one line; None if it may be a bug, whose traceback is of use.

    command: such as "train"; None if the command line has none. The commands "profile" and "tune" run scripts, whose
    errors keep their tracebacks, unless JAX has no device or stdout cannot be written.
    """
    if _is_without_device(error):
        found = os.environ.get("JAX_PLATFORMS")
        reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".") or "JAX found no device"
        return reason if not found else f"JAX_PLATFORMS: got {found!r}, want a platform of this machine ({reason})"
    if isinstance(error, OSError) and error.errno in _FULL and not _has_stdout():
        return f"the output cannot be written ({error.strerror})"
    if command in ("profile", "tune"):
        return None
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        way = f"; {_LESS[command]}" if command in _LESS else ""
        return f"memory does not suffice ({_first_line(error)}){way}"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):  # of pathlib before Python 3.13
        return str(error)
    if not isinstance(error, OSError) or error.filename is None:
        return None
    is_of_path = isinstance(error, PermissionError) or error.errno in _UNUSABLE
    return f"{error.filename}: {error.strerror}" if is_of_path else None


def _has_stdout() -> bool:
    """Whether stdout can be written. A write that failed may have emptied its buffer, so this writes a line break."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _is_without_device(error: BaseException) -> bool:
    """Whether JAX raised this error because it has no device of the platforms in JAX_PLATFORMS.

    It has two errors: a RuntimeError, and an assertion of its module xla_bridge.
    """
    if isinstance(error, AssertionError):
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and os.path.basename(frames[-1].filename) == "xla_bridge.py"
    return isinstance(error, RuntimeError) and str(error).startswith("Unable to initialize backend")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
