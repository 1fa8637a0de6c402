"""Scripts in processes of their own, where JAX sees several CPU devices."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["done_by", "lines_of", "results_of"]


def lines_of(script: str, *arguments: str, **options: Any) -> list[str]:
    """The lines that a script prints in a process with several CPU devices. options: of done_by."""
    return done_by(script, *arguments, **options).stdout.splitlines()


def done_by(
    script: str, *arguments: str, devices: int = 8, limit: int = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script's process, which had this number of CPU devices and ended well. limit: seconds."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment, capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def results_of(script: str, names: Sequence[str], *first: str, **options: Any) -> dict[str, Any]:
    """The results by name that a script prints as JSON in its last line, given the words `first` and then the names.

    options: of lines_of.
    """
    found = json.loads(lines_of(script, *first, *names, **options)[-1])
    assert sorted(found) == sorted(names)
    return found
