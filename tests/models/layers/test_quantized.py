"""Low-bit weights in Flax: Linear, GatedMLP and whole models against the dequantised weights."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels import models
from jax_kernels.models import QuantizedGatedMLP, QuantizedLinear, QuantizedWeight, Transformer, TransformerConfig
from jax_kernels.quantization import dequantize, quantize
from tests.support.cases import tiers

FORMATS = ("int8", "int4", "mxfp8", "mxfp4")
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 77)), jnp.float32)
CONFIG = TransformerConfig(
    vocab_size=50, model_dim=72, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=100, tie_embeddings=False
)
# Allowed relative errors of the logits of CONFIG's model, by format: 1.5 times the measured error.
LOGITS = {"int8": 0.021, "int4": 0.38, "mxfp8": 0.15, "mxfp4": 0.48}
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 11))

forward = nnx.jit(lambda model, tokens: model(tokens))


def linear(kind=models.Linear, **options):
    return kind(77, 45, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0), **options)


def transformer(**changes):
    return Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


def distance(got, want):
    got, want = (np.asarray(y, np.float64) for y in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def dequantized(model, quantized):
    """The float model with the dequantised weights of the other model."""
    of = dict(nnx.iter_modules(quantized))
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear) and isinstance(of[path], QuantizedLinear):
            module.kernel[...] = dequantize(of[path].kernel)
    return model


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", [pytest.param(models.Linear, id="models"), pytest.param(nnx.Linear, id="nnx")])
def test_linear_matches_dequantized_weights(kind, format):
    plain = linear(kind)
    layer = QuantizedLinear.from_linear(plain, format)
    plain.kernel[...] = dequantize(quantize(plain.kernel[...], format))
    np.testing.assert_allclose(layer(X), plain(X), rtol=1e-5, atol=1e-5)
    loss = lambda layer, x: jnp.sin(layer(x)).sum()
    (got, dx), (want, wanted) = (nnx.jit(nnx.grad(loss, argnums=(0, 1)))(module, X) for module in (layer, plain))
    assert distance(dx, wanted) < 1e-5
    assert len(jax.tree.leaves(got)) == 1  # only the bias
    assert distance(got["bias"][...], want["bias"][...]) < 1e-5


@pytest.mark.parametrize(
    ("format", "options"),
    [("int8", {"scaling": "row"}), ("int4", {"group_size": 32, "scale_dtype": jnp.bfloat16})],
)
def test_activation_residual_and_options(format, options):
    plain = linear(dtype=jnp.bfloat16, activation="silu", implementation="xla", use_bias=False)
    layer = QuantizedLinear.from_linear(plain, format, **options)
    assert (layer.activation, layer.implementation, layer.bias) == ("silu", "xla", None)
    want = quantize(plain.kernel[...], format, axis=-2, **options)
    for got, wanted in ((layer.values, want.values), (layer.scale, want.scale)):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got[...], wanted)
    plain.kernel[...] = dequantize(want)
    residual = jnp.ones((3, 5, 45))
    got = layer(X, residual=residual)
    assert got.dtype == jnp.bfloat16
    assert distance(got, plain(X, residual=residual)) < 0.01


@pytest.mark.parametrize(("format", "quantize_down"), tiers.pairs(FORMATS, (True, False), ("int4", True)))
def test_gated_mlp(format, quantize_down):
    plain = models.GatedMLP(77, 45, activation="gelu", rngs=nnx.Rngs(0))
    mlp = QuantizedGatedMLP.from_mlp(plain, format, quantize_down=quantize_down)
    assert isinstance(mlp.down_proj, QuantizedLinear) == quantize_down
    plain = dequantized(plain, mlp)
    loss = lambda mlp, x: jnp.sin(mlp(x, residual=x)).sum()
    np.testing.assert_allclose(mlp(X, residual=X), plain(X, residual=X), rtol=1e-4, atol=1e-4)
    assert distance(nnx.grad(loss, argnums=1)(mlp, X), nnx.grad(loss, argnums=1)(plain, X)) < 1e-5


@pytest.mark.parametrize("format", tiers.cases(FORMATS, ["int4"]))
def test_transformer_is_close_to_float(format):
    plain = transformer()
    quantized = models.quantize_weights(transformer(), format, skip=())
    assert isinstance(quantized.head, QuantizedLinear)
    want, got = forward(plain, TOKENS), forward(quantized, TOKENS)
    assert 0.2 * LOGITS[format] < distance(got, want) < LOGITS[format]
    rounded = dequantized(plain, quantized)
    assert distance(got, forward(rounded, TOKENS)) < 1e-5
    losses = [model.losses(TOKENS, np.roll(TOKENS, -1, 1)) for model in (quantized, rounded)]
    assert distance(*losses) < 1e-5
    lengths = jnp.array([11, 6])
    drawn = [model.generate(TOKENS, 6, 0, lengths=lengths) for model in (quantized, rounded)]
    np.testing.assert_array_equal(*drawn)


def test_decoding_with_a_cache_and_nnx_split():
    model = models.quantize_weights(transformer(scan_layers=True), "int4")
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, tokens, cache: nnx.merge(graphdef, state)(tokens, cache=cache))
    cache, outs = model.init_cache(2, 16), []
    for chunk in (slice(0, 6), slice(6, 7), slice(7, 11)):
        out, cache = step(state, TOKENS[:, chunk], cache)
        outs.append(out)
    want = forward(model, TOKENS)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), want, atol=1e-5)
    unrolled = models.quantize_weights(transformer(), "int4")
    np.testing.assert_allclose(forward(unrolled, TOKENS), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_scanned_blocks_keep_scales_and_values(format):
    """The computation is in bfloat16. Other models round their matrices to bfloat16 when they are stacked."""
    models_ = [models.quantize_weights(transformer(scan_layers=x, dtype="bfloat16"), format) for x in (True, False)]
    assert distance(*(forward(model, TOKENS) for model in models_)) < 0.02


@pytest.mark.slow
def test_input_gradients_and_optimizers():
    model = models.quantize_weights(transformer(), "mxfp8")
    before = {path: np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(model, QuantizedWeight))}
    assert len(before) == 2 * 2 * 7
    loss = lambda model, embeddings: (model(embeddings=embeddings) ** 2).mean()
    embeddings = model.embed_tokens(TOKENS)
    rounded = dequantized(transformer(), model)
    got, want = (nnx.jit(nnx.grad(loss, argnums=1))(x, embeddings) for x in (model, rounded))
    assert distance(got, want) < 1e-5
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    norm = np.asarray(model.final_norm.scale[...])
    optimizer.update(model, nnx.grad(lambda model: model.losses(TOKENS, TOKENS).mean())(model))
    assert np.abs(model.final_norm.scale[...] - norm).max() > 0
    for path, x in nnx.to_flat_state(nnx.state(model, QuantizedWeight)):
        np.testing.assert_array_equal(x[...], before[path])
    of_weights = nnx.grad(lambda model: model(TOKENS).mean(), argnums=nnx.DiffState(0, QuantizedWeight))
    with pytest.raises(NotImplementedError, match="of low-bit weights has no gradient"):
        of_weights(models.quantize_weights(transformer(), "mxfp8"))


def test_skip_takes_one_name_as_in_the_bridge():
    model = models.quantize_weights(transformer(), "int8", skip="mlp")
    low = [x for _, x in nnx.iter_modules(model) if isinstance(x, QuantizedLinear)]
    assert any(x is model.head for x in low)
    assert not any(isinstance(x, QuantizedGatedMLP) for _, x in nnx.iter_modules(model))


def test_skip_and_a_second_call():
    model = models.quantize_weights(transformer(), "int4", skip=("head", "mlp.down_proj", "layers.1"))
    first, second = model.layers
    assert type(first.mlp) is QuantizedGatedMLP
    assert type(first.mlp.down_proj) is models.Linear
    assert type(second.mlp) is models.GatedMLP
    assert type(second.attention.q_proj) is type(model.head) is nnx.Linear
    want = forward(dequantized(transformer(), model), TOKENS)
    assert distance(forward(model, TOKENS), want) < 1e-5
    with pytest.raises(ValueError, match="layers: got blocks that differ"):
        models.quantize_weights(transformer(scan_layers=True), skip=("layers.1",))(TOKENS)
    values = first.attention.q_proj.values
    assert models.quantize_weights(model, "int8", skip=()) is model
    assert first.attention.q_proj.values is values
    assert model.head.layout.format == second.mlp.gate_proj.layout.format == "int8"
    assert first.mlp.down_proj.layout.format == "int8"
    assert first.mlp.gate_proj.layout.format == "int4"


@pytest.mark.slow
def test_longnet():
    config = models.LongNetConfig(
        vocab_size=50, model_dim=32, num_layers=1, num_heads=4, segment_lengths=(4, 16), dilation_rates=(1, 2)
    )
    model = models.quantize_weights(models.LongNet(config, rngs=nnx.Rngs(0)), "int8")
    rounded = dequantized(models.LongNet(config, rngs=nnx.Rngs(0)), model)
    np.testing.assert_array_equal(*(x.generate(TOKENS, 3, 0) for x in (model, rounded)))


def test_other_models():
    class Shared(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.again = self.first
            self.conv = nnx.Conv(8, 8, 3, rngs=nnx.Rngs(0))
            self.more = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)

    model = models.quantize_weights(Shared(), "int8", group_size=32)
    assert isinstance(model.first, QuantizedLinear)
    assert model.first is model.again
    assert isinstance(model.more.layers[0], QuantizedLinear)
    assert type(model.conv) is nnx.Conv
    shapes = nnx.eval_shape(lambda: models.quantize_weights(transformer()))
    assert shapes.layers[0].mlp.gate_proj.values.dtype == jnp.uint8


def test_bad_arguments_are_named():
    class Own(nnx.Linear):
        pass

    class Listed(nnx.Module):
        def __init__(self):
            self.some = nnx.data([nnx.Linear(8, 8, rngs=nnx.Rngs(0))])

    quantized = models.quantize_weights(transformer())
    for given, error, message in [
        ((transformer(), "e4m3"), ValueError, "format: got 'e4m3', want one of 'int8', 'int4', 'mxfp8', 'mxfp4'"),
        ((linear(),), TypeError, "model: got Linear, want an nnx.Module that has Linears"),
        ((quantized,), ValueError, "model: got no Linear or GatedMLP outside skip, want at least one"),
        ((nnx.Sequential(Own(8, 8, rngs=nnx.Rngs(0))),), TypeError, "layers.0: got Own, want a models.Linear"),
        ((Listed(),), ValueError, "model: got some.0 in a list or dict, want an nnx.List or nnx.Dict"),
        ((transformer(precision="fp8"),), ValueError, "q_proj.precision: got 'fp8' with low-bit weights, want"),
    ]:
        if given[0] is quantized:
            models.quantize_weights(quantized, skip=())  # the head
        with pytest.raises(error, match=re.escape(message)):
            models.quantize_weights(*given)
    for options, error, message in [
        ({"format": "mxfp4", "group_size": 64}, ValueError, "group_size: got 64 with format 'mxfp4'"),
        ({"skip": (1,)}, TypeError, "skip: got (1,), want a name, a sequence of names, or None"),
        ({"skip": "heads"}, ValueError, "skip: got 'heads', want names of modules of the model"),
        ({"skip": ("up_proj",)}, ValueError, "skip: got names of a part of layers.0.mlp, want"),
    ]:
        model = transformer()
        with pytest.raises(error, match=re.escape(message)):
            models.quantize_weights(model, **options)
        assert not jax.tree.leaves(nnx.state(model, QuantizedWeight))
    with pytest.raises(ValueError, match="model: got one with low-bit weights, want the model before"):
        models.flat_parameters(quantized)


def test_bad_module_arguments_are_named():
    w = linear().kernel[...]
    with pytest.raises(TypeError, match="kernel: got one of float8_e4m3fn, want a QuantizedArray of 'int8', 'int4'"):
        QuantizedLinear(quantize(w))
    with pytest.raises(ValueError, match=re.escape("kernel: got shape (77, 45), quantized along axis -1, want two")):
        QuantizedLinear(quantize(w, "int4", axis=-1))
    with pytest.raises(ValueError, match=re.escape("bias: got shape (77,), want (45,)")):
        QuantizedLinear(quantize(w, "int4"), bias=jnp.zeros(77))
    with pytest.raises(ValueError, match=re.escape("linear.precision: got 'highest' with low-bit weights")):
        QuantizedLinear.from_linear(linear(precision="highest"))
    with pytest.raises(ValueError, match="linear: got a dot_general or a preferred_element_type"):
        QuantizedLinear.from_linear(linear(preferred_element_type=jnp.float32))
    with pytest.raises(TypeError, match=re.escape("linear: got Conv, want a models.Linear or an nnx.Linear")):
        QuantizedLinear.from_linear(nnx.Conv(8, 8, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="mlp: got Linear, want a GatedMLP"):
        QuantizedGatedMLP.from_mlp(linear())
    with pytest.raises(TypeError, match="gate_proj: got Linear, want a QuantizedLinear"):
        QuantizedGatedMLP(linear(), linear(), linear())
    layer = QuantizedLinear(quantize(w, "int4"), bias=jnp.zeros(45))
    with pytest.raises(ValueError, match="gate_proj: got one with a bias or an activation"):
        QuantizedGatedMLP(layer, layer, linear())
    with pytest.raises(ValueError, match=re.escape("x: got shape (2, 5), want [..., 77]")):
        layer(jnp.ones((2, 5)))
