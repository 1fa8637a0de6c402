"""Processes without Pallas-Triton, as with a later JAX."""

import os
import sys

VARIABLE = "JAX_KERNELS_TESTS_WITHOUT_TRITON"
_MODULES = "jax.experimental.pallas.triton", "jax._src.pallas.triton"


def is_on() -> bool:
    """Whether this process has no Pallas-Triton: the variable is set, and is not 0."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def block() -> None:
    """Makes each import of Pallas-Triton raise ImportError from here on, if the variable is set."""
    if not is_on():
        return
    if loaded := [name for name in _MODULES if sys.modules.get(name) is not None]:
        raise RuntimeError(f"{VARIABLE}: got {loaded} imported already, want tests.support imported first")
    sys.modules.update(dict.fromkeys(_MODULES))  # type: ignore[arg-type]
