"""Block specs of Ampere's desktop and professional GPUs (RTX 30, A40, A10): 99 KiB of shared memory per block.

Their tensor cores have half to a quarter of sm_80's rate, so that small blocks keep them busy. No row spills. No
row is measured yet.
"""

import dataclasses

from jax_kernels.pallas.block_specs.matmul_specs import MatmulRow, MatmulTriton
from jax_kernels.pallas.block_specs.sm80 import SM80
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton as Backward
from jax_kernels.pallas.block_specs.specs import AttentionForwardTriton as Forward
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

ATTENTION = (
    Row(
        implementation="triton",
        head_dim=64,
        bits=16,
        forward=Forward(block_q=128, block_kv=64, num_warps=4, num_stages=2),
        backward=Backward(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64, num_warps=4, num_stages=2),
    ),
    Row(
        implementation="triton",
        head_dim=128,
        bits=16,
        forward=Forward(block_q=128, block_kv=64, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64, num_warps=8, num_stages=2),
    ),
    # A value of 128 columns leaves room for blocks of twice the size, 88 KiB in the forward. A tile of a float32 bias
    # would not fit as well: calls with a bias or a dense mask keep the forward's blocks of the row for 256.
    Row(
        implementation="triton",
        head_dim=192,
        v_head_dim=128,
        bits=16,
        forward=Forward(block_q=64, block_kv=32, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=32, block_kv_dkv=64, block_q_dq=64, block_kv_dq=32, num_warps=8, num_stages=2),
        dense_bits=32,
    ),
    Row(
        implementation="triton",
        head_dim=192,
        v_head_dim=128,
        bits=16,
        forward=Forward(block_q=128, block_kv=32, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=32, block_kv_dkv=64, block_q_dq=64, block_kv_dq=32, num_warps=8, num_stages=2),
    ),
    # Blocks of 16 queries or keys: two blocks of 64 rows of 256 columns are 64 KiB.
    Row(
        implementation="triton",
        head_dim=256,
        bits=16,
        forward=Forward(block_q=64, block_kv=32, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=16, block_kv_dkv=64, block_q_dq=64, block_kv_dq=16, num_warps=8, num_stages=2),
    ),
    # float32: sm_80's rows, whose exact matmuls are unrolled and run without tensor cores. At head_dim 256 shared
    # memory has room for half the block.
    Row(
        implementation="triton",
        head_dim=64,
        bits=32,
        forward=Forward(block_q=64, block_kv=32, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=32, block_kv_dkv=64, block_q_dq=64, block_kv_dq=32, num_warps=8, num_stages=2),
    ),
    Row(
        implementation="triton",
        head_dim=128,
        bits=32,
        forward=Forward(block_q=64, block_kv=16, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=32, block_kv_dkv=16, block_q_dq=16, block_kv_dq=32, num_warps=8, num_stages=2),
    ),
    Row(
        implementation="triton",
        head_dim=256,
        bits=32,
        forward=Forward(block_q=32, block_kv=16, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16, num_warps=4, num_stages=2),
    ),
)

# Not measured.
MATMUL = (
    MatmulRow(
        implementation="triton",
        columns=None,
        rows=64,
        bits=16,
        config=MatmulTriton(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4, split_steps=8),
    ),
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=16,
        config=MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4, split_steps=16),
    ),
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=32,
        config=MatmulTriton(block_m=128, block_n=64, block_k=32, num_warps=8, num_stages=3, split_steps=16),
    ),
)

# Not measured. Shared memory lacks room for the wide blocks of aligned rows.
GROUPED = tuple(row for row in SM80.grouped if not row.is_aligned)

SM86 = dataclasses.replace(
    SM80,
    capability=(8, 6),
    attention_order=("triton", "cudnn", "xla"),
    attention=ATTENTION,
    matmul=MATMUL,
    grouped=GROUPED,
)
