"""Ampere, the data-centre parts (A100, A30). Hopper and the data-centre Blackwells take these Triton rows too.

What ptxas makes of each row stands in tests/pallas/attention/compile_budget.json.
"""

from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton as Backward
from jax_kernels.pallas.block_specs.specs import AttentionDecodeRow as DecodeRow
from jax_kernels.pallas.block_specs.specs import AttentionDecodeTriton as Decode
from jax_kernels.pallas.block_specs.specs import AttentionForwardTriton as Forward
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

ATTENTION_ORDER = ("triton", "cudnn", "xla")

# 8 warps for 128 x 128 scores: 4 spill on sm_80, and on Hopper ptxas then serialises wgmma for want of registers.
# A wgmma reads its first operand from shared memory, which 128 columns hide and 64 or fewer don't. The backward's
# blocks of 64 x 128 are twice what one warpgroup can hold, and halve what is read from L2 per FLOP.
# float32: exact products, its default, run on the plain cores and are unrolled: larger blocks spill kilobytes.
ATTENTION = (
    Row("triton", 64, 16, Forward(128, 128, 8, 2), Backward(64, 128, 128, 64, 8, 2)),
    Row("triton", 128, 16, Forward(128, 128, 8, 2), Backward(64, 128, 128, 64, 8, 2)),
    Row("triton", 256, 16, Forward(64, 64, 8, 2), Backward(32, 64, 64, 32, 8, 2)),
    Row("triton", 64, 32, Forward(64, 32, 8, 2), Backward(32, 64, 64, 32, 8, 2)),
    Row("triton", 128, 32, Forward(64, 16, 8, 2), Backward(32, 16, 16, 32, 8, 2)),
    Row("triton", 256, 32, Forward(32, 32, 8, 2), Backward(16, 32, 32, 16, 8, 2)),
)

# Not measured yet. Two stages of keys and values fit the 99 KiB of sm_86 too.
ATTENTION_DECODE = (
    DecodeRow("triton", 64, Decode(128, 4, 3)),
    DecodeRow("triton", 128, Decode(64, 4, 3)),
    DecodeRow("triton", 256, Decode(32, 4, 3)),
)
