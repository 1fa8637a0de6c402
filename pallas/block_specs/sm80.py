"""Block specs of Ampere's data-centre GPUs (A100, A30). Hopper and data-centre Blackwell also use these Triton rows.

tests/pallas/attention/compile_budget.json has ptxas's registers and spills of each row. No row is measured on an A100
yet: the rows are the largest blocks that fit the registers.
"""

from jax_kernels.pallas.block_specs.matmul_specs import (
    GroupedOrder,
    GroupedRow,
    MatmulLowBitRow,
    MatmulLowBitTriton,
    MatmulOrder,
    MatmulRow,
    MatmulTriton,
)
from jax_kernels.pallas.block_specs.normalization_specs import NormBackwardTriton, NormOrder, NormRow, NormTriton
from jax_kernels.pallas.block_specs.record import BlockSpecs, measured
from jax_kernels.pallas.block_specs.specs import H200
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton as Backward
from jax_kernels.pallas.block_specs.specs import AttentionDecodeRow as DecodeRow
from jax_kernels.pallas.block_specs.specs import AttentionDecodeTriton as Decode
from jax_kernels.pallas.block_specs.specs import AttentionForwardTriton as Forward
from jax_kernels.pallas.block_specs.specs import AttentionRow as Row

# 8 warps for 128 x 128 scores: with 4 warps, kernels spill on sm_80, and on Hopper ptxas serialises wgmma for lack of
# registers. The backward's blocks of 64 x 128 have twice the values that one warpgroup can hold. They halve the bytes
# read from L2 per FLOP.
WIDE_SCORES = Forward(block_q=128, block_kv=128, num_warps=8, num_stages=2)
WIDE_BACKWARD = Backward(block_q_dkv=64, block_kv_dkv=128, block_q_dq=128, block_kv_dq=64, num_warps=8, num_stages=2)

ATTENTION = (
    *measured(
        H200,
        Row(implementation="triton", head_dim=64, bits=16, forward=WIDE_SCORES, backward=WIDE_BACKWARD),
        Row(implementation="triton", head_dim=128, bits=16, forward=WIDE_SCORES, backward=WIDE_BACKWARD),
    ),
    # No rows for 80, 96 and 112, nor for 160 and 192: Triton's tensors have 128 and 256 columns there, so that ptxas
    # reports the registers and the shared memory of the next row, and smaller blocks would read more keys per FLOP.
    # A value of 128 columns takes half the registers of 256: blocks of twice the size fit, and spill nothing. Not
    # measured.
    Row(
        implementation="triton",
        head_dim=192,
        v_head_dim=128,
        bits=16,
        forward=Forward(block_q=128, block_kv=64, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64, num_warps=8, num_stages=2),
    ),
    # Half the rows, because 256 columns of the accumulator take twice the registers.
    Row(
        implementation="triton",
        head_dim=256,
        bits=16,
        forward=Forward(block_q=64, block_kv=64, num_warps=8, num_stages=2),
        backward=Backward(block_q_dkv=32, block_kv_dkv=64, block_q_dq=64, block_kv_dq=32, num_warps=8, num_stages=2),
    ),
    # float32: exact matmuls, the default, are unrolled and run without tensor cores. Larger blocks spill kilobytes.
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

# Measured on an H200, layer_norm in bfloat16, and used for the other GPUs. The comment at each row gives its times in
# ms, and the times of the next best blocks.
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
        measured_on=H200,
    ),
    # (32768, 4096): forward 0.142, with 16 warps 0.160; backward 0.238, with 16 warps 0.241, with 1 program 0.353.
    NormRow(
        implementation="triton",
        columns=4096,
        forward=NormTriton(block_rows=1, chunk=4096, num_warps=8),
        backward=NormBackwardTriton(block_rows=1, chunk=4096, num_warps=8, programs=2),
        measured_on=H200,
    ),
    # (16384, 8192): forward 0.147, with 16 warps 0.152; backward 0.326, with 2 programs 0.331.
    NormRow(
        implementation="triton",
        columns=8192,
        forward=NormTriton(block_rows=1, chunk=8192, num_warps=8),
        backward=NormBackwardTriton(block_rows=1, chunk=8192, num_warps=16, programs=1),
        measured_on=H200,
    ),
    # (8192, 16384): forward 0.168, with 16 warps 0.174; backward 0.428, with one chunk and 32 warps 0.627 (spills).
    NormRow(
        implementation="triton",
        columns=16384,
        forward=NormTriton(block_rows=1, chunk=16384, num_warps=8),
        backward=NormBackwardTriton(block_rows=1, chunk=8192, num_warps=16, programs=2),
        measured_on=H200,
    ),
    # Not measured.
    NormRow(
        implementation="triton",
        columns=None,
        forward=NormTriton(block_rows=1, chunk=16384, num_warps=8),
        backward=NormBackwardTriton(block_rows=1, chunk=8192, num_warps=16, programs=2),
    ),
)

# The Triton kernel is not yet timed against cuBLAS, which "xla" calls. Until then it runs only if named.
MATMUL_ORDER = (MatmulOrder(names=("xla", "triton")),)

# Not measured.
MATMUL = (
    # Few rows, as in decoding: the weights are read once, and several programs split a work tile.
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
    # With block_k 64 it spills if there is a residual.
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=16,
        is_aligned=True,
        config=MatmulTriton(block_m=128, block_n=256, block_k=32, num_warps=8, num_stages=4, split_steps=16),
    ),
    # Rows that are not aligned are loaded value by value: the addresses take the registers of half of the columns.
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=16,
        config=MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4, split_steps=16),
    ),
    # float32, in tf32 matmuls: a value takes twice the shared memory.
    MatmulRow(
        implementation="triton",
        columns=None,
        bits=32,
        config=MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4, split_steps=8),
    ),
)

# Measured on an H200, N = K = 8192, ms, Triton and XLA. One row: int4 0.026 and 0.088, int8 0.031 and 0.124, mxfp8
# 0.077 and 0.126. 64 rows: int4 0.054 and 0.090, but mxfp8 0.149 and 0.128. More rows are not measured.
LOW_BIT_ORDER = (
    MatmulOrder(rows=32, names=("triton", "xla"), measured_on=H200),
    MatmulOrder(names=("xla", "triton")),
)

# Not swept. With 16 rows and 64 columns, a work tile reads equally many bytes of x and of 4-bit weights. With N = 8192
# there are 128 tiles, about one per SM, each with three stages of 16 KiB in flight. All rows need less than 99 KiB of
# shared memory, for sm_86.
MATMUL_LOW_BIT = (
    MatmulLowBitRow(
        implementation="triton",
        bits=16,
        rows=16,
        weight_bits=4,
        config=MatmulLowBitTriton(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=4, programs=2),
        measured_on=H200,
    ),
    MatmulLowBitRow(
        implementation="triton",
        bits=16,
        rows=16,
        config=MatmulLowBitTriton(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, programs=2),
        measured_on=H200,
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
        measured_on=H200,
    ),
    # float32, in tf32 matmuls.
    MatmulLowBitRow(
        implementation="triton",
        bits=32,
        config=MatmulLowBitTriton(block_m=32, block_n=32, block_k=128, num_warps=4, num_stages=3, programs=2),
    ),
)

# Not measured. XLA loops over tiles with a launch or more for each; the Triton kernel is one launch.
GROUPED_ORDER = (GroupedOrder(names=("triton", "xla")),)

# Not measured. A work tile has rows of one group, so that small groups need few rows in a tile.
GROUPED = (
    GroupedRow(
        implementation="triton",
        mean_rows=64,
        bits=16,
        forward=MatmulTriton(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4),
        weight_gradient=MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4),
    ),
    # With 128 rows and 8 warps a gated unit spills.
    GroupedRow(
        implementation="triton",
        bits=16,
        is_gated=True,
        is_aligned=True,
        forward=MatmulTriton(block_m=64, block_n=256, block_k=32, num_warps=4, num_stages=4),
        weight_gradient=MatmulTriton(block_m=128, block_n=256, block_k=32, num_warps=8, num_stages=4),
    ),
    GroupedRow(
        implementation="triton",
        bits=16,
        is_aligned=True,
        forward=MatmulTriton(block_m=128, block_n=256, block_k=32, num_warps=8, num_stages=4),
        weight_gradient=MatmulTriton(block_m=128, block_n=256, block_k=32, num_warps=8, num_stages=4),
    ),
    # Rows that are not aligned are loaded value by value: the addresses take the registers of half of the columns.
    GroupedRow(
        implementation="triton",
        bits=16,
        forward=MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4),
        weight_gradient=MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4),
    ),
    # float32, in tf32 matmuls: a value takes twice the shared memory.
    GroupedRow(
        implementation="triton",
        bits=32,
        forward=MatmulTriton(block_m=128, block_n=64, block_k=32, num_warps=8, num_stages=3),
        weight_gradient=MatmulTriton(block_m=128, block_n=64, block_k=32, num_warps=8, num_stages=3),
    ),
)

SM80 = BlockSpecs(
    capability=(8, 0),
    attention_order=("triton", "cudnn", "xla"),
    attention=ATTENTION,
    attention_decode=ATTENTION_DECODE,
    matmul_order=MATMUL_ORDER,
    matmul=MATMUL,
    low_bit_order=LOW_BIT_ORDER,
    matmul_low_bit=MATMUL_LOW_BIT,
    grouped_order=GROUPED_ORDER,
    grouped=GROUPED,
    norm_order=(NormOrder(names=("triton", "xla")),),
    norm=NORM,
)
