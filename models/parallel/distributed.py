"""Several processes that train one model: how they find each other, and how long they wait for one another."""

import os
import re
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["gathered", "initialize_distributed", "scheduler"]

# A scheduler's variable for the number of processes; Kubernetes is known by one of its own, without the number.
_COUNTS = {"Slurm": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}
_KUBERNETES = "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"


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
    """jax.distributed.initialize, with time limits. To be called before anything else touches a device.

    Without arguments the scheduler's environment tells who is who: Slurm's, Open MPI's or Kubernetes's. A process that
    none of these started, and that has no arguments, stays alone.

    Args:
      coordinator: "host:port" of process 0. num_processes, process_id: how many there are, and which this one is.
      timeout: seconds within which all processes have to be there. A process that has not been heard of for as long, up
        to 100 seconds, counts as dead: the others then end with a message that says so.
      collective_timeout: seconds after which a collective on GPUs that has not ended ends the process.

    Returns:
      Whether this process is one of several.

    Raises:
      ValueError: only some of coordinator, num_processes and process_id are given, or one is out of range.
      TypeError: a number is no int.
      RuntimeError: the processes did not find each other in time, or devices were touched before.
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
    if coordinator is not None and not (isinstance(coordinator, str) and re.fullmatch(r".+:\d+", coordinator)):
        raise ValueError(f"coordinator: got {coordinator!r}, want host:port")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"process_id: got {process_id} of {num_processes} processes, want 0 to {num_processes - 1}")
    for name, value in (("timeout", timeout), ("collective_timeout", collective_timeout)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: got {value!r}, want seconds, an int")
        if value < 1:
            raise ValueError(f"{name}: got {value}, want 1 second or more")
    if coordinator is None and scheduler() is None:
        return False
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


def gathered(text: str) -> list[str]:
    """The text of each process, which all call this. Two small collectives, over all devices, whatever the mesh."""
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]
