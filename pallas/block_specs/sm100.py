"""Blackwell, the data-centre parts (B200, GB200)."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION, ATTENTION_ORDER

__all__ = ["ATTENTION", "ATTENTION_ORDER"]
