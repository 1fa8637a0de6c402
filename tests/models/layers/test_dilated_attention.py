"""Dilated attention as modules: their results, MAGNETO's options, and LongNet."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import models
from jax_kernels.models import LongNet, LongNetConfig, MultiHeadDilatedAttention, flat_parameters
from tests.support.oracles import dilated as dilated_oracle

PATTERN = {"segment_lengths": (6, 12), "dilation_rates": (1, 4)}
SHAPE = {"vocab_size": 50, "model_dim": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 48}

forward = nnx.jit(lambda model, *args: model(*args))


@pytest.mark.parametrize("layer_norm", [False, True])
def test_projections_around_dilated_attention(layer_norm):
    pattern = PATTERN | {"heads": "groups", "combine": "mean", "order": "hilbert"}
    module = MultiHeadDilatedAttention(
        24, 4, head_dim=8, use_rotary=False, is_causal=False, layer_norm=layer_norm, rngs=nnx.Rngs(0), **pattern
    )
    if layer_norm:
        module.out_norm.scale[...] = jnp.linspace(0.5, 2, 32)
        module.out_norm.bias[...] = jnp.linspace(-1, 1, 32)
    x = jax.random.normal(jax.random.key(1), (2, 12, 24))
    p = {name: array.astype(np.float64) for name, array in flat_parameters(module).items()}
    qkv = (np.asarray(x, np.float64) @ p[f"{name}_proj.kernel"] for name in "qkv")
    qkv = [y.reshape(2, 12, 4, 8) for y in qkv]
    out, *_ = dilated_oracle.dilated_attention(*qkv, qkv[0], np.zeros((2, 4, 12)), **pattern)
    out = out.reshape(2, 12, 32)
    if layer_norm:
        out = (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + 1e-5)
        out = out * p["out_norm.scale"] + p["out_norm.bias"]
    np.testing.assert_allclose(forward(module, x), out @ p["out_proj.kernel"], atol=5e-6)


def test_gamma_scales_value_and_output():
    module = MultiHeadDilatedAttention(256, 4, num_kv_heads=2, gamma=3.0, rngs=nnx.Rngs(0), **PATTERN)
    spread = {name: array.std() for name, array in flat_parameters(module).items()}
    for name, fan_out, gain in (("q", 256, 1), ("k", 128, 1), ("v", 128, 3), ("out", 256, 3)):
        assert spread[f"{name}_proj.kernel"] == pytest.approx(gain * (2 / (256 + fan_out)) ** 0.5, rel=0.03)
    query, out = (np.ravel(getattr(module, f"{name}_proj").kernel[...]) for name in ("q", "out"))
    assert abs(np.corrcoef(query, out)[0, 1]) < 0.02, "each kernel has random numbers of its own"


def test_all_arguments_reach_dilated_attention(monkeypatch):
    seen = {}
    given = PATTERN | {
        "is_causal": True,
        "heads": "groups",
        "combine": "lse",
        "layout": "overlap",
        "order": "hilbert",
        "stop_gradient_weights": True,
        "implementation": "xla",
    }
    module = models.DilatedAttention(**given)
    monkeypatch.setitem(
        type(module).__call__.__globals__, "dilated_attention", lambda *qkv, **given: seen.update(given)
    )
    module(1, 2, 3, segment_ids=4)
    assert seen == given | {"segment_ids": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"heads": "groups", "combine": "mean", "order": "hilbert"},
        {"layout": "partition", "norm_eps": 1e-3},
        {"precision": "fp8", "scaling": "row"},
    ],
)
def test_longnet_keeps_its_config_fields(fields):
    fields |= {"rope_theta": 500.0, "head_dim": 6, "dtype": "bfloat16", "param_dtype": "float16"}
    config = LongNetConfig(**SHAPE, **PATTERN, **fields, layer_norm=True, gamma=9.0, implementation="xla")
    block = LongNet(config, rngs=nnx.Rngs(0)).layers[0]
    pattern = ("segment_lengths", "dilation_rates", "heads", "combine", "layout", "order", "implementation")
    for name in pattern:
        assert getattr(block.attention.attention, name) == getattr(config, name)
    for name in ("rope_theta", "head_dim", "num_kv_heads", "implementation"):
        assert getattr(block.attention, name) == getattr(config, name)
    assert block.attention.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(nnx.state(block, nnx.Param))} == {jnp.dtype(jnp.float16)}
    query, value = (
        np.asarray(x.kernel[...], np.float32).std() for x in (block.attention.q_proj, block.attention.v_proj)
    )
    assert value > 5 * query
    for projection in (block.attention.out_proj, block.mlp.gate_proj, block.mlp.down_proj):
        for name in ("precision", "scaling"):
            assert getattr(projection, name, None) == getattr(config, name)
    assert block.attention_norm.epsilon == config.norm_eps


def test_implementation_reaches_the_projections():
    config = LongNetConfig(**SHAPE, **PATTERN, projection_implementation="fast")
    with pytest.raises(ValueError, match="implementation: got 'fast'"):
        LongNet(config, rngs=nnx.Rngs(0))(jnp.zeros((1, 12), jnp.int32))


def test_undilated_longnet_is_the_transformer():
    config = LongNetConfig(**SHAPE, segment_lengths=[100], dilation_rates=[1])
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(models.TransformerConfig)}
    transformer = models.Transformer(models.TransformerConfig(**fields), rngs=nnx.Rngs(0))
    longnet = LongNet(config, rngs=nnx.Rngs(5))
    nnx.update(longnet, nnx.state(transformer, nnx.Param))
    tokens = jax.random.randint(jax.random.key(1), (2, 11), 0, 50)
    np.testing.assert_allclose(forward(longnet, tokens), forward(transformer, tokens), atol=1e-5)


def test_longnet_learns_and_is_causal():
    longnet = LongNet(LongNetConfig(**SHAPE, **PATTERN, remat=True, layer_norm=True, gamma=1.2), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 50)
    logits = forward(longnet, tokens)
    changed = forward(longnet, tokens.at[:, 9].set((tokens[:, 9] + 1) % 50))
    np.testing.assert_array_equal(logits[:, :9], changed[:, :9])
    assert (logits[:, 9:12] != changed[:, 9:12]).any(axis=-1).all()
    gradients = nnx.jit(nnx.grad(lambda model: (model(tokens) ** 2).mean()))(longnet)
    flat = flat_parameters(gradients)
    assert flat.keys() == flat_parameters(longnet).keys() >= {"layers.0.attention.out_norm.scale"}
    assert all(np.abs(array).max() > 0 for array in flat.values())
    with pytest.raises(NotImplementedError, match="dilated attention has no cache"):
        longnet.init_cache(1, 8)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"dilation_rates": (1,)}, ValueError, "dilation_rates: got 1 of them for 2 segment_lengths"),
        (
            {"dilation_rates": (1, 13)},
            ValueError,
            r"dilation_rates\[1\]: got 13, want at most segment_lengths\[1\] = 12",
        ),
        ({"order": "snake"}, ValueError, "order: got 'snake'"),
        ({"sequence_strategy": "ring"}, ValueError, "LongNetConfig.sequence_strategy='ring' must be 'auto'"),
        ({"layer_norm": 1}, TypeError, "LongNetConfig.layer_norm=1 must be a bool"),
        ({"gamma": 0.0}, ValueError, "LongNetConfig.gamma=0.0 must be positive"),
        ({"gamma": "a"}, TypeError, "LongNetConfig.gamma='a' must be a number, or None"),
        (
            {"heads": "groups", "segment_lengths": [4] * 5, "dilation_rates": [1] * 5},
            ValueError,
            "must be at most num_heads=4",
        ),
    ],
)
def test_errors(fields, error, message):
    with pytest.raises(error, match=message):
        LongNetConfig(**SHAPE | PATTERN | fields)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gamma": -1.0}, ValueError, "^gamma=-1.0 must be positive and finite, or None"),
        ({"gamma": True}, TypeError, "^gamma=True must be a number, or None"),
        ({"layer_norm": "yes"}, TypeError, "^layer_norm='yes' must be a bool"),
    ],
)
def test_module_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        MultiHeadDilatedAttention(32, 4, rngs=nnx.Rngs(0), **PATTERN | arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": "yes"}, "is_causal: got str, want a bool"),
        ({"implementation": 3}, "implementation: got int, want a name or None"),
    ],
    ids=["is_causal", "implementation"],
)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        models.DilatedAttention((4,), (2,), **options)
