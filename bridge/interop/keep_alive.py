"""Holds memory that a PyTorch stream may still use: JAX's results, and the tensors that JAX reads.

JAX gives a result's memory to other arrays when the array dies, though a stream may still read the memory. If JAX is
the last to release a tensor, one of JAX's threads frees it, and takes the interpreter's lock from the calling thread.
So results and tensors are held until an event on the stream has passed. Later calls release entries whose events have
passed. If no call comes, a thread releases them.
"""

import collections
import contextlib
import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from jax_kernels.bridge.interop import cuda_driver

__all__ = ["StreamKeepAlive", "relaxed_capture"]

_IDLE_SECONDS = 0.05
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """A context manager inside which this thread's CUDA calls do not disturb a CUDA graph's capture in another thread.

    By default some calls, such as a query of an event, would end the capture with an error.
    """
    try:
        exchange: Callable[..., int] = cuda_driver.driver().cuThreadExchangeStreamCaptureMode  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class _Entry(NamedTuple):
    """Memory that is held until a stream has passed an event.

    copied: the event. memory: tensors over JAX's memory. size: the bytes of this memory. read: PyTorch's own tensors,
    which JAX reads.
    """

    copied: torch.cuda.Event
    memory: list[torch.Tensor]
    read: Sequence[torch.Tensor]
    size: int


class StreamKeepAlive:
    """Holds memory until a stream of a GPU has passed an event: a queue of entries for each stream, in its order.

    If more than a sixteenth of the GPU's memory is held, because the host runs far ahead of the GPU, `hold` waits for
    the oldest entries of its stream.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], collections.deque[_Entry]] = {}
        self._sizes: dict[int, int] = collections.defaultdict(int)
        self._is_needed = threading.Event()
        self._thread: threading.Thread | None = None
        self._calls = 0

    def hold(self, stream: torch.cuda.Stream, memory: list[torch.Tensor], read: Sequence[torch.Tensor] = ()) -> None:
        """Holds tensors until the stream has done all work that is queued on it now.

        memory: tensors over JAX's memory, which count as held bytes. read: PyTorch tensors that JAX reads. The host
        waits only if too much memory is held.
        """
        copied = torch.cuda.Event()
        copied.record(stream)
        index = stream.device_index
        entry = _Entry(copied=copied, memory=memory, read=read, size=sum(tensor.nbytes for tensor in memory))
        released: list[_Entry] = []  # freed after the lock is released: freeing runs JAX's code
        with self._lock, relaxed_capture():
            self._calls += 1
            queue = self._queues.setdefault((index, stream.cuda_stream), collections.deque())
            queue.append(entry)
            self._sizes[index] += entry.size
            self._pop_passed(released, index)
            while self._sizes[index] > _memory_to_hold(index) and len(queue) > 1:
                queue[0].copied.synchronize()
                self._pop(released, index, queue)
        self._is_needed.set()
        if self._thread is None:
            self._start()

    def _pop(self, released: list[_Entry], index: int, queue: collections.deque[_Entry]) -> None:
        """Moves a queue's oldest entry to `released`. index: the GPU's index."""
        released.append(queue.popleft())
        self._sizes[index] -= released[-1].size

    def _pop_passed(self, released: list[_Entry], index: int) -> None:
        """Moves the entries of GPU `index` whose events have passed to `released`, without waiting."""
        for (owner, _), entries in self._queues.items():
            while owner == index and entries and entries[0].copied.query():
                self._pop(released, index, entries)

    def release(self) -> None:
        """Releases all entries whose events have passed, without waiting for others."""
        released: list[_Entry] = []
        with self._lock, relaxed_capture():
            for index in {index for index, _ in self._queues}:
                self._pop_passed(released, index)

    def sizes(self) -> dict[int, int]:
        """The bytes of JAX's memory that are held, by the GPU's index."""
        with self._lock:
            return dict(self._sizes)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_watch,
                    args=(weakref.ref(self), self._is_needed),
                    daemon=True,
                    name="jax_kernels held memory",
                )
                self._thread.start()

    def _is_empty(self) -> bool:
        return not any(self._queues.values())

    def clear(self) -> list["weakref.ref[torch.Tensor]"]:
        """Waits for every event, and releases all entries. Returns weak references to the tensors that JAX read."""
        with self._lock:
            entries = [entry for queue in self._queues.values() for entry in queue]
            for entry in entries:
                entry.copied.synchronize()
            self._queues.clear()
            self._sizes.clear()
        return [weakref.ref(tensor) for entry in entries for tensor in entry.read]


def _watch(reference: "weakref.ref[StreamKeepAlive]", is_needed: threading.Event) -> None:
    """The loop of a thread that releases entries whose events have passed, if `hold` was not called for a while.

    is_needed: set if there are entries; the thread sleeps until then. It ends when the StreamKeepAlive dies.
    """
    calls = -1
    while True:
        is_needed.wait()
        time.sleep(_IDLE_SECONDS)
        held = reference()
        if held is None:
            return
        if held._calls == calls:
            held.release()
            if held._is_empty():
                is_needed.clear()
                if not held._is_empty():  # a call came in between
                    is_needed.set()
        calls = held._calls
        del held


@functools.cache
def _memory_to_hold(index: int) -> int:
    """The bytes that may be held on GPU `index` before the host waits: a sixteenth of its memory."""
    return torch.cuda.get_device_properties(index).total_memory // 16
