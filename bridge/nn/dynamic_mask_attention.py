"""Multi-head attention that learns which keys to attend to, as a PyTorch module."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional

from jax_kernels import masks
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.jax_functions.api import from_jax
from jax_kernels.bridge.nn.layers import (
    PlainLinear,
    check_flags,
    check_input,
    empty_attention,
    positive,
    rotary_embedding,
)
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.attention import float_masks
from jax_kernels.bridge.ops.attention.attention_checks import as_torch_is_set, check_tensor
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import dynamic_mask_attention as ops

__all__ = ["DynamicMaskAttention"]


class DynamicMaskAttention(torch.nn.Module):
    """Self-attention over [B, T, model_dim]. A query attends to the keys with the largest bias, computed from values.

    It is jax_kernels.models.DynamicMaskAttention without a cache. One JAX program makes the mask and runs attention.
    Equivalent to the following code, for each head of keys::

        query, key, value = (split_heads(linear(x)) for linear in (q_proj, k_proj, v_proj))
        query, key = rotary_embedding(query, arange(T)), rotary_embedding(key, arange(T))
        steps = dt_proj(value.flatten(2))  # [B, T, num_kv_heads]
        bias = exp(A * softplus(steps)).transpose(1, 2)[:, :, None]  # [B, num_kv_heads, 1, T]
        keep = bridge.masks.top_k(bias, keys_to_keep, among=masks.causal(), q_length=T)
        out = out_proj(bridge.dynamic_mask_attention(query, key, value, keep, bias).flatten(2))

    The mask passes no gradient; A and dt_proj learn through the bias. The module computes in x's dtype, or autocast's,
    and the bias in float32.

    Parameters, as in the Flax module with kernels transposed, and without biases: q_proj.weight
    [num_heads * head_dim, model_dim], k_proj.weight and v_proj.weight [num_kv_heads * head_dim, model_dim],
    out_proj.weight [model_dim, num_heads * head_dim], dt_proj.weight [num_kv_heads, num_kv_heads * head_dim], A
    [num_kv_heads]. The weights are initialised normal with variance 1 / in_features, and A normal with a standard
    deviation of 0.02. If A were 0, all keys would have the same bias.

    Args:
      model_dim: width of input and output.
      num_heads: number of query heads.
      num_kv_heads: number of key and value heads, a divisor of num_heads (None: num_heads).
      head_dim: width of a head, up to 256 (None: model_dim / num_heads).
      keys_to_keep: the most keys that a query attends to, among the keys that is_causal and the masks allow. Among keys
        of equal bias the first are kept.
      use_rotary, rope_theta: rotate queries and keys by their positions (see rotary_embedding).
      is_causal: a token attends to itself and to earlier tokens only.
      mask: a masks.Mask for all calls, with num_kv_heads heads or one head. It is combined with is_causal and a call's
        mask.
      implementation: of the attention, such as "triton"; None picks the device's first that supports the call.
      dtype, device: dtype and device of the parameters, as in any PyTorch module.

    Raises:
      ValueError, TypeError: an argument is out of range, or has a wrong type; the error names it.

    Source: Shi et al., "Trainable Dynamic Mask Sparse Attention" (2025), arXiv:2508.02124.
    """

    @plain_arguments
    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        keys_to_keep: int = 2048,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        use_rotary: bool = True,
        rope_theta: float = 10000.0,
        is_causal: bool = True,
        mask: Mask | None = None,
        implementation: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.model_dim = positive("model_dim", model_dim)
        self.num_heads = positive("num_heads", num_heads)
        self.keys_to_keep = positive("keys_to_keep", keys_to_keep)
        self.num_kv_heads = num_heads if num_kv_heads is None else positive("num_kv_heads", num_kv_heads)
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {num_kv_heads}, want a divisor of num_heads={num_heads}")
        if head_dim is None and model_dim % num_heads:
            raise ValueError(f"model_dim: got {model_dim} with num_heads={num_heads}, want a multiple, or a head_dim")
        self.head_dim = model_dim // num_heads if head_dim is None else positive("head_dim", head_dim)
        check_flags(use_rotary=use_rotary, is_causal=is_causal)
        if use_rotary and self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, want an even one: rotary embedding turns pairs")
        if mask is not None:
            if not isinstance(mask, Mask):
                raise TypeError(f"mask: got {type(mask).__name__}, want a masks.Mask, or None; pass a tensor to a call")
            self._check_heads(mask.heads)
        self.use_rotary = use_rotary
        self.rope_theta = rope_theta
        self.is_causal = is_causal
        self.mask = mask
        self.implementation = implementation

        place: dict[str, Any] = {"dtype": dtype, "device": device}
        of_queries, of_keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = PlainLinear(model_dim, of_queries, **place)
        self.k_proj = PlainLinear(model_dim, of_keys, **place)
        self.v_proj = PlainLinear(model_dim, of_keys, **place)
        self.out_proj = PlainLinear(of_queries, model_dim, **place)
        self.dt_proj = PlainLinear(of_keys, self.num_kv_heads, **place)
        self.A = torch.nn.Parameter(torch.empty(self.num_kv_heads, **place))
        torch.nn.init.normal_(self.A, std=0.02)

    def reset_parameters(self) -> None:
        """Draws new weights, normal with variance 1 / in_features, and A, normal with a standard deviation of 0.02."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.dt_proj):
            linear.reset_parameters()
        torch.nn.init.normal_(self.A, std=0.02)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | Mask | None = None) -> torch.Tensor:
        """Attends within x. Returns [B, T, model_dim], in x's dtype, or autocast's; an empty x gives an empty result.

        Args:
          x: [B, T, model_dim].
          mask: bool, broadcastable to [B, num_kv_heads, T, T], True = attend, or floats of 0 and 1, or a masks.Mask of
            num_kv_heads heads or one head. It is combined with is_causal and the module's mask.

        Raises:
          ValueError, TypeError: x or mask is nested, or has the wrong shape, dtype or device; the error names it.
        """
        if symbolic_trace.is_traced(x, mask):
            return symbolic_trace.leaf(self, x, mask=mask)
        check_input("x", x)
        check_dense("x", x)
        if x.ndim != 3 or x.shape[-1] != self.model_dim:
            raise ValueError(f"x: got shape {tuple(x.shape)}, want [batch, length, {self.model_dim}]")
        is_valid = None
        if float_masks.is_float(mask):
            mask, is_valid = float_masks.as_bool("mask", mask)
        if mask is not None:
            self._check_mask(mask, x)
        split = lambda y: y.unflatten(-1, (-1, self.head_dim))
        query, key, value = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        if self.use_rotary:
            positions = torch.arange(x.shape[1], device=x.device)
            query, key = (rotary_embedding(y, positions, self.rope_theta) for y in (query, key))
        # Contiguous, as torch.compile's trace of softplus's gradient assumes other strides for a transposed one.
        steps = functional.softplus(self.dt_proj(value.flatten(2)).float().transpose(1, 2).contiguous())
        bias = torch.exp(self.A.float()[:, None] * steps)[:, :, None]
        query, key, value, _, deterministic = as_torch_is_set(query, key, value)
        out = empty_attention(query, key, value, bias)
        if out is None:
            out = _dynamic_mask_attention(
                query,
                key,
                value,
                bias,
                [given for given in (self.mask, mask) if given is not None],
                keys_to_keep=self.keys_to_keep,
                is_causal=self.is_causal,
                deterministic=deterministic,
                implementation=self.implementation,
            )
        return float_masks.or_nan(self.out_proj(out.flatten(2)), is_valid)

    __prepare_scriptable__ = symbolic_trace.no_script

    def _check_mask(self, mask: torch.Tensor | Mask, x: torch.Tensor) -> None:
        """Raises TypeError or ValueError unless a call's mask fits x [B, T, model_dim]."""
        if isinstance(mask, Mask):
            self._check_heads(mask.heads)
            return
        check_tensor("mask", mask, x)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: got dtype {mask.dtype}, want torch.bool (True = attend), or floats of 0 and 1")
        want = (x.shape[0], self.num_kv_heads, x.shape[1], x.shape[1])
        if mask.ndim > 4 or any(n not in (1, m) for n, m in zip(mask.shape[::-1], want[::-1], strict=False)):
            raise ValueError(
                f"mask: got shape {tuple(mask.shape)}, want one broadcastable to [B, num_kv_heads, T, T] = {want}"
            )

    def _check_heads(self, heads: int) -> None:
        if heads not in (1, self.num_kv_heads):
            raise ValueError(f"mask: got {heads} heads, want 1 or num_kv_heads={self.num_kv_heads}")

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"keys_to_keep={self.keys_to_keep}, is_causal={self.is_causal}"
        )


@from_jax
def _dynamic_mask_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array,
    given: list[jax.Array | Mask],
    *,
    keys_to_keep: int,
    is_causal: bool,
    **arguments: Any,
) -> jax.Array:
    """Returns the attention [B, T, num_heads, head_dim] of each query to the keys of largest bias, in JAX.

    query: [B, T, num_heads, head_dim]. key, value: [B, T, num_kv_heads, head_dim]. bias: float32
    [B, num_kv_heads, 1, T], also added to the scores. given: bool arrays, broadcastable to [B, num_kv_heads, T, T], or
    Masks of num_kv_heads heads or one head: only keys that all of them keep are candidates. keys_to_keep: the most keys
    that a query attends to. is_causal: keys after a query are no candidates. arguments: further options of
    jax_kernels.dynamic_mask_attention.
    """
    length, heads = query.shape[1:3]
    among = masks.causal() if is_causal else masks.sliding_window(None, None)
    for mask in given:
        among = among & (mask if isinstance(mask, Mask) else masks.dense(mask))
    bias = jnp.where(jnp.isnan(bias), -jnp.inf, bias)  # a NaN is never chosen, as in masks.top_k
    keep = ops.keys_of_largest_bias(bias, keys_to_keep, among, num_heads=heads, q_length=length)
    return ops.dynamic_mask_attention(query, key, value, keep, bias, is_causal=is_causal, **arguments)
