"""Low-bit weights on tensors: matmuls against dequantised weights in float64, layers and models."""

import copy
import logging
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

import jax_kernels
from jax_kernels import bridge, quantization
from jax_kernels.bridge.direct import route
from tests.support.cases import tiers

FORMATS = {
    "int8": {"format": "int8"},
    "int8, rows": {"format": "int8", "scaling": "row"},
    "int4": {"format": "int4"},
    "int4, 32, bfloat16": {"format": "int4", "group_size": 32, "scale_dtype": torch.bfloat16},
    "mxfp8": {"format": "mxfp8"},
    "mxfp4": {"format": "mxfp4"},
}
# The relative error of quantizing normal values.
ERRORS = {"int8": 0.01, "int4": 0.13, "mxfp8": 0.035, "mxfp4": 0.14}
ACTIVATIONS = {None: lambda x: x, "gelu": functional.gelu, "silu": functional.silu}


def random(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=dtype, device=device)


def error_of(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def exact(x):
    return bridge.dequantize(x).double()


@pytest.mark.parametrize(
    ("axis", "name"),
    tiers.some_pairs([-1, -2], FORMATS, {(-1, "int8"), (-1, "mxfp4"), *((-2, name) for name in FORMATS)}, "axis"),
)
def test_quantize_matches_jax(axis, name):
    w, options = random(100, 70), dict(FORMATS[name])
    got = bridge.quantize(w, axis=axis, **options)
    if "scale_dtype" in options:
        options["scale_dtype"] = jnp.bfloat16
    want = quantization.quantize(jnp.asarray(w.numpy()), axis=axis, **options)
    assert (got.shape, got.ndim, got.length) == ((100, 70), 2, want.length)
    assert str(got.dtype) == f"torch.{want.dtype}"
    bits = lambda x: np.ascontiguousarray(np.asarray(x)).view(np.uint8)
    for ours, theirs in ((got.values, want.values), (got.scale, want.scale)):
        np.testing.assert_array_equal(ours.view(torch.uint8).numpy(), bits(theirs))
    np.testing.assert_array_equal(bridge.dequantize(got).numpy(), np.asarray(quantization.dequantize(want)))
    assert 0 < error_of(bridge.dequantize(got), w) < ERRORS[options["format"]]


def test_dequantize_differentiates_scales():
    w = bridge.quantize(random(64, 8), "int8")
    scale = w.scale.clone().requires_grad_()
    found = bridge.dequantize(bridge.QuantizedTensor(**vars(w) | {"scale": scale}), torch.bfloat16)
    assert found.dtype == torch.bfloat16
    (got,) = torch.autograd.grad(found.float().sum(), scale)
    torch.testing.assert_close(got[0], w.values.float().sum(1), rtol=1e-2, atol=1)


@pytest.mark.parametrize(
    ("name", "dtype"), tiers.pairs(FORMATS, [torch.float32, torch.bfloat16], ("int4", torch.float32))
)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [((1,), 100, 33), *(pytest.param(*x, marks=pytest.mark.slow) for x in (((2, 3), 128, 64), ((5,), 1, 3)))],
)
def test_matmul_values_and_gradients(name, rows, depth, columns, dtype):
    """Both layouts, with an epilogue."""
    x, bias, residual = (random(*shape, seed=at, dtype=dtype) for at, shape in
                         enumerate(((*rows, depth), (columns,), (*rows, columns))))  # fmt: skip
    w, tolerance = random(columns, depth, seed=3), 4 * torch.finfo(dtype).eps
    for axis, weight in ((-1, w), (-2, w.T)):
        quantized = bridge.quantize(weight, axis=axis, **FORMATS[name])
        given = [y.clone().requires_grad_() for y in (x, bias, residual)]
        wide = [y.double().requires_grad_() for y in (x, bias, residual)]
        got = bridge.matmul(
            given[0], quantized, bias=given[1], activation="silu", residual=given[2], transpose_w=axis == -1
        )
        want = functional.silu(wide[0] @ (exact(quantized).T if axis == -1 else exact(quantized)) + wide[1]) + wide[2]
        assert (got.dtype, got.shape) == (dtype, want.shape)
        assert error_of(got, want) < tolerance
        dout = random(*rows, columns, seed=4, dtype=dtype)
        gradients = torch.autograd.grad(got, given, dout), torch.autograd.grad(want, wide, dout.double())
        for ours, theirs in zip(*gradients, strict=True):
            assert ours.dtype == dtype
            assert error_of(ours, theirs) < 2 * tolerance


@pytest.mark.parametrize("format", ERRORS)
def test_gated_matmul(format):
    x = random(4, 100).requires_grad_()
    gate, up = (bridge.quantize(random(40, 100, seed=seed), format, axis=-1) for seed in (1, 2))
    got = bridge.gated_matmul(x, gate, up, transpose_w=True, residual=x.detach()[:, :40])
    wide = x.detach().double().requires_grad_()
    want = functional.silu(wide @ exact(gate).T) * (wide @ exact(up).T) + wide.detach()[:, :40]
    assert error_of(got, want) < 1e-6
    (ours,), (theirs,) = (torch.autograd.grad(y.sum(), z) for y, z in ((got, x), (want, wide)))
    assert error_of(ours, theirs) < 1e-6


def test_weights_have_no_gradients():
    x, w = random(4, 64), bridge.quantize(random(64, 8), "int8")
    w.scale.requires_grad_()
    for call in (lambda: bridge.matmul(x, w), lambda: bridge.gated_matmul(x, w, w)):
        with pytest.raises(NotImplementedError, match=r"^w(_gate)?: got low-bit weights that require a gradient"):
            call()
    with torch.no_grad():
        assert error_of(bridge.matmul(x, w), x.double() @ exact(w)) < 1e-6
    with pytest.raises(NotImplementedError, match=r"^x: got a tensor that requires a gradient"):
        bridge.quantize(torch.nn.Linear(64, 8).weight, "int4")


def test_cached_call_depends_on_the_weights():
    """Weights of the same shapes and dtypes, with another format or other values, make different calls."""
    x = random(4, 64)
    weights = [bridge.quantize(random(64, 8, seed=seed), "int4", group_size=32) for seed in (1, 2)]
    weights.append(bridge.QuantizedTensor(**vars(weights[0]) | {"length": 63}))
    for _ in range(3):
        for w in weights:
            y = x[:, : w.length].contiguous()
            assert error_of(bridge.matmul(y, w), y.double() @ exact(w)) < 1e-6


@pytest.mark.parametrize("format", ERRORS)
@pytest.mark.parametrize(
    "cls", [pytest.param(torch.nn.Linear, id="torch"), pytest.param(bridge.nn.Linear, id="bridge")]
)
def test_layer(format, cls):
    torch.manual_seed(0)
    layer = cls(100, 36)
    quantized = bridge.nn.QuantizedLinear.from_linear(layer, format)
    x, residual = random(2, 5, 100).requires_grad_(), random(2, 5, 36)
    want = functional.linear(x, bridge.dequantize(quantized.weight), layer.bias) + residual
    got = quantized(x, residual=residual)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.square().sum(), (x, layer.bias)) for y in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert 0 < error_of(quantized(x), layer(x)) < ERRORS[format] * 1.5
    assert list(quantized.state_dict()) == ["bias", "weight_values", "weight_scale", "weight_shape"]
    assert f"in_features=100, out_features=36, bias=True, format={format!r}, group_size=" in repr(quantized)

    other = bridge.nn.QuantizedLinear(100, 36, format=format)
    assert not bridge.dequantize(other.weight).any()
    other.load_state_dict(quantized.state_dict())
    for same in (other, copy.deepcopy(quantized), torch.nn.Sequential(quantized).to("cpu")[0]):
        torch.testing.assert_close(same(x, residual=residual), got, rtol=0, atol=0)


def test_layer_keeps_its_values_when_a_model_is_cast():
    for format in ERRORS:
        layer = bridge.nn.QuantizedLinear.from_linear(torch.nn.Linear(64, 8), format)
        weights = bridge.dequantize(layer.weight)
        layer.to(torch.bfloat16)
        assert layer.bias.dtype == torch.bfloat16
        torch.testing.assert_close(bridge.dequantize(layer.half().double().weight), weights, rtol=0, atol=0)
        assert layer.to("meta").weight_scale.is_meta


def test_layer_takes_the_options_of_linear():
    layer = bridge.nn.Linear(64, 8, bias=False, activation="silu").eval()
    quantized = bridge.nn.QuantizedLinear.from_linear(layer, "int8", scaling="row", scale_dtype=torch.bfloat16)
    assert (quantized.bias, quantized.training, quantized.activation) == (None, False, "silu")
    assert (quantized.group_size, quantized.weight_scale.dtype) == (None, torch.bfloat16)
    x = random(3, 64)
    torch.testing.assert_close(quantized(x), functional.silu(x @ bridge.dequantize(quantized.weight).T))
    with torch.autocast("cpu", torch.bfloat16):
        assert quantized(x).dtype == torch.bfloat16
        assert quantized(x, residual=random(3, 8)).dtype == torch.float32


@pytest.mark.parametrize("format", ["int4", "mxfp8"])
def test_compiled_and_in_inference_mode(format):
    layer, x = bridge.nn.QuantizedLinear.from_linear(torch.nn.Linear(100, 36), format), random(5, 100).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)
    gradients = [torch.autograd.grad(run(x).sum(), x) for run in (compiled, layer)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    product = torch.compile(
        lambda x, w: bridge.matmul(x, w, transpose_w=True), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for rows in (5, 3, 7):
        y, w = x.detach()[:1].repeat(rows, 1), layer.weight
        torch.testing.assert_close(product(y, w), bridge.matmul(y, w, transpose_w=True), rtol=0, atol=0)
    with torch.inference_mode():
        want = layer(x.detach())
        torch.testing.assert_close(compiled(x.detach()), want, rtol=0, atol=0)
    assert want.is_inference()


@pytest.mark.parametrize("skip", [(), "up_proj", ("gate_proj", "up_proj"), "down_proj"])
def test_gated_mlp(skip):
    torch.manual_seed(0)
    module = bridge.nn.GatedMLP(64, 96)
    x, residual = random(3, 64).requires_grad_(), random(3, 64)
    plain = copy.deepcopy(module)
    bridge.quantize_weights(module, "int8", skip=skip)
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(module, name).weight
        if isinstance(weight, bridge.QuantizedTensor):
            getattr(plain, name).weight.data = bridge.dequantize(weight)
        assert isinstance(weight, bridge.QuantizedTensor) == (name not in skip)
    got, want = module(x, residual=residual), plain(x, residual=residual)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.sin().sum(), x) for y in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(("format", "most"), [("int8", 0.03), ("int4", 0.3)])
def test_llama(format, most, caplog):
    """Its logits and tokens equal the model's with dequantised weights, and are near the float model's."""
    plain = llama()
    with caplog.at_level(logging.INFO, "jax_kernels.bridge.quantized_linear"):
        model = bridge.quantize_weights(copy.deepcopy(plain), format, group_size=32, skip="lm_head")
    layers = {name: x for name, x in model.named_modules() if isinstance(x, bridge.nn.QuantizedLinear)}
    assert len(layers) == 14
    assert f"quantize_weights: 14 linear layers have {format} weights now" in caplog.text
    assert type(model.lm_head) is torch.nn.Linear
    rounded = copy.deepcopy(plain)
    for name, layer in layers.items():
        rounded.get_submodule(name).weight.data = bridge.dequantize(layer.weight)
    tokens = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        got, same, near = (x(tokens).logits for x in (model, rounded, plain))
        assert error_of(got, same) < 1e-5
        assert 1e-4 < error_of(got, near) < most
        options = {"max_new_tokens": 6, "do_sample": False}
        torch.testing.assert_close(model.generate(tokens, **options), rounded.generate(tokens, **options))
    again = bridge.quantize_weights(llama(), format, group_size=32, skip="lm_head")
    again.load_state_dict(model.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(again(tokens).logits, got, rtol=0, atol=0)


def test_replaced_layers():
    shared = torch.nn.Linear(32, 32)
    model = torch.nn.ModuleDict({
        "a": torch.nn.Sequential(shared, torch.nn.ReLU(), shared),
        "b": torch.nn.ModuleDict({"in": bridge.nn.Linear(32, 8), "out": torch.nn.Linear(8, 32)}),
        "attention": torch.nn.MultiheadAttention(32, 2),
        "norm": torch.nn.LayerNorm(32),
    })  # fmt: skip
    assert bridge.quantize_weights(model, "int8", group_size=32, skip=["b.out"]) is model
    kinds = {name: type(x).__name__ for name, x in model.named_modules(remove_duplicate=False)}
    assert kinds["a.0"] == kinds["a.2"] == kinds["b.in"] == "QuantizedLinear"
    assert model["a"][0] is model["a"][2]
    assert kinds["b.out"] == "Linear"
    assert kinds["attention.out_proj"] == "NonDynamicallyQuantizableLinear"


def test_bad_weights():
    x, w = random(4, 64), bridge.quantize(random(64, 8), "int4")
    for given, error, text in (
        ({"transpose_w": True}, ValueError, "w: got weights quantized along axis -2, want axis -1"),
        ({"w_scale": 1.0}, ValueError, "x_scale, w_scale, scaling: got one with low-bit weights"),
        ({"precision": "fp8"}, ValueError, "precision: got 'fp8' with low-bit weights"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            bridge.matmul(x, w, **given)
    with pytest.raises(ValueError, match=re.escape("w: got shape (64, 8), want [K, N] with x's K = 60")):
        bridge.matmul(x[:, :60].contiguous(), w)
    with pytest.raises(ValueError, match=r"weight: got weights quantized along axis -2"):
        bridge.linear(x, w)
    with pytest.raises(ValueError, match=r"w_up: got .*, want w_gate's layout"):
        bridge.gated_matmul(x, w, bridge.quantize(random(64, 8), "int8"))
    with pytest.raises(TypeError, match=r"device: got torch\.float16, want a device"):
        w.to(torch.float16)
    assert w.to("meta").device.type == "meta"
    for options, text in (
        ({"format": "int3"}, "format: got 'int3', want one of"),
        ({"format": "int4", "group_size": 48}, "group_size: got 48 with format 'int4', want None or one of 32, 64"),
        ({"format": "mxfp4", "group_size": 128}, "group_size: got 128 with format 'mxfp4', want None or one of 32"),
        ({"format": "int8", "scale_dtype": torch.float16}, "scale_dtype: got torch.float16, want torch.float32"),
        ({"format": "mxfp8", "scaling": "row"}, "scaling: got 'row' with format 'mxfp8', want 'group'"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            bridge.quantize(random(64, 8), **options)
    with pytest.raises(TypeError, match=re.escape("x: got Tensor, want a bridge.QuantizedTensor")):
        bridge.dequantize(x)


def test_bad_layers():
    layer = torch.nn.Linear(64, 8)
    from_linear = bridge.nn.QuantizedLinear.from_linear
    with pytest.raises(TypeError, match=r"layer: got Conv1d, want torch\.nn\.Linear or bridge.nn\.Linear"):
        from_linear(torch.nn.Conv1d(1, 1, 1))
    with pytest.raises(ValueError, match="format: got 'e4m3', want one of 'int8', 'int4', 'mxfp8', 'mxfp4'"):
        from_linear(layer, "e4m3")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), bridge.nn.Linear(64, 8, precision="fp8"))
    with pytest.raises(ValueError, match=r"^1: layer: got precision='fp8' or a scaling"):
        bridge.quantize_weights(model)
    assert type(model[0]) is torch.nn.Linear
    with pytest.raises(ValueError, match="skip: got 'head', which is in no module's name"):
        bridge.quantize_weights(model, skip="head")
    with pytest.raises(ValueError, match=r"model: got no torch\.nn\.Linear or bridge.nn\.Linear outside skip"):
        bridge.quantize_weights(model, skip=("0", "1"))
    with pytest.raises(ValueError, match="model: got a linear layer itself"):
        bridge.quantize_weights(layer)
    with pytest.raises(TypeError, match=re.escape("model: got function, want a torch.nn.Module")):
        bridge.quantize_weights(llama)
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="layer: got hooks or a forward of its own"):
        from_linear(layer)


def test_bad_states():
    state = bridge.nn.QuantizedLinear(64, 8, format="int4", group_size=32).state_dict()
    for other, text in (
        (bridge.nn.QuantizedLinear(64, 8, format="mxfp4"), "weight_scale: got dtype torch.float32, want torch.uint8"),
        (bridge.nn.QuantizedLinear(63, 8, format="int4", group_size=32), "weight_shape: got [8, 64], want [8, 63]"),
        (bridge.nn.QuantizedLinear(64, 8, format="int8"), "weight_values: got dtype torch.uint8, want torch.int8"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            other.load_state_dict(state)


def test_plan_matches_jax():
    w = bridge.quantize(random(64, 8), "mxfp4")
    got = bridge.explain(bridge.gated_matmul, random(4, 64), w, w)
    given = quantization.quantize(jnp.ones((64, 8)), "mxfp4")
    assert str(got) == str(jax_kernels.explain(jax_kernels.gated_matmul, jnp.ones((4, 64)), given, given))


def test_flax_has_no_low_bit_parameters():
    with pytest.raises(ValueError, match=r"^source: got 0\.weight_values, low-bit weights, want float weights"):
        bridge.weights.to_flax(bridge.quantize_weights(torch.nn.Sequential(torch.nn.Linear(32, 8))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("format", ERRORS)
@pytest.mark.parametrize(("columns", "depth"), [(512, 1024), (200, 300)], ids=["whole", "odd"])
def test_on_a_gpu(format, rows, columns, depth):
    """Against matmuls with dequantised weights, by both routes, with the gradient of x."""
    x = random(rows, depth, dtype=torch.bfloat16, device="cuda").requires_grad_()
    layer = torch.nn.Linear(depth, columns, device="cuda", dtype=torch.bfloat16)
    quantized = bridge.nn.QuantizedLinear.from_linear(layer, format)
    wide = x.detach().double().requires_grad_()
    want = functional.linear(wide, exact(quantized.weight), layer.bias.double())
    (right,) = torch.autograd.grad(want.sum(), wide)
    for is_direct in (True, False):
        with route.enabled() if is_direct else route.disabled():
            for _ in range(2):  # the second call is cached
                got = quantized(x)
                assert error_of(got, want.detach()) < 1e-2
                (dx,) = torch.autograd.grad(got.sum(), x)
                assert error_of(dx, right) < 1e-2
            with torch.inference_mode():
                assert error_of(quantized(x.detach()), want.detach()) < 1e-2
    gate, up = quantized.weight, bridge.quantize(random(columns, depth, seed=5, device="cuda"), format, axis=-1)
    got = bridge.gated_matmul(x, gate, up, transpose_w=True)
    want = functional.silu(wide @ exact(gate).T) * (wide @ exact(up).T)
    assert error_of(got, want.detach()) < 1e-2
    moved = copy.deepcopy(quantized).to("cpu").to("cuda")
    torch.testing.assert_close(moved(x), quantized(x), rtol=0, atol=0)
