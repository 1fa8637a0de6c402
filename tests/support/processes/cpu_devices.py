"""Runs scripts in processes of their own, where JAX sees several CPU devices."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import forked

__all__ = ["collectives_of", "done_by", "lines_of", "results_of"]

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
    """The finished process of a script that ran with `devices` CPU devices and exited with 0. limit: seconds.

    environment: variables to add, as forked.run takes them.
    """
    flags = f"--xla_force_host_platform_device_count={devices} {forked.QUICK_COMPILES}"
    modules = ("jax_kernels.models",) if "jax_kernels.models" in Path(script).read_text() else ()
    done = forked.run(script, *arguments, env={"XLA_FLAGS": flags} | environment, timeout=limit, modules=modules)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def results_of(script: str, names: Sequence[str], *first: str, **options: Any) -> dict[str, Any]:
    """Runs a script with the words `first` and then the names. Returns the JSON of its last line, results by name.

    options: see lines_of.
    """
    found = json.loads(lines_of(script, *first, *names, **options)[-1])
    assert sorted(found) == sorted(names)
    return found
