"""A decoder-only Transformer as an nnx module."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_kernels.models.attention import KVCache, MultiHeadAttention
from jax_kernels.models.config import TransformerConfig
from jax_kernels.models.linear import GatedMLP
from jax_kernels.models.normalization import RMSNorm

__all__ = ["MLP", "Block", "Transformer", "flat_parameters"]


class MLP(nnx.Module):
    """The gated MLP: down_proj(silu(gate_proj(x)) * up_proj(x)), without bias."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        options = {"use_bias": False, "dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.gate_proj = nnx.Linear(config.model_dim, config.mlp_dim, **options)
        self.up_proj = nnx.Linear(config.model_dim, config.mlp_dim, **options)
        self.down_proj = nnx.Linear(config.mlp_dim, config.model_dim, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


def _mlp_of_8_bits(config: Any, rngs: nnx.Rngs) -> GatedMLP:
    """The MLP of the same parameters, by gated_matmul."""
    return GatedMLP(
        config.model_dim,
        config.mlp_dim,
        precision=config.precision,
        scaling=config.scaling,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


class Block(nnx.Module):
    """A block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        norm = lambda: RMSNorm(
            config.model_dim, epsilon=config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        self.attention_norm = norm()
        self.attention = self._attention(config, rngs)
        self.mlp_norm = norm()
        self.mlp = MLP(config, rngs=rngs) if config.precision is None else _mlp_of_8_bits(config, rngs)

    def _attention(self, config: Any, rngs: nnx.Rngs) -> MultiHeadAttention:
        return MultiHeadAttention(
            config.model_dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            implementation=config.implementation,
            precision=config.precision,
            scaling=config.scaling,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, cache: KVCache | None = None) -> tuple[jax.Array, KVCache | None]:
        if cache is None:
            attended = self.attention(self.attention_norm(x))
        else:
            attended, cache = self.attention(self.attention_norm(x), cache=cache)
        normed, x = self.mlp_norm(attended, residual=x)  # and x + attended
        return x + self.mlp(normed), cache


class Transformer(nnx.Module):
    """A causal decoder: token embedding, blocks with RMSNorm before attention and MLP, a final RMSNorm, a head.

    Parameters, with N from 0 to num_layers - 1 (kernels are [in, out], to be transposed for PyTorch's Linear)::

        embed                                [vocab_size, model_dim]
        layers.N.attention_norm.scale        [model_dim]
        layers.N.attention.q_proj.kernel     [model_dim, num_heads * head_dim]
        layers.N.attention.k_proj.kernel     [model_dim, num_kv_heads * head_dim]
        layers.N.attention.v_proj.kernel     [model_dim, num_kv_heads * head_dim]
        layers.N.attention.out_proj.kernel   [num_heads * head_dim, model_dim]
        layers.N.mlp_norm.scale              [model_dim]
        layers.N.mlp.gate_proj.kernel        [model_dim, mlp_dim]
        layers.N.mlp.up_proj.kernel          [model_dim, mlp_dim]
        layers.N.mlp.down_proj.kernel        [mlp_dim, model_dim]
        final_norm.scale                     [model_dim]
        head.kernel                          [model_dim, vocab_size], unless tie_embeddings

    The forward, in the terms of `flat_parameters`: x = embed[tokens]; for each block
    x += out_proj(attention(rotary(q), rotary(k), v)) of attention_norm(x), then
    x += down_proj(silu(gate_proj(h)) * up_proj(h)) with h = mlp_norm(x); logits = final_norm(x) @ head.kernel, or
    @ embed.T when tied. The residual stream is in config.dtype. RMSNorm is x / sqrt(mean(x²) + norm_eps) * scale.

    Args:
      config: the shape.
      rngs: initialises the parameters, from its stream `params`. Embeddings are normal with variance 1 / model_dim,
        kernels LeCun normal.
    """

    block_type = Block

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        initialize = nnx.initializers.normal(config.model_dim**-0.5)
        self.embed = nnx.Param(initialize(rngs.params(), (config.vocab_size, config.model_dim), config.param_dtype))
        self.layers = nnx.List([self.block_type(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(
            config.model_dim, epsilon=config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.model_dim,
                config.vocab_size,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )

    def init_cache(self, batch: int, max_length: int, dtype: Any = None) -> tuple[KVCache, ...]:
        """An empty cache for each block, for `batch` sequences of up to `max_length` tokens.

        dtype: default config.dtype. KVCache.with_length gives each sequence a length of its own.
        """
        return tuple(layer.attention.init_cache(batch, max_length, dtype) for layer in self.layers)

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [B, T, model_dim], in param_dtype, of int tokens [B, T]; NaN for an id of vocab_size or more."""
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: got {tokens.dtype} {tokens.shape}, want integers [batch, length]")
        return jnp.take(self.embed[...], tokens, axis=0)

    def __call__(
        self,
        tokens: jax.Array | None = None,
        *,
        embeddings: jax.Array | None = None,
        cache: tuple[KVCache, ...] | None = None,
    ) -> jax.Array | tuple[jax.Array, tuple[KVCache, ...]]:
        """Logits of the next token at every position.

        Args:
          tokens: integers [B, T]. With a cache these are the next T tokens.
          embeddings: [B, T, model_dim], the output of embed_tokens, in place of tokens: for gradients by the input.
          cache: from init_cache or from the call before. Not changed.

        Returns:
          float32 logits [B, T, vocab_size]; with a cache (logits, the new cache).

        Raises:
          ValueError: a shape or dtype is wrong, not exactly one of tokens and embeddings is given, or the cache
            has no room (under jit that gives NaN: see MultiHeadAttention).
          TypeError: the cache's length is no integer.
        """
        if cache is not None and len(cache) != len(self.layers):
            raise ValueError(f"cache: got {len(cache)} entries, want one for each of the {len(self.layers)} layers")
        if tokens is not None and embeddings is None:
            x = self.embed_tokens(tokens)
        elif tokens is None and embeddings is not None:
            x = embeddings
        else:
            raise ValueError("tokens, embeddings: want exactly one of them")
        x = x.astype(self.config.dtype)
        if cache is None:
            block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
            for layer in self.layers:
                x, _ = block(layer, x)
            return self._logits(x)
        filled = []
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, layer_cache = layer(x, layer_cache)
            filled.append(layer_cache)
        return self._logits(x), tuple(filled)

    def _logits(self, x: jax.Array) -> jax.Array:
        kernel = self.embed[...].T if self.config.tie_embeddings else self.head.kernel[...]
        x = self.final_norm(x)
        return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def flat_parameters(model: nnx.Module) -> dict[str, np.ndarray]:
    """The model's nnx.Params on the host, by dotted name: {"layers.0.attention.q_proj.kernel": array, ...}."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(str(part) for part in path): np.asarray(param[...]) for path, param in state}
