"""Ampere, the desktop and professional parts (RTX 30, A40, A10)."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION, ATTENTION_ORDER

__all__ = ["ATTENTION", "ATTENTION_ORDER"]
