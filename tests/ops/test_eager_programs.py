"""Eager calls of "xla" run as a few programs, not as a program for each operation."""

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import (
    decode_attention,
    dequantize,
    flash_attention,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    masks,
    matmul,
    quantize,
    rms_norm,
)

COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if event.endswith("backend_compile_duration") else None
)
Q, X, W, ROWS = jnp.ones((2, 13, 2, 8)), jnp.ones((11, 24)), jnp.ones((24, 12)), jnp.array([5, 6])
TARGETS = jnp.arange(11)
MASK = masks.causal() | masks.prefix(3)


def gradients(op):
    return lambda *arrays: jax.vjp(op, *arrays)[1](op(*arrays))


# The call, its arrays, and the most programs that its first call of these shapes compiles.
CALLS = {
    "attention": (lambda q: flash_attention(q, q, q, is_causal=True), [Q], 2),
    "attention gradients": (gradients(lambda q: flash_attention(q, q, q, is_causal=True)), [Q], 12),
    "mask": (lambda q: flash_attention(q, q, q, mask=MASK), [Q], 3),
    "decode": (lambda q: decode_attention(q[:, :1], q, q), [Q], 5),
    "matmul": (lambda x, w: matmul(x, w, activation="gelu"), [X, W], 2),
    "matmul gradients": (gradients(lambda x, w: matmul(x, w, activation="gelu")), [X, W], 8),
    "fp8": (lambda x, w: matmul(x, w, precision="fp8"), [X, W], 8),
    "grouped": (lambda x, w: grouped_matmul(x, w, ROWS), [X, jnp.ones((2, 24, 12))], 4),
    "losses": (lambda x, w: linear_cross_entropy(x, w, TARGETS), [X, W], 8),
    "loss gradients": (jax.grad(lambda x, w: linear_cross_entropy(x, w, TARGETS, reduction="mean")), [X, W], 16),
    "rms_norm": (rms_norm, [X, jnp.ones(24)], 2),
    "layer_norm gradients": (gradients(layer_norm), [X, jnp.ones(24), jnp.ones(24)], 8),
    "quantize": (lambda x: quantize(x, scaling="row"), [X], 2),
    "low-bit weights": (lambda w: dequantize(quantize(w, "int4")), [jnp.ones((64, 16))], 4),
    "top k": (lambda x: masks.top_k(x, 3).array, [X], 3),
    "top k of a row": (lambda x: masks.top_k(x[:1], 3, among=masks.causal(), q_length=9).rank, [X], 16),
}


@pytest.mark.parametrize("name", CALLS)
def test_programs_of_a_call(name):
    call, arrays, most = CALLS[name]
    jax.clear_caches()
    jax.block_until_ready(jax.tree.leaves(call(*arrays)))
    before = len(COMPILED)
    jax.clear_caches()
    jax.block_until_ready(jax.tree.leaves(call(*arrays)))
    assert 0 < len(COMPILED) - before <= most


CALLERS = {
    "activation": lambda: matmul(X, W, activation=lambda z: jnp.tanh(z)),
    "mask": lambda: flash_attention(Q, Q, Q, mask=masks.from_function(lambda b, h, q, k: q >= k)),
}


@pytest.mark.parametrize("name", CALLERS)
def test_a_callers_function_is_not_compiled_in_each_call(name):
    """A function that is new in each call."""
    jax.block_until_ready(CALLERS[name]())
    before = len(COMPILED)
    jax.block_until_ready(CALLERS[name]())
    assert len(COMPILED) == before
