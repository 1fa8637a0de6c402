"""Block specs of Ampere's data-centre parts (A100, A30). Hopper and data-centre Blackwell take these Triton rows too.

tests/pallas/attention/compile_budget.json says what ptxas makes of each row. Nothing here is measured on an A100 yet:
the rows are the largest blocks that fit the registers.
"""

from jax_kernels.pallas.block_specs.matmul_specs import (
    MatmulLowBitRow,
    MatmulLowBitTriton,
    MatmulOrder,
    MatmulRow,
    MatmulTriton,
)
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton as Backward
from jax_kernels.pallas.block_specs.specs import AttentionDecodeRow as DecodeRow
from jax_kernels.pallas.block_specs.specs import AttentionDecodeTriton as Decode
from jax_kernels.pallas.block_specs.specs import AttentionForwardTriton as Forward
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row
from jax_kernels.pallas.block_specs.specs import NormBackwardTriton, NormOrder, NormRow, NormTriton

ATTENTION_ORDER = ("triton", "cudnn", "xla")
NORM_ORDER = (NormOrder(names=("triton", "xla")),)

# 8 warps for 128 x 128 scores: with 4, kernels spill on sm_80, and on Hopper ptxas serialises wgmma for want of
# registers. The backward's blocks of 64 x 128 are twice what one warpgroup can hold. They halve the bytes that are read
# from L2 per FLOP.
WIDE_SCORES = Forward(block_q=128, block_kv=128, num_warps=8, num_stages=2)
WIDE_BACKWARD = Backward(block_q_dkv=64, block_kv_dkv=128, block_q_dq=128, block_kv_dq=64, num_warps=8, num_stages=2)

ATTENTION = (
    Row(implementation="triton", head_dim=64, bits=16, forward=WIDE_SCORES, backward=WIDE_BACKWARD),
    Row(implementation="triton", head_dim=128, bits=16, forward=WIDE_SCORES, backward=WIDE_BACKWARD),
    # Half the rows: 256 columns of the accumulator take twice the registers.
    Row(
        implementation="triton",
        head_dim=256,
        bits=16,
        forward=Forward(block_q=64, block_kv=64, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=32, block_kv_dkv=64, block_q_dq=64, block_kv_dq=32, num_warps=8, num_stages=2),
    ),
    # float32: exact products, its default, run on the plain cores and are unrolled. Larger blocks spill kilobytes.
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
        forward=Forward(block_q=32, block_kv=32, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=16, block_kv_dkv=32, block_q_dq=32, block_kv_dq=16, num_warps=8, num_stages=2),
    ),
)

# Two stages of keys and values fit the 99 KiB of sm_86 too. Not measured.
ATTENTION_DECODE = (
    DecodeRow(implementation="triton", head_dim=64, config=Decode(block_kv=128, num_warps=4, num_stages=3)),
    DecodeRow(implementation="triton", head_dim=128, config=Decode(block_kv=64, num_warps=4, num_stages=3)),
    DecodeRow(implementation="triton", head_dim=256, config=Decode(block_kv=32, num_warps=4, num_stages=3)),
)

# Measured on an H200, layer_norm in bfloat16, and taken for the other GPUs. Beside each row are its times in ms, and
# those of the next best blocks.
NORM = (
    # Not measured.
    NormRow(
        implementation="triton",
        columns=256,
        forward=NormTriton(block_rows=16, chunk=256, num_warps=4),
        backward=NormBackwardTriton(block_rows=8, chunk=256, num_warps=4, programs=4),
    ),
    # (65536, 1024): forward 0.067, with 2 rows and 4 warps 0.070; backward 0.117, with 2 rows and 4 programs 0.119.
    NormRow(
        implementation="triton",
        columns=1024,
        forward=NormTriton(block_rows=1, chunk=1024, num_warps=1),
        backward=NormBackwardTriton(block_rows=1, chunk=1024, num_warps=4, programs=8),
    ),
    # (32768, 4096): forward 0.142, with 16 warps 0.160; backward 0.238, with 16 warps 0.241, with 1 program 0.353.
    NormRow(
        implementation="triton",
        columns=4096,
        forward=NormTriton(block_rows=1, chunk=4096, num_warps=8),
        backward=NormBackwardTriton(block_rows=1, chunk=4096, num_warps=8, programs=2),
    ),
    # (16384, 8192): forward 0.147, with 16 warps 0.152; backward 0.326, with 2 programs 0.331.
    NormRow(
        implementation="triton",
        columns=8192,
        forward=NormTriton(block_rows=1, chunk=8192, num_warps=8),
        backward=NormBackwardTriton(block_rows=1, chunk=8192, num_warps=16, programs=1),
    ),
    # (8192, 16384): forward 0.168, with 16 warps 0.174; backward 0.428, with one chunk and 32 warps 0.627: they spill.
    NormRow(
        implementation="triton",
        columns=16384,
        forward=NormTriton(block_rows=1, chunk=16384, num_warps=8),
        backward=NormBackwardTriton(block_rows=1, chunk=8192, num_warps=16, programs=2),
    ),
    # Not measured.
    NormRow(
        implementation="triton",
        columns=None,
        forward=NormTriton(block_rows=1, chunk=16384, num_warps=8),
        backward=NormBackwardTriton(block_rows=1, chunk=8192, num_warps=16, programs=2),
    ),
)

# Until the Triton kernel is timed beside cuBLAS, which "xla" calls, it serves by its name alone.
MATMUL_ORDER = (MatmulOrder(names=("xla", "triton")),)

# Not measured.
MATMUL = (
    # Few rows, as in decoding: the weights pass once, and several programs share a work tile.
    MatmulRow(
        implementation="triton",
        columns=None,
        rows=64,
        bits=16,
        config=MatmulTriton(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4, split_steps=4),
    ),
    # With 128 rows a gated unit spills.
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=16,
        is_gated=True,
        is_aligned=True,
        config=MatmulTriton(block_m=256, block_n=128, block_k=32, num_warps=8, num_stages=4, split_steps=16),
    ),
    # With 64 of the inner dimension it spills beside a residual.
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=16,
        is_aligned=True,
        config=MatmulTriton(block_m=128, block_n=256, block_k=32, num_warps=8, num_stages=4, split_steps=16),
    ),
    # Rows that are not aligned are loaded number by number: the addresses take the registers of half of the columns.
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=16,
        config=MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4, split_steps=16),
    ),
    # float32, in tf32 products: a number takes twice the shared memory.
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=32,
        config=MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4, split_steps=8),
    ),
)

# Measured on an H200, N = K = 8192, Triton over XLA: one row of int4 0.026 ms for 0.088, of int8 0.031 for 0.124, of
# mxfp8 0.077 for 0.126; 64 rows of int4 0.054 for 0.090, but of mxfp8 0.149 for 0.128. More were not measured.
LOW_BIT_ORDER = (MatmulOrder(rows=32, names=("triton", "xla")), MatmulOrder(names=("xla", "triton")))

# Not swept. Of 16 rows and 64 columns, x and 4-bit weights give a work tile as many bytes: with N = 8192 there are
# 128 tiles, about one a multiprocessor, each with three stages of 16 KiB on the way. Less than 99 KiB of shared memory,
# for sm_86.
MATMUL_LOW_BIT = (
    MatmulLowBitRow(
        implementation="triton",
        bits=16,
        rows=16,
        weight_bits=4,
        config=MatmulLowBitTriton(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=4, programs=2),
    ),
    MatmulLowBitRow(
        implementation="triton",
        bits=16,
        rows=16,
        config=MatmulLowBitTriton(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, programs=2),
    ),
    MatmulLowBitRow(
        implementation="triton",
        bits=16,
        rows=32,
        config=MatmulLowBitTriton(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=4, programs=2),
    ),
    MatmulLowBitRow(
        implementation="triton",
        bits=16,
        config=MatmulLowBitTriton(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3, programs=1),
    ),
    # float32, in tf32 products.
    MatmulLowBitRow(
        implementation="triton",
        bits=32,
        config=MatmulLowBitTriton(block_m=32, block_n=32, block_k=128, num_warps=4, num_stages=3, programs=2),
    ),
)
