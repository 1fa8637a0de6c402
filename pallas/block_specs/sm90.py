"""Hopper (H100, H200, GH200)."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION as SM80
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90 as Backward
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90 as Forward
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

WIDE_CAUSAL = Forward(2, 64, 2, share_q_out=True, heads_together=8)

ATTENTION_ORDER = ("mosaic_gpu", "cudnn", "triton", "xla")

# H200, bf16, (2, 8192, 16 x 128 | 32 x 64 | 8 x 256), device time over jax.nn's cuDNN in the same run.
# rotate=5 gave the non-causal backward 4 % over 0, heads_together=4 the causal one 2 %; heads_together=16 the causal
# forward at 64 7 % over 1, and 8 the one at 256 23 %. cuDNN's causal forward at 256 stays ahead (0.89).
ATTENTION = (
    Row("mosaic_gpu", 64, 16, Forward(3, 128, 3), Backward(128, rotate=5), is_causal=False),
    Row("mosaic_gpu", 64, 16, Forward(2, 128, 4, heads_together=16), Backward(128, heads_together=4), is_causal=True),
    Row("mosaic_gpu", 128, 16, Forward(2, 128, 2), Backward(64, rotate=5), is_causal=False),
    Row("mosaic_gpu", 128, 16, Forward(2, 128, 2), Backward(64, heads_together=4), is_causal=True),
    Row("mosaic_gpu", 192, 16, Forward(2, 64, 2, share_q_out=True), Backward(64, do_stages=1)),
    Row("mosaic_gpu", 256, 16, Forward(2, 64, 2, share_q_out=True), Backward(64, do_stages=1), is_causal=False),
    Row("mosaic_gpu", 256, 16, WIDE_CAUSAL, Backward(64, do_stages=1), is_causal=True),
    *SM80,
)
