"""Block specs of attention on Hopper (H100, H200, GH200), measured on an H200 in bfloat16, or as `measured` says.

The comment at a value gives its reason: the device time with it over the device time without it, in one run. "Full" is
without a mask. Sizes are (2, 8192, 16 x 128), (2, 8192, 32 x 64) and (2, 8192, 8 x 256), unless the comment gives
another. benchmarks/notes has the other values that were tried.
"""

import dataclasses
import functools

from jax_kernels.pallas.block_specs.record import measured
from jax_kernels.pallas.block_specs.sm80 import SM80
from jax_kernels.pallas.block_specs.sm90_attention_between import BETWEEN, DENSE_BETWEEN, LISTS_BETWEEN, NORMS_Q
from jax_kernels.pallas.block_specs.specs import (
    H100,
    H200,
    AttentionBackwardTriton,
    AttentionForwardTriton,
    DilatedLaunches,
)
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90 as Backward
from jax_kernels.pallas.block_specs.specs import AttentionDecodeRow as DecodeRow
from jax_kernels.pallas.block_specs.specs import AttentionDecodeSm90 as Decode
from jax_kernels.pallas.block_specs.specs import AttentionDqueryRow as DqueryRow
from jax_kernels.pallas.block_specs.specs import AttentionDquerySm90 as Dquery
from jax_kernels.pallas.block_specs.specs import AttentionForwardFp8Sm90 as ForwardFp8
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90 as Forward
from jax_kernels.pallas.block_specs.specs import AttentionFp8Row as Fp8Row
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

__all__ = [
    "ATTENTION",
    "ATTENTION_DECODE",
    "ATTENTION_DQUERY",
    "ATTENTION_FP8",
    "DILATED_LAUNCHES",
]

# Forward. Values that are the same in all rows are the defaults of the type.
# bounded_from: the pass for the norms reads all queries and keys once, and saves a tenth of the loop over keys. It
# gains 2 % at 2048 keys per query, and loses 10 % at 1024 (causal, length 2048). With fewer queries than keys it needs
# more keys per query: by bytes, 777 queries x 3001 keys would lose 4 % (not measured).
# bounded_from_limited: bounding loses 4 % with a window of 2048 keys. It loses 15 % with 8 causal documents in 8192
# tokens, or 3 % with norms_q_in_kernel. The number of keys of a segment is not known beforehand.
# bounded_from_lists: with 8192 keys, bounding loses 28 % of a call's time if a tenth of the blocks is live, loses 5 %
# at three tenths, and gains 7 % at a half.
# one_launch_max_tiles: four calls of 0.2 to 1.9 tiles per SM take 0.045 ms in one launch and 0.080 ms in four launches.
# Calls of 8 to 31 tiles per SM take 2 % more in one launch, because each tile must find its call and its arrays.

# Forward, head_dim 64.
# Three warpgroups are 1.2 times as fast as two. With a score_mod three warpgroups spill, and are still faster: causal
# ALiBi takes 1.17 of the plain kernel's time with three warpgroups, 1.28 with two.
FULL_64 = Forward(compute_warpgroups=3, block_kv=128, stages=3)
# head_group: going from 4 to 16 gains one percent.
CAUSAL_64 = dataclasses.replace(FULL_64, dynamic=True, head_group=16)
# Two warpgroups with early_q take 0.92 of three's time at 2048 causal keys, 0.95 at 4096, 1.05 at 8192.
# head_group: 32 takes 0.93 of 16's time at (8, 2048), 0.96 at (4, 4096).
SHORT_64 = Forward(compute_warpgroups=2, block_kv=128, stages=4, early_q=True, dynamic=True, head_group=32)
# With a window or segments three warpgroups spill. head_group: with a window 32 takes 1.03 of 16's time.
LIMITED_64 = dataclasses.replace(SHORT_64, head_group=16)
# head_group: with 8 documents 32 takes 0.96 of 16's time. norms_q_in_kernel: 0.975 if not causal.
SEGMENTS_64 = dataclasses.replace(SHORT_64, norms_q_in_kernel=True)

# Forward, head_dim 128. early_q: 0.97 causal, 0.98 full, 0.99 with a window or documents.
FULL_128 = Forward(compute_warpgroups=2, block_kv=128, stages=2, early_q=True)
# dynamic with head_group: speed over cuDNN's is 1.13 at 1, 1.31 at 8; 32 takes 0.97 of 16's time.
CAUSAL_128 = dataclasses.replace(FULL_128, dynamic=True, head_group=32)
# head_group: with a window 16 takes 0.95 to 0.98 of 1's time, 32 takes 1.01 of 16's.
LIMITED_128 = dataclasses.replace(CAUSAL_128, head_group=16)
SEGMENTS_128 = dataclasses.replace(CAUSAL_128, norms_q_in_kernel=True)
# With three tenths of the blocks live: head_group of 1, 2, 4, 8 and 32 take 0.98, 0.98, 0.97, 1 and 1.11; tiles
# that are not dynamic take 1.06; blocks of 64 keys 1.07; norms_q_in_kernel 0.97; early_q 1.01.
LISTS_128 = Forward(compute_warpgroups=2, block_kv=128, stages=2, dynamic=True, head_group=4, norms_q_in_kernel=True)

# Forward, head_dim up to 256: 64 keys leave room for two stages if the output shares the queries' memory.
WIDE = Forward(compute_warpgroups=2, block_kv=64, stages=2, share_q_out=True)
# head_group: speed over cuDNN's is 1.06 at 1, 1.28 at 8; 4 takes 1.04 of 8's time, 16 and 32 1.00. NORMS_Q: 0.985.
WIDE_CAUSAL = dataclasses.replace(WIDE, dynamic=True, head_group=8, **NORMS_Q)

# Backward, head_dim 64. q_loop_stagger=5: 0.96 of 0's time if not causal.
BACKWARD_FULL_64 = Backward(block_q=128, q_loop_stagger=5)
# Persistent CTAs take 0.99 causal, 0.96 with a window, 0.91 with documents, 1.01 full. head_group=4: 0.98 causal.
# Three stages of queries: 0.975 causal.
BACKWARD_PERSISTENT_64 = Backward(block_q=128, head_group=4, persistent=True, v_stages=2)
BACKWARD_CAUSAL_64 = dataclasses.replace(BACKWARD_PERSISTENT_64, q_stages=3)
# head_group=16: 0.99 with a window, 0.98 with documents. Three stages of queries: 0.95 with a window, 0.99 with
# documents.
BACKWARD_LIMITED_64 = dataclasses.replace(BACKWARD_PERSISTENT_64, head_group=16, q_stages=3)
# One stage of dO leaves room for a bias's tile.
BACKWARD_DENSE_64 = Backward(block_q=128, do_stages=1, head_group=4)

# Backward, head_dim 128. early_dv gains here; at head_dim 64 it loses 5 %.
BACKWARD_FULL_128 = Backward(block_q=64, q_loop_stagger=5, early_dv=True)
BACKWARD_CAUSAL_128 = Backward(block_q=64, head_group=4)
# 16 heads together take 0.974 of the time at (8, 512, 16 x 128), where the dquery of all fits the L2 cache.
BACKWARD_SHORT_128 = dataclasses.replace(BACKWARD_CAUSAL_128, head_group=16)
# head_group=16, early_dv and exit_after_smem_read together: 0.96 to 0.98 with a window of 1024. Persistent CTAs: 1.04.
BACKWARD_LIMITED_128 = Backward(block_q=64, head_group=16, early_dv=True, exit_after_smem_read=True)
# Persistent CTAs: 0.95 with causal documents (head_group of 2, 4, 8 and 32: 0.98, 0.95, 0.96, 0.96), 1.00 with
# documents that are not causal. q_loop_stagger: only if not causal, not timed.
BACKWARD_SEGMENTS_128 = Backward(block_q=64, head_group=16, early_dv=True, persistent=True, q_loop_stagger=5)
# Persistent CTAs: 0.94, 0.97 and 0.98 with 0.1, 0.3 and 0.5 of the blocks live. head_group: 2 takes 0.99 and 0.96
# of 4's time, 8 takes 1.09 and 1.02. Without early_dv: 1.01 to 1.04.
BACKWARD_LISTS_128 = Backward(block_q=64, head_group=2, early_dv=True, persistent=True)
BACKWARD_DENSE_128 = Backward(block_q=64, do_stages=1, head_group=4)

# Backward, head_dim up to 256: early_dv, late_do and exit_after_smem_read together take 0.96. q_loop_stagger=5: 0.98 if
# not causal.
WIDE_BACKWARD_CAUSAL = Backward(
    block_q=64, do_stages=1, early_dv=True, late_do=True, exit_after_smem_read=True, head_group=4
)
WIDE_BACKWARD = dataclasses.replace(WIDE_BACKWARD_CAUSAL, head_group=1, q_loop_stagger=5)

# A deterministic dquery: the largest blocks that fit shared memory and registers, with a bias's tile if there is one.
ATTENTION_DQUERY = (
    DqueryRow(head_dim=64, bias_bits=16, blocks=Dquery(block_kv=128, k_stages=3, v_stages=3)),
    DqueryRow(head_dim=64, bias_bits=32, blocks=Dquery(block_kv=128, k_stages=3, v_stages=2)),
    DqueryRow(head_dim=128, bias_bits=16, blocks=Dquery(block_kv=128, k_stages=2, v_stages=2)),
    DqueryRow(head_dim=128, bias_bits=32, blocks=Dquery(block_kv=128, k_stages=2, v_stages=1)),
    DqueryRow(head_dim=256, bias_bits=0, blocks=Dquery(block_kv=64, k_stages=2, v_stages=1)),
    DqueryRow(head_dim=256, bias_bits=32, blocks=Dquery(block_kv=64, k_stages=1, v_stages=1)),
)

# Causal segments of 1024 rows, in total 480 tiles of 128 queries, 16 heads of 128: one launch takes 0.043 ms, two
# launches 0.057, four 0.082. One launch with 360 tiles, 12 heads of 64, takes 0.028. A gather reaches 4.0 of the data
# sheet's 4.8 TB/s.
DILATED_LAUNCHES = DilatedLaunches(launch_seconds=14e-6, core_flops=4.5e12, gather_seconds=3e-6, gather_bandwidth=5 / 6)

# Rows without a bias, a dense mask or lists.
MOSAIC = measured(
    H200,
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=SEGMENTS_64,
        backward=BACKWARD_LIMITED_64,
        has_segments=True,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=LIMITED_64,
        backward=BACKWARD_LIMITED_64,
        is_limited=True,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=FULL_64,
        backward=BACKWARD_FULL_64,
        is_causal=False,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=SHORT_64,
        backward=BACKWARD_CAUSAL_64,
        is_causal=True,
        max_kv_length=4096,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=CAUSAL_64,
        backward=BACKWARD_CAUSAL_64,
        is_causal=True,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=SEGMENTS_128,
        backward=BACKWARD_SEGMENTS_128,
        has_segments=True,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=LIMITED_128,
        backward=BACKWARD_LIMITED_128,
        is_limited=True,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=FULL_128,
        backward=BACKWARD_FULL_128,
        is_causal=False,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=CAUSAL_128,
        backward=BACKWARD_SHORT_128,
        is_causal=True,
        max_kv_length=1024,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=CAUSAL_128,
        backward=BACKWARD_CAUSAL_128,
        is_causal=True,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=256,
        bits=16,
        forward=WIDE,
        backward=WIDE_BACKWARD,
        is_causal=False,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=256,
        bits=16,
        forward=WIDE_CAUSAL,
        backward=WIDE_BACKWARD_CAUSAL,
        is_causal=True,
    ),
)

# With a bias or a dense mask: the largest blocks of keys that spill no registers and leave room for a bias's tile. A
# mask without a bias, of one bit per score, has no tile. Other sizes are not measured. At (2, 4096, 16 x 128) a call
# with a bias is 1.6 to 2.9 times as fast as cuDNN's.
MOSAIC_DENSE = (
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=CAUSAL_64,
        backward=BACKWARD_PERSISTENT_64,
        is_limited=False,
        dense_bits=1,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=LIMITED_128,
        backward=BACKWARD_CAUSAL_128,
        is_limited=False,
        dense_bits=1,
    ),
    # With a window: 64 keys, because the predicate needs registers too.
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=Forward(compute_warpgroups=2, block_kv=64, stages=4, dynamic=True),
        backward=BACKWARD_DENSE_64,
        is_limited=True,
        dense_bits=32,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=Forward(compute_warpgroups=2, block_kv=128, stages=3, dynamic=True, head_group=16),
        backward=BACKWARD_DENSE_64,
        dense_bits=32,
    ),
    # A 16-bit bias tile leaves room for 128 keys, a 32-bit tile for 64.
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=Forward(compute_warpgroups=2, block_kv=128, stages=2, share_q_out=True, dynamic=True, head_group=16),
        backward=BACKWARD_DENSE_128,
        is_limited=False,
        dense_bits=16,
        measured_on=H200,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=Forward(compute_warpgroups=2, block_kv=64, stages=3, share_q_out=True, dynamic=True, head_group=16),
        backward=BACKWARD_DENSE_128,
        dense_bits=32,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=256,
        bits=16,
        forward=dataclasses.replace(WIDE, head_group=8),
        backward=WIDE_BACKWARD_CAUSAL,
        dense_bits=16,
    ),
)

# Masks as lists of live blocks: the blocks of the rows for windows; head_group up to the L2 cache's capacity.
MOSAIC_LISTS = (
    # The backward's persistent CTAs take 0.84, 0.91 and 0.93 with 0.1, 0.3 and 0.5 of the blocks live.
    Row(
        implementation="mosaic_gpu",
        head_dim=64,
        bits=16,
        forward=Forward(compute_warpgroups=2, block_kv=128, stages=4, dynamic=True, head_group=16),
        backward=BACKWARD_PERSISTENT_64,
        has_lists=True,
        measured_on=H200,
    ),
    Row(
        implementation="mosaic_gpu",
        head_dim=128,
        bits=16,
        forward=LISTS_128,
        backward=BACKWARD_LISTS_128,
        has_lists=True,
        measured_on=H200,
    ),
    # Not measured.
    Row(
        implementation="mosaic_gpu",
        head_dim=256,
        bits=16,
        forward=WIDE_CAUSAL,
        backward=WIDE_BACKWARD_CAUSAL,
        has_lists=True,
    ),
)

# The best of (64, 128), (128, 64), (64, 64) and (128, 128) with 4 or 8 warps and 2 or 3 stages. sm_80's row has 0.7 of
# this row's speed without a mask and 0.8 with a mask: 128 x 128 scores leave no registers to keep a wgmma in flight.
BACKWARD_TRITON = AttentionBackwardTriton(
    block_q_dkv=64, block_kv_dkv=128, block_q_dq=128, block_kv_dq=64, num_warps=8, num_stages=2
)
TRITON_64 = measured(
    H200,
    Row(
        implementation="triton",
        head_dim=64,
        bits=16,
        forward=AttentionForwardTriton(block_q=128, block_kv=64, num_warps=4, num_stages=3),
        backward=BACKWARD_TRITON,
        is_causal=False,
    ),
    # Backward: with BACKWARD_TRITON 0.80 of this row's speed; with its blocks and three stages 0.91.
    Row(
        implementation="triton",
        head_dim=64,
        bits=16,
        forward=AttentionForwardTriton(block_q=128, block_kv=64, num_warps=8, num_stages=3),
        backward=AttentionBackwardTriton(
            block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64, num_warps=4, num_stages=3
        ),
        is_causal=True,
    ),
)
# Two blocks of queries share a multiprocessor: while one fills its pipeline, the other computes. With 7 live blocks of
# 128 keys, the forward takes 0.85 of the time with 128 x 128 scores, the backward 0.88. delta_in_dq: 0.945.
LISTS_TRITON = Row(
    implementation="triton",
    head_dim=128,
    bits=16,
    forward=AttentionForwardTriton(block_q=128, block_kv=64, num_warps=4, num_stages=2),
    backward=AttentionBackwardTriton(
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
        num_warps=4,
        num_stages=2,
        delta_in_dq=True,
    ),
    has_lists=True,
)
# Full attention, with sm_80's two stages: forward 0.88 of this row's speed, backward 0.80.
STAGES_TRITON = Row(
    implementation="triton",
    head_dim=128,
    bits=16,
    forward=AttentionForwardTriton(block_q=128, block_kv=128, num_warps=8, num_stages=3),
    backward=AttentionBackwardTriton(
        block_q_dkv=64, block_kv_dkv=128, block_q_dq=128, block_kv_dq=64, num_warps=8, num_stages=3
    ),
)
# Causal attention, with sm_80's row: forward 0.52 of this row's speed. Backward: 0.73 with dkey and dvalue in one
# kernel, of 64 keys; 0.94 with steps of 32 queries for dvalue.
WIDE_TRITON = Row(
    implementation="triton",
    head_dim=256,
    bits=16,
    forward=AttentionForwardTriton(block_q=128, block_kv=64, num_warps=8, num_stages=2),
    backward=AttentionBackwardTriton(
        block_q_dkv=32,
        block_kv_dkv=128,
        block_q_dq=128,
        block_kv_dq=32,
        num_warps=8,
        num_stages=2,
        block_q_dv=64,
        delta_in_dq=True,
    ),
)
# Above head_dim 64, sm_80's rows leave shared memory for the tiles of a bias or of a score_mod's arrays.
DENSE_TRITON = tuple(
    dataclasses.replace(row, dense_bits=32)
    for row in SM80.attention
    if row.head_dim > 64 and row.bits == 16 and row.v_head_dim is None
)

TRITON = (*TRITON_64, *DENSE_TRITON, *measured(H100, LISTS_TRITON, STAGES_TRITON, WIDE_TRITON))

# Rows of narrower head_dims come first.
_by_head_dim = functools.partial(sorted, key=lambda row: (row.head_dim, row.v_head_dim or row.head_dim))
ATTENTION = (
    *_by_head_dim((*LISTS_BETWEEN, *MOSAIC_LISTS)),
    *_by_head_dim((*DENSE_BETWEEN, *MOSAIC_DENSE)),
    *_by_head_dim((*BETWEEN, *MOSAIC)),
    *TRITON,
    # TRITON has Hopper's own blocks in 16 bits.
    *(row for row in SM80.attention if row.bits != 16),
)

# (64, 1, 32 / 8 heads) and (1, 1, 32 / 8) over 16,384 keys: one or two warpgroups with 64 or 128 keys per block are all
# within 3 %, at 4.4 to 4.5 TB/s.
ATTENTION_DECODE = (
    *measured(
        H200,
        # One warpgroup takes 1.17 of two's time here: its softmax is slower than the loads of keys.
        DecodeRow(
            implementation="mosaic_gpu", head_dim=64, config=Decode(compute_warpgroups=2, block_kv=128, stages=2)
        ),
        DecodeRow(
            implementation="mosaic_gpu", head_dim=128, config=Decode(compute_warpgroups=1, block_kv=128, stages=2)
        ),
    ),
    # 192 and 256 are not measured: as many stages as fit shared memory.
    DecodeRow(implementation="mosaic_gpu", head_dim=192, config=Decode(compute_warpgroups=1, block_kv=64, stages=3)),
    DecodeRow(implementation="mosaic_gpu", head_dim=256, config=Decode(compute_warpgroups=1, block_kv=64, stages=2)),
    *SM80.attention_decode,
)

# The comment at a row gives its speed over the bf16 forward's, and the speed of other blocks (keys x stages).
FP8_128 = ForwardFp8(compute_warpgroups=2, block_kv=128, stages=4, dynamic=True, head_group=16)
FP8_256 = ForwardFp8(compute_warpgroups=2, block_kv=128, stages=2)
ATTENTION_FP8 = measured(
    H200,
    # Full 1.15; two warpgroups 0.92.
    Fp8Row(
        implementation="mosaic_gpu",
        head_dim=64,
        config=ForwardFp8(compute_warpgroups=3, block_kv=128, stages=4),
        is_causal=False,
    ),
    # Causal 1.19; two warpgroups 1.09.
    Fp8Row(
        implementation="mosaic_gpu",
        head_dim=64,
        config=ForwardFp8(compute_warpgroups=3, block_kv=128, stages=4, dynamic=True, head_group=16),
        is_causal=True,
    ),
    # Full 1.30 (925 TFLOP/s); 128 x 4 and 160 x 3: 1.27.
    Fp8Row(
        implementation="mosaic_gpu",
        head_dim=128,
        config=ForwardFp8(compute_warpgroups=2, block_kv=192, stages=3),
        is_causal=False,
    ),
    # Causal 1.34.
    Fp8Row(implementation="mosaic_gpu", head_dim=128, config=FP8_128, is_causal=True),
    # Full 1.65, causal 1.67.
    Fp8Row(implementation="mosaic_gpu", head_dim=256, config=FP8_256, is_causal=False),
    Fp8Row(
        implementation="mosaic_gpu",
        head_dim=256,
        config=dataclasses.replace(FP8_256, dynamic=True, head_group=8),
        is_causal=True,
    ),
)
