"""Block specs of Hopper (H100, H200, GH200), measured on an H200 in bfloat16. sm90_attention.py has those of attention.

Beside a number stands its reason. benchmarks/notes has the other numbers that were tried.
"""

from jax_kernels.pallas.block_specs.matmul_specs import (
    MatmulLowBitRow,
    MatmulLowBitSm90,
    MatmulOrder,
    MatmulRow,
    MatmulSm90,
    MatmulTriton,
)
from jax_kernels.pallas.block_specs.sm80 import MATMUL as SM80_MATMUL
from jax_kernels.pallas.block_specs.sm80 import MATMUL_LOW_BIT as SM80_LOW_BIT
from jax_kernels.pallas.block_specs.sm80 import NORM as SM80_NORM
from jax_kernels.pallas.block_specs.sm90_attention import (
    ATTENTION,
    ATTENTION_DECODE,
    ATTENTION_DQUERY,
    ATTENTION_FP8,
    DILATED_LAUNCHES,
)
from jax_kernels.pallas.block_specs.specs import NormOrder, NormRow, NormSm90, RingRow

__all__ = [
    "ATTENTION",
    "ATTENTION_DECODE",
    "ATTENTION_DQUERY",
    "ATTENTION_FP8",
    "ATTENTION_ORDER",
    "DILATED_LAUNCHES",
    "LOW_BIT_ORDER",
    "MATMUL",
    "MATMUL_LOW_BIT",
    "MATMUL_ORDER",
    "MATMUL_TRITON",
    "NORM",
    "NORM_ORDER",
    "RING",
]

ATTENTION_ORDER = ("mosaic_gpu", "cudnn", "triton", "xla")

# rows: 16 x 8192 x 8192 (rows, columns, inner) takes 0.033 ms in Triton, 0.035 in XLA and 0.076 in the Hopper kernel;
# 64 x 4096 x 4096 takes 0.0122, 0.0145 and 0.0392. tiles: with fewer than multiprocessors some of those idle.
MATMUL_ORDER = (
    MatmulOrder(rows=64, names=("triton", "xla", "mosaic_gpu")),
    MatmulOrder(tiles=100, names=("xla", "triton", "mosaic_gpu")),
    MatmulOrder(names=("mosaic_gpu", "xla", "triton")),
)

# Not measured. wgmma takes its operands from shared memory, so that there are registers for twice sm_80's block_k.
MATMUL_TRITON = (
    SM80_MATMUL[0],
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=16,
        is_aligned=True,
        config=MatmulTriton(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4, split_steps=8),
    ),
    *SM80_MATMUL[-2:],
)

WIDE = MatmulSm90(block_n=192, stages=4, rows_together=8, pingpong=True, wg_rows=128, short_activation=True)

# At 8192 x 8192 x 8192, 16 bits: (block_n, stages, rows_together) 256, 4, 8 takes 1.54 to 1.60 ms, 256, 3, 8 1.56,
# 256, 4, 16 1.58, 256, 4, 4 1.65, 128, 6, 8 1.88. A cluster of 2: 0.187 for 0.194 at 4096 x 4096 x 4096,
# 1.527 for 1.563 at 8192 x 8192 x 8192 with an epilogue, 0.785 for 0.770 at 16384 x 4096 x 4096.
MATMUL = (
    # 8192 x 8192 x 8192 on an H100: 0.823 ms with promoted_steps 2, 0.911 with 1. Before products started without
    # zeros, on an H200: 0.831, 1.009, 0.922 with block_n 128, 0.874 with rows_together 16; 0.997 with three
    # warpgroups of 128 columns, promoted_steps 1 and a cluster of 2.
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        bits=8,
        config=MatmulSm90(block_n=256, stages=4, rows_together=8, promoted_steps=2),
    ),
    MatmulRow(
        implementation="mosaic_gpu",
        columns=128,
        config=MatmulSm90(block_n=128, stages=6, rows_together=8, promoted_steps=2, cluster=2),
    ),
    # 8192 x 14336 x 4096: 2.686 ms, with clusters of two 2.775. In another run 2.749 with a short silu, 2.799 without,
    # and with a short one 2.785 with rows_together 16, 2.819 with 4, 2.841 with pingpong.
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        config=MatmulSm90(block_n=256, stages=4, rows_together=8, promoted_steps=2, short_activation=True),
        is_gated=True,
    ),
    # Each warpgroup has work tiles of 128 x 192, and its epilogue runs beside the other's products. Bias and gelu, 8192
    # x 8192 x 8192: 1.552 ms, with the last row 1.618, with clusters of two 1.578; plain 1.528, 1.571, 1.583. At 16384
    # x 4096 x 4096, where it leaves 6 % unused and the last row 3 %, 0.825 for 0.806, plain 0.793 for 0.781.
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        config=WIDE,
        bits=16,
        derives=False,
        unused=0.025,
    ),
    # The less of the inner dimension, the more the epilogue counts. Bias and gelu on an H100, 16384 x 4096 x 2048, 6 %
    # unused: 0.397 ms, with the last row 0.407, plain 0.385 for 0.377; 16384 x 6144 x 2048, 3 %: 0.579 for 0.646,
    # plain 0.577 for 0.569; 16384 x 2048 x 5632, 6 %: 0.541 for 0.543, plain 0.534 for 0.488.
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        inner=2048,
        config=WIDE,
        bits=16,
        derives=False,
        has_long_epilogue=True,
        unused=0.08,
    ),
    # Bias and gelu, 8192 x 8192 x 8192: 1.566 ms, without early_bias and short_activation 1.600, with pingpong 1.682,
    # of 128 columns with wg_rows 128 1.687, and with pingpong, too, 1.672. 16384 x 4096 x 4096: 0.819, 0.821, 0.848,
    # 0.863, 0.834.
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        config=MatmulSm90(
            block_n=256,
            stages=4,
            rows_together=8,
            promoted_steps=2,
            cluster=2,
            early_bias=True,
            short_activation=True,
        ),
    ),
    *MATMUL_TRITON,
)

LOW_BIT_ORDER = (
    MatmulOrder(rows=64, names=("mosaic_gpu", "triton", "xla")),
    MatmulOrder(names=("xla", "triton")),
)

# N = K = 8192, 16 rows: of int4 (compute_wgs, stages) 4, 3 takes 0.0147 ms, 4, 4 0.0148, 4, 6 0.0158, 2, 6 0.0154; of
# int8 0.0230, 0.0237, 0.0249, 0.0228; of mxfp8 0.0293, 0.0295, 0.0297, 0.0327. Triton: 0.0262, 0.0320, 0.0779.
MATMUL_LOW_BIT = (
    MatmulLowBitRow(implementation="mosaic_gpu", bits=16, rows=32, config=MatmulLowBitSm90(compute_wgs=4, stages=3)),
    # Four warpgroups have 112 registers a thread each, and would spill sums of more than 32 rows.
    MatmulLowBitRow(implementation="mosaic_gpu", bits=16, rows=64, config=MatmulLowBitSm90(compute_wgs=2, stages=6)),
    *SM80_LOW_BIT,
)

# Hopper's time over Triton's, layer norm: forward 0.91 at (32768, 4096), 0.90 at (16384, 8192), 0.99 at (65536, 1024),
# 0.81 at (8192, 16384); backward 0.82, 0.62, 0.90, 0.47. Fewer columns are not measured.
NORM_ORDER = (
    NormOrder(columns=768, names=("triton", "mosaic_gpu", "xla")),
    NormOrder(names=("mosaic_gpu", "triton", "xla")),
)

# A thread has up to 32 columns of a block. With four warpgroups it has 128 registers, of which the sums of the backward
# take 64. Layer norm, ms: forward of (32768, 4096) with turns 2 0.1297, 3 0.1326, 4 0.1339, 1 0.1745, with claims
# 0.1326; of (16384, 8192) 0.1435, 0.1321, 0.1340, and 0.1323 with claims; of (65536, 1024) 0.0668, 0.0679, 0.0682; of
# (8192, 16384) with claims and 3 stages 0.1367, with 5 0.1404, without claims 0.1473. Backward with claims 0.1965,
# 0.1987, 0.1060, 0.2013, without 0.2203, 0.2237, 0.1159, 0.2273.
NORM = (
    NormRow(
        implementation="mosaic_gpu",
        columns=1024,
        forward=NormSm90(row_warps=1, warpgroups=1, stages=3, turns=2),
        backward=NormSm90(row_warps=1, warpgroups=4, stages=3, claims=True),
    ),
    NormRow(
        implementation="mosaic_gpu",
        columns=4096,
        forward=NormSm90(row_warps=4, warpgroups=1, stages=3, turns=2),
        backward=NormSm90(row_warps=4, warpgroups=4, stages=3, claims=True),
    ),
    NormRow(
        implementation="mosaic_gpu",
        columns=8192,
        forward=NormSm90(row_warps=8, warpgroups=2, stages=4, turns=3),
        backward=NormSm90(row_warps=8, warpgroups=4, stages=3, claims=True),
    ),
    NormRow(
        implementation="mosaic_gpu",
        columns=None,
        forward=NormSm90(row_warps=16, warpgroups=4, stages=3, claims=True),
        backward=NormSm90(row_warps=16, warpgroups=4, stages=3, claims=True),
    ),
    *SM80_NORM,
)

# Two H200s over NVLink, causal, 16 heads of 128, forward and both directions, ms, "ring" and "all_gather": with 1,024
# tokens on each 0.202, 0.236 and 0.417, 0.412; 2,048 tokens 0.273, 0.258 and 0.588, 0.690; 4,096 tokens 0.390, 0.454
# and 1.293, 1.547. Two H100s, "ring" and "all_to_all": with 8,192 tokens 1.103, 1.259 and 4.216, 4.011; 32,768 tokens
# 13.31, 14.08 and 54.52, 52.77; 65,536 tokens 54.74, 55.69 and 217.7, 208.9; a decoder's step with 4,096 tokens of four
# sequences 292.5 and 288.1. That step with sends by copies: ring 281.4, all-to-alls 275.5, permutes 271.2. Four H100s
# with copies, "ring", "all_to_all" by all-to-alls and by permutes: with 4,096 tokens on each 0.739, 0.875, 0.750 and
# 2.672, 2.302, 2.190; 16,384 tokens 7.235, 7.499, 7.164 and 28.73, 27.73, 27.25. Sends two steps ahead 0.739 and 2.627;
# 7.444 and 29.25. More GPUs are not measured. Two H100s with copies and a window of 1,024, with 4,096 tokens on each,
# "ring", "halo" and "all_to_all", zigzag: 0.403, 0.233, 0.364 and 1.419, 0.732, 0.739; contiguous, "ring" and "halo":
# 0.231, 0.207 and 0.739, 0.481. A window of 4,096 with 16,384 tokens, zigzag: 2.021, 1.325, 1.554 and 7.570, 5.030,
# 4.161; contiguous: 1.324, 1.168 and 5.403, 4.507. Four H100s with 16,384 tokens, zigzag, a window of 1,024: 1.924,
# 0.523, 1.195 and 6.957, 1.945, 2.880; of 4,096: 2.683, 1.368, 1.753 and 9.492, 5.116, 4.922.
RING = (
    RingRow(strategy="ring", differentiated="all_to_all", is_windowed=False),
    RingRow(strategy="halo", differentiated="all_to_all"),
)
