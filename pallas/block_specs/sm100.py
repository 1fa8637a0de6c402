"""Blackwell, the data-centre parts (B200, GB200)."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION

__all__ = ["ATTENTION", "ATTENTION_ORDER"]

# Pallas through Triton has no tcgen05 products, which are where this GPU's speed is.
ATTENTION_ORDER = ("cudnn", "triton", "xla")
