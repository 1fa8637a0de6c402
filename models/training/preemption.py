"""SIGTERM, which schedulers send to take a machine back: all processes then end after the same step."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

__all__ = ["STOPPED", "stop_asked"]

# The exit status of a run that SIGTERM ended, as in shells.
STOPPED = 128 + signal.SIGTERM


@contextlib.contextmanager
def stop_asked() -> Iterator[Callable[[int], bool]]:
    """A context manager that gives a function asked(step): whether SIGTERM asks the run to end after this step.

    Call it after each step, with the step's number. With several processes, the process that gets SIGTERM notifies the
    others, and all end after the same step; the handler is jax.distributed's. In a single process this context installs
    the handler, if it runs in the main thread and the caller neither handles nor ignores SIGTERM; otherwise asked is
    always False.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    asked = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()  # Python has handlers only in the main thread
    if not is_main or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
        yield lambda step: False
        return
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda step: asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
