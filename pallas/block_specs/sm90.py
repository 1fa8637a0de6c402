"""Hopper (H100, H200, GH200)."""

import dataclasses

from jax_kernels.pallas.block_specs.sm80 import ATTENTION as SM80
from jax_kernels.pallas.block_specs.sm80 import ATTENTION_DECODE as SM80_DECODE
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90 as Backward
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton, AttentionForwardTriton
from jax_kernels.pallas.block_specs.specs import AttentionDecodeRow as DecodeRow
from jax_kernels.pallas.block_specs.specs import AttentionDecodeSm90 as Decode
from jax_kernels.pallas.block_specs.specs import AttentionForwardFp8Sm90 as ForwardFp8
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90 as Forward
from jax_kernels.pallas.block_specs.specs import AttentionFp8Row as Fp8Row
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

ATTENTION_ORDER = ("mosaic_gpu", "cudnn", "triton", "xla")

SHORT_64 = Forward(2, 128, 4, early_q=True, dynamic=True, heads_together=32)
LIMITED_64 = dataclasses.replace(SHORT_64, heads_together=16)
SEGMENTS_64 = dataclasses.replace(SHORT_64, measures_q=True)
CAUSAL_64 = Forward(3, 128, 3, dynamic=True, heads_together=16)
FULL_128 = Forward(2, 128, 2, early_q=True)
CAUSAL_128 = Forward(2, 128, 2, early_q=True, dynamic=True, heads_together=32)
LIMITED_128 = dataclasses.replace(CAUSAL_128, heads_together=16)
SEGMENTS_128 = dataclasses.replace(CAUSAL_128, measures_q=True)
LISTS_128 = Forward(2, 128, 2, dynamic=True, heads_together=4, measures_q=True)
BACKWARD_CAUSAL_64 = Backward(128, heads_together=4, persistent=True, v_stages=2)
BACKWARD_CAUSAL_128 = Backward(64, heads_together=4)
BACKWARD_LIMITED_64 = dataclasses.replace(BACKWARD_CAUSAL_64, heads_together=16)
BACKWARD_SEGMENTS_128 = Backward(64, heads_together=16, early_dv=True, persistent=True)
BACKWARD_LISTS_128 = Backward(64, heads_together=2, early_dv=True, persistent=True)
BACKWARD_DENSE_64 = Backward(128, do_stages=1, heads_together=4)
BACKWARD_DENSE_128 = Backward(64, do_stages=1, heads_together=4)
WIDE = Forward(2, 64, 2, share_q_out=True)
WIDE_CAUSAL = Forward(2, 64, 2, share_q_out=True, dynamic=True, heads_together=8)
WIDE_BACKWARD = Backward(64, do_stages=1, early_dv=True, late_do=True, leave_early=True)
WIDE_BACKWARD_CAUSAL = dataclasses.replace(WIDE_BACKWARD, heads_together=4)
BACKWARD_TRITON = AttentionBackwardTriton(64, 128, 128, 64, 8, 2)

# H200, bf16, (2, 8192, 16 x 128 | 32 x 64 | 8 x 256), device time over jax.nn's cuDNN in the same run. Forward:
# three warpgroups are 1.2 times two at head_dim 64, but with a window or segments they spill. With a score_mod they
# spill, too, and are faster yet: causal ALiBi takes 1.17 times the plain kernel's time, of two warpgroups 1.28.
# heads_together together with dynamic: causal 128 1.13 at 1, 1.31 at 8; causal 256 1.06 at 1, 1.28 at 8; causal 64 a
# percent from 4 to 16; of 32, 48 and 64 the times over 16 are 0.93, 0.97 and 0.98 at 8 x 2048 x 16 x 128, 0.97 and (64)
# 1.05 at 8192, 0.96 and (64) 0.985 at 4 x 4096 x 32 x 64; with a window 32 takes 1.03 and 1.01, with 8 documents 0.96
# and 0.98 where causal or not, and measures_q 0.975 more where not (causal, no bound pays). Backward: rotate=5 gave 4 %
# over 0 where not causal, heads_together=4 2 % where causal; at 256 early_dv, late_do and leave_early together 4 %, but
# at 64 early_dv costs 5 %. With a window of 1024 at 128, heads_together=16 gave 2 to 5 % forward; it, early_dv and
# leave_early together 2 to 4 % backward. early_q takes 0.97 of the time where causal, 0.98 where full, 0.99 with a
# window or documents. At 64, two warpgroups with it take 0.92 of three's time at 2048 causal keys, 0.95 at 4096, 1.05
# at 8192. Backward at 64, persistent CTAs take 0.99 of the time where causal, 0.96 with a window and 0.91 with
# documents, there with 16 heads together 0.99 and 0.98 of that; 1.01 where full. At 128 they take 0.95 with causal
# documents (2, 4, 8 and 32 heads together 0.98, 0.95, 0.96, 0.96), 1.00 with documents alone, but 1.02 and 1.04 with a
# window, and 1.1 without.
MOSAIC = (
    Row("mosaic_gpu", 64, 16, SEGMENTS_64, BACKWARD_LIMITED_64, has_segments=True),
    Row("mosaic_gpu", 64, 16, LIMITED_64, BACKWARD_LIMITED_64, is_limited=True),
    Row("mosaic_gpu", 64, 16, Forward(3, 128, 3), Backward(128, rotate=5), is_causal=False),
    Row("mosaic_gpu", 64, 16, SHORT_64, BACKWARD_CAUSAL_64, is_causal=True, up_to=4096),
    Row("mosaic_gpu", 64, 16, CAUSAL_64, BACKWARD_CAUSAL_64, is_causal=True),
    Row("mosaic_gpu", 128, 16, SEGMENTS_128, BACKWARD_SEGMENTS_128, has_segments=True),
    Row(
        "mosaic_gpu",
        128,
        16,
        LIMITED_128,
        Backward(64, heads_together=16, early_dv=True, leave_early=True),
        is_limited=True,
    ),
    Row("mosaic_gpu", 128, 16, FULL_128, Backward(64, rotate=5, early_dv=True), is_causal=False),
    Row("mosaic_gpu", 128, 16, CAUSAL_128, BACKWARD_CAUSAL_128, is_causal=True),
    Row("mosaic_gpu", 192, 16, WIDE, WIDE_BACKWARD, is_causal=False),
    Row("mosaic_gpu", 192, 16, WIDE_CAUSAL, WIDE_BACKWARD_CAUSAL, is_causal=True),
    Row("mosaic_gpu", 256, 16, WIDE, WIDE_BACKWARD, is_causal=False),
    Row("mosaic_gpu", 256, 16, WIDE_CAUSAL, WIDE_BACKWARD_CAUSAL, is_causal=True),
)

# With a bias or a dense mask: the most keys that spill nothing and leave room for a bias's tile, which a mask alone (of
# one bit) does without. Of other sizes none is measured. At (2, 4096, 16 x 128) biases are 1.6 to 2.9 times as fast as
# cuDNN, forward and backward.
MOSAIC_DENSE = (
    Row("mosaic_gpu", 64, 16, CAUSAL_64, BACKWARD_CAUSAL_64, is_limited=False, dense_bits=1),
    Row("mosaic_gpu", 128, 16, LIMITED_128, BACKWARD_CAUSAL_128, is_limited=False, dense_bits=1),
    Row("mosaic_gpu", 64, 16, Forward(2, 64, 4, dynamic=True), BACKWARD_DENSE_64, is_limited=True, dense_bits=32),
    Row("mosaic_gpu", 64, 16, Forward(2, 128, 3, dynamic=True, heads_together=16), BACKWARD_DENSE_64, dense_bits=32),
    Row(
        "mosaic_gpu",
        128,
        16,
        Forward(2, 128, 2, share_q_out=True, dynamic=True, heads_together=16),
        BACKWARD_DENSE_128,
        is_limited=False,
        dense_bits=16,
    ),
    Row(
        "mosaic_gpu",
        128,
        16,
        Forward(2, 64, 3, share_q_out=True, dynamic=True, heads_together=16),
        BACKWARD_DENSE_128,
        dense_bits=32,
    ),
    Row("mosaic_gpu", 256, 16, dataclasses.replace(WIDE, heads_together=8), WIDE_BACKWARD_CAUSAL, dense_bits=16),
)

# Masks as lists of live blocks: the blocks of windows, and as many heads together as the L2 cache has room for the keys
# and values of. At (2, 8192, 16 x 128) heads_together of 1, 2, 4, 8 and 32 take 0.98, 0.98, 0.97, 1 and 1.11 of the
# time forward at three tenths of the blocks, static tiles 1.06, blocks of 64 keys 1.07; measures_q takes 0.97 at three
# tenths and 0.98 at a half, early_q 1.01 and 1.02. Backward persistent CTAs take 0.94, 0.97 and 0.98 at 0.1, 0.3 and
# 0.5 of the blocks, with 2 heads together 0.99 and 0.96 of that, with 8 1.09 and 1.02; without early_dv 1.01 to 1.04;
# at head_dim 64 0.84, 0.91 and 0.93. Other sizes are not measured.
MOSAIC_LISTS = (
    Row("mosaic_gpu", 64, 16, Forward(2, 128, 4, dynamic=True, heads_together=16), BACKWARD_CAUSAL_64, has_lists=True),
    Row("mosaic_gpu", 128, 16, LISTS_128, BACKWARD_LISTS_128, has_lists=True),
    Row("mosaic_gpu", 256, 16, WIDE_CAUSAL, WIDE_BACKWARD_CAUSAL, has_lists=True),
)

# Of (64, 128), (128, 64), (64, 64) and (128, 128) with 4 or 8 warps and 2 or 3 stages. The row of sm_80 has 0.7 of it
# without a mask and 0.8 with, for want of registers: 128 x 128 scores leave none to keep a product in flight.
TRITON = (
    Row("triton", 64, 16, AttentionForwardTriton(128, 64, 4, 3), BACKWARD_TRITON, is_causal=False),
    Row("triton", 64, 16, AttentionForwardTriton(128, 64, 8, 3), BACKWARD_TRITON, is_causal=True),
)

ATTENTION = (*MOSAIC_LISTS, *MOSAIC_DENSE, *MOSAIC, *TRITON, *SM80[1:])

# H200, (64, 1, 32 / 8 heads) and (1, 1, 32 / 8) over 16,384 keys: of two warpgroups or one, and 64 or 128 keys a
# block, all stand within 3 %, at 4.4 to 4.5 TB/s. At head_dim 64 one warpgroup is 1.17 times as slow as two: its
# softmax is slower than the keys come. 192 and 256 are not measured: as many stages as shared memory holds.
ATTENTION_DECODE = (
    DecodeRow("mosaic_gpu", 64, Decode(2, 128, 2)),
    DecodeRow("mosaic_gpu", 128, Decode(1, 128, 2)),
    DecodeRow("mosaic_gpu", 192, Decode(1, 64, 3)),
    DecodeRow("mosaic_gpu", 256, Decode(1, 64, 2)),
    *SM80_DECODE,
)

# H200, (2, 8192, 16 x 128 | 8 x 256), time over that of the bf16 forward in the same run, of blocks of keys x stages.
# Full 128: 128x4 1.27, 160x3 1.27, 192x3 1.30 (925 TFLOP/s); causal 128: 128x4 1.34. 256: full 1.65, causal 1.67.
# The maximum searched and all rescaled in each step: 1.16, 1.25 (192x3), 1.27 (224x3); 1.20; 1.52, 1.48. A new maximum
# looked for only where sums of P are too large: 1.25; 1.29; 1.55, 1.58. Full 64: 1.15, of two warpgroups 0.92 (2x192x4
# 0.99); causal 64: 1.19, of two 1.09.
ATTENTION_FP8 = (
    Fp8Row("mosaic_gpu", 64, ForwardFp8(3, 128, 4), is_causal=False),
    Fp8Row("mosaic_gpu", 64, ForwardFp8(3, 128, 4, dynamic=True, heads_together=16), is_causal=True),
    Fp8Row("mosaic_gpu", 128, ForwardFp8(2, 192, 3), is_causal=False),
    Fp8Row("mosaic_gpu", 128, ForwardFp8(2, 128, 4, dynamic=True, heads_together=16), is_causal=True),
    Fp8Row("mosaic_gpu", 256, ForwardFp8(2, 128, 2), is_causal=False),
    Fp8Row("mosaic_gpu", 256, ForwardFp8(2, 128, 2, dynamic=True, heads_together=8), is_causal=True),
)
