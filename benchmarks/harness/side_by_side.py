"""Lets several benchmarks run side by side: they compile at the same time and use the GPU one after another.

    export BENCHMARK_LOCK=/tmp/gpu.lock
    python benchmarks/sparse.py ... & python benchmarks/dilated.py ... & wait

Most of a benchmark's time is compilation, on the host. Processes with the same file in BENCHMARK_LOCK take turns on the
GPU, one turn for each case, so no process is timed while another process uses the GPU. Waiting for a turn counts
towards --budget. Compilers and PyTorch's first calls also run work on the GPU, which is not timed: several processes
may do so at once, but no turn begins before it ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import IO

IDLE, AMONG_OTHERS, ALONE = range(3)
_FLOCK = {IDLE: fcntl.LOCK_UN, AMONG_OTHERS: fcntl.LOCK_SH, ALONE: fcntl.LOCK_EX}
_state = IDLE  # the kind of lock that this process holds
_files: dict[str, IO[str]] = {}


def gpu_alone() -> contextlib.AbstractContextManager[None]:
    """A turn on the GPU. Turns of one process may be nested."""
    return _holding(ALONE)


def gpu_among_others() -> contextlib.AbstractContextManager[None]:
    """Admits several processes at once, for GPU work that is not timed and takes long on the host."""
    return _holding(AMONG_OTHERS)


@contextlib.contextmanager
def _holding(wanted: int) -> Iterator[None]:
    global _state
    path, before = os.environ.get("BENCHMARK_LOCK"), _state
    if path is None or before >= wanted:
        yield
        return
    if path not in _files:
        _files[path] = open(path, "w")  # noqa: SIM115
    # flock releases the lock before it takes the other kind of lock, so two processes cannot block each other.
    fcntl.flock(_files[path], _FLOCK[wanted])
    _state = wanted
    try:
        yield
    finally:
        _state = before
        fcntl.flock(_files[path], _FLOCK[before])
