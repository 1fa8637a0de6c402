"""Room for compiled programs in a process of tests.

Each program that JAX or PyTorch compiles takes memory maps, 6 on two cores and more on many, of which Linux gives a
process 65,530; the process ends at the next. A process that runs all tests of a part compiles thousands of programs,
and which of them depends on how pytest-xdist shares them out. So `Room` looks after every test, whichever came before.
"""

import gc
import sys
from pathlib import Path

import jax

__all__ = ["Room", "clear", "count_maps", "resident_bytes"]

_COMPILED = "/jax/core/compile/backend_compile_duration"


def count_maps() -> int:
    """How many memory maps the process has; 0 where the system does not say."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def resident_bytes() -> int:
    """The memory of the process that is in use; 0 where the system does not say."""
    found = Path("/proc/self/statm")
    return int(found.read_text().split()[1]) * 4096 if found.exists() else 0


def clear() -> None:
    """Drops the compiled programs of JAX, of the bridge and of PyTorch, where these are loaded."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "jax_kernels.bridge" in sys.modules:
        sys.modules["jax_kernels.bridge"].clear_cache()
    jax.clear_caches()
    gc.collect()


class Room:
    """Clears the caches where there are many programs, after a test.

    To read the maps takes 1 ms for 1,000 of them. They are read after as many programs as `most_unseen`, or tests as
    `most_tests`, for maps that are not of JAX's programs. least_room: as many more than clearing leaves are allowed.
    most_bytes: of memory, which programs take too. limit: of maps that clearing may leave.
    """

    def __init__(
        self,
        most_maps: int = 15_000,
        least_room: int = 5_000,
        most_bytes: int = 5 << 30,
        most_unseen: int = 100,
        most_tests: int = 50,
        limit: int = 50_000,
    ) -> None:
        self.most_maps = most_maps
        self.least_room = least_room
        self.most_bytes = most_bytes
        self.most_unseen = most_unseen
        self.most_tests = most_tests
        self.limit = limit
        self._programs = self._tests = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, _: float, **kwargs: object) -> None:
        self._programs += event == _COMPILED

    def after_test(self) -> bool:
        """Tells whether it cleared. Raises RuntimeError where that leaves so many maps that the process will end."""
        self._tests += 1
        is_full = resident_bytes() > self.most_bytes
        if self._programs < self.most_unseen and self._tests < self.most_tests and not is_full:
            return False
        self._programs = self._tests = 0
        if count_maps() <= self.most_maps and not is_full:
            return False
        jax.clear_caches()  # what the bridge and PyTorch keep serves on, and compiles its programs again
        gc.collect()
        if is_full or count_maps() > self.most_maps // 2:
            clear()
        if is_full:  # what stays is not programs: no use in doing it after every test
            self.most_bytes = max(self.most_bytes, resident_bytes() + (1 << 30))
        maps = count_maps()
        if maps > self.limit:
            raise RuntimeError(f"{maps} memory maps are left without any programs, want at most {self.limit}")
        self.most_maps = max(self.most_maps, maps + self.least_room)
        return True
