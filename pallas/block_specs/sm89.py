"""Ada (RTX 40, L4, L40S)."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION, ATTENTION_ORDER

__all__ = ["ATTENTION", "ATTENTION_ORDER"]
