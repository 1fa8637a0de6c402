"""The PyTorch bridge: this library's operators, and any JAX function, on PyTorch tensors.

Importing it turns off JAX's preallocation of most of the GPU's memory (see `memory`).
"""

from jax_kernels.bridge.memory import leave_memory_to_torch
from jax_kernels.bridge.memory import memory_report as memory_report

leave_memory_to_torch()

from jax_kernels.bridge import huggingface as huggingface  # noqa: E402
from jax_kernels.bridge import masks as masks  # noqa: E402
from jax_kernels.bridge import nn as nn  # noqa: E402
from jax_kernels.bridge import weights as weights  # noqa: E402
from jax_kernels.bridge.aliases import flash_attn_func as flash_attn_func  # noqa: E402
from jax_kernels.bridge.aliases import flash_attn_kvpacked_func as flash_attn_kvpacked_func  # noqa: E402
from jax_kernels.bridge.aliases import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func  # noqa: E402
from jax_kernels.bridge.aliases import flash_attn_varlen_func as flash_attn_varlen_func  # noqa: E402
from jax_kernels.bridge.aliases import (  # noqa: E402
    flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func,
)
from jax_kernels.bridge.aliases import (  # noqa: E402
    flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
)
from jax_kernels.bridge.aliases import flash_dmattn_func as flash_dmattn_func  # noqa: E402
from jax_kernels.bridge.attention import flash_attention as flash_attention  # noqa: E402
from jax_kernels.bridge.caches import cache_info as cache_info  # noqa: E402
from jax_kernels.bridge.caches import clear_cache as clear_cache  # noqa: E402
from jax_kernels.bridge.compile_attention import compile_attention as compile_attention  # noqa: E402
from jax_kernels.bridge.decode_attention import decode_attention as decode_attention  # noqa: E402
from jax_kernels.bridge.dilated_attention import dilated_attention as dilated_attention  # noqa: E402
from jax_kernels.bridge.distributed import initialize_distributed as initialize_distributed  # noqa: E402
from jax_kernels.bridge.explaining import benchmark_implementations as benchmark_implementations  # noqa: E402
from jax_kernels.bridge.explaining import device_info as device_info  # noqa: E402
from jax_kernels.bridge.explaining import explain as explain  # noqa: E402
from jax_kernels.bridge.flex_attention import flex_attention as flex_attention  # noqa: E402
from jax_kernels.bridge.fp8 import flash_attention_fp8 as flash_attention_fp8  # noqa: E402
from jax_kernels.bridge.fp8 import quantize_fp8 as quantize_fp8  # noqa: E402
from jax_kernels.bridge.function import from_jax as from_jax  # noqa: E402
from jax_kernels.bridge.kv_cache import flash_attn_with_kvcache as flash_attn_with_kvcache  # noqa: E402
from jax_kernels.bridge.matmul import gated_matmul as gated_matmul  # noqa: E402
from jax_kernels.bridge.matmul import linear as linear  # noqa: E402
from jax_kernels.bridge.matmul import matmul as matmul  # noqa: E402
from jax_kernels.bridge.matmul import mlp as mlp  # noqa: E402
from jax_kernels.bridge.normalization import layer_norm as layer_norm  # noqa: E402
from jax_kernels.bridge.normalization import rms_norm as rms_norm  # noqa: E402
from jax_kernels.bridge.prepare_mask import prepare_mask as prepare_mask  # noqa: E402
from jax_kernels.bridge.quantized import QuantizedTensor as QuantizedTensor  # noqa: E402
from jax_kernels.bridge.quantized import dequantize as dequantize  # noqa: E402
from jax_kernels.bridge.quantized import quantize as quantize  # noqa: E402
from jax_kernels.bridge.quantized_linear import quantize_weights as quantize_weights  # noqa: E402
from jax_kernels.bridge.ring_attention import ring_attention as ring_attention  # noqa: E402
from jax_kernels.bridge.ring_attention import shard_sequence as shard_sequence  # noqa: E402
from jax_kernels.bridge.ring_attention import unshard_sequence as unshard_sequence  # noqa: E402
from jax_kernels.bridge.ring_dilated_attention import (  # noqa: E402
    sequence_parallel_dilated_attention as sequence_parallel_dilated_attention,
)
from jax_kernels.bridge.sdpa import scaled_dot_product_attention as scaled_dot_product_attention  # noqa: E402
from jax_kernels.bridge.sparse_attention import block_sparse_attention as block_sparse_attention  # noqa: E402
from jax_kernels.bridge.sparse_attention import dynamic_mask_attention as dynamic_mask_attention  # noqa: E402
from jax_kernels.bridge.symbolic import refuse_functions as _refuse_functions  # noqa: E402

_refuse_functions(globals().values())
