"""The public ops as the command line names them, each with its typical call."""

import importlib
import pkgutil

import jax_kernels.testing
from jax_kernels.testing.typical_call import TypicalCall

__all__ = ["OPS", "SHORT_NAMES"]

# By a short name of an op, the op's own name.
SHORT_NAMES = {"attention": "flash_attention"}

# The modules of jax_kernels.testing in the order of their ops in the commands. The ops of other modules come last.
_ORDER = (
    "attention",
    "flash_attention_fp8",
    "decode_attention",
    "dilated_attention",
    "ring_attention",
    "masked_attention",
    "matmul",
    "mlp",
    "grouped_matmul",
    "grouped_gated_matmul",
    "normalization",
    "linear_cross_entropy",
)


def _typical_calls() -> dict[str, TypicalCall]:
    """The entries of TYPICAL of all modules of jax_kernels.testing."""
    found: dict[str, TypicalCall] = {}
    names = (module.name for module in pkgutil.iter_modules(jax_kernels.testing.__path__))
    for name in dict.fromkeys([*_ORDER, *names]):
        found |= getattr(importlib.import_module(f"jax_kernels.testing.{name}"), "TYPICAL", {})
    return found


OPS = _typical_calls()
