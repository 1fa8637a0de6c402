"""Benchmarks side by side: processes that compile at the same time, and use the GPU one after another.

    export BENCHMARK_LOCK=/tmp/gpu.lock
    python benchmarks/sparse.py ... & python benchmarks/dilated.py ... & wait

Most of a benchmark is compiling, on the host. Those with the same file in BENCHMARK_LOCK take turns at the GPU, a case
a turn, so that none times while another runs there; what waits for a turn counts towards its --budget. The first call
of a PyTorch contender, which compiles it, is made out of turn: it is short beside a round.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator

_turns = 0  # of this process, one in another


@contextlib.contextmanager
def gpu_alone() -> Iterator[None]:
    """A turn, which may hold others of the same process."""
    global _turns
    path = os.environ.get("BENCHMARK_LOCK")
    if path is None or _turns:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go where the file is closed
        _turns += 1
        try:
            yield
        finally:
            _turns -= 1


def is_shared() -> bool:
    return "BENCHMARK_LOCK" in os.environ
