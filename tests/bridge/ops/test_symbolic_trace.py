"""torch.fx.symbolic_trace, torch.jit.script and torch.jit.trace of models that call this library."""

import io
import warnings

import pytest
import torch
from torch import fx
from torch.nn import functional

from jax_kernels import bridge
from jax_kernels.bridge import flash_attention
from jax_kernels.bridge.interop import warn_once

fx.wrap("flash_attention")
TORCHS = functional.scaled_dot_product_attention


class Model(torch.nn.Module):
    """A function of tensors as a module. parts: its submodules."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


class Attends(torch.nn.Module):
    """Attention as in a model's own code, with PyTorch's names."""

    def forward(self, query, key, value, mask):
        scale = query.shape[-1] ** -0.5 / 2
        query = query * 2
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale) + 1


class Causal(torch.nn.Module):
    def forward(self, query, key, value):
        return functional.scaled_dot_product_attention(query, key, value, None, 0.0, True)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def assigned(monkeypatch):
    monkeypatch.setattr(functional, "scaled_dot_product_attention", bridge.scaled_dot_product_attention)


def test_fx_keeps_attention_as_one_node(assigned):
    """The graph serves other values, lengths and gradients, and equals PyTorch's own function in float64."""
    traced = fx.symbolic_trace(Attends())
    nodes = [node for node in traced.graph.nodes if node.target is bridge.scaled_dot_product_attention]
    assert [node.op for node in nodes] == ["call_function"]
    for length in (5, 9):
        query, key, value = draw(3, 2, 4, length, 8, seed=length).requires_grad_()
        mask = draw(length, length) > -0.5
        exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
        want = TORCHS(2 * exact[0], *exact[1:], mask, scale=8**-0.5 / 2) + 1
        got = traced(query, key, value, mask)
        torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=0)
        ours, right = (torch.autograd.grad(y.square().sum(), x) for y, x in ((got, (query, key, value)), (want, exact)))
        for x, y in zip(ours, right, strict=True):
            torch.testing.assert_close(x.double(), y, atol=3e-5, rtol=1e-5)
    again = fx.symbolic_trace(traced)
    assert torch.equal(again(query, key, value, mask), got)


X = draw(2, 6, 16)
# Modules that hold a module of the library, by its name.
HOLDERS = {
    "MultiheadAttention": lambda: Model(
        lambda self, x: self.part(x, x, x, need_weights=True)[0],
        part=bridge.nn.MultiheadAttention(16, 4, batch_first=True),
    ),
    "MultiheadAttention, a parameter's queries": lambda: Model(
        lambda self, x: self.part(self.query, x, value=x, key_padding_mask=x[..., 0] > 1)[0],
        part=bridge.nn.MultiheadAttention(16, 4, batch_first=True),
        query=torch.nn.Parameter(draw(2, 3, 16)),
    ),
    "AdaptiveAttention": lambda: Model(
        *(lambda self, x: self.part(x, x * 2, is_causal=True),), part=bridge.nn.AdaptiveAttention(16, 4)
    ),
    "DynamicMaskAttention": lambda: Model(
        *(lambda self, x: self.part(x),), part=bridge.nn.DynamicMaskAttention(16, 4, keys_to_keep=3)
    ),
    "MultiheadDilatedAttention": lambda: Model(
        lambda self, x: self.part(x, is_causal=True), part=bridge.nn.MultiheadDilatedAttention(16, 4, (4,), (2,))
    ),
    "FlexAttention": lambda: Model(
        lambda self, x: self.part(*[x.unflatten(-1, (2, 8))] * 3), part=bridge.nn.FlexAttention("sliding_window", 2)
    ),
    "Linear and norms": lambda: Model(
        lambda self, x: self.rms(self.norm(self.linear(x, residual=x))),
        linear=bridge.nn.Linear(16, 16),
        norm=bridge.nn.LayerNorm(16),
        rms=bridge.nn.RMSNorm(16),
    ),
    "GatedMLP": lambda: Model(lambda self, x: self.part(x, residual=x), part=bridge.nn.GatedMLP(16, 32)),
    "QuantizedLinear": lambda: Model(
        lambda self, x: self.part(x),
        part=bridge.nn.QuantizedLinear.from_linear(torch.nn.Linear(16, 16), format="int8"),
    ),
    "Block": lambda: Model(
        lambda self, x: self.part(x),
        part=bridge.nn.Transformer({"vocab_size": 8, "model_dim": 16, "num_layers": 1, "num_heads": 2}).layers[0],
    ),
    "TransformerEncoderLayer": lambda: Model(lambda self, x: self.part(x), part=encoder_layer()),
}


def encoder_layer():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    layer.self_attn = bridge.nn.MultiheadAttention(16, 4, batch_first=True)
    return layer


@pytest.mark.parametrize("name", HOLDERS)
def test_fx_keeps_modules_as_nodes(name):
    model = HOLDERS[name]()
    traced = fx.symbolic_trace(model)
    parts = {key for key, _ in model.named_children()}
    assert parts == {node.target for node in traced.graph.nodes if node.op == "call_module"}
    for x in (X, 2 * X):
        assert torch.equal(traced(x), model(x))


def test_fx_error_for_a_module_names_the_fix():
    for module in (bridge.nn.MultiheadAttention(16, 4), bridge.nn.Linear(16, 16), bridge.nn.FlexAttention("causal")):
        with pytest.raises(ValueError, match=r"^torch\.fx\.symbolic_trace: got a .*, want a module that has it as a"):
            fx.symbolic_trace(module)


doubled = bridge.from_jax(lambda x: 2 * x)
FUNCTIONS = {
    "flash_attention": (lambda self, x: bridge.flash_attention(*[x.unflatten(-1, (2, 8))] * 3), "query"),
    "flash_attention, a mask": (
        lambda self, x: bridge.flash_attention(*[X.unflatten(-1, (2, 8))] * 3, mask=x > 0), "mask",
    ),
    "matmul": (lambda self, x: bridge.matmul(x, torch.ones(16, 4)), "x"),
    "rms_norm": (lambda self, x: bridge.rms_norm(x), "x"),
    "decode_attention": (lambda self, x: bridge.decode_attention(x, x, x), "query"),
    "dilated_attention": (
        lambda self, x: bridge.dilated_attention(x, x, x, segment_lengths=(4,), dilation_rates=(1,)), "query",
    ),
    "quantize": (lambda self, x: bridge.quantize(x), "x"),
    "from_jax": (lambda self, x: doubled(x), "args: got"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fx_error_for_functions_names_fx_wrap(name):
    call, argument = FUNCTIONS[name]
    with pytest.raises(TypeError, match=rf"^{argument}.*torch\.fx\.proxy\.Proxy.*torch\.fx\.wrap$"):
        fx.symbolic_trace(Model(call))


def test_fx_wrap_works():
    traced = fx.symbolic_trace(Model(lambda self, x: flash_attention(*[x.unflatten(-1, (2, 8))] * 3, is_causal=True)))
    query = X.unflatten(-1, (2, 8))
    assert torch.equal(traced(X), flash_attention(query, query, query, is_causal=True))


def test_script_runs_pytorchs_attention(assigned, monkeypatch):
    """With one warning; also inside of torch.nn.MultiheadAttention, and it is saved."""
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    with pytest.warns(UserWarning, match=r"scaled_dot_product_attention: torch\.jit\.script.*PyTorch's own"):
        scripted = torch.jit.script(Causal())
    query, key, value = draw(3, 2, 4, 7, 8)
    want = TORCHS(query, key, value, is_causal=True)
    kept = io.BytesIO()
    torch.jit.save(scripted, kept)
    kept.seek(0)
    for program in (scripted, torch.jit.load(kept)):
        torch.testing.assert_close(program(query, key, value), want)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="scaled_dot")
        scripted = torch.jit.script(module)
    for got, right in zip(scripted(X, X, X), module(X, X, X), strict=True):
        torch.testing.assert_close(got, right)


SCRIPTED = {
    **{name: lambda name=name: torch.nn.Sequential(*HOLDERS[name]().children()) for name in HOLDERS},
    "Transformer": lambda: bridge.nn.Transformer({"vocab_size": 8, "model_dim": 16, "num_layers": 1, "num_heads": 2}),
}


@pytest.mark.parametrize("name", SCRIPTED)
def test_script_error_for_modules_names_the_fix(name):
    with pytest.raises(RuntimeError, match=r"^torch\.jit\.script: got a jax_kernels \w+, which .*torch\.compile"):
        torch.jit.script(SCRIPTED[name]())


class Calls(torch.nn.Module):
    def forward(self, x):
        return bridge.flash_attention(x, x, x)


class Norms(torch.nn.Module):
    def forward(self, x):
        return bridge.rms_norm(x)


def test_script_error_for_functions_names_the_fix():
    wanted = r"torch\.jit\.script: got code that calls jax_kernels\.bridge\.{}, .*torch\.compile"
    for given, name in ((Calls(), "flash_attention"), (Norms(), "rms_norm"), (bridge.matmul, "matmul")):
        with pytest.raises(RuntimeError, match=wanted.format(name)):
            torch.jit.script(given)


RECORDED = [x for x in HOLDERS if "parameter" not in x]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", RECORDED)
def test_jit_trace_records_the_operator(name):
    """torch.jit.trace records the operator, whether the call is cached or not, with or without gradients."""
    torch.manual_seed(0)
    model = HOLDERS[name]()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(X)
            model(X)  # caches the call
            traced = torch.jit.trace(model, (X,), check_trace=False)
        kept = io.BytesIO()
        torch.jit.save(traced, kept)
        kept.seek(0)
        x = draw(2, 6, 16, seed=4).requires_grad_()
        leaves = [x, *(y for y in model.parameters() if y.requires_grad)] if grad else [x]
        want = model(x)
        for program in (traced, torch.jit.load(kept)) if not grad else (traced,):
            got = program(x)
            torch.testing.assert_close(got, want)
            results = [torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (got, want)]
            for ours, right in zip(*results, strict=True):
                torch.testing.assert_close(ours, right)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_of_a_function_with_parameters_raises():
    """PyTorch's error reaches the caller, also after a cached call. Else PyTorch crashes at the end of the trace."""
    for module in (bridge.nn.Linear(16, 16), bridge.nn.AdaptiveAttention(16, 2)):
        module(X)
        module(X)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad as a constant"):
                torch.jit.trace(lambda x, module=module: module(x), (X,), check_trace=False)
