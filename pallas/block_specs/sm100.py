"""Block specs of Blackwell's data-centre GPUs (B200, GB200)."""

import dataclasses

from jax_kernels.pallas.block_specs.sm80 import SM80
from jax_kernels.pallas.block_specs.sm90 import GROUPED, MATMUL_TRITON

SM100 = dataclasses.replace(
    SM80,
    capability=(10, 0),
    # cuDNN first until the Triton rows, which were chosen for sm_80, are measured on these GPUs.
    attention_order=("cudnn", "triton", "xla"),
    matmul=MATMUL_TRITON,
    grouped=GROUPED,
)
