"""PyTorch modules built on this library's operations.

This package may import all other packages of the bridge.
"""

from jax_kernels.bridge.nn.adaptive_attention import AdaptiveAttention as AdaptiveAttention
from jax_kernels.bridge.nn.dynamic_mask_attention import DynamicMaskAttention as DynamicMaskAttention
from jax_kernels.bridge.nn.gated_mlp import GatedMLP as GatedMLP
from jax_kernels.bridge.nn.layers import rotary_embedding as rotary_embedding
from jax_kernels.bridge.nn.linear import Linear as Linear
from jax_kernels.bridge.nn.mixture_of_experts import MixtureOfExperts as MixtureOfExperts
from jax_kernels.bridge.nn.mixture_of_experts import Routing as Routing
from jax_kernels.bridge.nn.multihead_attention import MultiheadAttention as MultiheadAttention
from jax_kernels.bridge.nn.multihead_dilated_attention import MultiheadDilatedAttention as MultiheadDilatedAttention
from jax_kernels.bridge.nn.pattern_attention import FlexAttention as FlexAttention
from jax_kernels.bridge.nn.quantized_linear import QuantizedLinear as QuantizedLinear
from jax_kernels.bridge.nn.ring_dilated_attention import RingDilatedAttention as RingDilatedAttention
from jax_kernels.bridge.nn.transformer import MLP as MLP
from jax_kernels.bridge.nn.transformer import Attention as Attention
from jax_kernels.bridge.nn.transformer import Block as Block
from jax_kernels.bridge.nn.transformer import Transformer as Transformer
from jax_kernels.bridge.nn.transformer import has_gpu as has_gpu
from jax_kernels.bridge.nn.transformer import logits_and_input_gradients as logits_and_input_gradients
from jax_kernels.bridge.ops.normalization import LayerNorm as LayerNorm
from jax_kernels.bridge.ops.normalization import RMSNorm as RMSNorm
from jax_kernels.lazy_names import dir_of as _dir_of

# For the command line.
_INTERNAL = ("has_gpu", "logits_and_input_gradients")
__dir__ = _dir_of(__name__, lambda name: name not in _INTERNAL)
