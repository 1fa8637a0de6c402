"""Test cases, float64 oracles and error bounds of the ops: for `jax-kernels check` and for users' own tests."""

from jax_kernels.testing.attention import AttentionResults as AttentionResults
from jax_kernels.testing.attention import attention_float64 as attention_float64
from jax_kernels.testing.attention import attention_inputs as attention_inputs
from jax_kernels.testing.attention import errors_of_attention as errors_of_attention
from jax_kernels.testing.attention import largest_error as largest_error
from jax_kernels.testing.attention import named_errors as named_errors
from jax_kernels.testing.attention import plain_attention as plain_attention
from jax_kernels.testing.attention import rms_error as rms_error
from jax_kernels.testing.attention import run_attention as run_attention
from jax_kernels.testing.attention import tolerance as tolerance
from jax_kernels.testing.attention import tolerance_by as tolerance_by
from jax_kernels.testing.attention import tolerance_of as tolerance_of
from jax_kernels.testing.attention import why_not as why_not
from jax_kernels.testing.attention import without_garbage as without_garbage
from jax_kernels.testing.attention_cases import ATTENTION_CASES as ATTENTION_CASES
from jax_kernels.testing.attention_cases import GPU_ATTENTION_CASES as GPU_ATTENTION_CASES
from jax_kernels.testing.attention_cases import AttentionCase as AttentionCase
