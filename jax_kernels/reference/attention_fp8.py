"""Attention of 8-bit arrays in plain jnp, the "xla" implementation. float32 products of 8-bit values are exact."""

import dataclasses

import jax.numpy as jnp

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.reference import chunked_attention


def attention_forward(inputs: AttentionInputs, options: AttentionOptions, factors, *, chunk_bytes):
    """(out [B, T, H, Dv] bfloat16, lse [B, H, T] float32) of 8-bit query, key and value.

    factors: float32 [B, H, 2]: a head's factor of query @ key^T, from the scales of query and key, and its factor of
    the result, from the scale of value. chunk_bytes: as in chunked_attention.forward.
    """
    query, key, value = (x.astype(jnp.float32) for x in inputs[:3])
    of_scores, of_out = (factors[..., i][:, None, :, None] for i in range(2))
    inputs = inputs._replace(query=query * of_scores, key=key, value=value)
    options = dataclasses.replace(options, precision="fp32")
    out, lse = chunked_attention.forward(inputs, options, out_dtype=jnp.float32, chunk_bytes=chunk_bytes)
    return (out * of_out).astype(jnp.bfloat16), lse
