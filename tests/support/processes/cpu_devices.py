"""Runs scripts in processes of their own, where JAX sees several CPU devices."""

import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from tests.support.processes import python

__all__ = ["QUICK_COMPILES", "collectives_of", "done_by", "lines_of", "results_of"]

# XLA's flags with which it compiles for a CPU in half the time. Each fusion's emitter would load all dialects of MLIR,
# and a program of a few loops would be split into 32 modules.
QUICK_COMPILES = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)

_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives_of(text: str) -> list[tuple[Any, ...]]:
    """(name, *shape) of each result of a collective in the text of a compiled program, without repetitions."""
    shapes = lambda results: [[int(n) for n in found.split(",") if n] for found in re.findall(r"\[([\d,]*)\]", results)]
    return sorted({(name, *shape) for results, name in _COLLECTIVE.findall(text) for shape in shapes(results)})


def lines_of(script: str, *arguments: str, **options: Any) -> list[str]:
    """The output lines of a script in a process with several CPU devices. options: see done_by."""
    return done_by(script, *arguments, **options).stdout.splitlines()


def done_by(
    script: str, *arguments: str, devices: int = 8, limit: int = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The finished process of a script that ran with `devices` CPU devices and exited with 0. limit: seconds."""
    flags = f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILES}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | environment
    return python.done_by(script, *arguments, limit=limit, **environment)


def results_of(script: str, names: Sequence[str], *first: str, **options: Any) -> dict[str, Any]:
    """Runs a script with the words `first` and then the names. Returns the JSON of its last line, results by name.

    options: see lines_of.
    """
    found = json.loads(lines_of(script, *first, *names, **options)[-1])
    assert sorted(found) == sorted(names)
    return found
