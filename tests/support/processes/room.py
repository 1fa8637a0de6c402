"""Limits the compiled programs that a test process keeps.

Each program that JAX or PyTorch compiles takes memory maps: 6 on two cores, more on many cores. Linux allows a process
65,530 maps and kills it at the next. A process that runs all tests of a folder compiles thousands of programs, and the
tests of a process depend on pytest-xdist. So `Room` checks after every test, whatever ran before it.
"""

import gc
import sys
from pathlib import Path

import jax

__all__ = ["Room", "clear", "count_maps", "resident_bytes"]

_COMPILED = "/jax/core/compile/backend_compile_duration"


def count_maps() -> int:
    """The number of memory maps of the process; 0 if the system does not say."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def resident_bytes() -> int:
    """The resident memory of the process; 0 if the system does not say."""
    found = Path("/proc/self/statm")
    return int(found.read_text().split()[1]) * 4096 if found.exists() else 0


def clear() -> None:
    """Drops the compiled programs of JAX, of the bridge and of PyTorch, if these are loaded."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "jax_kernels.bridge" in sys.modules:
        sys.modules["jax_kernels.bridge"].clear_cache()
    jax.clear_caches()
    gc.collect()


class Room:
    """Clears the caches after a test if there are too many programs.

    Reading the maps takes 1 ms for 1,000 maps. They are read after `most_unseen` new programs, or after `most_tests`
    tests, since not only JAX's programs have maps. least_room: additional maps allowed beyond the number left by
    clearing. most_bytes: the allowed memory, which programs take too. limit: the number of maps that clearing may
    leave.
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
        """Returns whether it cleared. Raises RuntimeError if clearing leaves more than `limit` maps."""
        self._tests += 1
        is_full = resident_bytes() > self.most_bytes
        if self._programs < self.most_unseen and self._tests < self.most_tests and not is_full:
            return False
        self._programs = self._tests = 0
        if count_maps() <= self.most_maps and not is_full:
            return False
        jax.clear_caches()  # the bridge and PyTorch keep working: they compile their programs again
        gc.collect()
        if is_full or count_maps() > self.most_maps // 2:
            clear()
        if is_full:  # the remaining memory is not programs: clearing after every test would not help
            self.most_bytes = max(self.most_bytes, resident_bytes() + (1 << 30))
        maps = count_maps()
        if maps > self.limit:
            raise RuntimeError(f"{maps} memory maps are left without any programs, want at most {self.limit}")
        self.most_maps = max(self.most_maps, maps + self.least_room)
        return True
