"""Attention of 8-bit arrays in plain jnp, the "xla" implementation: in float32, whose products are exact."""

import jax.numpy as jnp

from jax_kernels.attention_inputs import AttentionInputs, AttentionOptions
from jax_kernels.reference import attention


def attention_forward(query, key, value, factors, q_offset, kv_lengths, *, is_causal):
    """(out [B, T, H, Dv] bfloat16, lse [B, H, T] float32).

    Arguments are those of jax_kernels.pallas.attention.forward_fp8_sm90.
    """
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    of_scores, of_out = (factors[..., i][:, None, :, None] for i in range(2))
    if kv_lengths is not None:  # what stands past a length may be anything, a NaN too
        value = jnp.where((jnp.arange(key.shape[1]) < kv_lengths[:, None])[..., None, None], value, 0)
    is_static = isinstance(q_offset, int)
    inputs = AttentionInputs(
        query * of_scores, key, value, kv_lengths=kv_lengths, q_offset=None if is_static else q_offset
    )
    options = AttentionOptions(
        scale=1.0, is_causal=is_causal, q_offset=q_offset if is_static else None, precision="fp32"
    )
    out, lse = attention.forward(inputs, options, out_dtype=jnp.float32)
    return (out * of_out).astype(jnp.bfloat16), lse
