"""jax_kernels: attention and matmul kernels in JAX Pallas, for JAX, Flax and PyTorch."""

from typing import TYPE_CHECKING

from jax_kernels.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from jax_kernels import masks as masks
    from jax_kernels.analysis.analyze import analyze as analyze
    from jax_kernels.analysis.report import Advice as Advice
    from jax_kernels.analysis.report import Analysis as Analysis
    from jax_kernels.analysis.report import OpUse as OpUse
    from jax_kernels.chunks import memory_limit as memory_limit
    from jax_kernels.compilation import compile_kernels as compile_kernels
    from jax_kernels.compilation import compiler_options as compiler_options
    from jax_kernels.device import DeviceInfo as DeviceInfo
    from jax_kernels.device import device_info as device_info
    from jax_kernels.device import device_names as device_names
    from jax_kernels.dispatch import Plan as Plan
    from jax_kernels.dispatch import explain as explain
    from jax_kernels.hilbert import hilbert_order as hilbert_order
    from jax_kernels.hilbert import invert_order as invert_order
    from jax_kernels.ops.attention.block_sparse_attention import block_sparse_attention as block_sparse_attention
    from jax_kernels.ops.attention.compile_attention import compile_attention as compile_attention
    from jax_kernels.ops.attention.decode_attention import decode_attention as decode_attention
    from jax_kernels.ops.attention.dynamic_mask_attention import dynamic_mask_attention as dynamic_mask_attention
    from jax_kernels.ops.attention.flash_attention import flash_attention as flash_attention
    from jax_kernels.ops.attention.flash_attention_fp8 import flash_attention_fp8 as flash_attention_fp8
    from jax_kernels.ops.attention.prepare_mask import prepare_mask as prepare_mask
    from jax_kernels.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from jax_kernels.ops.dilated.dilated_attention import dilated_attention as dilated_attention
    from jax_kernels.ops.dilated.sequence_parallel import (
        sequence_parallel_dilated_attention as sequence_parallel_dilated_attention,
    )
    from jax_kernels.ops.grouped.grouped_matmul import grouped_gated_matmul as grouped_gated_matmul
    from jax_kernels.ops.grouped.grouped_matmul import grouped_matmul as grouped_matmul
    from jax_kernels.ops.matmul.matmul import gated_matmul as gated_matmul
    from jax_kernels.ops.matmul.matmul import matmul as matmul
    from jax_kernels.ops.matmul.mlp import mlp as mlp
    from jax_kernels.ops.normalization.normalization import layer_norm as layer_norm
    from jax_kernels.ops.normalization.normalization import rms_norm as rms_norm
    from jax_kernels.ops.ring.planning.documents import DocumentLayout as DocumentLayout
    from jax_kernels.ops.ring.ring_attention import ring_attention as ring_attention
    from jax_kernels.ops.ring.shard_sequence import shard_sequence as shard_sequence
    from jax_kernels.ops.ring.shard_sequence import unshard_sequence as unshard_sequence
    from jax_kernels.quantization import QuantizedArray as QuantizedArray
    from jax_kernels.quantization import dequantize as dequantize
    from jax_kernels.quantization import quantize as quantize
    from jax_kernels.quantization import quantize_fp8 as quantize_fp8
    from jax_kernels.testing.validation import ValidationReport as ValidationReport
    from jax_kernels.testing.validation import validate as validate
    from jax_kernels.tuning.benchmark import ImplementationTime as ImplementationTime
    from jax_kernels.tuning.benchmark import benchmark_implementations as benchmark_implementations
    from jax_kernels.tuning.session import TunedCall as TunedCall
    from jax_kernels.tuning.session import tune as tune

__version__ = "0.1.0"

# The module of each public name. It is imported when the name is first read: the kernels' modules take a second.
_MODULES = {
    "jax_kernels.masks": ("masks",),
    "jax_kernels.analysis.analyze": ("analyze",),
    "jax_kernels.analysis.report": (
        "Advice",
        "Analysis",
        "OpUse",
    ),
    "jax_kernels.chunks": ("memory_limit",),
    "jax_kernels.compilation": (
        "compile_kernels",
        "compiler_options",
    ),
    "jax_kernels.device": (
        "DeviceInfo",
        "device_info",
        "device_names",
    ),
    "jax_kernels.dispatch": (
        "Plan",
        "explain",
    ),
    "jax_kernels.hilbert": (
        "hilbert_order",
        "invert_order",
    ),
    "jax_kernels.ops.attention.block_sparse_attention": ("block_sparse_attention",),
    "jax_kernels.ops.attention.compile_attention": ("compile_attention",),
    "jax_kernels.ops.attention.decode_attention": ("decode_attention",),
    "jax_kernels.ops.attention.dynamic_mask_attention": ("dynamic_mask_attention",),
    "jax_kernels.ops.attention.flash_attention": ("flash_attention",),
    "jax_kernels.ops.attention.flash_attention_fp8": ("flash_attention_fp8",),
    "jax_kernels.ops.attention.prepare_mask": ("prepare_mask",),
    "jax_kernels.ops.cross_entropy.linear_cross_entropy": ("linear_cross_entropy",),
    "jax_kernels.ops.dilated.dilated_attention": ("dilated_attention",),
    "jax_kernels.ops.dilated.sequence_parallel": ("sequence_parallel_dilated_attention",),
    "jax_kernels.ops.grouped.grouped_matmul": ("grouped_gated_matmul", "grouped_matmul"),
    "jax_kernels.ops.matmul.matmul": (
        "gated_matmul",
        "matmul",
    ),
    "jax_kernels.ops.matmul.mlp": ("mlp",),
    "jax_kernels.ops.normalization.normalization": (
        "layer_norm",
        "rms_norm",
    ),
    "jax_kernels.ops.ring.planning.documents": ("DocumentLayout",),
    "jax_kernels.ops.ring.ring_attention": ("ring_attention",),
    "jax_kernels.ops.ring.shard_sequence": (
        "shard_sequence",
        "unshard_sequence",
    ),
    "jax_kernels.quantization": (
        "QuantizedArray",
        "dequantize",
        "quantize",
        "quantize_fp8",
    ),
    "jax_kernels.testing.validation": (
        "ValidationReport",
        "validate",
    ),
    "jax_kernels.tuning.benchmark": (
        "ImplementationTime",
        "benchmark_implementations",
    ),
    "jax_kernels.tuning.session": (
        "TunedCall",
        "tune",
    ),
}
__getattr__, __dir__ = _lazy_names(__name__, _MODULES, submodules=("adapters", "bridge", "models"))
