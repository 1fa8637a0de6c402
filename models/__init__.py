"""Flax: attention_fn for Flax's own modules, and nnx modules built on this library's kernels.

Needs the `flax` extra. Outside this package only `jax-kernels demo` imports Flax.
"""

from jax_kernels.extras import require as _require

_require("flax", "jax_kernels.models")

from jax_kernels.lazy_names import dir_of as _dir_of
from jax_kernels.models.config import ExpertsConfig, TransformerConfig
from jax_kernels.models.layers.attention import KVCache, MultiHeadAttention, rotary_embedding
from jax_kernels.models.layers.attention_fn import attention_fn
from jax_kernels.models.layers.delayed_scaling import AmaxHistory
from jax_kernels.models.layers.dilated_attention import (
    DilatedAttention,
    LongNet,
    LongNetConfig,
    MultiHeadDilatedAttention,
)
from jax_kernels.models.layers.dynamic_mask_attention import DynamicMaskAttention
from jax_kernels.models.layers.linear import GatedMLP, Linear
from jax_kernels.models.layers.mixture_of_experts import MixtureOfExperts
from jax_kernels.models.layers.normalization import LayerNorm, RMSNorm
from jax_kernels.models.layers.quantized import QuantizedGatedMLP, QuantizedLinear, QuantizedWeight, quantize_weights
from jax_kernels.models.layers.quantized_experts import QuantizedMixtureOfExperts
from jax_kernels.models.layers.routing import ExpertBias, Routing
from jax_kernels.models.parallel.distributed import initialize_distributed
from jax_kernels.models.parallel.pipeline import pipelined
from jax_kernels.models.parallel.sharding import ShardingRules, make_mesh, shard_batch, shard_model, state_shardings
from jax_kernels.models.training.data import TokenBatches, read_documents, read_text
from jax_kernels.models.training.losses import linear_cross_entropy
from jax_kernels.models.training.next_token import next_token_loss
from jax_kernels.models.training.packing import document_positions, document_starts, within_documents
from jax_kernels.models.training.trainer import Trainer
from jax_kernels.models.transformer import Transformer, flat_parameters

__all__ = [
    "AmaxHistory",
    "DilatedAttention",
    "DynamicMaskAttention",
    "ExpertBias",
    "ExpertsConfig",
    "GatedMLP",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LongNet",
    "LongNetConfig",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "MultiHeadDilatedAttention",
    "QuantizedGatedMLP",
    "QuantizedLinear",
    "QuantizedMixtureOfExperts",
    "QuantizedWeight",
    "RMSNorm",
    "Routing",
    "ShardingRules",
    "TokenBatches",
    "Trainer",
    "Transformer",
    "TransformerConfig",
    "attention_fn",
    "document_positions",
    "document_starts",
    "flat_parameters",
    "initialize_distributed",
    "linear_cross_entropy",
    "make_mesh",
    "next_token_loss",
    "pipelined",
    "quantize_weights",
    "read_documents",
    "read_text",
    "rotary_embedding",
    "shard_batch",
    "shard_model",
    "state_shardings",
    "within_documents",
]

__dir__ = _dir_of(__name__, lambda name: name in __all__)
