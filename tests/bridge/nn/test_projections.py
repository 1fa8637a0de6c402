"""Modules whose kernels read a layer's weight call the layer instead, where a call does more than the matmul."""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from jax_kernels import bridge
from jax_kernels.bridge import nn
from jax_kernels.models import TransformerConfig

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
NAMES = ("gate_proj", "up_proj", "down_proj")


class Lora(torch.nn.Module):
    """A layer plus matrices of rank 2, with the layer's weight as an attribute, as peft has it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(2, base.in_features))
        self.b = torch.nn.Parameter(torch.randn(base.out_features, 2))

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def _lora(layer):
    return Lora(layer)


def _with_bias(layer):
    layer.bias = torch.nn.Parameter(torch.randn(layer.out_features))
    return layer


def _pruned(layer):
    prune.random_unstructured(layer, "weight", 0.5)
    with torch.no_grad():
        layer.weight_orig.mul_(2.0)  # as a step of an optimiser; the layer's hook computes weight again
    return layer


def _hooked(layer):
    layer.register_forward_hook(lambda module, args, out: 2.0 * out)
    return layer


def _own_forward(layer):
    forward = layer.forward
    layer.forward = lambda x, **options: forward(x, **options) + 1.0
    return layer


def _pytorchs(layer):
    made = torch.nn.Linear(layer.in_features, layer.out_features)
    made.weight = layer.weight
    return made


def _exact(layer):
    layer.precision = "bf16"
    return layer


CHANGES = [_lora, _with_bias, _pruned, _hooked, _own_forward, _pytorchs, _exact, parametrizations.weight_norm]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changed_projection_of_gated_mlp(change, name):
    """A GatedMLP's result and gradients are its projections' calls, whatever a projection is replaced by."""
    torch.manual_seed(1)
    mlp = nn.GatedMLP(8, 6)
    setattr(mlp, name, change(getattr(mlp, name)))
    residual = torch.randn(3, 8)
    out = mlp(X, residual=residual)
    want = mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(X)) * mlp.up_proj(X)) + residual
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    parameters = list(mlp.parameters())
    gradients = (torch.autograd.grad(x.square().sum(), parameters) for x in (out, want))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "activation", ["gelu_tanh", torch.nn.functional.mish, torch.nn.LeakyReLU(0.3)], ids=["name", "mish", "leaky_relu"]
)
def test_activations_of_a_changed_projection(activation):
    """Projections that are called one by one have the same activation, in bfloat16 and in a graph too."""
    mlp = nn.GatedMLP(8, 6, activation=activation).bfloat16()
    want = mlp(X.bfloat16())
    other = copy.deepcopy(mlp)
    other.gate_proj.register_forward_hook(lambda module, args, out: None)
    torch.testing.assert_close(other(X.bfloat16()), want, rtol=2e-2, atol=2e-2)
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X.bfloat16()), other(X.bfloat16()), rtol=0, atol=0)


def test_hooks_of_all_modules():
    """A hook of all modules runs in the calls of a GatedMLP's projections."""
    mlp = nn.GatedMLP(8, 6)
    want, seen = mlp(X), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        torch.testing.assert_close(mlp(X), want, rtol=1e-5, atol=1e-5)
    finally:
        handle.remove()
    assert {*seen} == {*mlp.modules()}


READERS = {
    "AdaptiveAttention": (nn.AdaptiveAttention, 8, 2),
    "GatedMLP": (nn.GatedMLP, 8, 6),
    "MixtureOfExperts": (nn.MixtureOfExperts, 8, 6, 4, 2),
}


@pytest.mark.parametrize("name", READERS)
def test_each_call_computes_a_parametrized_weight_once(name):
    """A read of a spectral_norm's weight in training moves its vectors, and changes the next results."""
    cls, *arguments = READERS[name]
    module = cls(*arguments)
    for layer in list(module.modules()):
        for parameter, value in list(layer.named_parameters(recurse=False)):
            if value.ndim > 1:
                parametrizations.spectral_norm(layer, parameter)
    norms = [x for x in module.modules() if isinstance(x, parametrizations._SpectralNorm)]
    reads = []
    for norm in norms:
        norm.register_forward_hook(lambda norm, args, out: reads.append(norm))
    module(X[None])
    assert len(reads) == len(norms)
    assert {*reads} == {*norms}


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
@pytest.mark.parametrize(
    ("cls", "arguments"), [(nn.AdaptiveAttention, (8, 2)), (nn.MultiheadDilatedAttention, (8, 2, [4], [1]))]
)
def test_changed_projection_of_attention(cls, arguments, name):
    """A module of attention needs no weight of a projection, and gets the result of its call."""
    torch.manual_seed(0)
    module = cls(*arguments)
    plain, base = copy.deepcopy(module), getattr(module, name)
    twice = torch.nn.Sequential(base, torch.nn.Linear(8, 8))
    setattr(module, name, twice)
    with torch.no_grad():
        getattr(plain, name).weight.copy_(twice[1].weight @ base.weight)
        getattr(plain, name).bias.copy_(twice[1](base.bias))
    torch.testing.assert_close(module(X[None]), plain(X[None]), rtol=1e-5, atol=1e-5)
    if cls is nn.MultiheadDilatedAttention:
        got, want = ((x.device, x.dtype, x.attention_backend) for x in (module.bfloat16(), plain.bfloat16()))
        assert got == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_low_bit_weights(dtype):
    x = torch.randn(1, 3, 128)
    for cls, *arguments in ((nn.AdaptiveAttention, 128, 2), (nn.MultiheadDilatedAttention, 128, 2, [4], [1])):
        module = cls(*arguments)
        low = bridge.quantize_weights(copy.deepcopy(module), "int8").to(dtype)
        with torch.no_grad():
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                getattr(module, name).weight.copy_(bridge.dequantize(getattr(low, name).weight, torch.float32))
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(low(x.to(dtype)).float(), module(x), rtol=bound, atol=bound)
        assert getattr(low, "dtype", dtype) == dtype
        assert getattr(low, "attention_backend", "xla") == "xla"


@pytest.mark.parametrize("name", NAMES)
def test_changed_projection_of_the_transformers_mlp(name):
    """The MLP of a Transformer with precision="fp8" calls a LoRA layer."""
    config = TransformerConfig(
        vocab_size=16, model_dim=32, num_layers=1, num_heads=2, head_dim=16, mlp_dim=32, precision="fp8"
    )
    mlp = nn.transformer.MLP(nn.transformer.shape_of(config)).float()
    setattr(mlp, name, Lora(getattr(mlp, name)))
    mlp(torch.randn(1, 3, 32)).sum().backward()
    assert getattr(mlp, name).a.grad.abs().sum() > 0


@pytest.mark.parametrize("with_gradients", [False, True])
def test_low_bit_weights_in_an_encoder_of_pytorch(with_gradients):
    """PyTorch's fast path of inference reads the weights of the layers, and is not taken."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 2, 64, batch_first=True)
    plain = torch.nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
    x, padding = torch.randn(2, 5, 64), torch.arange(5) >= torch.tensor([[5], [3]])
    low_bit = bridge.quantize_weights(copy.deepcopy(plain), "int8")
    with torch.set_grad_enabled(with_gradients):
        for options in ({}, {"src_key_padding_mask": padding}):
            got, want = low_bit(x, **options), plain(x, **options)
            kept = ~padding if options else torch.ones_like(padding)
            torch.testing.assert_close(got[kept], want[kept], atol=0.05, rtol=0.05)
    with pytest.raises(TypeError, match=r"^linear: got a QuantizedTensor, want a torch\.Tensor: bridge\.matmul and"):
        torch.nn.functional.linear(x, low_bit.layers[0].linear1.weight)
