"""Hopper (H100, H200, GH200)."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION as SM80
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90 as Backward
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90 as Forward
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

ATTENTION_ORDER = ("mosaic_gpu", "cudnn", "triton", "xla")

ATTENTION = (
    Row("mosaic_gpu", 64, 16, Forward(3, 128, 3), Backward(128, rotate=5), is_causal=False),
    Row("mosaic_gpu", 64, 16, Forward(2, 128, 4, heads_together=16), Backward(128, heads_together=4), is_causal=True),
    Row("mosaic_gpu", 128, 16, Forward(2, 128, 2), Backward(64, rotate=5), is_causal=False),
    Row("mosaic_gpu", 128, 16, Forward(2, 128, 2), Backward(64, heads_together=4), is_causal=True),
    Row("mosaic_gpu", 192, 16, Forward(2, 64, 2, share_q_out=True), Backward(64, do_stages=1)),
    Row("mosaic_gpu", 256, 16, Forward(2, 64, 2, share_q_out=True), Backward(64, do_stages=1), is_causal=False),
    Row(
        "mosaic_gpu",
        256,
        16,
        Forward(2, 64, 2, share_q_out=True, heads_together=8),
        Backward(64, do_stages=1),
        is_causal=True,
    ),
    *SM80,
)
