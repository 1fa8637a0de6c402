"""The PyTorch bridge: this library's operators, and any JAX function, on PyTorch tensors.

Importing it keeps JAX from taking most of the GPU's memory at its first use (see `interop.memory`), and registers the
operators torch.ops.jax_kernels, which exported programs call. The module of a public name is imported when the name is
first read.
"""

from typing import TYPE_CHECKING

from jax_kernels.extras import require as _require

_require("torch", "jax_kernels.bridge")

from jax_kernels.bridge.interop.memory import leave_memory_to_torch

leave_memory_to_torch()  # before the first import that starts JAX's GPU backend

from jax_kernels.bridge.jax_functions import dynamic_shapes as _dynamic_shapes  # noqa: F401
from jax_kernels.bridge.jax_functions import program_operators as _program_operators  # noqa: F401
from jax_kernels.bridge.ops.attention import flash_attention_operator as _flash_attention_operator  # noqa: F401
from jax_kernels.bridge.ops.symbolic_trace import refuse_function as _refuse_function
from jax_kernels.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from jax_kernels.bridge import huggingface as huggingface
    from jax_kernels.bridge import masks as masks
    from jax_kernels.bridge import nn as nn
    from jax_kernels.bridge import weights as weights
    from jax_kernels.bridge.interop.memory import memory_report as memory_report
    from jax_kernels.bridge.jax_functions.api import from_jax as from_jax
    from jax_kernels.bridge.jax_functions.caches import cache_info as cache_info
    from jax_kernels.bridge.jax_functions.caches import clear_cache as clear_cache
    from jax_kernels.bridge.nn.quantized_linear import quantize_weights as quantize_weights
    from jax_kernels.bridge.ops.analyze import analyze as analyze
    from jax_kernels.bridge.ops.attention.compile_attention import compile_attention as compile_attention
    from jax_kernels.bridge.ops.attention.dilated_attention import dilated_attention as dilated_attention
    from jax_kernels.bridge.ops.attention.flash_attention import flash_attention as flash_attention
    from jax_kernels.bridge.ops.attention.flash_attention_fp8 import flash_attention_fp8 as flash_attention_fp8
    from jax_kernels.bridge.ops.attention.flash_attention_fp8 import quantize_fp8 as quantize_fp8
    from jax_kernels.bridge.ops.attention.masked_attention import block_sparse_attention as block_sparse_attention
    from jax_kernels.bridge.ops.attention.masked_attention import dynamic_mask_attention as dynamic_mask_attention
    from jax_kernels.bridge.ops.attention.prepare_mask import prepare_mask as prepare_mask
    from jax_kernels.bridge.ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from jax_kernels.bridge.ops.decoding.decode_attention import decode_attention as decode_attention
    from jax_kernels.bridge.ops.drop_in.flash_attn import flash_attn_func as flash_attn_func
    from jax_kernels.bridge.ops.drop_in.flash_attn import flash_attn_kvpacked_func as flash_attn_kvpacked_func
    from jax_kernels.bridge.ops.drop_in.flash_attn import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
    from jax_kernels.bridge.ops.drop_in.flash_attn import flash_dmattn_func as flash_dmattn_func
    from jax_kernels.bridge.ops.drop_in.flash_attn_kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
    from jax_kernels.bridge.ops.drop_in.flash_attn_varlen import flash_attn_varlen_func as flash_attn_varlen_func
    from jax_kernels.bridge.ops.drop_in.flash_attn_varlen import (
        flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func,
    )
    from jax_kernels.bridge.ops.drop_in.flash_attn_varlen import (
        flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
    )
    from jax_kernels.bridge.ops.drop_in.flex_attention import flex_attention as flex_attention
    from jax_kernels.bridge.ops.drop_in.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from jax_kernels.bridge.ops.explain import benchmark_implementations as benchmark_implementations
    from jax_kernels.bridge.ops.explain import device_info as device_info
    from jax_kernels.bridge.ops.explain import explain as explain
    from jax_kernels.bridge.ops.grouped_matmul import grouped_gated_matmul as grouped_gated_matmul
    from jax_kernels.bridge.ops.grouped_matmul import grouped_matmul as grouped_matmul
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
    from jax_kernels.bridge.ops.validation import validate as validate

_MODULES = {
    "jax_kernels.bridge.huggingface": ("huggingface",),
    "jax_kernels.bridge.masks": ("masks",),
    "jax_kernels.bridge.nn": ("nn",),
    "jax_kernels.bridge.weights": ("weights",),
    "jax_kernels.bridge.jax_functions.api": ("from_jax",),
    "jax_kernels.bridge.jax_functions.caches": (
        "cache_info",
        "clear_cache",
    ),
    "jax_kernels.bridge.nn.quantized_linear": ("quantize_weights",),
    "jax_kernels.bridge.ops.analyze": ("analyze",),
    "jax_kernels.bridge.ops.attention.compile_attention": ("compile_attention",),
    "jax_kernels.bridge.ops.attention.dilated_attention": ("dilated_attention",),
    "jax_kernels.bridge.ops.attention.flash_attention": ("flash_attention",),
    "jax_kernels.bridge.ops.attention.flash_attention_fp8": (
        "flash_attention_fp8",
        "quantize_fp8",
    ),
    "jax_kernels.bridge.ops.attention.masked_attention": (
        "block_sparse_attention",
        "dynamic_mask_attention",
    ),
    "jax_kernels.bridge.ops.attention.prepare_mask": ("prepare_mask",),
    "jax_kernels.bridge.ops.cross_entropy": ("linear_cross_entropy",),
    "jax_kernels.bridge.ops.decoding.decode_attention": ("decode_attention",),
    "jax_kernels.bridge.ops.drop_in.flash_attn": (
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_dmattn_func",
    ),
    "jax_kernels.bridge.ops.drop_in.flash_attn_kvcache": ("flash_attn_with_kvcache",),
    "jax_kernels.bridge.ops.drop_in.flash_attn_varlen": (
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
    ),
    "jax_kernels.bridge.ops.drop_in.flex_attention": ("flex_attention",),
    "jax_kernels.bridge.ops.drop_in.sdpa": ("scaled_dot_product_attention",),
    "jax_kernels.bridge.ops.explain": (
        "benchmark_implementations",
        "device_info",
        "explain",
    ),
    "jax_kernels.bridge.ops.grouped_matmul": (
        "grouped_gated_matmul",
        "grouped_matmul",
    ),
    "jax_kernels.bridge.ops.matmul": (
        "gated_matmul",
        "linear",
        "matmul",
        "mlp",
    ),
    "jax_kernels.bridge.ops.normalization": (
        "layer_norm",
        "rms_norm",
    ),
    "jax_kernels.bridge.ops.quantization": (
        "QuantizedTensor",
        "dequantize",
        "quantize",
    ),
    "jax_kernels.bridge.ops.sequence_parallel.dilated_attention": ("sequence_parallel_dilated_attention",),
    "jax_kernels.bridge.ops.sequence_parallel.process_mesh": ("initialize_distributed",),
    "jax_kernels.bridge.ops.sequence_parallel.ring_attention": (
        "ring_attention",
        "shard_sequence",
        "unshard_sequence",
    ),
    "jax_kernels.bridge.ops.validation": ("validate",),
    "jax_kernels.bridge.interop.memory": ("memory_report",),
}
__getattr__, __dir__ = _lazy_names(__name__, _MODULES, _refuse_function)
