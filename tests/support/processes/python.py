"""Runs this Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["PATHS", "done_by"]

# The PYTHONPATH of a process that imports this checkout.
PATHS = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])


def done_by(*words: str | Path, limit: int = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished process of python WORDS, with its output as text; it must exit with 0.

    limit: seconds. environment: variables to add or to replace.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=os.environ | {"PYTHONPATH": PATHS} | environment,
        capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done
