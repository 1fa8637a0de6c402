"""Blackwell, the desktop and professional parts (RTX 50, RTX PRO 6000): shared memory and mma as on sm_86."""

from jax_kernels.pallas.block_specs.sm86 import ATTENTION, ATTENTION_ORDER

__all__ = ["ATTENTION", "ATTENTION_ORDER"]
