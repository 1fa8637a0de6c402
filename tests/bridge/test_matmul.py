"""matmul, linear and Linear on tensors against PyTorch's own: results, gradients, autocast, state dicts."""

import re

import numpy as np
import pytest
import torch
from torch.nn import functional

from jax_kernels import bridge

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def tensors(*shapes, dtype=torch.float32, seed=0):
    random = np.random.default_rng(seed)
    return [torch.tensor(random.standard_normal(shape), dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_linear_with_its_epilogue(activation):
    x, weight, bias, residual = tensors((2, 5, 24), (40, 24), (40,), (2, 5, 40))
    got = bridge.linear(x, weight, bias, activation=activation, residual=residual)
    function = ACTIVATIONS.get(activation, lambda x: x)
    want = function(functional.linear(x, weight, bias)) + residual
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    given, dout = (x, weight, bias, residual), torch.sin(want.detach())
    gradients = torch.autograd.grad(got, given, dout), torch.autograd.grad(want, given, dout)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_matmul():
    x, w = tensors((2, 5, 24), (24, 40), dtype=torch.bfloat16)
    got = bridge.matmul(x, w, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ w.float(), rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(dx, w.sum(1).expand_as(x), rtol=1e-2, atol=1e-1)


def test_module_is_that_of_torch():
    torch.manual_seed(0)
    mine = bridge.nn.Linear(24, 40)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(24, 40)
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    (x,) = tensors((3, 24))
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-5)
    with_epilogue = bridge.nn.Linear(24, 40, activation="silu")
    with_epilogue.load_state_dict(theirs.state_dict())
    residual = torch.ones(3, 40)
    torch.testing.assert_close(
        with_epilogue(x, residual=residual), functional.silu(theirs(x)) + 1, rtol=1e-5, atol=1e-5
    )
    assert bridge.nn.Linear(4, 8, bias=False).bias is None


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_mlp(activation):
    module, (x, residual) = bridge.nn.GatedMLP(24, 40, activation=activation), tensors((2, 5, 24), (2, 5, 24))
    got = module(x, residual=residual)
    gate, up, down = (y.weight for y in (module.gate_proj, module.up_proj, module.down_proj))
    want = (ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)) @ down.T + residual
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    given = (x, gate, up, down, residual)
    gradients = [torch.autograd.grad(torch.sin(y).sum(), given) for y in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert sorted(module.state_dict()) == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]


def test_autocast():
    module, (x,) = bridge.nn.Linear(24, 40), tensors((3, 24))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = module(x), torch.nn.functional.linear(x, module.weight, module.bias)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    got.sum().backward()
    assert module.weight.grad.dtype == torch.float32


def test_under_torch_compile():
    module, (x,) = bridge.nn.Linear(16, 8, activation="relu"), tensors((6, 16))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)


def test_bad_input():
    x, w = tensors((6, 16), (16, 4))
    with pytest.raises(ValueError, match=re.escape("w: got shape (16, 4), want [N, K] with x's K = 16")):
        bridge.linear(x, w)
    with pytest.raises(TypeError, match=re.escape("activation: got function, want a name or None")):
        bridge.matmul(x, w, activation=lambda x: x)
    with pytest.raises(TypeError, match=re.escape("out_dtype: got torch.int8, want torch.bfloat16")):
        bridge.matmul(x, w, out_dtype=torch.int8)
    with pytest.raises(TypeError, match=re.escape("transpose_w: linear's weight is [N, K]")):
        bridge.linear(x, w, transpose_w=False)
    with pytest.raises(TypeError, match="float64"):
        bridge.matmul(x.double(), w.double())
