"""jax_kernels.models.Transformer and LongNet as PyTorch modules, and the names of all modules of bridge.nn."""

import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.jax_functions.argument_checks import check_tensors
from jax_kernels.bridge.nn.adaptive_attention import AdaptiveAttention
from jax_kernels.bridge.nn.config import PATTERN, Config, shape_of
from jax_kernels.bridge.nn.dynamic_mask_attention import DynamicMaskAttention
from jax_kernels.bridge.nn.gated_mlp import GatedMLP
from jax_kernels.bridge.nn.layers import (
    PlainLayerNorm,
    PlainLinear,
    PlainRMSNorm,
    TokenEmbedding,
    computes_its_weight,
    rotary_embedding,
)
from jax_kernels.bridge.nn.linear import Linear
from jax_kernels.bridge.nn.mixture_of_experts import MixtureOfExperts
from jax_kernels.bridge.nn.multihead_attention import MultiheadAttention
from jax_kernels.bridge.nn.multihead_dilated_attention import MultiheadDilatedAttention
from jax_kernels.bridge.nn.pattern_attention import FlexAttention
from jax_kernels.bridge.nn.quantized_linear import QuantizedLinear
from jax_kernels.bridge.nn.ring_dilated_attention import RingDilatedAttention
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.attention.dilated_attention import dilated_attention
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.matmul import gated_matmul, linear
from jax_kernels.bridge.ops.normalization import LayerNorm, RMSNorm

__all__ = [
    "MLP",
    "AdaptiveAttention",
    "Attention",
    "Block",
    "DynamicMaskAttention",
    "FlexAttention",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "MultiheadDilatedAttention",
    "QuantizedLinear",
    "RMSNorm",
    "RingDilatedAttention",
    "Transformer",
    "has_gpu",
    "logits_and_input_gradients",
    "rotary_embedding",
]


class FP8Linear(PlainLinear):
    """PlainLinear whose matmul has precision="fp8": each call rounds x and the weights to 8 bits.

    The parameter keeps the dtype param_dtype, and gets a gradient. The result has x's dtype. shape: the model's config;
    its fields param_dtype and scaling (the values that share a scale) are read.
    """

    def __init__(
        self, in_features: int, out_features: int, shape: types.SimpleNamespace, xavier_gain: float | None = None
    ) -> None:
        super().__init__(in_features, out_features, shape.param_dtype, xavier_gain=xavier_gain)
        self.scaling = shape.scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight.to(x.dtype), precision="fp8", scaling=self.scaling)


def _linear(
    in_features: int, out_features: int, shape: types.SimpleNamespace, xavier_gain: float | None = None
) -> PlainLinear:
    """Returns a new linear layer without bias: an FP8Linear if the config's precision is "fp8", else a PlainLinear.

    shape: the model's config; its fields precision, param_dtype and scaling are read. xavier_gain: as in PlainLinear.
    """
    if shape.precision == "fp8":
        return FP8Linear(in_features, out_features, shape, xavier_gain)
    return PlainLinear(in_features, out_features, shape.param_dtype, xavier_gain=xavier_gain)


class Attention(torch.nn.Module):
    """Causal self-attention over [B, T, model_dim], with rotary embedding and grouped key and value heads.

    With segment_lengths it is dilated, like jax_kernels.models.MultiHeadDilatedAttention. shape: the model's config
    with all defaults: a namespace of the fields of jax_kernels.models.TransformerConfig or LongNetConfig, with
    torch.dtypes.
    """

    def __init__(self, shape: types.SimpleNamespace) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.rope_theta = shape.rope_theta
        self.implementation = shape.implementation
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        gain = None if shape.gamma is None else 1.0  # LongNet's weights
        self.q_proj = _linear(shape.model_dim, heads, shape, gain)
        self.k_proj = _linear(shape.model_dim, kv_heads, shape, gain)
        self.v_proj = _linear(shape.model_dim, kv_heads, shape, shape.gamma)
        self.out_proj = _linear(heads, shape.model_dim, shape, shape.gamma)
        self.q_norm = self.k_norm = None
        if shape.qk_norm:
            self.q_norm, self.k_norm = (
                PlainRMSNorm(shape.head_dim, shape.norm_eps, shape.param_dtype) for _ in range(2)
            )
        self.pattern = {name: getattr(shape, name) for name in PATTERN}
        self.out_norm = PlainLayerNorm(heads, eps=1e-5, dtype=shape.param_dtype) if shape.layer_norm else None

    __prepare_scriptable__ = symbolic_trace.no_script

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if symbolic_trace.is_traced(x):
            return symbolic_trace.leaf(self, x)
        check_dense("x", x)
        split = lambda y: y.unflatten(-1, (-1, self.head_dim))
        query, key, value = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        positions = torch.arange(x.shape[1], device=x.device)
        query = rotary_embedding(query, positions, self.rope_theta)
        key = rotary_embedding(key, positions, self.rope_theta)
        if self.pattern["segment_lengths"] is None:
            out = flash_attention(query, key, value, is_causal=True, implementation=self.implementation)
        else:
            out = dilated_attention(
                query, key, value, is_causal=True, implementation=self.implementation, **self.pattern
            )
        out = out.flatten(-2)
        return self.out_proj(out if self.out_norm is None else self.out_norm(out))


class MLP(torch.nn.Module):
    """The gated MLP of a block: down_proj(silu(gate_proj(x)) * up_proj(x)), over [B, T, model_dim].

    With precision "fp8" its matmuls round their inputs and weights to 8 bits. shape: the model's config; its
    fields model_dim, mlp_dim, precision, scaling and param_dtype are read.
    """

    def __init__(self, shape: types.SimpleNamespace) -> None:
        super().__init__()
        self.precision = shape.precision
        self.scaling = shape.scaling
        self.gate_proj = _linear(shape.model_dim, shape.mlp_dim, shape)
        self.up_proj = _linear(shape.model_dim, shape.mlp_dim, shape)
        self.down_proj = _linear(shape.mlp_dim, shape.model_dim, shape)

    __prepare_scriptable__ = symbolic_trace.no_script

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if symbolic_trace.is_traced(x):
            return symbolic_trace.leaf(self, x)
        check_dense("x", x)
        if self.precision == "fp8" and all(computes_its_weight(y, FP8Linear) for y in (self.gate_proj, self.up_proj)):
            gate, up = (projection.weight.to(x.dtype) for projection in (self.gate_proj, self.up_proj))
            return self.down_proj(gated_matmul(x, gate, up, transpose_w=True, precision="fp8", scaling=self.scaling))
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(torch.nn.Module):
    """A block of a Transformer: adds attention(norm(x)) to x [B, T, model_dim], then mlp(norm(x)) to the sum.

    The two norms are RMSNorms with their own weights. The MLP is a MixtureOfExperts in the blocks that the config's
    experts name. index: of the block. shape: the model's config: a namespace of the fields of
    jax_kernels.models.TransformerConfig or LongNetConfig, with defaults for the missing ones and torch.dtypes.
    """

    def __init__(self, shape: types.SimpleNamespace, index: int = 0) -> None:
        super().__init__()
        self.attention_norm = PlainRMSNorm(shape.model_dim, shape.norm_eps, shape.param_dtype)
        self.attention = Attention(shape)
        self.mlp_norm = PlainRMSNorm(shape.model_dim, shape.norm_eps, shape.param_dtype)
        experts = shape.experts
        has_experts = experts is not None and (experts.layers is None or index in experts.layers)
        self.mlp = _experts(shape) if has_experts else MLP(shape)

    __prepare_scriptable__ = symbolic_trace.no_script

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if symbolic_trace.is_traced(x):
            return symbolic_trace.leaf(self, x)
        check_dense("x", x)
        x = x + self.attention(self.attention_norm(x))
        hidden = self.mlp_norm(x)
        if isinstance(self.mlp, MixtureOfExperts):  # its weights stay as they are: they are many
            return x + self.mlp(hidden.to(self.mlp.up_proj.dtype)).to(x.dtype)
        return x + self.mlp(hidden)


class Transformer(torch.nn.Module):
    """A causal decoder: jax_kernels.models.Transformer and LongNet in PyTorch, with the same forward.

    It consists of a token embedding, blocks with RMSNorm before attention and MLP, a final RMSNorm, and a head.
    load_flax_state loads the Flax models' weights.

    Args:
      config: a jax_kernels.models.TransformerConfig or LongNetConfig, or a mapping with its fields.

    Raises:
      ValueError: a field is missing or unknown, or does not fit the others.
    """

    def __init__(self, config: Config | Mapping[str, Any]) -> None:
        super().__init__()
        shape = shape_of(config)
        self.dtype = shape.dtype
        self.remat = shape.remat
        self.logit_softcap = shape.logit_softcap
        self.embed = TokenEmbedding(shape.vocab_size, shape.model_dim, dtype=shape.param_dtype)
        self.layers = torch.nn.ModuleList(Block(shape, index) for index in range(shape.num_layers))
        self.final_norm = PlainRMSNorm(shape.model_dim, shape.norm_eps, shape.param_dtype)
        self.head = None if shape.tie_embeddings else PlainLinear(shape.model_dim, shape.vocab_size, shape.param_dtype)

    def forward(self, tokens: torch.Tensor | None = None, *, embeddings: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits of the next token at every position, float32 [B, T, vocab_size].

        Args:
          tokens: integers [B, T], from 0 to vocab_size - 1.
          embeddings: [B, T, model_dim], the output of `embed`, instead of tokens: for gradients by the input.

        Raises:
          ValueError: not exactly one of tokens and embeddings is given, the tensor is nested, tokens do not have two
            axes, or on a CPU a token is outside the vocabulary. On a GPU, and under torch.compile, such a token gives
            NaN.
        """
        if symbolic_trace.is_traced(tokens, embeddings):
            return symbolic_trace.leaf(self, tokens=tokens, embeddings=embeddings)
        if (tokens is None) == (embeddings is None):
            got = "neither" if tokens is None else "both"
            raise ValueError(f"tokens, embeddings: got {got}, want exactly one of them")
        for name, given in (("tokens", tokens), ("embeddings", embeddings)):
            if isinstance(given, torch.Tensor):
                check_dense(name, given)
        x = (self._embedded(tokens) if embeddings is None else embeddings).to(self.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.remat and torch.is_grad_enabled() else layer(x)
        x = self.final_norm(x)
        if self.head is None:
            logits = functional.linear(x, self.embed.weight.to(x.dtype)).float()
        else:
            logits = self.head(x).float()
        cap = self.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    __prepare_scriptable__ = symbolic_trace.no_script

    def _embedded(self, tokens: Any) -> torch.Tensor:
        """Returns the embeddings [B, T, model_dim] of tokens [B, T].

        Raises ValueError for tokens that are no integers [B, T] and, on a CPU, for an id outside the vocabulary. On a
        GPU, and under torch.compile or torch.func, such an id gives NaN.
        """
        check_tensors(tokens=tokens)
        dtype = tokens.dtype
        if tokens.ndim != 2 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise ValueError(f"tokens: got {dtype} {tuple(tokens.shape)}, want integers [batch, length]")
        most = self.embed.num_embeddings - 1
        if tokens.numel() and torch_internals.has_known_values(tokens):
            low, high = (int(x) for x in torch.aminmax(tokens))
            if low < 0 or high > most:
                raise ValueError(f"tokens: got ids from {low} to {high}, want 0 to {most}")
            return self.embed(tokens.long())
        tokens = tokens.long()
        is_id = (tokens >= 0) & (tokens <= most)
        return self.embed(torch.where(is_id, tokens, 0)).masked_fill(~is_id[..., None], float("nan"))

    @torch.no_grad()
    def load_flax_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Copies the parameters of a jax_kernels.models.Transformer or LongNet into this model.

        state: arrays by dotted name, as models.flat_parameters returns them. Raises ValueError if names or shapes do
        not match this model, which then stays unchanged.
        """
        named = (*self.named_parameters(), *self.named_buffers())
        parameters = {_flax_name(name): parameter for name, parameter in named}
        missing, unknown = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
        if missing or unknown:
            raise ValueError(f"state: got names that do not fit; missing: {missing}, unknown: {unknown}")
        loaded = {}
        for name, parameter in parameters.items():
            # PyTorch reads no NumPy bfloat16. float32 holds every value of bfloat16.
            array = torch.from_numpy(np.array(state[name], np.float32))
            loaded[name] = array.T if name.endswith(".kernel") else array
            if loaded[name].shape != parameter.shape:
                raise ValueError(f"state[{name!r}]: got shape {tuple(array.shape)}, which does not fit this model")
        for name, parameter in parameters.items():
            parameter.copy_(loaded[name])


def _flax_name(name: str) -> str:
    """Returns the Flax models' dotted name of a Transformer's parameter.

    "embed.weight" becomes "embed". In other names the last part "weight" becomes "scale" in a norm and "kernel"
    elsewhere; other last parts stay.
    """
    if name == "embed.weight":
        return "embed"
    if not name.endswith(".weight"):
        return name
    return name.removesuffix("weight") + ("scale" if name.endswith("norm.weight") else "kernel")


def _experts(shape: types.SimpleNamespace) -> MixtureOfExperts:
    """Returns a new MixtureOfExperts for the config's experts."""
    experts = shape.experts
    return MixtureOfExperts(
        shape.model_dim,
        experts.mlp_dim or shape.mlp_dim,
        experts.num_experts,
        experts.experts_per_token,
        scores=experts.scores,
        renormalize=experts.renormalize,
        weight_scale=experts.weight_scale,
        shared_experts=experts.shared_experts,
        balance_bias=experts.bias_rate is not None,
        precision=shape.precision,
        implementation=experts.implementation,
        dtype=shape.param_dtype,
    )


def has_gpu() -> bool:
    """Whether PyTorch can use a CUDA GPU here."""
    return torch.cuda.is_available()


def logits_and_input_gradients(
    config: Config | Mapping[str, Any],
    parameters: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    targets: np.ndarray,
    *,
    device: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (logits, gradients by the embeddings) of a Transformer with Flax's weights, to compare with Flax.

    config: the config of Transformer. parameters: arrays by dotted name, as in load_flax_state. tokens, targets: int
    [B, T]. device: where it runs.
    Both results are NumPy arrays: the logits [B, T, vocab_size], and the gradient [B, T, model_dim] of the mean
    cross-entropy by the tokens' embeddings.
    """
    model = Transformer(config)
    model.load_flax_state(parameters)
    model.to(device)
    inputs, labels = (torch.as_tensor(x, dtype=torch.long, device=device) for x in (tokens, targets))
    embeddings = model.embed(inputs).detach().requires_grad_()
    logits = model(embeddings=embeddings)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (gradient,) = torch.autograd.grad(loss, embeddings)
    return logits.detach().cpu().numpy(), gradient.cpu().numpy()
