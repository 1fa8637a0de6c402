"""SIGTERM, by which schedulers take a machine back: a common end of all processes after the same step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

__all__ = ["STOPPED", "stop_asked"]

# The exit status of a run that SIGTERM ended, as shells have it.
STOPPED = 128 + signal.SIGTERM


@contextlib.contextmanager
def stop_asked() -> Iterator[Callable[[int], bool]]:
    """A function to call after each step with its number: whether SIGTERM asks for the run's end after this step.

    Of several processes, one that gets SIGTERM tells the others, and all end after the same step: jax.distributed has
    the handler. In a single process this has it, in the main thread, where SIGTERM has no handler and is not ignored.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    asked = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()  # others can have no handlers in Python
    if not is_main or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
        yield lambda step: False
        return
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda step: asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
