"""Block specs of Ada (RTX 40, L4, L40S): the shared memory and the instructions of sm_86."""

from jax_kernels.pallas.block_specs.sm86 import (
    ATTENTION,
    ATTENTION_DECODE,
    ATTENTION_ORDER,
    MATMUL,
    MATMUL_ORDER,
    NORM,
    NORM_ORDER,
)

__all__ = ["ATTENTION", "ATTENTION_DECODE", "ATTENTION_ORDER", "MATMUL", "MATMUL_ORDER", "NORM", "NORM_ORDER"]
