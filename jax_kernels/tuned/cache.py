"""The winners of tuned calls, in one JSON file per device: in the user's cache folder, and in the folder `shipped`.

A process reads a device's files once, at the first call that is planned for the device. A file that cannot be read, or
in the user's folder one that another version of the library wrote, is reported by one warning and ignored. So are the
entries of a file that cannot serve, such as blocks that the device cannot hold.

The files in `shipped` are part of the library. benchmarks/ship_winners.py writes them.
"""

import contextlib
import contextvars
import functools
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_kernels.device import device_info
from jax_kernels.files import write_whole
from jax_kernels.tuned.blocks import MOST_SHARED_MEMORY
from jax_kernels.tuned.winners import Winner

__all__ = [
    "SHIPPED",
    "clear",
    "find",
    "find_shipped",
    "folder",
    "ignored",
    "listed",
    "listed_shipped",
    "name_of",
    "path_of",
    "read",
    "store",
    "write",
]

SHIPPED = Path(__file__).parent / "shipped"
_SETTING = "JAX_KERNELS_TUNED"
_SETTINGS = ("", "1", "own", "0")
_LOCK_SECONDS = 60.0

# By folder and device name: the winners by key, as this process read or measured them.
_LOADED: dict[tuple[Path, str], dict[str, Winner]] = {}
# The (file, whether it could not be written) that were reported.
_REPORTED: set[tuple[Path, bool]] = set()
_IS_IGNORED: contextvars.ContextVar[bool] = contextvars.ContextVar("jax_kernels_ignores_tuning", default=False)


def folder() -> Path | None:
    """The folder of the files of winners, as by folder_of."""
    return folder_of("tuning")


def folder_of(name: str) -> Path | None:
    """The folder `name` of JAX_KERNELS_CACHE, else of the user's cache folder; None without the package platformdirs.

    The folder need not exist. Raises ValueError for a JAX_KERNELS_CACHE in the home of a user that does not exist.
    """
    given = os.environ.get("JAX_KERNELS_CACHE")
    if not given:
        users = _users_folder()
        return None if users is None else users / name
    try:
        return Path(given).expanduser() / name
    except RuntimeError:
        raise ValueError(f"JAX_KERNELS_CACHE: got {given!r}, want a folder: there is no such home") from None


@functools.cache
def _users_folder() -> Path | None:
    try:
        import platformdirs
    except ModuleNotFoundError:  # the cli extra, with which calls are tuned, is not installed
        return None
    return platformdirs.user_cache_path("jax_kernels", appauthor=False)


def path_of(device: str) -> Path | None:
    """The path of a device's file. device: the name of its DeviceInfo. None without a folder."""
    parent = folder()
    return None if parent is None else parent / name_of(device)


def name_of(device: str) -> str:
    """The name of a device's file. device: the name of its DeviceInfo."""
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', device)}.json"


def find(device: str) -> Mapping[str, Winner]:
    """The user's winners of a device, by the keys of their requests.

    Empty without a file, inside `ignored`, and if JAX_KERNELS_TUNED is 0. Raises ValueError for a JAX_KERNELS_TUNED
    other than 0, own and 1, and as `folder`.
    """
    parent = folder()
    if _setting() == "0" or parent is None or _IS_IGNORED.get():
        return {}
    found = _LOADED.get((parent, device))
    if found is None:
        found = _LOADED[parent, device] = read(path_of(device), device)
    return found


def find_shipped(device: str) -> Mapping[str, Winner]:
    """The winners of a device that are part of the library, by the keys of their requests.

    Empty without a file, inside `ignored`, and if JAX_KERNELS_TUNED is 0 or "own". Raises ValueError as `find`.
    """
    if _setting() in ("0", "own") or _IS_IGNORED.get():
        return {}
    found = _LOADED.get((SHIPPED, device))
    if found is None:
        found = _LOADED[SHIPPED, device] = read(SHIPPED / name_of(device), device, is_shipped=True)
    return found


def _setting() -> str:
    """JAX_KERNELS_TUNED: 0 ignores all winners; "own" ignores the winners of the library; 1 or unset ignores none."""
    setting = os.environ.get(_SETTING, "")
    if setting not in _SETTINGS:
        raise ValueError(f"{_SETTING}: got {setting!r}, want 0 for block specs alone, own for your own winners, or 1")
    return setting


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """A context manager: inside, calls are planned as without tuning."""
    token = _IS_IGNORED.set(True)
    try:
        yield
    finally:
        _IS_IGNORED.reset(token)


def store(device: str, key: str, winner: Winner) -> None:
    """Keeps the winner of a request, for this process and in the device's file.

    Other processes may store winners at the same time: each one adds to the file under a lock. If the file cannot be
    written, one warning says so, and the winner serves only this process. So it is if an error of the disk hides the
    winners of the file, which would be lost.

    Raises ModuleNotFoundError without filelock, or without platformdirs and JAX_KERNELS_CACHE.
    """
    parent, path = folder(), path_of(device)
    if parent is None or path is None:
        raise ModuleNotFoundError("tuning needs the package platformdirs, or JAX_KERNELS_CACHE", name="platformdirs")
    if (parent, device) not in _LOADED:
        _LOADED[parent, device] = read(path, device)
    loaded = _LOADED[parent, device]
    loaded[key] = loaded[key].joined(winner) if key in loaded else winner
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _lock(path):
            kept = read(path, device, raises=True)
            write(path, device, {**kept, key: kept[key].joined(winner) if key in kept else winner})
    except OSError as error:
        _report(path, f"cannot be written ({error}): tuned calls are known to this process alone", is_written=True)


def listed() -> dict[str, dict[str, Winner]]:
    """The winners in the user's folder, by device and key. Files that `find` ignores are reported and left out."""
    return _listed(_files())


def listed_shipped() -> dict[str, dict[str, Winner]]:
    """The winners that are part of the library, by device and key; empty if JAX_KERNELS_TUNED turns them off."""
    return {} if _setting() in ("0", "own") else _listed(sorted(SHIPPED.glob("*.json")), is_shipped=True)


def _listed(paths: Iterable[Path], *, is_shipped: bool = False) -> dict[str, dict[str, Winner]]:
    found: dict[str, dict[str, Winner]] = {}
    for path in paths:
        device = _device_of(path)
        if device is not None and (winners := read(path, device, is_shipped=is_shipped)):
            found[device] = winners
    return found


def _device_of(path: Path) -> str | None:
    """The name of the device of a file; None, with a warning, for a file without one."""
    try:
        device = json.loads(path.read_text())["device"]
    except FileNotFoundError:  # another process removed it
        return None
    except OSError as error:
        _report(path, f"cannot be read ({error}): it is ignored")
        return None
    except Exception as error:
        _report(path, f"is corrupt ({type(error).__name__}: {error}): it is ignored")
        return None
    if not isinstance(device, str) or name_of(device) != path.name:
        _report(path, f"is corrupt (device: got {device!r}, want the device of the file's name): it is ignored")
        return None
    return device


def clear() -> list[Path]:
    """Removes all files of winners, of every version and device, and returns their paths. This process forgets them.

    Raises OSError if a file cannot be removed or its lock is held for a minute, ModuleNotFoundError without filelock.
    """
    removed = _files()
    for path in removed:
        with _lock(path):
            path.unlink(missing_ok=True)
    _LOADED.clear()
    _REPORTED.clear()
    return removed


def _files() -> list[Path]:
    parent = folder()
    return [] if parent is None or not parent.is_dir() else sorted(parent.glob("*.json"))


def _lock(path: Path) -> Any:
    """A lock of the file's name, which one process holds at a time. Raises OSError, after a minute or if refused."""
    import filelock

    return filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS)


def _version() -> str:
    return sys.modules["jax_kernels"].__version__


def read(path: Path | None, device: str, *, is_shipped: bool = False, raises: bool = False) -> dict[str, Winner]:
    """The winners of a file; empty without the file, and, with a warning, for one that cannot serve.

    is_shipped: whether the file is part of the library, so that its version is too. raises: whether an OSError of the
    read is raised, instead of a warning.
    """
    if path is None:
        return {}
    try:
        tree = json.loads(path.read_text())
        if (version := tree["version"]) != _version() and not is_shipped:
            _report(path, f"was written by version {version}, and this is {_version()}: it is ignored")
            return {}
        if tree["device"] != device:
            raise ValueError(f"device: got {tree['device']!r}, want {device!r}")
        return _served(path, tree["winners"].items(), _shared_memory(device), is_shipped=is_shipped)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        if raises:
            raise
        _report(path, f"cannot be read ({error}): it is ignored")
    except Warning:  # a filter of the user's makes the report an error
        raise
    except Exception as error:  # also a RecursionError, of lists within lists: a file may hold anything
        _report(path, f"is corrupt ({type(error).__name__}: {error}): it is ignored")
    return {}


def _served(
    path: Path, entries: Iterable[tuple[str, Any]], shared_memory: int, *, is_shipped: bool
) -> dict[str, Winner]:
    """The winners of a file's entries, without the ones that cannot serve, which one warning reports.

    shared_memory: the most bytes of shared memory of a CTA; 0 is no limit.
    """
    found, refused = {}, []
    for key, entry in entries:
        try:
            request = json.loads(key)
            if not isinstance(request, dict) or not isinstance(request.get("op"), str):
                raise TypeError("winners: got another name of an entry, want the request of an op in JSON")
            found[key] = Winner.from_json(entry, request=request, shared_memory=shared_memory, is_shipped=is_shipped)
        except Exception as error:
            refused.append(f"{key} ({type(error).__name__}: {error})")
    if refused:
        others = f" and {len(refused) - 1} more" if refused[1:] else ""
        _report(path, f"has entries that cannot serve, and are ignored: {refused[0]}{others}")
    return found


def _shared_memory(device: str) -> int:
    """The most bytes of shared memory of a CTA of the device; 0 for a CPU."""
    try:
        return device_info(device).shared_memory_per_block
    except ValueError:  # a GPU without an entry in the table
        return MOST_SHARED_MEMORY


def write(path: Path, device: str, winners: Mapping[str, Winner]) -> None:
    """Writes a device's file of winners, as a whole. Raises OSError."""
    entries = {key: winners[key].as_json() for key in sorted(winners)}
    write_whole(path, json.dumps({"version": _version(), "device": device, "winners": entries}, indent=1) + "\n")


def _report(path: Path, problem: str, *, is_written: bool = False) -> None:
    """Warns about a file, once in a process for its content, and once if it cannot be written (is_written)."""
    if (path, is_written) not in _REPORTED:
        _REPORTED.add((path, is_written))
        warnings.warn(f"tuned calls: {path} {problem}", RuntimeWarning, stacklevel=2)
