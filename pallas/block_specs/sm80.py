"""Ampere, the data-centre parts (A100, A30)."""

from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton as Backward
from jax_kernels.pallas.block_specs.specs import AttentionForwardTriton as Forward
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

ATTENTION_ORDER = ("cudnn", "triton", "xla")

ATTENTION = (
    Row("triton", 64, 16, Forward(128, 64, 4, 3), Backward(64, 64, 64, 64, 4, 2)),
    Row("triton", 128, 16, Forward(128, 64, 8, 2), Backward(64, 64, 64, 64, 8, 2)),
    Row("triton", 256, 16, Forward(64, 32, 8, 2), Backward(32, 32, 32, 32, 4, 1)),
    Row("triton", 64, 32, Forward(64, 32, 4, 2), Backward(32, 32, 32, 32, 4, 1)),
    Row("triton", 128, 32, Forward(32, 32, 4, 2), Backward(32, 32, 32, 32, 4, 1)),
    Row("triton", 256, 32, Forward(32, 16, 4, 1), Backward(16, 16, 16, 16, 4, 1)),
)
