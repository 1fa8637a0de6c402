"""The PyTorch bridge: this library's operators, and any JAX function, on PyTorch tensors.

Importing it turns off JAX's preallocation of most of the GPU's memory (see `memory`).
"""

from jax_kernels.bridge.interop.memory import leave_memory_to_torch
from jax_kernels.bridge.interop.memory import memory_report as memory_report

leave_memory_to_torch()

from jax_kernels.bridge import huggingface as huggingface
from jax_kernels.bridge import masks as masks
from jax_kernels.bridge import nn as nn
from jax_kernels.bridge import weights as weights
from jax_kernels.bridge.jax_functions.api import from_jax as from_jax
from jax_kernels.bridge.jax_functions.caches import cache_info as cache_info
from jax_kernels.bridge.jax_functions.caches import clear_cache as clear_cache
from jax_kernels.bridge.nn.quantized_linear import quantize_weights as quantize_weights
from jax_kernels.bridge.ops.attention.compile_attention import compile_attention as compile_attention
from jax_kernels.bridge.ops.attention.dilated_attention import dilated_attention as dilated_attention
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention as flash_attention
from jax_kernels.bridge.ops.attention.flash_attention_fp8 import flash_attention_fp8 as flash_attention_fp8
from jax_kernels.bridge.ops.attention.flash_attention_fp8 import quantize_fp8 as quantize_fp8
from jax_kernels.bridge.ops.attention.masked_attention import block_sparse_attention as block_sparse_attention
from jax_kernels.bridge.ops.attention.masked_attention import dynamic_mask_attention as dynamic_mask_attention
from jax_kernels.bridge.ops.attention.prepare_mask import prepare_mask as prepare_mask
from jax_kernels.bridge.ops.decoding.decode_attention import decode_attention as decode_attention
from jax_kernels.bridge.ops.drop_in.flash_attn import flash_attn_func as flash_attn_func
from jax_kernels.bridge.ops.drop_in.flash_attn import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from jax_kernels.bridge.ops.drop_in.flash_attn import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from jax_kernels.bridge.ops.drop_in.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from jax_kernels.bridge.ops.drop_in.flash_attn import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from jax_kernels.bridge.ops.drop_in.flash_attn import (
    flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
)
from jax_kernels.bridge.ops.drop_in.flash_attn import flash_dmattn_func as flash_dmattn_func
from jax_kernels.bridge.ops.drop_in.flash_attn_kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
from jax_kernels.bridge.ops.drop_in.flex_attention import flex_attention as flex_attention
from jax_kernels.bridge.ops.drop_in.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
from jax_kernels.bridge.ops.explain import benchmark_implementations as benchmark_implementations
from jax_kernels.bridge.ops.explain import device_info as device_info
from jax_kernels.bridge.ops.explain import explain as explain
from jax_kernels.bridge.ops.matmul import gated_matmul as gated_matmul
from jax_kernels.bridge.ops.matmul import linear as linear
from jax_kernels.bridge.ops.matmul import matmul as matmul
from jax_kernels.bridge.ops.matmul import mlp as mlp
from jax_kernels.bridge.ops.normalization import layer_norm as layer_norm
from jax_kernels.bridge.ops.normalization import rms_norm as rms_norm
from jax_kernels.bridge.ops.quantization import QuantizedTensor as QuantizedTensor
from jax_kernels.bridge.ops.quantization import dequantize as dequantize
from jax_kernels.bridge.ops.quantization import quantize as quantize
from jax_kernels.bridge.ops.sequence_parallel.dilated_attention import (
    sequence_parallel_dilated_attention as sequence_parallel_dilated_attention,
)
from jax_kernels.bridge.ops.sequence_parallel.process_mesh import initialize_distributed as initialize_distributed
from jax_kernels.bridge.ops.sequence_parallel.ring_attention import ring_attention as ring_attention
from jax_kernels.bridge.ops.sequence_parallel.ring_attention import shard_sequence as shard_sequence
from jax_kernels.bridge.ops.sequence_parallel.ring_attention import unshard_sequence as unshard_sequence
from jax_kernels.bridge.ops.symbolic_trace import refuse_functions as _refuse_functions

_refuse_functions(globals().values())
