"""Blackwell, the data-centre parts (B200, GB200)."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION, ATTENTION_DECODE, NORM, NORM_ORDER

__all__ = ["ATTENTION", "ATTENTION_DECODE", "ATTENTION_ORDER", "NORM", "NORM_ORDER"]

# Until the Triton rows, which were chosen for sm_80, are measured there.
ATTENTION_ORDER = ("cudnn", "triton", "xla")
