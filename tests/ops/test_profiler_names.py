"""The names of calls in profilers: HLO of JAX's programs, which jax.profiler shows, and torch.profiler's rows."""

import jax
import jax.numpy as jnp
import pytest

import jax_kernels

SPEC = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
ROWS = jax.ShapeDtypeStruct((16, 8), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
SCALE = jax.ShapeDtypeStruct((8,), jnp.float32)
IDS = jax.ShapeDtypeStruct((16,), jnp.int32)
SIZES = jax.ShapeDtypeStruct((2,), jnp.int32)
WEIGHTS = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)
KEEP = jax.ShapeDtypeStruct((1, 1, 16, 16), jnp.bool_)

CALLS = {
    "flash_attention": (SPEC, SPEC, SPEC),
    "dynamic_mask_attention": (SPEC, SPEC, SPEC, KEEP),
    "matmul": (ROWS, SQUARE),
    "gated_matmul": (ROWS, SQUARE, SQUARE),
    "mlp": (ROWS, SQUARE, SQUARE),
    "rms_norm": (ROWS, SCALE),
    "layer_norm": (ROWS, SCALE, SCALE),
    "grouped_matmul": (ROWS, WEIGHTS, SIZES),
    "linear_cross_entropy": (ROWS, SQUARE, IDS),
    "decode_attention": (jax.ShapeDtypeStruct((1, 1, 2, 8), jnp.float32), SPEC, SPEC),
}


@pytest.mark.parametrize("name", CALLS)
def test_hlo_names_the_op(name):
    """The compiled HLO of a call has the op's name in its metadata; so has a backward, as transpose(jvp(name))."""
    op, specs = getattr(jax_kernels, name), CALLS[name]
    text = jax.jit(op).lower(*specs).compile().as_text()
    assert f"/{name}/" in text
    if name == "decode_attention":  # it has no gradient
        return
    loss = lambda x, *rest: op(x, *rest).sum()
    text = jax.jit(jax.grad(loss)).lower(*specs).compile().as_text()
    assert f"transpose(jvp({name}))" in text


def test_the_scope_is_the_ops():
    """A dilated attention's program has no other op's scope on the outside."""
    op = lambda q: jax_kernels.dilated_attention(q, q, q, segment_lengths=(8,), dilation_rates=(2,))
    assert "/dilated_attention/" in jax.jit(op).lower(SPEC).compile().as_text()
