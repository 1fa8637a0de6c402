"""Blackwell, the desktop and professional parts (RTX 50, RTX PRO 6000): shared memory and mma as on sm_86."""

from jax_kernels.pallas.block_specs.sm86 import ATTENTION

__all__ = ["ATTENTION", "ATTENTION_ORDER"]

# As on sm_100, until the Triton rows are measured there.
ATTENTION_ORDER = ("cudnn", "triton", "xla")
