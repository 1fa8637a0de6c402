"""Processes without Pallas-Triton, as with a later JAX."""

import os
import runpy
import sys
from pathlib import Path

VARIABLE = "JAX_KERNELS_TESTS_WITHOUT_TRITON"
_SITE = Path(__file__).with_name("site")


def is_on() -> bool:
    """Whether this process has no Pallas-Triton: the variable is set, and is not 0."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def block() -> None:
    """If the variable is set, makes each import of Pallas-Triton raise ImportError, here and in child processes.

    No module may have imported it before.
    """
    if not is_on():
        return
    if sys.modules.get("jax.experimental.pallas.triton") is not None:
        raise RuntimeError(f"{VARIABLE}: got Pallas-Triton imported already, want tests.support imported first")
    runpy.run_path(str(_SITE / "sitecustomize.py"))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(_SITE) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_SITE), *filter(None, paths)])
