"""Ampere, the desktop and professional parts (RTX 30, A40, A10): 99 KiB of shared memory for a block."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION_DECODE
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton as Backward
from jax_kernels.pallas.block_specs.specs import AttentionForwardTriton as Forward
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

__all__ = ["ATTENTION", "ATTENTION_DECODE", "ATTENTION_ORDER"]

ATTENTION_ORDER = ("triton", "cudnn", "xla")

# Tensor cores have half to a quarter of sm_80's rate here: small blocks feed them, and none of these spills.
# float32: see sm80.py.
ATTENTION = (
    Row("triton", 64, 16, Forward(128, 64, 4, 2), Backward(64, 64, 64, 64, 4, 2)),
    Row("triton", 128, 16, Forward(128, 64, 8, 2), Backward(64, 64, 64, 64, 8, 2)),
    Row("triton", 256, 16, Forward(64, 32, 8, 2), Backward(16, 64, 64, 16, 8, 2)),
    Row("triton", 64, 32, Forward(64, 32, 8, 2), Backward(32, 64, 64, 32, 8, 2)),
    Row("triton", 128, 32, Forward(64, 16, 8, 2), Backward(32, 16, 16, 32, 8, 2)),
    Row("triton", 256, 32, Forward(32, 16, 8, 2), Backward(16, 16, 16, 16, 4, 2)),
)
