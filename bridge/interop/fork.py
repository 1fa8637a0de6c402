"""An error for processes that were forked while JAX was running: they lack JAX's threads, and would wait for ever."""

import os

from jax._src import xla_bridge

__all__ = ["refuse"]

_FORKED: list[int] = []  # ids of the ancestor processes that ran JAX


def _forked() -> None:
    """Runs in a child process after a fork: notes that the parent process had started JAX, if it had."""
    # There is no public way to ask for the backends without starting them.
    if getattr(xla_bridge, "_backends", None):
        _FORKED.append(os.getppid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def refuse() -> None:
    """Raises RuntimeError in a process that was forked, directly or not, from a process in which JAX was running."""
    if _FORKED:
        raise RuntimeError(
            f"jax_kernels.bridge was called in process {os.getpid()}, which was forked from process {_FORKED[-1]}, "
            'where JAX was running: JAX does not work in forked processes. Start the process by "spawn": '
            'multiprocessing.get_context("spawn"), or DataLoader(..., multiprocessing_context="spawn")'
        )
