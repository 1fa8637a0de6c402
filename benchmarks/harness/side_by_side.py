"""Benchmarks side by side: processes that compile at the same time, and use the GPU one after another.

    export BENCHMARK_LOCK=/tmp/gpu.lock
    python benchmarks/sparse.py ... & python benchmarks/dilated.py ... & wait

Most of a benchmark is compiling, on the host. Those with the same file in BENCHMARK_LOCK take turns at the GPU, a case
a turn, so that none times while another runs there; what waits for a turn counts towards its --budget. What compilers
and PyTorch's first calls run on the GPU is not timed: some of it may run at once, but no turn begins before it ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import IO

IDLE, AMONG_OTHERS, ALONE = range(3)
_FLOCK = {IDLE: fcntl.LOCK_UN, AMONG_OTHERS: fcntl.LOCK_SH, ALONE: fcntl.LOCK_EX}
_state = IDLE  # of this process
_files: dict[str, IO[str]] = {}


def gpu_alone() -> contextlib.AbstractContextManager[None]:
    """A turn, which may hold others of the same process."""
    return _holding(ALONE)


def gpu_among_others() -> contextlib.AbstractContextManager[None]:
    """For work on the GPU that is not timed, and takes too long on the host to keep others from theirs."""
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
    # From one kind to another it lets go in between, so that two who wait for the same do not wait for each other.
    fcntl.flock(_files[path], _FLOCK[wanted])
    _state = wanted
    try:
        yield
    finally:
        _state = before
        fcntl.flock(_files[path], _FLOCK[before])
