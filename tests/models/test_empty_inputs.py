"""Flax modules on an empty batch, and on no tokens: results are empty, gradients 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import masks, models

SHAPES = [(0, 6), (2, 0)]
PATTERN = {"segment_lengths": (4, 8), "dilation_rates": (1, 2)}
MODULES = {
    "MultiHeadAttention": lambda rngs: models.MultiHeadAttention(32, 4, num_kv_heads=2, rngs=rngs),
    "DynamicMaskAttention": lambda rngs: models.DynamicMaskAttention(32, 4, num_kv_heads=2, keys_to_keep=3, rngs=rngs),
    "MultiHeadDilatedAttention": lambda rngs: models.MultiHeadDilatedAttention(
        32, 4, **PATTERN, layer_norm=True, rngs=rngs
    ),
}
EXPERTS = {"num_experts": 4, "shared_experts": 1, "bias_rate": 0.1}
SIZES = {"vocab_size": 64, "model_dim": 32, "num_layers": 1, "num_heads": 4}
MODELS = {
    "Transformer": lambda rngs: models.Transformer(models.TransformerConfig(**SIZES), rngs=rngs),
    "experts": lambda rngs: models.Transformer(models.TransformerConfig(**SIZES, experts=EXPERTS), rngs=rngs),
    "LongNet": lambda rngs: models.LongNet(models.LongNetConfig(**SIZES, **PATTERN), rngs=rngs),
}


def check_zeros(tree):
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, shape):
    module, x, ids = MODULES[name](nnx.Rngs(0)), jnp.ones((*shape, 32)), jnp.zeros(shape, jnp.int32)
    assert module(x).shape == x.shape
    assert module(x, segment_ids=ids, positions=jnp.arange(shape[1])).shape == x.shape
    check_zeros(nnx.jit(nnx.grad(lambda module, x: module(x).sum(), argnums=(0, 1)))(module, x))
    if name == "MultiHeadDilatedAttention":
        return
    assert module(x, mask=jnp.ones((shape[0], 1, shape[1], shape[1]), bool)).shape == x.shape
    assert module(x, mask=masks.causal() | masks.prefix(2)).shape == x.shape
    out, cache = module(x, cache=module.init_cache(shape[0], 8))
    assert (out.shape, int(cache.length)) == (x.shape, shape[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, shape):
    model, tokens = MODELS[name](nnx.Rngs(0)), jnp.zeros(shape, jnp.int32)
    assert model(tokens, segment_ids=tokens).shape == (*shape, 64)
    assert model.losses(tokens, tokens).shape == shape
    check_zeros(nnx.jit(nnx.grad(lambda model: model.losses(tokens, tokens).sum()))(model))


def test_generate():
    model = MODELS["Transformer"](nnx.Rngs(0))
    assert model.generate(jnp.zeros((0, 6), jnp.int32), 3, temperature=0.0).shape == (0, 3)


@pytest.mark.parametrize("shape", [(0, 5, 4, 16), (3, 0, 5, 4, 16), (2, 0, 4, 16)])
def test_attention_fn(shape):
    query, key = jnp.ones(shape), jnp.ones((*shape[:-3], 7, *shape[-2:]))
    mask = jnp.ones((*shape[:-3], 1, shape[-3], 7))
    assert models.attention_fn(query, key, key, mask=mask).shape == shape


def test_attention_fn_without_keys():
    query = jnp.ones((2, 5, 4, 16))
    np.testing.assert_array_equal(models.attention_fn(query, query[:, :0], query[:, :0]), jnp.zeros_like(query))
