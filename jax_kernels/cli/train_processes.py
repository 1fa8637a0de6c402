"""Checks that all processes of `jax-kernels train` have the same arguments."""

import json
from collections.abc import Mapping
from typing import Any

import jax

from jax_kernels.models.parallel.distributed import gathered

__all__ = ["check_agreement"]


def check_agreement(given: Mapping[str, Any]) -> None:
    """Raises ValueError, on each process, if an argument differs between the processes of jax.distributed.

    given: this process's JSON values by the names of their options; each process has the same names.
    """
    if jax.process_count() > 1:
        told = disagreements([json.loads(text) for text in gathered(json.dumps(given))])
        if told:
            raise ValueError("; ".join(told))


def disagreements(given: list[dict[str, Any]]) -> list[str]:
    """The text of an error for each argument that is not the same in all processes.

    given: the arguments of each process, in the order of the processes.
    """
    told = []
    for name, wanted in given[0].items():
        other = next((i for i, own in enumerate(given) if own[name] != wanted), None)
        if other is not None:
            values = f"got {wanted} in process 0 and {given[other][name]} in process {other}"
            told.append(f"{name}: {values}, want the same in all processes")
    return told
