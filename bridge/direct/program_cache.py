"""A cache of launch chains on disk, so that a function's first call in a later process compiles nothing by XLA.

JAX's own cache cannot serve here: it does not read programs that were compiled for a GPU without starting it. A file
has a chain under the SHA-256 of its lowered program, the GPU and the versions of the compilers. A smaller file, a link,
has the name of a chain's file under the key of a call (call_key.py). Files are whole at any moment, so that several
processes can share the folder; the files that were used longest ago are removed above MOST_BYTES.

The files contain code that the GPU runs. So a folder or a file that another user can write is not read: its owner has
to be this user or root, and only the owner may write it. A folder that cannot be written is read.

The folder is `programs` in JAX_KERNELS_CACHE, or in the user's cache folder. JAX_KERNELS_PROGRAM_CACHE=0 turns the
cache off. So does a user's own jax_compilation_cache_dir, unless JAX_KERNELS_PROGRAM_CACHE=1.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import re
import stat
import types
import typing
import zlib
from pathlib import Path
from typing import Any

import jax
from jax.extend.mlir import ir as mlir_ir

import jax_kernels
from jax_kernels.bridge.direct import chain as records
from jax_kernels.bridge.direct.chain import LaunchChain
from jax_kernels.bridge.interop.warn_once import warn_once
from jax_kernels.files import write_whole
from jax_kernels.tuned.cache import folder_of

__all__ = [
    "MOST_BYTES",
    "folder",
    "key_of",
    "link",
    "linked",
    "load",
    "program_text",
    "remember",
    "source_digest",
    "store",
    "versions",
    "was_remembered",
]

MOST_BYTES = 256 << 20
_FORMAT = 2
_SETTING = "JAX_KERNELS_PROGRAM_CACHE"
# The packages that compile a program, or change its text.
_COMPILERS = (
    "jax-kernels",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvvm",
)
# JAX sets these when it imports its kernels.
_PATHS_OF_JAX = ("MOSAIC_GPU_RUNTIME_LIB_PATH", "MOSAIC_GPU_NVSHMEM_BC_PATH", "MOSAIC_GPU_NVSHMEM_SO_PATH")
_OF_KERNELS = re.compile(r'(?:kernel_hash|module) = "[^"]*"')  # a quote inside is \22
_IS_KEY = re.compile(rb"[0-9a-f]{64}")
ir: Any = mlir_ir  # type checkers do not see its classes


def folder() -> Path | None:
    """The folder of the files, which need not exist; None if the cache is off, or without the package platformdirs.

    It is off while Mosaic dumps its programs, too.

    Raises ValueError for a JAX_KERNELS_PROGRAM_CACHE other than 0 and 1, and for a JAX_KERNELS_CACHE in the home of a
    user that does not exist.
    """
    setting = os.environ.get(_SETTING)
    if setting not in (None, "", "0", "1"):
        raise ValueError(f"{_SETTING}: got {setting!r}, want 0 to turn the cache of programs off, or 1")
    has_own = bool(jax.config.jax_compilation_cache_dir)
    has_dumps = any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)  # only a compilation writes them
    if setting == "0" or has_dumps or (has_own and setting != "1"):
        return None
    return folder_of("programs")


@functools.cache
def versions() -> dict[str, str]:
    """The versions of the installed packages that compile a program, or change its text, by name."""
    found = {}
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def source_digest() -> str:
    """A digest of this library's source code, and of the winners that are part of it."""
    root, digest = str(Path(jax_kernels.__file__).parent), hashlib.sha256()
    for parent, folders, names in os.walk(root, followlinks=True):  # a checkout has links to folders
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                path = os.path.join(parent, name)
                with open(path, "rb") as file:
                    data = file.read()
                digest.update(f"{path.removeprefix(root)} {len(data)} ".encode() + data)
    return digest.hexdigest()


def key_of(*parts: str) -> str:
    """The name of a file: a digest of the parts, the versions of the compilers, and XLA's and Mosaic's settings."""
    settings = {name: x for name, x in os.environ.items() if name.startswith(("XLA_FLAGS", "MOSAIC_GPU_"))}
    for name in _PATHS_OF_JAX:
        settings.pop(name, None)
    whole = json.dumps([_FORMAT, versions(), sorted(settings.items()), *parts])
    return hashlib.sha256(whole.encode()).hexdigest()


def program_text(lowered: jax.stages.Lowered, text: str) -> str:
    """The text of a lowered program, which is equal in each process that lowers the same function.

    text: lowered.as_text(). JAX numbers the Mosaic kernels of a process. The result has neither the numbers nor the
    hashes of these kernels.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    kernels = []
    for call in _mosaic_calls(module.operation):
        config = call.attributes["mhlo.backend_config"]
        kernels += [_kernel_text(module.context, x.attr.value_bytes) for x in config if x.name == "module"]
    return "\n".join([_OF_KERNELS.sub("", text), *kernels])


def _mosaic_calls(operation: Any) -> list[Any]:
    """The calls of Mosaic kernels inside an MLIR operation, at any depth, in order."""
    found = []
    for region in operation.regions:
        for block in region:
            for inner in block:
                is_call = inner.operation.name == "stablehlo.custom_call"
                if is_call and inner.operation.attributes["call_target_name"].value == "mosaic_gpu_v2":
                    found.append(inner.operation)
                found += _mosaic_calls(inner.operation)
    return found


def _kernel_text(context: Any, bytecode: bytes) -> str:
    """A digest of a kernel's MLIR without the name of its dumps, which has the kernel's number in the process.

    context: the MLIR context of the program, which has the dialects of kernels.
    """
    with context:
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(bytecode)
        with contextlib.suppress(KeyError):
            del module.operation.attributes["mosaic_gpu.dump_basename"]
        file = io.BytesIO()  # printing the module as text would take fifteen times as long
        module.operation.write_bytecode(file)
        return hashlib.sha256(file.getvalue()).hexdigest()


def load(key: str) -> LaunchChain | None:
    """The chain that `store` wrote under this key; None without a whole file."""
    data = _read(key)
    if data is None:
        return None
    try:
        return _decoded(json.loads(zlib.decompress(data)), LaunchChain)
    except (ValueError, KeyError, TypeError, zlib.error):  # written by another program
        _report_damage()
        return None


def store(key: str, chain: LaunchChain) -> None:
    """Writes a chain under a key. If the folder cannot be written, warns once and writes nothing."""
    _write(key, zlib.compress(json.dumps(_encoded(chain)).encode(), 1))


def link(key: str, target: str) -> None:
    """Writes under a key that its chain is under the key `target`."""
    _write(key, target.encode())


def linked(key: str) -> LaunchChain | None:
    """The chain under the key that `link` wrote under this key; None without both files."""
    target = _read(key)
    if target is None:
        return None
    if not _IS_KEY.fullmatch(target):
        _report_damage()
        return None
    return load(target.decode())


def was_remembered(key: str) -> bool:
    """Whether `remember` was called for this key, in any process."""
    return _read(key) == b"yes"


def remember(key: str) -> None:
    """Notes a key on disk, such as of a test that passed."""
    _write(key, b"yes")


def _read(key: str) -> bytes | None:
    """The data of a file; None without the file, for a damaged one, and for one that another user can write."""
    where = folder()
    if where is None:
        return None
    try:
        if not _is_safe_folder(where):
            return None
        with (where / key).open("rb") as file:
            if not _is_safe(os.fstat(file.fileno())):
                _report(f"does not read {where / key}: a user other than you and root owns it, or may write it")
                return None
            data = file.read()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(where / key)  # used now
    digest, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() == digest:
        return body
    _report_damage()
    return None


def _is_safe(facts: os.stat_result) -> bool:
    """Whether only this user and root can write a file or folder. True on Windows, where the mode does not tell."""
    if not hasattr(os, "geteuid"):
        return True
    return facts.st_uid in (os.geteuid(), 0) and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_safe_folder(where: Path) -> bool:
    """Whether only this user and root can write the folder; otherwise warns once.

    It may be a folder that an earlier version made by the umask: then takes the rights of the others away. Raises
    OSError.
    """
    facts = where.stat()
    if not _is_safe(facts) and facts.st_uid == os.geteuid():
        where.chmod(0o700)  # files of another owner in it are not read
        facts = where.stat()
    if _is_safe(facts):
        return True
    _report(f"does not use compiled programs in {where}: a user other than you and root owns it, or may write it")
    return False


def _report_damage() -> None:
    """Warns once that a file is damaged. Its program is compiled, and the file is written, again."""
    _report(f"found a damaged file of compiled programs in {folder()}, and compiles its program again")


def _report(problem: str) -> None:
    """Warns about a problem, once in a process."""
    warn_once(f"jax_kernels.bridge {problem}. Set JAX_KERNELS_CACHE to another folder, or {_SETTING}=0.")


def _write(key: str, data: bytes) -> None:
    where = folder()
    if where is None:
        return
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_safe_folder(where):
            return
        write_whole(where / key, hashlib.sha256(data).digest() + data, mode=0o600)
        _remove_oldest(where)
    except OSError as error:
        _report(
            f"cannot keep compiled programs in {where} ({error.strerror or error}), so each process compiles them again"
        )


def _remove_oldest(where: Path) -> None:
    """Removes the files that were used longest ago until the folder has at most MOST_BYTES."""
    files = []
    for path in where.iterdir():
        with contextlib.suppress(OSError):  # another process removed it
            facts = path.stat()
            files.append((facts.st_mtime, facts.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


def _encoded(x: Any) -> Any:
    """A chain, or a part of it, as JSON. A record has its type's name, bytes are in base64."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {field.name: _encoded(getattr(x, field.name)) for field in dataclasses.fields(x)}
        return {"type": type(x).__name__} | fields
    if isinstance(x, bytes):
        return base64.b64encode(x).decode()
    return [_encoded(part) for part in x] if isinstance(x, tuple) else x


def _decoded(x: Any, kind: Any) -> Any:
    """The value of this type that `_encoded` turned into JSON. Raises an error for JSON of another form."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        return tuple(_decoded(part, typing.get_args(kind)[0]) for part in x)
    kind = getattr(kind, "__value__", kind)  # of a type alias
    if isinstance(kind, types.UnionType):
        if x is None and types.NoneType in typing.get_args(kind):
            return None
        names = {option.__name__: option for option in typing.get_args(kind)}
        return _decoded(x, names[x["type"]])
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, vars(records))
        if x.pop("type") != kind.__name__:  # type: ignore[union-attr]
            raise ValueError(f"got another record than {kind}")
        return kind(**{name: _decoded(value, hints[name]) for name, value in x.items()})  # type: ignore[operator]
    if kind is bytes:
        return base64.b64decode(x)
    if type(x) is not kind:
        raise ValueError(f"got {type(x).__name__}, want {kind.__name__}")
    return x
