"""The processes of `jax-kernels train` among themselves: equal arguments at the start, and a common end on SIGTERM."""

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["STOPPED", "check_agreement", "stop_asked"]

# The exit status of a run that SIGTERM ended, as shells have it.
STOPPED = 128 + signal.SIGTERM


def check_agreement(given: Mapping[str, Any]) -> None:
    """Raises ValueError, on each process, for arguments that are not the same on all of them.

    given: JSON values by the names of their options, the same names on each process.
    """
    if jax.process_count() > 1:
        told = disagreements([json.loads(text) for text in _gathered(json.dumps(given))])
        if told:
            raise ValueError("; ".join(told))


def disagreements(given: list[dict[str, Any]]) -> list[str]:
    """An error for each argument that is not the same in all processes. given: the arguments of each process."""
    told = []
    for name, wanted in given[0].items():
        other = next((i for i, own in enumerate(given) if own[name] != wanted), None)
        if other is not None:
            values = f"got {wanted} in process 0 and {given[other][name]} in process {other}"
            told.append(f"{name}: {values}, want the same in all processes")
    return told


def _gathered(text: str) -> list[str]:
    """The text of each process. Two small collectives, over all devices, whatever the mesh."""
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


@contextlib.contextmanager
def stop_asked() -> Iterator[Callable[[int], bool]]:
    """A function to call after each step with its number: whether SIGTERM asks for the run's end after this step.

    Of several processes, one that gets SIGTERM tells the others, and all end after the same step.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # where Python has no handlers
        yield lambda step: False
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda step: asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
