"""Reads the launch of a compiled Mosaic kernel, so that a later launch needs neither Mosaic nor its compiler.

XLA's executable has a Mosaic kernel as a cubin and as a host function in a relocatable ELF file. The host function
fills tensor maps, and launches the kernel or describes the launch. It is called here with invented addresses, and with
Python functions instead of the functions of Mosaic's runtime: these note their arguments. So no GPU is needed, and none
is used. The noted launch has no machine code of the host.

The formats are jaxlib 0.11's and 0.12's, from jaxlib/mosaic/gpu: mosaic_gpu.proto, and the functions in runtime.cc.
"""

import ctypes
import dataclasses
import mmap
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jax_kernels.bridge.direct.chain import BufferSlice, Bytes, Dims, MosaicLaunch, Parameter, TensorMap, TensorMaps
from jax_kernels.bridge.direct.records import Message

__all__ = ["MAP_BYTES", "launch_of"]

MAP_BYTES = 128  # of a CUtensorMap
# Versions of MosaicGpuKernelProto. The host function of _LAUNCHES, jaxlib 0.11's, gets a function, a stream and the
# addresses, and launches the kernel. The one of _DESCRIBES, 0.12's, gets a description to fill and the addresses.
_LAUNCHES, _DESCRIBES = 3, 4
_MOST_CLUSTER = 8  # CTAs of a cluster without a special attribute of the kernel
# Mosaic's numbers of dtypes -> (CUtensorMapDataType, bytes). Types of less than a byte are not used by this library.
_DTYPES = {1: (0, 1), 2: (1, 2), 3: (2, 4), 4: (4, 8), 5: (6, 2), 6: (7, 4), 7: (9, 2), 9: (3, 4), 10: (5, 8)}
_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CUtensorMapSwizzle
_FUNCTION, _STREAM = 0x5EED_0001, 0x5EED_0002
_STRIDE = 1 << 40  # between the invented addresses of buffers
_LONGS = ctypes.POINTER(ctypes.c_int64)
_FILL = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
    *(_LONGS, _LONGS, ctypes.c_int64, _LONGS),
)
_LAUNCH = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint32,) * 10),
    *(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)),
)
_HOST = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_DESCRIBE = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint32,) * 10, ctypes.c_int32, ctypes.c_int32),
    *(ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int32)),
)
_DESCRIBING_HOST = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _UnknownLaunchError(Exception):
    """Raised for a kernel whose launch cannot be noted. The text is the reason."""


def launch_of(state: bytes, arguments: Sequence[BufferSlice]) -> MosaicLaunch | None:
    """The launch of a kernel that XLA compiled; None if it cannot be noted, as on a CPU other than x86-64.

    state: the MosaicGpuKernelProto of the executable. arguments: the slices whose addresses the host function gets.
    """
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        return None
    try:
        kernel = Message(state)
        if kernel.integer(1) not in (_LAUNCHES, _DESCRIBES) or kernel.integer(3) or kernel.integer(7):
            return None
        if not 1 <= kernel.integer(11, 1) <= _MOST_CLUSTER:
            return None
        code = _HostCode.load(kernel.data(2), kernel.text(5))
        noted = [_noted(kernel, code, arguments, first) for first in (0x1000_0000_0000, 0x2000_0000_0000)]
    except (_UnknownLaunchError, ValueError, IndexError, KeyError, struct.error, OSError):
        return None
    return noted[0] if noted[0] == noted[1] else None


def _noted(kernel: Message, code: "_HostCode", arguments: Sequence[BufferSlice], first: int) -> MosaicLaunch:
    """The launch that the host function makes if argument i has the address first + i * _STRIDE."""
    notes = _Notes(arguments, first, kernel.integer(10), _parameter_sizes(kernel.data(8), kernel.text(9)))
    code.call([first + index * _STRIDE for index in range(len(arguments))], notes, kernel.integer(1))
    if notes.problem is not None:
        raise _UnknownLaunchError(notes.problem)
    if notes.launched is None:
        raise _UnknownLaunchError("the host function launched nothing")
    launched = notes.launched
    cluster = launched.cluster
    if cluster.x * cluster.y * cluster.z != kernel.integer(11, 1):
        raise _UnknownLaunchError(f"got {cluster}, want {kernel.integer(11, 1)} CTAs")
    return dataclasses.replace(launched, name=kernel.text(9), cubin=kernel.data(8))


class _Notes:
    """The arguments of the calls that a host function makes.

    launched: the launch, without name and cubin; None before it. problem: why the calls were not understood, or None.
    """

    def __init__(self, arguments: Sequence[BufferSlice], first: int, shared_memory: int, sizes: list[int]) -> None:
        self._arguments = arguments
        self._first = first
        self._shared_memory = shared_memory
        self._sizes = sizes
        self._maps: dict[bytes, TensorMap] = {}
        self.launched: MosaicLaunch | None = None
        self.problem: str | None = None

    def guarded(self, note: Callable[..., None]) -> Callable[..., int]:
        """The method as a C function, which returns 0. An error ends up in `problem`: C code cannot raise it."""

        def call(*given: Any) -> int:
            try:
                note(*given)
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
            return 0

        return call

    def slice_at(self, address: int) -> BufferSlice | None:
        """The part of an argument from an invented address on; None for another number."""
        index, offset = divmod(address - self._first, _STRIDE)
        if not 0 <= index < len(self._arguments) or offset >= self._arguments[index].size:
            return None
        whole = self._arguments[index]
        return dataclasses.replace(whole, offset=whole.offset + offset, size=whole.size - offset)

    def fill(
        self, target: int, base: int, kind: int, rank: int, sizes: Any, strides: Any, swizzle: int, box: Any
    ) -> None:
        """Notes a tensor map, and writes bytes to `target` by which the launch finds it."""
        source = self.slice_at(base)
        dtype, width = _DTYPES[kind]
        if source is None or not 1 <= rank <= 5 or strides[rank - 1] != 1:
            raise ValueError(f"got a tensor map of rank {rank} at {base:#x}")
        found = TensorMap(
            source=source,
            dtype=dtype,
            sizes=tuple(sizes[:rank][::-1]),
            strides=tuple(width * x for x in strides[: rank - 1][::-1]),
            box=tuple(box[:rank][::-1]),
            swizzle=_SWIZZLES[swizzle],
        )
        if not all(0 < x <= 256 for x in found.box) or not all(0 < x <= 2**32 for x in found.sizes):
            raise ValueError(f"got {found}")
        mark = struct.pack("<Q", 0x7E50_0000 + len(self._maps)) * (MAP_BYTES // 8)
        self._maps[mark] = found
        ctypes.memmove(target, mark, MAP_BYTES)

    def describe(self, description: int, *given: Any) -> None:
        """Notes the launch that a host function of 0.12 describes. description: the address that it got."""
        *numbers, count, parameters, sizes = given
        if description != _FUNCTION or [size or 8 for size in sizes[:count]] != self._sizes:  # 0: a device address
            raise ValueError(f"got parameters of {sizes[:count]} bytes, want {self._sizes}")
        self.launch(_FUNCTION, *numbers, _STREAM, parameters)

    def launch(self, function: int, *given: Any) -> None:
        """Notes the launch."""
        *numbers, shared_memory, is_dependent, stream, parameters = given
        grid, cluster, block = (Dims(x=x, y=y, z=z) for x, y, z in (numbers[:3], numbers[3:6], numbers[6:]))
        whole = function, stream, shared_memory, is_dependent
        if whole != (_FUNCTION, _STREAM, self._shared_memory, 0) or self.launched is not None:
            raise ValueError(f"got a launch with {whole}")
        if not 0 < block.x * block.y * block.z <= 1024 or not grid.x * grid.y * grid.z:
            raise ValueError(f"got a launch of {grid}, {block}")
        self.launched = MosaicLaunch(
            name="",
            cubin=b"",
            grid=grid,
            block=block,
            cluster=cluster if cluster.x else Dims(),
            shared_memory=shared_memory,
            parameters=tuple(
                self._parameter(ctypes.string_at(parameters[index], size)) for index, size in enumerate(self._sizes)
            ),
        )

    def _parameter(self, value: bytes) -> Parameter:
        """The parameter with these bytes. Raises ValueError for tensor maps and other bytes."""
        pieces = [value[at : at + MAP_BYTES] for at in range(0, len(value), MAP_BYTES)]
        if all(piece in self._maps for piece in pieces):
            return TensorMaps(maps=tuple(self._maps[piece] for piece in pieces))
        if any(mark[:8] in value for mark in self._maps):
            raise ValueError("got a parameter of tensor maps and other bytes")
        found = self.slice_at(int.from_bytes(value, "little")) if len(value) == 8 else None
        return Bytes(value=value) if found is None else found


def _parameter_sizes(cubin: bytes, kernel: str) -> list[int]:
    """The bytes of each parameter of a kernel in a cubin, in order. They are in the section .nv.info of the kernel."""
    info, at, found = _Elf(cubin).named(f".nv.info.{kernel}"), 0, {}
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the value is in the size's bytes
            continue
        if attribute == 0x17:  # a parameter
            _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at)
            found[ordinal] = packed >> 18
        at += size
    if sorted(found) != list(range(len(found))):
        raise _UnknownLaunchError(f"got parameters {sorted(found)}")
    return [found[index] for index in range(len(found))]


@dataclasses.dataclass(frozen=True)
class _Section:
    """A section of an ELF file. The fields have the names of elf.h, without sh_."""

    name: int
    type: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int
    addralign: int
    entsize: int


class _Elf:
    """A 64-bit little-endian ELF file. Raises ValueError for other data."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\2\1":
            raise ValueError("got no ELF file of 64 bits")
        self.data = data
        self.type, self.machine = struct.unpack_from("<HH", data, 16)
        (start,) = struct.unpack_from("<Q", data, 40)
        _, count, names = struct.unpack_from("<HHH", data, 58)
        self.sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * i)) for i in range(count)]
        self._names = self.sections[names]

    def bytes_of(self, section: _Section) -> bytes:
        return self.data[section.offset : section.offset + section.size]

    def text(self, table: _Section, at: int) -> str:
        """The text at an offset of a table of texts."""
        start = table.offset + at
        return self.data[start : self.data.index(b"\0", start)].decode()

    def named(self, name: str) -> bytes:
        """The bytes of the section of this name. Raises KeyError without one."""
        for section in self.sections:
            if self.text(self._names, section.name) == name:
                return self.bytes_of(section)
        raise KeyError(name)


_OBJECT, _X86_64 = 1, 62
_ALLOCATED, _EXECUTABLE = 2, 4
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8
_ABSOLUTE_64 = 1  # R_X86_64_64
_LIBC = ("memcpy", "memmove", "memset")


class _HostCode:
    """A host function in executable memory. `call` calls it."""

    def __init__(self, memory: mmap.mmap, slots: dict[str, list[int]], entry: int) -> None:
        self._memory = memory
        self._slots = slots
        self._entry = entry

    @classmethod
    def load(cls, data: bytes, name: str) -> "_HostCode":
        """Copies the code of a relocatable ELF file to new memory.

        data: the file. name: of the function. Raises _UnknownLaunchError if the file has other relocations than 64-bit
        addresses of its own sections and of functions.
        """
        elf = _Elf(data)
        if (elf.type, elf.machine) != (_OBJECT, _X86_64):
            raise _UnknownLaunchError(f"got an ELF file of type {elf.type} for machine {elf.machine}")
        # Unwind tables, which have relocations of their own, are left out: nothing is thrown.
        placed: dict[int, int] = {}
        size = 0
        for index, section in enumerate(elf.sections):
            if section.flags & _ALLOCATED and section.type == 1 and section.size:
                size = -(-size // max(1, section.addralign)) * max(1, section.addralign)
                placed[index] = size
                size += section.size
        memory = mmap.mmap(-1, max(size, 1), prot=mmap.PROT_READ | mmap.PROT_WRITE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for index, offset in placed.items():
            memory[offset : offset + elf.sections[index].size] = elf.bytes_of(elf.sections[index])
        (table,) = (x for x in elf.sections if x.type == _SYMBOLS)
        symbols = list(struct.iter_unpack("<IBBHQQ", elf.bytes_of(table)))
        strings = elf.sections[table.link]
        slots: dict[str, list[int]] = {}
        for section in elf.sections:
            if section.type != _RELOCATIONS or section.info not in placed:
                continue
            for offset, info, addend in struct.iter_unpack("<QQq", elf.bytes_of(section)):
                label, _, _, home, value, _ = symbols[info >> 32]
                at = placed[section.info] + offset
                if info & 0xFFFF_FFFF != _ABSOLUTE_64:
                    raise _UnknownLaunchError(f"got a relocation of type {info & 0xFFFF_FFFF}")
                if home:
                    struct.pack_into("<Q", memory, at, base + placed[home] + value + addend)
                else:
                    slots.setdefault(elf.text(strings, label), []).append(at)
        entries = [base + placed[x[3]] + x[4] for x in symbols if x[3] and elf.text(strings, x[0]) == name]
        if len(entries) != 1:
            raise _UnknownLaunchError(f"got {len(entries)} functions {name}")
        return cls(memory, slots, entries[0])

    def call(self, buffers: Sequence[int], notes: _Notes, version: int) -> None:
        """Calls the function with the addresses of buffers. Its calls of Mosaic's runtime go to `notes`.

        version: _LAUNCHES or _DESCRIBES. Raises _UnknownLaunchError if the function calls others.
        """
        functions: dict[str, Any] = {"mosaic_gpu_init_tma_desc": _FILL(notes.guarded(notes.fill))}
        if version == _LAUNCHES:
            functions["mosaic_gpu_launch_kernel"] = _LAUNCH(notes.guarded(notes.launch))
        else:
            functions["mosaic_gpu_build_kernel_spec"] = _DESCRIBE(notes.guarded(notes.describe))
        libc = ctypes.CDLL(None, use_errno=True)
        size = len(self._memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._protect(libc, base, size, mmap.PROT_READ | mmap.PROT_WRITE)
        for name, places in self._slots.items():
            if name not in functions and name not in _LIBC:
                raise _UnknownLaunchError(f"the host function calls {name}")
            target = ctypes.cast(functions.get(name) or getattr(libc, name), ctypes.c_void_p).value
            for at in places:
                struct.pack_into("<Q", self._memory, at, target)
        self._protect(libc, base, size, mmap.PROT_READ | mmap.PROT_EXEC)
        addresses = (ctypes.c_uint64 * max(1, len(buffers)))(*buffers)
        if version == _LAUNCHES:
            _HOST(self._entry)(_FUNCTION, _STREAM, ctypes.addressof(addresses))
        else:
            _DESCRIBING_HOST(self._entry)(_FUNCTION, ctypes.addressof(addresses))

    @staticmethod
    def _protect(libc: ctypes.CDLL, base: int, size: int, rights: int) -> None:
        """Sets the rights of memory. Raises OSError if the system refuses them."""
        if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), rights):
            raise OSError(ctypes.get_errno(), "mprotect")
