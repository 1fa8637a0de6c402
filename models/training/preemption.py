"""Signals that ask a run to end: SIGTERM, which schedulers send to take a machine back, and Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

__all__ = ["INTERRUPTED", "STOPPED", "stop_asked"]

# The exit statuses of a run that SIGTERM or Ctrl-C ended, as in shells.
STOPPED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


@contextlib.contextmanager
def stop_asked(on_interrupt: Callable[[], None] | None = None) -> Iterator[Callable[[int], int]]:
    """A context manager that gives a function asked(step): the exit status if a signal asks the run to end after this
    step, else 0.

    Call it after each step, with the step's number. With several processes, the process that gets SIGTERM notifies the
    others, and all end after the same step; the handler is jax.distributed's. In a single process this context installs
    the handlers, if it runs in the main thread and the caller neither handles nor ignores the signal; otherwise asked
    is always 0.

    on_interrupt: called at the first Ctrl-C in a single process, which then asks the run to end; a second one raises
    KeyboardInterrupt. None leaves Ctrl-C to the caller.
    """
    if jax.process_count() > 1:
        yield lambda step: STOPPED if multihost_utils.reached_preemption_sync_point(step) else 0
        return
    status = 0

    def terminate(*_: Any) -> None:
        nonlocal status
        status = STOPPED

    def interrupt(*_: Any) -> None:
        nonlocal status
        if status == INTERRUPTED or on_interrupt is None:
            raise KeyboardInterrupt
        status = INTERRUPTED
        on_interrupt()

    handlers = {signal.SIGTERM: terminate} | ({} if on_interrupt is None else {signal.SIGINT: interrupt})
    before = {x: signal.getsignal(x) for x in handlers}
    is_main = threading.current_thread() is threading.main_thread()  # Python has handlers only in the main thread
    installed = [x for x in handlers if is_main and before[x] in (signal.SIG_DFL, None, signal.default_int_handler)]
    for x in installed:
        signal.signal(x, handlers[x])
    try:
        yield lambda step: status
    finally:
        for x in installed:
            signal.signal(x, before[x] or signal.SIG_DFL)
