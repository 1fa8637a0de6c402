"""Runs processes at the same time that find each other at a free port."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.support.processes.forked import QUICK_COMPILES
from tests.support.processes.python import PATHS

__all__ = ["free_port", "printed_by", "printed_by_ranks"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def printed_by(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], *, code: int = 0, limit: int = 240
) -> list[str]:
    """The standard outputs of Python processes that run at the same time, and must exit with `code`.

    commands: for each process its words after "python", and variables of its environment. limit: seconds.
    """
    environment = os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, *words], env=environment | own, **pipes) for words, own in commands]
    try:
        outputs = [process.communicate(timeout=limit) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (printed, errors) in zip(started, outputs, strict=True):
        assert process.returncode == code, printed[-2000:] + errors[-4000:]
    return [printed for printed, _ in outputs]


def printed_by_ranks(program: str, *words: str, ranks: int = 2) -> list[str]:
    """The standard outputs of the processes of a torch.distributed program, which is text, on CPUs.

    The program calls init_process_group("gloo"), which reads the environment.
    """
    joint = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    joint["XLA_FLAGS"] = QUICK_COMPILES
    own = [joint | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return printed_by([(["-W", "ignore", "-c", program, *words], environment) for environment in own])
