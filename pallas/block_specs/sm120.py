"""Block specs of Blackwell's desktop and professional GPUs (RTX 50, RTX PRO 6000): shared memory and mma of sm_86."""

import dataclasses

from jax_kernels.pallas.block_specs.sm86 import SM86

SM120 = dataclasses.replace(
    SM86,
    capability=(12, 0),
    # cuDNN first until the Triton rows, which were chosen for sm_86, are measured on these GPUs.
    attention_order=("cudnn", "triton", "xla"),
)
