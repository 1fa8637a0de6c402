"""Block specs of Blackwell's desktop and professional GPUs (RTX 50, RTX PRO 6000): shared memory and mma of sm_86."""

from jax_kernels.pallas.block_specs.sm86 import ATTENTION, ATTENTION_DECODE, MATMUL, MATMUL_ORDER, NORM, NORM_ORDER

__all__ = ["ATTENTION", "ATTENTION_DECODE", "ATTENTION_ORDER", "MATMUL", "MATMUL_ORDER", "NORM", "NORM_ORDER"]

# cuDNN first until the Triton rows, which were chosen for sm_86, are measured on these GPUs.
ATTENTION_ORDER = ("cudnn", "triton", "xla")
