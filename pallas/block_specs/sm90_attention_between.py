"""Block specs of attention on Hopper for head_dims between 64, 128 and 256.

benchmarks/notes/head_dims.md has the FLOPs, the shared memory and the registers from which the blocks were chosen. The
widths of the backward's tiles are in pallas/attention/sm90/backward/widths.py. A comment with a ratio is of a sweep on
an H200 in bfloat16 at (2, 8192, 16 x head_dim), or 8 heads from 160 on: the device time with the value over the time
without it. Rows without measured_on are not timed.
"""

import dataclasses
import functools
from typing import Any

from jax_kernels.pallas.block_specs.specs import H200, AttentionBackwardSm90, AttentionRow
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90 as Forward

__all__ = ["BETWEEN", "DENSE_BETWEEN", "LISTS_BETWEEN", "NORMS_Q"]

Row = functools.partial(AttentionRow, implementation="mosaic_gpu", bits=16)
Backward = functools.partial(AttentionBackwardSm90, wider_if_deterministic=True)

# Fields of a forward that computes the norms of its queries. The launch halves its limits for bounds, because the pass
# reads keys alone; so they are twice the defaults, and the same calls are bounded as without it.
NORMS_Q: dict[str, Any] = {"norms_q_in_kernel": True, "bounded_from": 4096, "bounded_from_lists": 6144}

# Forward, head_dim up to 96. A block's matmuls take 768 cycles of a warpgroup, its exponentials 512: as at 128, two
# warpgroups alternate. Three stages and the next queries take 192 KB.
# NORMS_Q: 0.97 causal and full at 96, 0.98 causal at 80 and 112, 0.99 full at 80. head_group: 8 takes 0.98 to 1.00 of
# 16's time, 32 takes 1.03 at 96 and 1.10 at 80 and 112. Three warpgroups: 1.2 to 1.4.
FULL_96 = Forward(compute_warpgroups=2, block_kv=128, stages=3, early_q=True, atom=32, **NORMS_Q)
CAUSAL_96 = dataclasses.replace(FULL_96, dynamic=True, head_group=16)
LISTS_96 = dataclasses.replace(CAUSAL_96, head_group=4, early_q=False, bounded_from_lists=3072)
# A bias's tile takes 32 KB.
BIAS_96 = Forward(compute_warpgroups=2, block_kv=128, stages=2, dynamic=True, head_group=16, atom=32)

# Forward, head_dim up to 80 and up to 112: atoms of 16 columns need no copy of the arrays to a multiple of 32 or 64.
FULL_80, CAUSAL_80, LISTS_80 = (dataclasses.replace(x, atom=16) for x in (FULL_96, CAUSAL_96, LISTS_96))
FULL_112, CAUSAL_112, LISTS_112 = (dataclasses.replace(x, stages=2) for x in (FULL_80, CAUSAL_80, LISTS_80))

# Forward, head_dim up to 160, or up to 192 with values up to 128: 128 keys in two stages, if the output shares the
# queries' memory (200 and 208 KB). Causal: head_group 16 takes 1.02 of 8's time, 96 keys 1.12 to 1.15, 64 keys 1.04 at
# 192/128; full, 96 keys 1.06 at 160. NORMS_Q: 0.985 causal and 0.97 full at 160, 1.00 at 192/128.
FULL_192_128 = Forward(compute_warpgroups=2, block_kv=128, stages=2, share_q_out=True)
CAUSAL_192_128 = dataclasses.replace(FULL_192_128, dynamic=True, head_group=8)
FULL_160, CAUSAL_160 = (dataclasses.replace(x, atom=32, **NORMS_Q) for x in (FULL_192_128, CAUSAL_192_128))
# A bias's tile takes 16 KB.
BIAS_160, BIAS_192_128 = (dataclasses.replace(x, block_kv=64) for x in (CAUSAL_160, CAUSAL_192_128))

# Forward, head_dim up to 192: 64 keys in three stages take 0.93 of the time of 96 keys in two stages if causal, 0.98 if
# not; in two stages with early_q 0.94 and 1.01. NORMS_Q: 0.97 causal, 1.00 full.
FULL_192 = Forward(compute_warpgroups=2, block_kv=64, stages=3, share_q_out=True)
CAUSAL_192 = dataclasses.replace(FULL_192, dynamic=True, head_group=8, **NORMS_Q)

# Backward, head_dim up to 96: with 128 queries each warpgroup adds 64 rows of dquery with all columns. For a step of
# 64 queries this takes 0.86 of the shared memory's cycles with 64 queries at 96, and 0.74 at 80.
# A q_loop_stagger would spill 4 bytes at 96, and takes 1.02 at 80.
BACKWARD_FULL_96 = Backward(block_q=128, do_stages=1, exit_after_smem_read=True)
BACKWARD_CAUSAL_96 = Backward(block_q=128, do_stages=1, head_group=4, exit_after_smem_read=True)
BACKWARD_LIMITED_96 = dataclasses.replace(BACKWARD_CAUSAL_96, head_group=16)
BACKWARD_FULL_80 = Backward(block_q=128, exit_after_smem_read=True)
BACKWARD_CAUSAL_80, BACKWARD_LIMITED_80 = (
    dataclasses.replace(x, do_stages=2) for x in (BACKWARD_CAUSAL_96, BACKWARD_LIMITED_96)
)
# At 112 the tiles of 128 queries do not fit: the tiles and blocks of 128.
BACKWARD_FULL_112 = Backward(block_q=64, q_loop_stagger=5, early_dv=True)
BACKWARD_CAUSAL_112 = Backward(block_q=64, head_group=4)
BACKWARD_LIMITED_112 = Backward(block_q=64, head_group=16, early_dv=True, exit_after_smem_read=True)
# 64 queries leave room for a bias's tile, and for block lists of smaller cells.
BACKWARD_LISTS_96 = Backward(block_q=64, head_group=2, early_dv=True)
BACKWARD_DENSE_96 = Backward(block_q=64, do_stages=1, head_group=4)

# Backward with up to 320 columns of key and value together: 128 keys, as at 128.
BACKWARD_FULL_160 = Backward(block_q=64, q_loop_stagger=5, exit_after_smem_read=True)
BACKWARD_CAUSAL_160 = Backward(block_q=64, head_group=4, exit_after_smem_read=True)
# One stage of dO leaves room for a bias's tile. Lists would spill 24 bytes with two.
BACKWARD_DENSE_160 = dataclasses.replace(BACKWARD_CAUSAL_160, do_stages=1)

# Backward with more columns: the blocks of 256. Causal, without early_dv: 0.92 (0.95 to 1.00 in the first turns). Full,
# without early_dv and exit_after_smem_read: 0.93.
BACKWARD_FULL_192 = Backward(block_q=64, do_stages=1, late_do=True)
BACKWARD_CAUSAL_192 = dataclasses.replace(BACKWARD_FULL_192, head_group=4)

BETWEEN = (
    Row(head_dim=80, forward=CAUSAL_80, backward=BACKWARD_LIMITED_80, is_limited=True),
    Row(head_dim=80, forward=FULL_80, backward=BACKWARD_FULL_80, is_causal=False, measured_on=H200),
    Row(head_dim=80, forward=CAUSAL_80, backward=BACKWARD_CAUSAL_80, is_causal=True, measured_on=H200),
    Row(head_dim=96, forward=CAUSAL_96, backward=BACKWARD_LIMITED_96, is_limited=True),
    Row(head_dim=96, forward=FULL_96, backward=BACKWARD_FULL_96, is_causal=False, measured_on=H200),
    Row(head_dim=96, forward=CAUSAL_96, backward=BACKWARD_CAUSAL_96, is_causal=True, measured_on=H200),
    Row(head_dim=112, forward=CAUSAL_112, backward=BACKWARD_LIMITED_112, is_limited=True),
    Row(head_dim=112, forward=FULL_112, backward=BACKWARD_FULL_112, is_causal=False),
    Row(head_dim=112, forward=CAUSAL_112, backward=BACKWARD_CAUSAL_112, is_causal=True, measured_on=H200),
    Row(head_dim=160, forward=FULL_160, backward=BACKWARD_FULL_160, is_causal=False, measured_on=H200),
    Row(head_dim=160, forward=CAUSAL_160, backward=BACKWARD_CAUSAL_160, is_causal=True, measured_on=H200),
    # Two stages of dO leave no room for segment ids.
    Row(
        head_dim=192,
        v_head_dim=128,
        forward=CAUSAL_192_128,
        backward=BACKWARD_DENSE_160,
        has_segments=True,
    ),
    Row(
        head_dim=192,
        v_head_dim=128,
        forward=FULL_192_128,
        backward=BACKWARD_FULL_160,
        is_causal=False,
        measured_on=H200,
    ),
    Row(
        head_dim=192,
        v_head_dim=128,
        forward=CAUSAL_192_128,
        backward=BACKWARD_CAUSAL_160,
        is_causal=True,
        measured_on=H200,
    ),
    Row(head_dim=192, forward=FULL_192, backward=BACKWARD_FULL_192, is_causal=False, measured_on=H200),
    Row(head_dim=192, forward=CAUSAL_192, backward=BACKWARD_CAUSAL_192, is_causal=True, measured_on=H200),
)

DENSE_BETWEEN = (
    Row(head_dim=96, forward=CAUSAL_96, backward=BACKWARD_DENSE_96, is_limited=False, dense_bits=1),
    Row(head_dim=96, forward=BIAS_96, backward=BACKWARD_DENSE_96, is_limited=False, dense_bits=16),
    Row(
        head_dim=96,
        forward=dataclasses.replace(BIAS_96, block_kv=64, stages=3),
        backward=BACKWARD_DENSE_96,
        dense_bits=32,
    ),
    Row(head_dim=160, forward=BIAS_160, backward=BACKWARD_DENSE_160, dense_bits=16),
    Row(head_dim=192, v_head_dim=128, forward=BIAS_192_128, backward=BACKWARD_DENSE_160, dense_bits=16),
    Row(
        head_dim=192,
        forward=dataclasses.replace(CAUSAL_192, stages=2),
        backward=BACKWARD_CAUSAL_192,
        dense_bits=16,
    ),
)

LISTS_BETWEEN = (
    Row(head_dim=80, forward=LISTS_80, backward=BACKWARD_LISTS_96, has_lists=True),
    Row(head_dim=96, forward=LISTS_96, backward=BACKWARD_LISTS_96, has_lists=True),
    Row(head_dim=112, forward=LISTS_112, backward=BACKWARD_LISTS_96, has_lists=True),
    Row(head_dim=160, forward=CAUSAL_160, backward=BACKWARD_DENSE_160, has_lists=True),
    Row(head_dim=192, v_head_dim=128, forward=CAUSAL_192_128, backward=BACKWARD_DENSE_160, has_lists=True),
    Row(head_dim=192, forward=CAUSAL_192, backward=BACKWARD_CAUSAL_192, has_lists=True),
)
