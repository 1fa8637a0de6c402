"""Block specs of Blackwell's data-centre GPUs (B200, GB200)."""

from jax_kernels.pallas.block_specs.sm80 import ATTENTION, ATTENTION_DECODE, MATMUL_ORDER, NORM, NORM_ORDER
from jax_kernels.pallas.block_specs.sm90 import MATMUL_TRITON as MATMUL

__all__ = ["ATTENTION", "ATTENTION_DECODE", "ATTENTION_ORDER", "MATMUL", "MATMUL_ORDER", "NORM", "NORM_ORDER"]

# cuDNN first until the Triton rows, which were chosen for sm_80, are measured on these GPUs.
ATTENTION_ORDER = ("cudnn", "triton", "xla")
