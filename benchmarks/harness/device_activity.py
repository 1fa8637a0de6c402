"""Device time by CUPTI's activity records, for work launched by JAX or by PyTorch.

JAX's own profiler (jax.experimental.mosaic.gpu.profiler) records only kernels, so it would not count the zeroing of an
accumulator, which XLA does with a memset; and CUPTI has one subscriber, so the profilers of two frameworks conflict.
Activity records need no subscriber.
"""

import atexit
import contextlib
import ctypes
import importlib.util
import operator
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from harness.timing import Call, Reading, queue, wait

# CUpti_ActivityKind, cupti_activity.h.
MEMCPY, MEMSET, KERNEL, CONCURRENT_KERNEL, PEER_MEMCPY = 1, 2, 3, 10, 22
ENABLED = (CONCURRENT_KERNEL, MEMSET, MEMCPY, PEER_MEMCPY)
NAMES = {MEMCPY: "[copy]", MEMSET: "[memset]", PEER_MEMCPY: "[copy between GPUs]"}

BUFFER_BYTES = 8 << 20
FLUSH_FORCED = 1

_Bytes = ctypes.POINTER(ctypes.c_uint8)
_Requested = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(_Bytes), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_Completed = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, _Bytes, ctypes.c_size_t, ctypes.c_size_t)


class _Record(ctypes.Structure):
    """The fields at the same offset in the records of kernels, memsets and copies since CUDA 11.

    Only the records of kernels have a name at _NAME_OFFSET.
    """

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("_others", ctypes.c_uint8 * 12),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
    )


_DEVICE_OFFSET, _NAME_OFFSET = 40, 104  # the same in CUpti_ActivityKernel5 to CUpti_ActivityKernel11
_MEMORY_DEVICE_OFFSET = 32  # the same in the records of memsets and copies


class Activity(NamedTuple):
    """A kernel, memset or copy. start, end: in ns. device: the number of its GPU."""

    name: str
    start: int
    end: int
    device: int


def find_library() -> str:
    """The path of the libcupti that the process has loaded, else of the nvidia packages', else the linker's name."""
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = line.rpartition(" ")[2]
            if pathlib.Path(path).name.startswith("libcupti.so"):
                return path
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for pattern in ("cu13/lib/libcupti.so*", "cuda_cupti/lib/libcupti.so*"):
            found = sorted(pathlib.Path(root).glob(pattern))
            if found:
                return str(found[0])
    return "libcupti.so.13"


def busy(intervals: Sequence[tuple[int, int]]) -> int:
    """The length of the union of (start, end): the time of overlapping kernels counts once."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


class DeviceActivity:
    """The "cupti" timer. It collects until it is closed or the process ends. Make one before anything is compiled.

    Raises RuntimeError with CUPTI's message if CUPTI fails, and OSError without libcupti.
    """

    def __init__(self, library: Any = None):
        self._cupti = ctypes.CDLL(find_library()) if library is None else library
        self._lent: dict[int, Any] = {}
        self._records: list[Activity] = []
        self._trouble: list[str] = []
        # CUPTI keeps the addresses: the two function objects must live as long as CUPTI.
        self._callbacks = (_Requested(self._lend), _Completed(self._take_back))
        self._do("cuptiActivityRegisterCallbacks", *self._callbacks)
        self._enable()
        atexit.register(self.close)  # a buffer returned after Python has ended would crash the process

    def __call__(self, call: Call, calls: int, framework: str) -> Reading:
        return reading(self.of(lambda: wait(queue(call, calls), framework)), calls)

    def profile(self, work: Callable[[], Any], calls: int) -> dict[str, Any]:
        """The profile of one call. work: makes `calls` calls and waits for them."""
        return profile(self.of(work), calls)

    def of(self, work: Callable[[], Any]) -> list[Activity]:
        """Runs a function that queues work and waits for it. Returns the activities of that work."""
        self._collect()
        work()
        return self._collect()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is collected inside the block: records take host time in each launch."""
        self._disable()
        try:
            yield
        finally:
            self._enable()

    def close(self) -> None:
        """Ends the collection; CUPTI returns its buffers."""
        atexit.unregister(self.close)
        self._disable()
        self._cupti.cuptiActivityFlushAll(ctypes.c_uint32(FLUSH_FORCED))

    def _enable(self) -> None:
        for kind in ENABLED:
            self._do("cuptiActivityEnable", ctypes.c_int(kind))

    def _disable(self) -> None:
        for kind in ENABLED:
            self._cupti.cuptiActivityDisable(ctypes.c_int(kind))

    def _do(self, function: str, *arguments: Any) -> None:
        result = getattr(self._cupti, function)(*arguments)
        if result != 0:
            words = ctypes.c_char_p()
            self._cupti.cuptiGetResultString(ctypes.c_int(result), ctypes.byref(words))
            raise RuntimeError(f"{function}: {(words.value or b'').decode()} ({result})")

    def _collect(self) -> list[Activity]:
        """Each activity since the last call."""
        self._do("cuptiActivityFlushAll", ctypes.c_uint32(FLUSH_FORCED))
        dropped = ctypes.c_size_t(0)
        self._do("cuptiActivityGetNumDroppedRecords", None, ctypes.c_uint32(0), ctypes.byref(dropped))
        records, self._records = self._records, []
        trouble, self._trouble = self._trouble, []
        if trouble:
            raise RuntimeError(f"reading CUPTI's records failed: {trouble[0]}")
        if dropped.value:
            raise RuntimeError(f"CUPTI dropped {dropped.value} records")
        return records

    def _lend(self, buffer: Any, size: Any, most: Any) -> None:
        memory = ctypes.create_string_buffer(BUFFER_BYTES + 8)
        address = (ctypes.addressof(memory) + 7) // 8 * 8
        self._lent[address] = memory
        buffer[0] = ctypes.cast(ctypes.c_void_p(address), _Bytes)
        size[0] = BUFFER_BYTES
        most[0] = 0  # as many records as fit

    def _take_back(self, context: Any, stream: int, buffer: Any, size: int, valid: int) -> None:
        try:  # an exception cannot leave a C callback: _collect raises it
            self._records += records(self._cupti.cuptiActivityGetNextRecord, buffer, valid)
        except Exception as error:
            self._trouble.append(repr(error))
        self._lent.pop(ctypes.addressof(buffer.contents), None)


def records(next_record: Callable[..., int], buffer: Any, valid: int) -> list[Activity]:
    """Each kernel, memset and copy in a buffer of `valid` bytes."""
    found = []
    record = ctypes.c_void_p(None)
    while next_record(buffer, ctypes.c_size_t(valid), ctypes.byref(record)) == 0 and record.value:
        fields = _Record.from_address(record.value)
        is_kernel = fields.kind in (KERNEL, CONCURRENT_KERNEL)
        if not is_kernel and fields.kind not in NAMES:
            continue
        offset = _DEVICE_OFFSET if is_kernel else _MEMORY_DEVICE_OFFSET
        device = ctypes.c_uint32.from_address(record.value + offset).value
        pointer = ctypes.c_char_p.from_address(record.value + _NAME_OFFSET) if is_kernel else None
        name = NAMES[fields.kind] if pointer is None else (pointer.value or b"?").decode(errors="replace")
        found.append(Activity(name, fields.start, fields.end, device))
    return found


def reading(found: Sequence[Activity], calls: int) -> Reading:
    """The Reading of one of `calls` calls.

    Raises RuntimeError for no activities, and for one that had not finished.
    """
    if not found:
        raise RuntimeError("CUPTI saw no device activity")
    if any(x.end < x.start or x.end == 0 for x in found):
        raise RuntimeError("CUPTI handed over records of work that had not finished")
    kernels: dict[str, float] = {}
    for x in found:
        kernels[x.name] = kernels.get(x.name, 0.0) + (x.end - x.start) / 1e6 / calls
    return Reading(_busy_ms(found, calls), kernels, len(found) / calls)


def profile(found: Sequence[Activity], calls: int) -> dict[str, Any]:
    """A summary of one of `calls` calls on the first GPU, without memsets and copies.

    {"kernels": [{"name": without its number, "ms", "launches"}], the longest first; in ms "span": from the first
    kernel's start to the last kernel's end, "busy": with any kernel, "sends": with an NCCL kernel, "sends_alone": with
    only NCCL kernels}.
    """
    mine = [x for x in found if x.device == 0 and x.name not in NAMES.values()]
    names: dict[str, list[Activity]] = {}
    for x in mine:
        names.setdefault(re.sub(r"[._]\d+$", "", x.name), []).append(x)
    kernels = [
        {"name": name, "ms": sum(x.end - x.start for x in of_name) / 1e6 / calls, "launches": len(of_name) / calls}
        for name, of_name in names.items()
    ]
    span = max(x.end for x in mine) - min(x.start for x in mine) if mine else 0
    sends = [x for x in mine if "nccl" in x.name.lower()]
    others = [x for x in mine if "nccl" not in x.name.lower()]
    return {
        "kernels": sorted(kernels, key=operator.itemgetter("ms"), reverse=True),
        "span": span / 1e6 / calls,
        "busy": _busy_ms(mine, calls),
        "sends": _busy_ms(sends, calls),
        "sends_alone": _busy_ms(mine, calls) - _busy_ms(others, calls),
    }


def timeline(found: Sequence[Activity]) -> list[dict[str, Any]]:
    """Each activity in the order of the starts: {"device", "name", "start", "end"}, in us after the first start."""
    first = min((x.start for x in found), default=0)
    us = lambda time: (time - first) / 1e3
    ordered = sorted(found, key=operator.attrgetter("start"))
    return [{"device": x.device, "name": x.name, "start": us(x.start), "end": us(x.end)} for x in ordered]


def _busy_ms(found: Sequence[Activity], calls: int) -> float:
    return busy([(x.start, x.end) for x in found]) / 1e6 / calls
