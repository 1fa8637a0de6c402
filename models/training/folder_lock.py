"""The lock of a folder of checkpoints: only one run at a time writes the folder."""

import contextlib
import datetime
import errno
import gc
import json
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import jax

from jax_kernels.files import write_whole
from jax_kernels.models.parallel.distributed import gathered
from jax_kernels.models.training.checkpoints import NotWritten, reason

__all__ = ["FolderInUse", "FolderLock"]

_LOCK, _HOLDER = ".lock", ".lock.json"
# Error numbers of file systems without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


class FolderInUse(ValueError):
    """Raised if another run has the lock of a folder, and so the right to write it."""


class FolderLock:
    """The right to write a folder, which only one run has at a time.

    The lock is an operating system lock on the file .lock in the folder. The operating system releases it when the
    process ends, even if it is killed. The file .lock.json names the holder. With several processes of jax.distributed,
    process 0 holds the lock for all processes; all processes call take. On a file system without locks there is only a
    warning: there, take succeeds without a lock, and another run could write at the same time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.is_held = False
        self._lock: Any = None

    @property
    def excludes_others(self) -> bool:
        """Whether this process has the operating system's lock: process 0, unless the file system has no locks."""
        return self._lock is not None

    def take(self) -> None:
        """Takes the lock without waiting. Does nothing if this object has the lock. Makes the folder if it is missing.

        On a file system without locks it warns, and the object counts as holding the lock. Raises FolderInUse, which
        names the process that has the lock, or NotWritten if the folder cannot be written.
        """
        if not self.is_held:
            _raise_for_all(self._taken() if jax.process_index() == 0 else {})
            self.is_held = True

    def check_free(self) -> None:
        """Raises FolderInUse or NotWritten if `take` would. Keeps no lock, and makes no folder. All processes call
        this.
        """
        failure: dict[str, Any] = {}
        if jax.process_index() == 0 and self.folder.is_dir():
            failure = self._taken()
            self.release()
        _raise_for_all(failure)

    def release(self) -> None:
        """Releases the lock. Does nothing if this object does not have it."""
        self.is_held = False
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the next holder overwrites the file
                (self.folder / _HOLDER).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    def _taken(self) -> dict[str, Any]:
        """Takes the lock, in process 0. Returns {} if the run may write, else {"in_use": bool, "text": the error}.

        {} means that this object has the lock, or that the file system has no locks: then a warning says so, and no
        lock is held. in_use: whether another run has the lock; otherwise the folder cannot be written.
        """
        import filelock

        # Any thread may release the lock, because the garbage collector runs in all threads.
        lock = filelock.FileLock(self.folder / _LOCK, thread_local=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                gc.collect()  # an unreachable Trainer of this process may have the lock
                lock.acquire(timeout=0)
        except filelock.Timeout:
            return {"in_use": True, "text": f"folder: got {self.folder}, {self._holder()}"}
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                return {"in_use": False, "text": f"folder: {self.folder} cannot be written ({reason(error)})"}
            warnings.warn(
                f"folder: {self.folder} is on a file system without locks ({reason(error)}): a second run could write "
                "there at the same time",
                stacklevel=4,
            )
            return {}
        try:
            write_whole(self.folder / _HOLDER, json.dumps(_this_process()))
        except OSError as error:
            lock.release()
            return {"in_use": False, "text": f"folder: {self.folder} cannot be written ({reason(error)})"}
        self._lock = lock
        return {}

    def _holder(self) -> str:
        """The end of an error's sentence, which names the process that has the lock and says how to go on."""
        try:
            found = json.loads((self.folder / _HOLDER).read_text())
            pid, host, since = (found[name] for name in ("pid", "host", "since"))
        except (OSError, ValueError, KeyError, TypeError):
            return "which another run writes, want another folder, or wait until that run ends"
        if (pid, host) == (os.getpid(), platform.node()):
            return (
                f"which another Trainer of this process writes since {since}, want another folder, or close() the other"
            )
        return f"which process {pid} on {host} writes since {since}, want another folder, or wait until that run ends"


def _raise_for_all(failure: dict[str, Any]) -> None:
    """Raises FolderInUse or NotWritten in each process if process 0 did not get the lock.

    failure: in process 0 the result of FolderLock._taken, {} in other processes.
    """
    if jax.process_count() > 1:
        failure = json.loads(gathered(json.dumps(failure))[0])
    if failure:
        raise (FolderInUse if failure["in_use"] else NotWritten)(failure["text"])


def _this_process() -> dict[str, Any]:
    """The content of .lock.json: the process id, the host, and the time."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"pid": os.getpid(), "host": platform.node(), "since": now}
