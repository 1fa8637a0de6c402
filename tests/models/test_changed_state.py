"""Models with other modules in their blocks: the state that a call changes, and the dtypes of results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jax_kernels.models import ExpertsConfig, Transformer, TransformerConfig
from jax_kernels.models.block import matrices_rounded_to

TOKENS = np.arange(16).reshape(2, 8)
LAYERS = 2


class WithState(nnx.Module):
    """An MLP after a Dropout, which counts its calls."""

    def __init__(self, mlp, seed):
        self.mlp = mlp
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x, *, residual):
        self.calls[...] += 1
        return self.mlp(self.dropout(x), residual=residual)


def made(**options):
    sizes = {"vocab_size": 32, "model_dim": 16, "num_layers": LAYERS, "num_heads": 2, "implementation": "xla"}
    return Transformer(TransformerConfig(**sizes | options), rngs=nnx.Rngs(0))


def with_state(**options):
    model = made(**options)
    for seed, layer in enumerate(model.layers):
        layer.mlp = WithState(layer.mlp, seed)
    return model


@pytest.mark.parametrize("options", [{}, {"scan_layers": True}, {"remat": "products"}], ids=["loop", "scan", "remat"])
def test_blocks_keep_the_state_that_a_call_changes(options):
    model = with_state(**options)
    first, second = model(TOKENS), model(TOKENS)
    assert not np.allclose(first, second)  # another mask of the Dropout
    nnx.jit(nnx.grad(lambda model: model.losses(TOKENS, TOKENS, reduction="sum")))(model)
    assert [int(layer.mlp.calls[...]) for layer in model.layers] == [3] * LAYERS
    assert [int(layer.mlp.dropout.rngs.count[...]) for layer in model.layers] == [3] * LAYERS


def test_a_call_equals_the_blocks_one_after_the_other():
    model, expected = with_state(), with_state()
    found = model(TOKENS)
    x = expected.embed_tokens(TOKENS)
    for layer in expected.layers:
        x, _, _ = layer(x)
    np.testing.assert_allclose(found, expected.final_norm(x) @ expected.embed[...].T, atol=1e-5)


def test_capture_collects_the_values_of_blocks():
    _, captured = nnx.capture(made(), nnx.Intermediate, method_outputs=nnx.Intermediate)(TOKENS)
    for i in range(LAYERS):
        assert captured["layers"][i]["mlp"]["__call__"].get_value()[0].shape == (2, 8, 16)


def test_explicit_axes_refuse_a_changed_state():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=r"mesh: got Explicit axes .*mlp\.calls"):
        with_state()(TOKENS)
    with jax.set_mesh(mesh):
        assert made()(TOKENS).shape == (2, 8, 32)


def test_stages_refuse_a_changed_state():
    mesh = jax.sharding.AbstractMesh((2,), ("pipeline",), axis_types=(AxisType.Auto,))
    wanted = r"mesh: got stages along 'pipeline' .*mlp\.calls"
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match=wanted):
        jax.eval_shape(lambda: with_state()(TOKENS))


def adapted(options, names):
    """A model whose projections of these names are nnx.LoRAs without a dtype, and the same model without nnx.LoRAs."""
    model, merged = made(**options), made(**options)
    for layer, of_merged in zip(model.layers, merged.layers, strict=True):
        for name in names:
            base = getattr(layer.attention, name)
            lora = nnx.LoRA(16, 2, 16, base_module=base, rngs=nnx.Rngs(1))
            lora.lora_b[...] = 0.1 * jax.random.normal(jax.random.key(2), (2, 16))
            setattr(layer.attention, name, lora)
            kernel = getattr(of_merged.attention, name).kernel
            kernel[...] = kernel[...] + lora.lora_a[...] @ lora.lora_b[...]
    return model, merged


@pytest.mark.parametrize("names", [("q_proj",), ("v_proj",), ("out_proj",), ("q_proj", "k_proj", "v_proj")], ids=str)
def test_wider_projections_keep_the_model_in_its_dtype(names):
    model, merged = adapted({"dtype": "bfloat16"}, names)
    np.testing.assert_allclose(model(TOKENS), merged(TOKENS), atol=0.1)
    assert model.layers[0].attention(jnp.ones((1, 4, 16), jnp.bfloat16)).dtype == jnp.bfloat16
    logits, _ = model(TOKENS, cache=model.init_cache(2, 8))
    np.testing.assert_allclose(logits, model(TOKENS), atol=0.1)


def test_the_residual_stream_keeps_its_dtype_after_a_wider_mlp():
    class Wider(nnx.Module):
        def __call__(self, x, *, residual):
            return (x + residual).astype(jnp.float32)

    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "scan_layers": True}):
        model = made(**options)
        for layer in model.layers:
            layer.mlp = Wider()
        hidden, _, _ = model._hidden(jnp.asarray(TOKENS), None)
        assert hidden.dtype == jnp.bfloat16
        assert np.isfinite(model(TOKENS)).all()


@pytest.mark.parametrize("options", [{"scan_layers": True}, {"remat": "products"}], ids=str)
def test_matrices_keep_their_dtype_in_a_scan(options):
    """Only matrices that the blocks' matmuls round are rounded before the blocks."""
    seen = []

    class WithMatrix(nnx.Module):
        def __init__(self, mlp):
            self.mlp = mlp
            self.lora = nnx.LoRA(16, 2, 16, rngs=nnx.Rngs(0))
            self.matrix = nnx.Param(jnp.full((16, 16), 1 / 3, jnp.float32))

        def __call__(self, x, *, residual):
            seen.append([str(y.dtype) for y in (self.mlp.up_proj.kernel, self.lora.lora_a, self.matrix)])
            return self.mlp(x, residual=residual)

    model = made(dtype="bfloat16", **options)
    for layer in model.layers:
        layer.mlp = WithMatrix(layer.mlp)
    assert np.isfinite(model(TOKENS)).all()
    assert seen
    assert all(dtypes == ["bfloat16", "float32", "float32"] for dtypes in seen)


def test_a_users_linear_layer_keeps_its_matrix():
    """A subclass of another library may compute in another dtype than its own."""

    class InFloat32(nnx.Linear):
        def __call__(self, x):
            return (x.astype(jnp.float32) @ self.kernel[...]).astype(x.dtype)

    block = made(dtype="bfloat16").layers[0]
    block.attention.out_proj = InFloat32(16, 16, dtype=jnp.bfloat16, use_bias=False, rngs=nnx.Rngs(0))
    paths = matrices_rounded_to(jnp.bfloat16, *nnx.split(block))
    assert ("attention", "q_proj", "kernel") in paths
    assert ("attention", "out_proj", "kernel") not in paths


def test_matrices_that_blocks_round():
    projections = {("attention", f"{name}_proj", "kernel") for name in ("q", "k", "v", "out")}
    experts = ExpertsConfig(num_experts=2, experts_per_token=1, shared_experts=1)
    shared = {("mlp", "shared", f"{name}_proj", "kernel") for name in ("gate", "up", "down")}
    for options, mlp in [
        ({}, {("mlp", f"{name}_proj", "kernel") for name in ("gate", "up", "down")}),
        ({"experts": experts}, shared | {("mlp", f"{name}_proj") for name in ("gate", "up", "down")}),
    ]:
        split = nnx.split(made(dtype="bfloat16", **options).layers[0])
        assert matrices_rounded_to(jnp.bfloat16, *split) == projections | mlp
        assert not matrices_rounded_to(jnp.float16, *split)
