"""Initialisation of several processes that train one model, with time limits, and the scheduler's environment."""

import math
import os
import re
import socket
import time
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["CoordinatorNotFound", "gathered", "initialize_distributed", "scheduler"]

# Each scheduler's variable with the number of processes. Kubernetes has other variables, without the number.
_COUNTS = {"Slurm": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}
_RETRY_SECONDS = 0.5
_KUBERNETES = "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"


class CoordinatorNotFound(RuntimeError):
    """Raised if no process answers at the coordinator's address in time."""


def scheduler(environment: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler that started this process as one of several: "Slurm", "Open MPI" or "Kubernetes"; else None."""
    for name, variable in _COUNTS.items():
        if environment.get(variable, "1").isdecimal() and int(environment.get(variable, "1")) > 1:
            return name
    return "Kubernetes" if all(name in environment for name in _KUBERNETES) else None


def initialize_distributed(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 300,
    collective_timeout: int = 600,
) -> bool:
    """Starts jax.distributed, with time limits, and returns whether there are several processes.

    Call it before any other code touches a device. Without arguments the values come from the scheduler's environment:
    Slurm, Open MPI or Kubernetes. Without arguments and without such a scheduler, the process runs alone.

    Args:
      coordinator: "host:port" of process 0.
      num_processes: the number of processes. process_id: the index of this process.
      timeout: seconds within which all processes must have started. A process that does not respond for as long, at
        most 100 seconds, counts as dead: the other processes then end with a message.
      collective_timeout: seconds after which a GPU collective that has not finished ends the process.

    Returns:
      Whether there are several processes.

    Raises:
      ValueError: only some of coordinator, num_processes and process_id are given, or an argument is out of range.
      TypeError: a number is not an int.
      RuntimeError: no process answers at the coordinator's address in time, or devices were touched before.

    If process 0 answers and another process does not start in time, JAX ends the process with the status 134.
    """
    given = (coordinator, num_processes, process_id)
    if coordinator is None and given != (None, None, None):
        raise ValueError(
            f"coordinator: got None with num_processes={num_processes} and process_id={process_id}, want host:port"
        )
    for name, number in (("num_processes", num_processes), ("process_id", process_id)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"{name}: got {number!r}, want an int")
    if coordinator is not None and (num_processes is None or process_id is None):
        raise ValueError(
            f"num_processes, process_id: got {num_processes} and {process_id}, want both with a coordinator"
        )
    if coordinator is not None:
        found = re.fullmatch(r".+:(\d+)", coordinator) if isinstance(coordinator, str) else None
        if found is None or not 0 < int(found[1]) < 2**16:
            raise ValueError(f"coordinator: got {coordinator!r}, want host:port, with a port from 1 to 65535")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"process_id: got {process_id} of {num_processes} processes, want 0 to {num_processes - 1}")
    for name, value in (("timeout", timeout), ("collective_timeout", collective_timeout)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: got {value!r}, want seconds, an int")
        if value < 1:
            raise ValueError(f"{name}: got {value}, want 1 second or more")
        if value >= 2**31:
            raise ValueError(f"{name}: got {value}, want fewer than 2**31 seconds")
    if coordinator is None and scheduler() is None:
        return False
    if coordinator is not None and process_id:
        timeout = _wait_for(coordinator, timeout)
    flag, flags = "--xla_gpu_nccl_termination_timeout_seconds", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={collective_timeout}".strip()
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=min(timeout, 100),
        shutdown_timeout_seconds=timeout,
    )
    return jax.process_count() > 1


def _wait_for(coordinator: str, timeout: int) -> int:
    """Waits until a process listens at the address. Returns the seconds of the timeout that are left, 1 or more.

    JAX would end the process without a Python error. Raises CoordinatorNotFound.
    """
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        left = max(0.1, end - time.monotonic())
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=left).close()
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > end:
                raise CoordinatorNotFound(
                    f"coordinator: got {coordinator!r}, where no process answers in {timeout} seconds "
                    f"({error.strerror or error}), want host:port of process 0"
                ) from error
            time.sleep(_RETRY_SECONDS)
        else:
            return max(1, math.ceil(end - time.monotonic()))


def gathered(text: str) -> list[str]:
    """The texts of all processes, by process index. Each process passes its own text.

    All processes must call this. It runs two small collectives over all devices, whatever the mesh.
    """
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]
