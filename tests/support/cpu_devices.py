"""Scripts in processes of their own, where JAX sees several CPU devices."""

import os
import subprocess
import sys

__all__ = ["lines_of"]


def lines_of(script: str, *arguments: str, devices: int = 8, limit: int = 200) -> list[str]:
    """The lines that a script prints in a process with so many CPU devices. limit: seconds."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment, capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
