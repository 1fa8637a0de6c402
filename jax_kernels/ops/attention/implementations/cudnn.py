"""Attention by cuDNN, through jax.nn: the requests that it supports, and the call."""

import jax
import jax.numpy as jnp

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.ops import unsupported
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.reference.attention import without_ignored

__all__ = ["forward", "supports"]


def supports(request: AttentionRequest) -> str | None:
    """The reason, in words for users, why cuDNN cannot serve the request; None if it can."""
    capability = request.device.compute_capability
    if capability is None:
        return f"it needs an NVIDIA GPU, and this runs on {request.device.name}"
    if reason := unsupported.below(request, (8, 0)):
        return reason
    if request.bits != 16:
        return "it takes bfloat16 and float16, not float32"
    if request.return_lse:
        return "its backward takes no gradient of the log-sum-exp"
    if request.has_segment_ids:
        return "it does not take segment_ids"
    if request.has_score_mod:
        return "it does not take a score_mod"
    if request.softcap is not None:
        return "it does not take a softcap"
    if request.has_sinks:
        return "it does not take sinks"
    if request.q_offset != 0:
        return "its causal mask starts at position 0: q_offset must be 0"
    if request.deterministic:
        return "its backward is not deterministic without XLA's own flag"
    limit = 256 if capability >= (9, 0) else 128
    if max(request.head_dim, request.v_head_dim) > limit:
        return f"its head_dim is at most {limit} here"
    if request.head_dim != request.v_head_dim:
        return "it needs one head_dim for query, key and value"
    if request.head_dim % 8:
        return "it needs a head_dim that is a multiple of 8"
    if request.q_length % 2 or request.kv_length % 2:
        return "its backward needs even lengths"
    return _window(request) or _bias(request)


# Wider backwards are for plain and causal attention.
_SPECIAL = 128


def _window(request: AttentionRequest) -> str | None:
    """The reason, in words for users, why cuDNN cannot serve the request's window; None if it can, or without one."""
    if request.window is None:
        return None
    if not request.is_causal:
        return "its window has only a left side, under a causal mask"
    if request.head_dim > _SPECIAL:
        return f"with a window its head_dim is at most {_SPECIAL}"
    if request.has_kv_lengths or request.has_mask or request.bias_shape is not None:
        return "it does not take a window with kv_lengths, a dense mask or a bias"
    if request.q_length > request.kv_length:
        return "with a window it needs a key for every query: kv_length may not be below q_length"
    return None


def _bias(request: AttentionRequest) -> str | None:
    """The reason, in words for users, why cuDNN cannot serve the request's bias; None if it can, or without one."""
    if request.bias_shape is None:
        return None
    if request.has_mask:
        return "it does not take a bias with a dense mask"
    if request.head_dim > _SPECIAL:
        return f"with a bias its head_dim is at most {_SPECIAL}"
    if request.bias_dtype != request.dtype:
        return f"it takes a bias in query's dtype {request.dtype}, not {request.bias_dtype}"
    want = (1, request.heads, request.q_length, request.kv_length)
    if request.bias_shape != want:
        return f"it has a gradient only for a bias of shape [1, H, T, S] = {want}, not {request.bias_shape}"
    return None


def forward(inputs: AttentionInputs, options: AttentionOptions, *, out_dtype, config, interpret):
    """(out [B, T, H, Dv], None instead of lse) by cuDNN; JAX differentiates it. Queries without a key get out = 0."""
    del config, interpret
    query, key, value, mask, bias, kv_lengths = (
        getattr(inputs, name) for name in ("query", "key", "value", "mask", "bias", "kv_lengths")
    )
    dead = None  # queries without a key, for which cuDNN would average over all values
    if kv_lengths is not None:
        key, value, *_ = without_ignored(inputs)[1:]
        dead = (kv_lengths <= 0)[:, None, None, None]
        kv_lengths = jnp.clip(kv_lengths, 1, key.shape[1])
    if bias is not None:  # a row of only -inf would give NaN
        finite = bias != -jnp.inf
        bias = jnp.where(finite, bias, 0)
        mask = finite if mask is None else mask & finite
    if mask is not None:
        keep = mask
        if kv_lengths is not None:
            keep = keep & (jnp.arange(key.shape[1]) < kv_lengths[:, None, None, None])
        if options.is_causal:
            keep = keep & (jnp.arange(query.shape[1])[:, None] >= jnp.arange(key.shape[1]))
        empty = ~keep.any(axis=-1, keepdims=True).swapaxes(1, 2)
        dead = empty if dead is None else dead | empty
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], query.shape[1], key.shape[1]))
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=options.scale,
        is_causal=options.is_causal,
        query_seq_lengths=None if kv_lengths is None else jnp.full_like(kv_lengths, query.shape[1]),
        key_value_seq_lengths=kv_lengths,
        local_window_size=options.window,
        implementation="cudnn",
    )
    out = out if dead is None else jnp.where(dead, 0, out)
    return out.astype(out_dtype), None
