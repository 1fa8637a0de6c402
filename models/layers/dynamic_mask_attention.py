"""Multi-head attention that learns which keys to attend to, as an nnx module."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from flax import nnx

from jax_kernels import masks
from jax_kernels.models.config import positive
from jax_kernels.models.layers.attention import MultiHeadAttention, as_mask
from jax_kernels.ops.attention.dynamic_mask_attention import dynamic_mask_attention, keys_of_largest_bias
from jax_kernels.plain_numbers import plain_arguments

__all__ = ["DynamicMaskAttention"]


class DynamicMaskAttention(MultiHeadAttention):
    """MultiHeadAttention whose queries attend to the keys with the largest bias. The bias is computed from the values.

    Equivalent to the following JAX code, within MultiHeadAttention, for each head of keys::

        steps = value.reshape(B, S, num_kv_heads * head_dim) @ dt_proj.kernel  # [B, S, num_kv_heads]
        bias = exp(A * softplus(steps)).transpose(0, 2, 1)[:, :, None]  # [B, num_kv_heads, 1, S]
        keep = masks.top_k(bias, keys_to_keep, among=masks.causal(), q_length=T)
        out = dynamic_mask_attention(query, key, value, keep, bias)

    The mask passes no gradient; A and dt_proj learn through the bias.

    Parameters: as in MultiHeadAttention, and dt_proj.kernel [num_kv_heads * head_dim, num_kv_heads], A [num_kv_heads].

    Args:
      keys_to_keep: the largest number of keys that a query attends to, among the keys that is_causal and the masks
        allow. Among keys with equal bias the first keys are kept.
      rngs: also draws A, normal with a standard deviation of 0.02. If A were 0, all keys would have the same bias.
      Other arguments: as in MultiHeadAttention. A mask has num_kv_heads heads, or one head.

    Raises:
      ValueError, TypeError: an argument is wrong; the error names it.

    Source: Shi et al., "Trainable Dynamic Mask Sparse Attention" (2025), arXiv:2508.02124.
    """

    @plain_arguments
    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        keys_to_keep: int = 2048,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(model_dim, num_heads, param_dtype=param_dtype, rngs=rngs, **options)
        positive("keys_to_keep", keys_to_keep)
        self.keys_to_keep = keys_to_keep
        self.A = nnx.Param(0.02 * jax.random.normal(rngs.params(), (self.num_kv_heads,), param_dtype))
        self.dt_proj = nnx.Linear(
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, **arguments: Any) -> jax.Array:
        """The attention's result [B, T, num_heads, head_dim], to the keys of largest bias among all keys that the masks
        allow.

        query: [B, T, num_heads, head_dim]. key, value: [B, S, num_kv_heads, head_dim]. arguments: segment_ids, or
        q_offset and kv_lengths with a cache.
        """
        batch, kv_length = value.shape[:2]
        for name, length in (("x", query.shape[1]), ("cache", kv_length)):
            if jax.export.is_symbolic_dim(length):
                raise ValueError(f"{name}: got the symbolic length {length}, want an int: each query ranks its keys")
        steps = self.dt_proj(value.reshape(batch, kv_length, self.num_kv_heads * self.head_dim)).astype(jnp.float32)
        bias = jnp.exp(self.A[...].astype(jnp.float32) * jax.nn.softplus(steps)).swapaxes(1, 2)[:, :, None]
        bias = jnp.where(jnp.isnan(bias), -jnp.inf, bias)  # a NaN is never chosen, as in masks.top_k
        mask = None if mask is None else as_mask(mask, query.shape[1], kv_length)
        ids = arguments.pop("segment_ids", None)
        if ids is not None:  # as a mask, so that a document's keys compete among themselves
            of_documents = masks.segments(ids, ids)
            mask = of_documents if mask is None else mask & of_documents
        among = self._among(mask, arguments.get("kv_lengths"))
        keep = keys_of_largest_bias(
            bias,
            self.keys_to_keep,
            among,
            num_heads=self.num_heads,
            q_length=query.shape[1],
            q_offset=arguments.get("q_offset", 0),
        )
        arguments |= {"is_causal": self.is_causal, "implementation": self.implementation}
        return dynamic_mask_attention(query, key, value, keep, bias, **arguments)

    def _decodes(self, query: jax.Array, mask: Any) -> bool:
        return False  # only _attend chooses the keys to keep

    def _attend_over_devices(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: Any,
        segment_ids: jax.Array | None = None,
        layout: str | None = None,
    ) -> jax.Array:
        raise NotImplementedError(
            f"sequence_axis: got tokens sharded along {self.sequence_axis!r}, want whole sequences: the keys to keep "
            "are chosen among all tokens"
        )

    def _among(self, mask: masks.Mask | None, kv_lengths: jax.Array | None) -> masks.Mask:
        """The Mask of the keys that compete for each query's attention: causal, within kv_lengths, and within `mask`.

        mask: the call's Mask, with num_kv_heads heads or one head, or None. kv_lengths: int32 [B], or None.
        """
        among = masks.causal() if self.is_causal else masks.sliding_window(None, None)
        if kv_lengths is not None:
            among = among & masks.prefix(kv_lengths)
        if mask is None:
            return among
        if mask.heads not in (1, self.num_kv_heads):
            raise ValueError(f"mask: got {mask.heads} heads, want 1 or num_kv_heads={self.num_kv_heads}")
        return among & mask
