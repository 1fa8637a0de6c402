"""Flax: attention_fn for Flax's own modules, and nnx modules built on this library's attention.

Needs the `flax` extra. Nothing else in the library imports Flax.
"""

from jax_kernels.models.attention import KVCache as KVCache
from jax_kernels.models.attention import MultiHeadAttention as MultiHeadAttention
from jax_kernels.models.attention import rotary_embedding as rotary_embedding
from jax_kernels.models.attention_fn import attention_fn as attention_fn
from jax_kernels.models.config import TransformerConfig as TransformerConfig
from jax_kernels.models.dilated_attention import DilatedAttention as DilatedAttention
from jax_kernels.models.dilated_attention import LongNet as LongNet
from jax_kernels.models.dilated_attention import LongNetConfig as LongNetConfig
from jax_kernels.models.dilated_attention import MultiHeadDilatedAttention as MultiHeadDilatedAttention
from jax_kernels.models.dynamic_mask_attention import DynamicMaskAttention as DynamicMaskAttention
from jax_kernels.models.transformer import Transformer as Transformer
from jax_kernels.models.transformer import flat_parameters as flat_parameters
