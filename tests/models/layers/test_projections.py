"""Projections that were replaced, or given a bias: modules that read kernels call such projections instead."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import models

NAMES = ("gate_proj", "up_proj", "down_proj")
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 16)), jnp.float32)
CONFIG = models.TransformerConfig(
    vocab_size=32, model_dim=16, num_layers=1, num_heads=2, mlp_dim=24, tie_embeddings=False
)
TOKENS = jnp.arange(12).reshape(2, 6)


def lora(linear, kind):
    """A LoRA layer with the linear's kernel, whose second matrix is not 0."""
    options = {"rngs": nnx.Rngs(1), "b_initializer": nnx.initializers.normal(1.0)}
    if kind == "wrapper":
        return nnx.LoRA(linear.in_features, 2, linear.out_features, base_module=linear, **options)
    layer = nnx.LoRALinear(linear.in_features, linear.out_features, lora_rank=2, use_bias=False, **options)
    layer.kernel = linear.kernel
    return layer


def change(parent, name, kind):
    linear = getattr(parent, name)
    if kind == "bias":
        linear.bias, linear.use_bias = nnx.Param(jnp.arange(linear.out_features, dtype=jnp.float32)), True
    else:
        setattr(parent, name, lora(linear, kind))


def plain(layer, x):
    """The layer's result from its parameters."""
    if isinstance(layer, nnx.LoRA):
        return plain(layer.base_module, x) + x @ layer.lora_a[...] @ layer.lora_b[...]
    out = x @ layer.kernel[...]
    if isinstance(layer, nnx.LoRALinear):
        out = out + plain_lora(layer.lora, x)
    return out if layer.bias is None else out + layer.bias[...]


def plain_lora(layer, x):
    return x @ layer.lora_a[...] @ layer.lora_b[...]


def plain_mlp(mlp, x):
    gate, up, down = (getattr(mlp, name) for name in NAMES)
    return plain(down, nnx.silu(plain(gate, x)) * plain(up, x))


@pytest.mark.parametrize("kind", ["bias", "subclass", "wrapper"])
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_projection_of_a_gated_mlp(name, kind):
    mlp = models.GatedMLP(16, 24, rngs=nnx.Rngs(0))
    assert mlp.is_one_op
    change(mlp, name, kind)
    assert not mlp.is_one_op
    loss = lambda of: lambda mlp, x: (of(mlp, x) ** 2).sum()
    got, want = (
        nnx.jit(nnx.value_and_grad(loss(of), argnums=nnx.DiffState(0, nnx.Param), has_aux=False))(mlp, X)
        for of in (lambda mlp, x: mlp(x, residual=x), lambda mlp, x: plain_mlp(mlp, x) + x)
    )
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-3), got, want)
    assert all(jnp.any(x) for x in jax.tree.leaves(got))


@pytest.mark.parametrize("name", NAMES)
def test_a_projection_with_another_precision(name):
    mlp = models.GatedMLP(16, 24, rngs=nnx.Rngs(0))
    exact = mlp(X)
    getattr(mlp, name).precision = "bf16"
    error = jnp.abs(mlp(X) - exact).max()
    assert 1e-5 < error < 0.1


def test_a_gated_mlp_in_8_bits():
    """The replaced projection is computed with its own precision."""
    mlp = models.GatedMLP(16, 24, precision="fp8", rngs=nnx.Rngs(0))
    change(mlp, "down_proj", "wrapper")
    gate, up = (getattr(mlp, name)(X) for name in NAMES[:2])
    np.testing.assert_allclose(mlp(X), mlp.down_proj(nnx.silu(gate) * up), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("kind", ["bias", "subclass", "wrapper"])
def test_a_changed_head(kind):
    model = models.Transformer(CONFIG, rngs=nnx.Rngs(0))
    change(model, "head", kind)
    with_identity = nnx.clone(model)
    with_identity.head = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
    with_identity.head.kernel[...] = jnp.eye(16)
    want = plain(model.head, with_identity(TOKENS))
    np.testing.assert_allclose(model(TOKENS), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match=re.escape(f"head: got a {type(model.head).__name__} with a bias")):
        model.losses(TOKENS, TOKENS)


def test_a_quantized_head_with_a_bias():
    model = models.Transformer(CONFIG, rngs=nnx.Rngs(0))
    model.head = models.QuantizedLinear.from_linear(model.head, "int8")
    without = model(TOKENS)
    model.losses(TOKENS, TOKENS)
    model.head.bias = nnx.Param(jnp.arange(32, dtype=jnp.float32))
    np.testing.assert_allclose(model(TOKENS), without + jnp.arange(32), rtol=1e-5, atol=1e-5)
