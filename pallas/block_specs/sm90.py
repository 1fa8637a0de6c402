"""Block specs of Hopper (H100, H200, GH200), measured on an H200 in bfloat16. Attention's are in sm90_attention.py.

The comment at a value gives its reason. benchmarks/notes has the other values that were tried.
"""

from jax_kernels.pallas.block_specs.matmul_specs import (
    GroupedOrder,
    GroupedRow,
    GroupedSm90,
    MatmulLowBitRow,
    MatmulLowBitSm90,
    MatmulOrder,
    MatmulRow,
    MatmulSm90,
    MatmulTriton,
)
from jax_kernels.pallas.block_specs.normalization_specs import NormOrder, NormRow, NormSm90
from jax_kernels.pallas.block_specs.record import BlockSpecs, measured
from jax_kernels.pallas.block_specs.ring_specs import RingCosts, RingRow
from jax_kernels.pallas.block_specs.sm80 import SM80
from jax_kernels.pallas.block_specs.sm90_attention import (
    ATTENTION,
    ATTENTION_DECODE,
    ATTENTION_DQUERY,
    ATTENTION_FP8,
    DILATED_LAUNCHES,
)
from jax_kernels.pallas.block_specs.specs import H100, H200

# rows: 16 x 8192 x 8192 (rows, columns, inner) takes 0.033 ms in Triton, 0.035 in XLA and 0.076 in the Hopper kernel;
# 64 x 4096 x 4096 takes 0.0122, 0.0145 and 0.0392. tiles: with fewer tiles than SMs some SMs idle.
MATMUL_ORDER = measured(
    H200,
    MatmulOrder(rows=64, names=("triton", "xla", "mosaic_gpu")),
    MatmulOrder(tiles=100, names=("xla", "triton", "mosaic_gpu")),
    MatmulOrder(names=("mosaic_gpu", "xla", "triton")),
)

FEW_ROWS, UNALIGNED, FLOAT32 = (row for row in SM80.matmul if not row.is_aligned)
# Not measured. wgmma reads its operands from shared memory, which leaves registers for twice sm_80's block_k.
MATMUL_TRITON = (
    FEW_ROWS,
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=16,
        is_aligned=True,
        config=MatmulTriton(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4, split_steps=8),
    ),
    UNALIGNED,
    FLOAT32,
)

WIDE = MatmulSm90(block_n=192, stages=4, row_group=8, pingpong=True, wg_rows=128, short_activation=True)

# At 8192 x 8192 x 8192, 16 bits, ms by (block_n, stages, row_group): (256, 4, 8) 1.54 to 1.60, (256, 3, 8) 1.56,
# (256, 4, 16) 1.58, (256, 4, 4) 1.65, (128, 6, 8) 1.88. With a cluster of 2, and without: 0.187 and 0.194 at 4096 x
# 4096 x 4096; 1.527 and 1.563 at 8192 x 8192 x 8192 with an epilogue; 0.785 and 0.770 at 16384 x 4096 x 4096.
MATMUL = (
    # 8192 x 8192 x 8192 on an H100: 0.823 ms with promoted_steps 2, 0.911 with 1. On an H200, while kernels still wrote
    # zeros to the accumulators: 0.831 with 2, 1.009 with 1, 0.922 with block_n 128, 0.874 with row_group 16; 0.997
    # with three warpgroups of 128 columns, promoted_steps 1 and a cluster of 2.
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        bits=8,
        config=MatmulSm90(block_n=256, stages=4, row_group=8, promoted_steps=2),
        measured_on=H200,
    ),
    MatmulRow(
        implementation="mosaic_gpu",
        columns=128,
        config=MatmulSm90(block_n=128, stages=6, row_group=8, promoted_steps=2, cluster=2),
    ),
    # 8192 x 14336 x 4096: 2.686 ms, with clusters of two 2.775. In another run 2.749 with short_activation, 2.799
    # without; with short_activation 2.785 with row_group 16, 2.819 with 4, 2.841 with pingpong.
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        config=MatmulSm90(block_n=256, stages=4, row_group=8, promoted_steps=2, short_activation=True),
        is_gated=True,
        measured_on=H200,
    ),
    # Each warpgroup has work tiles of 128 x 192, and its epilogue runs during the other warpgroup's matmuls. At 8192 x
    # 8192 x 8192, bias and gelu: 1.552 ms, with the last Hopper row 1.618, with clusters of two 1.578; plain: 1.528,
    # 1.571, 1.583. At 16384 x 4096 x 4096 this row leaves 6 % unused and the last Hopper row 3 %: bias and gelu 0.825
    # and 0.806, plain 0.793 and 0.781.
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        config=WIDE,
        bits=16,
        derives=False,
        unused=0.025,
        measured_on=H200,
    ),
    # The shorter the inner dimension, the larger the epilogue's share. On an H100, ms with this row and with the last
    # Hopper row:
    #   16384 x 4096 x 2048, 6 % unused: bias and gelu 0.397 and 0.407, plain 0.385 and 0.377
    #   16384 x 6144 x 2048, 3 % unused: bias and gelu 0.579 and 0.646, plain 0.577 and 0.569
    #   16384 x 2048 x 5632, 6 % unused: bias and gelu 0.541 and 0.543, plain 0.534 and 0.488
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        inner=2048,
        config=WIDE,
        bits=16,
        derives=False,
        has_long_epilogue=True,
        unused=0.08,
        measured_on=H100,
    ),
    # Bias and gelu, ms at 8192 x 8192 x 8192 and at 16384 x 4096 x 4096:
    #   this row 1.566, 0.819
    #   without early_bias and short_activation 1.600, 0.821
    #   with pingpong 1.682, 0.848
    #   128 columns with wg_rows 128 1.687, 0.863; with pingpong too 1.672, 0.834
    MatmulRow(
        implementation="mosaic_gpu",
        columns=None,
        config=MatmulSm90(
            block_n=256,
            stages=4,
            row_group=8,
            promoted_steps=2,
            cluster=2,
            early_bias=True,
            short_activation=True,
        ),
        measured_on=H200,
    ),
    *MATMUL_TRITON,
)

LOW_BIT_ORDER = (
    MatmulOrder(rows=64, names=("mosaic_gpu", "triton", "xla"), measured_on=H200),
    MatmulOrder(names=("xla", "triton")),
)

# N = K = 8192, 16 rows, ms:
#   (compute_wgs, stages)   (4, 3)  (4, 4)  (4, 6)  (2, 6)  Triton
#   int4                    0.0147  0.0148  0.0158  0.0154  0.0262
#   int8                    0.0230  0.0237  0.0249  0.0228  0.0320
#   mxfp8                   0.0293  0.0295  0.0297  0.0327  0.0779
MATMUL_LOW_BIT = (
    *measured(
        H200,
        MatmulLowBitRow(
            implementation="mosaic_gpu", bits=16, rows=32, config=MatmulLowBitSm90(compute_wgs=4, stages=3)
        ),
        # With four warpgroups a thread has 112 registers, and sums of more than 32 rows would spill.
        MatmulLowBitRow(
            implementation="mosaic_gpu", bits=16, rows=64, config=MatmulLowBitSm90(compute_wgs=2, stages=6)
        ),
    ),
    *SM80.matmul_low_bit,
)

FEW_GROUPED, _, _, *OTHER_GROUPED = SM80.grouped
# As in MATMUL_TRITON, wgmma leaves registers for twice sm_80's block_k. 32768 x 1280 x 2560 in 64 groups: 0.80 of the
# speed of a dense matmul.
WIDE_GROUPED = MatmulTriton(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)
# Rows x inner x columns, groups, ms: the Hopper kernels, Triton, torch._grouped_mm; with gradients after the semicolon.
# Even groups, and skewed groups below, before the row's largest_first and snake:
#   32768 x 2560 x 1280, 64   0.316 0.352 0.343; 1.074 1.262 1.094
#   skewed                    0.361 0.384 0.386; 1.188 1.313 1.258
#   16384 x 4096 x 14336, 8   2.480 2.940 2.691; 7.858 9.593 8.221
#   skewed                    2.627 3.178 2.738
# "xla" takes 8.7 times as long as Triton. Few rows in a group are not measured.
GROUPED_ORDER = (
    GroupedOrder(mean_rows=64, names=("triton", "mosaic_gpu", "xla")),
    GroupedOrder(names=("mosaic_gpu", "triton", "xla"), measured_on=H200),
)
GROUPED = (
    # The blocks of the matmul.
    GroupedRow(
        implementation="mosaic_gpu",
        bits=16,
        forward=GroupedSm90(block_n=256, stages=4, row_group=8),
        weight_gradient=GroupedSm90(block_n=256, stages=4, row_group=8),
        measured_on=H200,
    ),
    # The blocks of the dense 8-bit matmul; others were not tried. The gradient of w has 16 bits.
    GroupedRow(
        implementation="mosaic_gpu",
        bits=8,
        is_gated=False,
        forward=GroupedSm90(block_n=256, stages=4, row_group=8),
        weight_gradient=GroupedSm90(block_n=256, stages=4, row_group=8),
        measured_on=H200,
    ),
    # A gated unit in 8 bits: the blocks of the matmul, with half of the columns for each of its weights.
    GroupedRow(
        implementation="mosaic_gpu",
        bits=8,
        forward=GroupedSm90(block_n=256, stages=4, row_group=8),
        weight_gradient=GroupedSm90(block_n=256, stages=4, row_group=8),
        measured_on=H200,
    ),
    FEW_GROUPED,
    GroupedRow(
        implementation="triton",
        bits=16,
        is_aligned=True,
        forward=WIDE_GROUPED,
        weight_gradient=WIDE_GROUPED,
        measured_on=H100,
    ),
    *OTHER_GROUPED,
)

# Hopper's time over Triton's, layer norm: forward 0.91 at (32768, 4096), 0.90 at (16384, 8192), 0.99 at (65536, 1024),
# 0.81 at (8192, 16384); backward 0.82, 0.62, 0.90, 0.47. Fewer columns are not measured.
NORM_ORDER = (
    NormOrder(columns=768, names=("triton", "mosaic_gpu", "xla")),
    NormOrder(names=("mosaic_gpu", "triton", "xla"), measured_on=H200),
)

# A thread has up to 32 columns of a block. With four warpgroups it has 128 registers, and the sums of the backward take
# 64 of them. Layer norm, ms:
#                                      (32768, 4096)  (16384, 8192)  (65536, 1024)  (8192, 16384)
#   forward, turns 1                   0.1745
#   forward, turns 2                   0.1297         0.1435         0.0668
#   forward, turns 3                   0.1326         0.1321         0.0679
#   forward, turns 4                   0.1339         0.1340         0.0682
#   forward, claims                    0.1326         0.1323                        0.1367
#   forward, claims and 5 stages                                                    0.1404
#   forward, neither turns nor claims                                               0.1473
#   backward, claims                   0.1965         0.1987         0.1060         0.2013
#   backward, no claims                0.2203         0.2237         0.1159         0.2273
NORM = (
    NormRow(
        implementation="mosaic_gpu",
        columns=1024,
        forward=NormSm90(row_warps=1, warpgroups=1, stages=3, turns=2),
        backward=NormSm90(row_warps=1, warpgroups=4, stages=3, claims=True),
        measured_on=H200,
    ),
    NormRow(
        implementation="mosaic_gpu",
        columns=4096,
        forward=NormSm90(row_warps=4, warpgroups=1, stages=3, turns=2),
        backward=NormSm90(row_warps=4, warpgroups=4, stages=3, claims=True),
        measured_on=H200,
    ),
    NormRow(
        implementation="mosaic_gpu",
        columns=8192,
        forward=NormSm90(row_warps=8, warpgroups=2, stages=4, turns=3),
        backward=NormSm90(row_warps=8, warpgroups=4, stages=3, claims=True),
        measured_on=H200,
    ),
    NormRow(
        implementation="mosaic_gpu",
        columns=None,
        forward=NormSm90(row_warps=16, warpgroups=4, stages=3, claims=True),
        backward=NormSm90(row_warps=16, warpgroups=4, stages=3, claims=True),
        measured_on=H200,
    ),
    *SM80.norm,
)

# NVLink, causal, 16 heads of 128, tokens per GPU. Times in ms: the forward, then forward and backward together.
#   two H200s              "ring"         "all_gather"
#   1,024 tokens           0.202 0.417    0.236 0.412
#   2,048                  0.273 0.588    0.258 0.690
#   4,096                  0.390 1.293    0.454 1.547
#   two H100s              "ring"         "all_to_all"
#   8,192                  1.103 4.216    1.259 4.011
#   32,768                 13.31 54.52    14.08 52.77
#   65,536                 54.74 217.7    55.69 208.9
# A decoder's step on two H100s, 4,096 tokens of four sequences: "ring" 292.5, "all_to_all" 288.1. With sends by copies:
# "ring" 281.4, "all_to_all" by all-to-alls 275.5, by permutes 271.2. The times below are with sends by copies.
#   four H100s             "ring"         ring, 2 sends ahead   by all-to-alls   by permutes
#   4,096                  0.739 2.672    0.739 2.627           0.875 2.302      0.750 2.190
#   16,384                 7.235 28.73    7.444 29.25           7.499 27.73      7.164 27.25
# With a window:           "ring"         "halo"         "all_to_all"
#   two H100s
#   4,096, 1,024 zigzag    0.403 1.419    0.233 0.732    0.364 0.739
#   4,096, 1,024           0.231 0.739    0.207 0.481
#   16,384, 4,096 zigzag   2.021 7.570    1.325 5.030    1.554 4.161
#   16,384, 4,096          1.324 5.403    1.168 4.507
#   four H100s
#   16,384, 1,024 zigzag   1.924 6.957    0.523 1.945    1.195 2.880
#   16,384, 4,096 zigzag   2.683 9.492    1.368 5.116    1.753 4.922
# Rows with a window give tokens, window and layout; without "zigzag" the layout is contiguous. Eight H200s, the ring
# only: 8,192 tokens 3.828 16.80, 32,768 tokens 55.9 219.9.
# The costs are fitted to these times, by hand. tests/ops/ring/test_ring_costs.py checks them against the results. In
# each measured case the strategy is within 5 % of the fastest, or within 0.02 ms, which is the difference between runs.
RING_COSTS = RingCosts(
    forward_flops=660e12,
    backward_flops=580e12,
    ring_backward_flops=540e12,
    halo_forward_flops=510e12,
    halo_backward_flops=430e12,
    all_gather_forward_flops=600e12,
    all_gather_backward_flops=430e12,
    link=370e9,
    ring_start=0.06e-3,
    ring_step=0.07e-3,
    ring_backward_step=0.03e-3,
    ring_copies=234e9,
    merged_copies=110e9,
    merged_backward_copies=44e9,
    all_to_all_start=0.22e-3,
    all_to_all_backward=0.08e-3,
    halo_start=0.13e-3,
    halo_chunk=0.03e-3,
    halo_backward_start=0.05e-3,
    halo_backward_chunk=0.15e-3,
    all_gather_start=0.22e-3,
    all_gather_backward=0.3e-3,
    mask_token=20e-9,
    mask_backward_token=45e-9,
    mask_start=0.06e-3,
    uneven=1.35,  # not measured: three documents of 50, 30 and 20 % on two devices
    live=0.4,
)
RING = (RingRow(costs=RING_COSTS),)

SM90 = BlockSpecs(
    capability=(9, 0),
    measured_on=H200,
    attention_order=("mosaic_gpu", "cudnn", "triton", "xla"),
    attention=ATTENTION,
    attention_decode=ATTENTION_DECODE,
    attention_dquery=ATTENTION_DQUERY,
    attention_fp8=ATTENTION_FP8,
    matmul_order=MATMUL_ORDER,
    matmul=MATMUL,
    low_bit_order=LOW_BIT_ORDER,
    matmul_low_bit=MATMUL_LOW_BIT,
    grouped_order=GROUPED_ORDER,
    grouped=GROUPED,
    norm_order=NORM_ORDER,
    norm=NORM,
    dilated_launches=DILATED_LAUNCHES,
    ring=RING,
)
