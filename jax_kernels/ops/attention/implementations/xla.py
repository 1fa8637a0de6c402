"""Attention in plain JAX. An eager call runs as one program, not as a program for each operation."""

import dataclasses
from typing import Any

import jax

from jax_kernels.reference import attention_chunks, chunked_attention
from jax_kernels.target import target_device

__all__ = ["backward", "chunk_bytes", "forward"]


def chunk_bytes(*arrays: Any) -> int:
    """The limit of the bytes of a chunk of the "xla" implementation on the device for which a call is planned."""
    is_cpu = target_device(*arrays).compute_capability is None
    return attention_chunks.CPU_CHUNK_BYTES if is_cpu else attention_chunks.CHUNK_BYTES


_COMPILED_FORWARD = jax.jit(
    chunked_attention.forward, static_argnums=1, static_argnames=("out_dtype", "chunk_bytes"), inline=True
)
_COMPILED_BACKWARD = jax.jit(chunked_attention.backward, static_argnums=1, static_argnames="chunk_bytes", inline=True)


def _has_function(x: Any) -> bool:
    """Whether a mask or a score_mod, or a part of it, holds a function, which may be another one in each call."""
    if isinstance(x, tuple | list):
        return any(map(_has_function, x))
    if dataclasses.is_dataclass(x):
        return any(_has_function(getattr(x, field.name)) for field in dataclasses.fields(x))
    return callable(x)


def forward(inputs, options, *, out_dtype, config, interpret):
    run = chunked_attention.forward if _has_function((inputs.mask, inputs.score_mod)) else _COMPILED_FORWARD
    return run(inputs, options, out_dtype=out_dtype, chunk_bytes=chunk_bytes(inputs.query))


def backward(inputs, options, lse, delta, dout, *, config, interpret, lse_lo=None):
    run = chunked_attention.backward if _has_function((inputs.mask, inputs.score_mod)) else _COMPILED_BACKWARD
    return run(inputs, options, lse, delta, dout, lse_lo, chunk_bytes=chunk_bytes(inputs.query))
