"""Functions as activations of the bridge's matmuls: in torch operations, or in jnp code."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.jax_functions.api import JaxOp
from jax_kernels.bridge.translate import activations

functional, nn = torch.nn.functional, torch.nn
# By name: an activation of the bridge, and PyTorch's own, or None if it is the same function.
FUNCTIONS = {
    "silu": (functional.silu, None),
    "tanh": (torch.tanh, None),
    "mish": (functional.mish, None),
    "relu6": (functional.relu6, None),
    "hardtanh": (functional.hardtanh, None),
    "hardsigmoid": (functional.hardsigmoid, None),
    "hardswish": (functional.hardswish, None),
    "elu": (functional.elu, None),
    "celu": (functools.partial(functional.celu, alpha=0.7), None),
    "selu": (functional.selu, None),
    "softsign": (functional.softsign, None),
    "tanhshrink": (functional.tanhshrink, None),
    "logsigmoid": (functional.logsigmoid, None),
    "leaky_relu": (nn.LeakyReLU(0.2), None),
    "threshold": (nn.Threshold(0.1, 0.3), None),
    "gelu": (nn.GELU(approximate="tanh"), None),
    "squared": (lambda x: functional.relu(x) ** 2, None),
    "where": (lambda x: torch.where(x > 0, x, 0.1 * x), None),
    "jax": (jax.nn.mish, functional.mish),
    "jnp": (lambda x: x * jnp.sin(x), lambda x: x * torch.sin(x)),
}
# Values at and around the kinks of functions. PyTorch's gradients are one-sided at kinks.
KINKS = torch.tensor([-6.0, -3.0, -1.0, -0.5, 0.0, 0.1, 0.5, 1.0, 3.0, 6.0, 8.0])


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [(0.5 * torch.randn(shape, generator=generator)).requires_grad_() for shape in ((6, 16), (16, 8), (8,))]


def with_gradients(function, *given):
    out = function(*given)
    return out, *torch.autograd.grad(out.sin().sum(), given)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    activation, own = FUNCTIONS[name]
    own = activation if own is None else own
    got = with_gradients(lambda x, w, b: bridge.matmul(x, w, bias=b, activation=activation), *tensors())
    want = with_gradients(lambda x, w, b: own(x @ w + b), *tensors())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_kinks(name):
    activation, own = FUNCTIONS[name]
    x, one = KINKS[:, None].clone().requires_grad_(), torch.ones(1, 1)
    got = with_gradients(lambda x: bridge.matmul(x, one, activation=activation), x)
    want = with_gradients(activation if own is None else own, x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# torch.compile before torch 2.12 has no other objects as constants than Python functions.
OBJECTS = ["leaky_relu", "jax"] if torch.__version__ >= (2, 12) else []


@pytest.mark.parametrize("name", ["mish", "squared", "jnp", *OBJECTS])
def test_under_torch_compile(name):
    activation, _ = FUNCTIONS[name]
    call = lambda x, w, b: bridge.matmul(x, w, bias=b, activation=activation)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(with_gradients(compiled, *tensors()), with_gradients(call, *tensors()), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [16, 256])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_gpu(name, rows):
    activation, own = FUNCTIONS[name]
    own = activation if own is None else own
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator) for shape in ((rows, 512), (512, 384)))
    given = [(x / 8).cuda().bfloat16().requires_grad_(), (w / 8).cuda().bfloat16().requires_grad_()]
    got = with_gradients(lambda x, w: bridge.matmul(x, w, activation=activation).float(), *given)
    want = with_gradients(lambda x, w: own(x @ w), *[x.detach().double().requires_grad_() for x in given])
    for g, x in zip(got, want, strict=True):
        assert (g - x).norm() <= 0.02 * x.norm()


def test_other_ops_and_modules():
    x, w, _ = tensors()
    gated = bridge.gated_matmul(x, w, w, functional.mish)
    torch.testing.assert_close(gated, functional.mish(x @ w) * (x @ w), rtol=1e-5, atol=1e-5)
    hidden = bridge.mlp(x, w, w.T, activation=functional.mish)
    torch.testing.assert_close(hidden, functional.mish(x @ w) @ w.T, rtol=1e-5, atol=1e-5)
    layer = bridge.nn.Linear(16, 8, activation=functional.mish)
    torch.testing.assert_close(layer(x), functional.mish(nn.Linear.forward(layer, x)), rtol=1e-5, atol=1e-5)
    block = bridge.nn.GatedMLP(16, 8, activation=nn.ReLU6())
    hidden = functional.relu6(block.gate_proj(x)) * block.up_proj(x)
    torch.testing.assert_close(block(x), block.down_proj(hidden), rtol=1e-5, atol=1e-5)
    few = bridge.nn.QuantizedLinear.from_linear(layer, format="int8")
    torch.testing.assert_close(few(x), layer(x), rtol=0.05, atol=0.05)


def test_named_functions_are_recognised():
    assert activations.name_of(functional.gelu) == "gelu"
    assert activations.name_of(torch.sigmoid) == "sigmoid"
    assert activations.name_of(None) is None


def test_equal_functions_share_a_program():
    x, w, _ = tensors()
    bridge.clear_cache()
    for factor in (2.0, 3.0, 2.0, 3.0):
        got = bridge.matmul(x, w, activation=lambda y, factor=factor: y * factor)
        torch.testing.assert_close(got, x @ w * factor, rtol=1e-5, atol=1e-5)
    assert bridge.cache_info().programs == 2


def test_equal_partials_and_modules_share_a_program():
    x, w, _ = tensors()
    for make, count in (
        (lambda slope: nn.LeakyReLU(slope), 2),
        (lambda slope: functools.partial(functional.leaky_relu, negative_slope=slope), 2),
        # Arrays may differ although they print alike.
        (lambda slope: functools.partial(jnp.multiply, jnp.float32(slope)), 4),
    ):
        bridge.clear_cache()
        for slope in (0.1, 0.3, 0.1, 0.3):
            got = bridge.matmul(x, w, activation=make(slope))
            y = x @ w
            want = functional.leaky_relu(y, slope) if count == 2 else y * slope
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert bridge.cache_info().programs == count


def test_same_function_hits_the_cache(monkeypatch):
    x, w, _ = tensors()
    call = lambda: bridge.matmul(x, w, activation=functional.mish)
    call()  # stores the function, if no test before has
    want = call()
    monkeypatch.setattr(JaxOp, "run", None)
    torch.testing.assert_close(call(), want, rtol=0, atol=0)


def test_explain_takes_a_function():
    x, w, _ = tensors()
    assert "xla" in str(bridge.explain(bridge.matmul, x, w, activation=functional.mish))


def reads(tensor):
    return lambda x: x * tensor


BAD = {
    "no function": (3, "activation: got int, want a name, or an elementwise function of one tensor"),
    "a tensor": (reads(torch.ones(1)), "activation: got reads.<locals>.<lambda>, which reads a torch.Tensor"),
    "parameters": (nn.PReLU(), "activation: PReLU(num_parameters=1) reads a torch.Tensor of shape (1,)"),
    "a sum": (lambda x: x.cumsum(0), "uses Tensor.cumsum, which has no form in jnp"),
    "two arguments": (lambda x, y: x, "raised TypeError when traced"),
    "no elements": (lambda x: x[0], "uses torch's __getitem__, which mixes or reshapes values"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_functions(name):
    x, w, _ = tensors()
    activation, message = BAD[name]
    with pytest.raises(TypeError, match=re.escape(message)):
        bridge.matmul(x, w, activation=activation)
