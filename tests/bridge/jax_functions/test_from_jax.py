"""from_jax: any JAX function as a PyTorch function."""

import collections
import copy
import gc
import pickle
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from jax_kernels import bridge, flash_attention
from jax_kernels.bridge.jax_functions import programs as module


def in_jax(tree, *, power, name="unused", flag=True):
    x, (y, index) = tree["x"], tree["pair"]
    return {"a": jnp.sin(x) * power * y, "b": [x @ x.T, index + 1], "none": None, "exp": jnp.exp(y)}


def in_torch(tree, *, power, name="unused", flag=True):
    x, (y, index) = tree["x"], tree["pair"]
    return {"a": torch.sin(x) * power * y, "b": [x @ x.T, index + 1], "none": None, "exp": torch.exp(y)}


bridged = bridge.from_jax(in_jax)


def loss(function, x, y, index, power=2.0):
    results = function({"x": x, "pair": (y, index)}, power=power, flag=False)
    assert list(results) == ["a", "b", "none", "exp"]
    assert results["none"] is None
    return results["a"].sum() + results["b"][0].square().sum() + (results["exp"] * 3).sum(), results["b"][1]


def make(size=5):
    x, y = (torch.randn(size, size, requires_grad=True) for _ in range(2))
    return x, y, torch.arange(size, dtype=torch.int32)


def compare(function, x, y, index, *rest):
    results = []
    for f in (bridged, in_torch):
        total, plus = function(f, x, y, index, *rest)
        assert not plus.requires_grad
        results.append((total, plus, *torch.autograd.grad(total, (x, y))))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)


def test_trees_constants_and_gradients():
    compare(loss, *make())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile(backend):
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    compare(compiled, *make())
    with torch.no_grad():
        x, y, index = make()
        torch.testing.assert_close(compiled(bridged, x, y, index), loss(in_torch, x, y, index), atol=1e-4, rtol=1e-5)


@pytest.mark.timeout(300)
def test_compile_with_changing_sizes_and_scalars():
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for size, power in ((3, 2), (4, 3), (5, 0.5), (6, 1.5)):
        compare(compiled, *make(size), power)


def test_func_grad():
    x, y, index = make()
    got, want = (
        torch.func.grad(lambda x: loss(f, x, y.detach(), index)[0])(x.detach())  # noqa: B023
        for f in (bridged, in_torch)
    )
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


def test_only_requested_gradients_are_computed():
    x, y, index = make()
    total, _ = loss(bridged, x.detach(), y, index)
    assert torch.autograd.grad(total, y)[0].shape == y.shape
    with torch.no_grad():
        assert not loss(bridged, x, y, index)[0].requires_grad
    assert not loss(bridged, x.detach(), y.detach(), index)[0].requires_grad


def test_output_without_cotangent_counts_as_zero():
    two = bridge.from_jax(lambda x: (x**2, x**3))
    x = torch.randn(7, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(two(x)[1].sum(), x)[0], 3 * x.detach() ** 2)


def test_residuals_are_stored_once():
    kept = []
    exp = bridge.from_jax(lambda x, y: jnp.exp(x) * y)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x, y = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
        out = exp(x, y)
    # exp(x) is a separate result; y is the input's own memory.
    assert len(kept) == 2
    assert sorted(k.data_ptr() == y.data_ptr() for k in kept) == [False, True]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (x, y)), (torch.exp(x) * y, torch.exp(x)))


def test_complex_gradients_follow_pytorchs_convention():
    z = torch.randn(6, dtype=torch.complex64, requires_grad=True)
    w = torch.randn(6, dtype=torch.complex64, requires_grad=True)
    ours = bridge.from_jax(lambda z, w: jnp.exp(1j * z) * jnp.conj(w) * z)(z, w)
    theirs = torch.exp(1j * z) * torch.conj(w) * z
    torch.testing.assert_close(ours, theirs)
    cotangent = torch.randn(6, dtype=torch.complex64)
    got, want = (torch.autograd.grad(r, (z, w), cotangent) for r in (ours, theirs))
    torch.testing.assert_close(got, want)


def test_identity_returns_a_new_tensor():
    x = torch.randn(64)
    first, second = bridge.from_jax(lambda x: (x, x))(x)
    first += 1
    torch.testing.assert_close(first, x + 1)
    torch.testing.assert_close(second, x)


class Pair(typing.NamedTuple):
    left: typing.Any
    right: typing.Any


def test_namedtuples_and_equal_constants_of_other_types():
    seen = []

    def function(pair, number):
        seen.append(number)
        return Pair(pair.left + number, pair.right)

    swap = bridge.from_jax(function)
    for number in (1, True, 1.0):
        result = swap(Pair(torch.zeros(2), torch.ones(2)), number)
        assert isinstance(result, Pair)
        assert result.left.tolist() == [1, 1]
    assert [type(x) for x in seen if x is not None][:1] == [int]
    assert {type(x) for x in seen} == {int, bool, float}


def test_functions_with_one_name_stay_apart():
    def make(factor):
        def scale(x):
            return x * factor

        return bridge.from_jax(scale)

    functions = [make(factor) for factor in (2, 3)]
    gc.collect()
    assert [f(torch.ones(1)).item() for f in functions] == [2, 3]
    assert bridge.from_jax(in_jax) is not bridged


def test_library_op_inside():
    op = bridge.from_jax(lambda q, k, v: flash_attention(q, k, v, is_causal=True))
    inputs = [torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3)]
    results = op(*inputs), bridge.flash_attention(*inputs, is_causal=True)
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)
    got, want = (torch.autograd.grad(r.square().sum(), inputs) for r in results)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_opcheck():
    x, y, index = make()
    loss(bridged, x, y, index)
    plans = {name: plan for name, plan in module.PROGRAMS.kept.items() if name.startswith("in_jax") and plan.grads}
    plan = next(name for name, plan in plans.items() if plan.grads[0].shape == (5, 5))
    tensors = [torch.randn(5, 5), torch.randn(5, 5), index]
    checks = torch.library.opcheck(torch.ops.jax_kernels.call.default, (tensors, plan))
    assert set(checks.values()) == {"SUCCESS"}
    assert torch.Tag.cudagraph_unsafe in torch.ops.jax_kernels.call.default.tags


def test_second_derivative_raises():
    x, y, index = make()
    (first,) = torch.autograd.grad(loss(bridged, x, y, index)[0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="from_jax of in_jax: double backward is not supported"):
        first.sum().backward()


def test_errors():
    x = torch.zeros(3)
    double = bridge.from_jax(lambda x, *rest: x * 2)
    with pytest.raises(TypeError, match=r"^function: got int, want a function"):
        bridge.from_jax(3)
    with pytest.raises(ValueError, match=r"^args: got no tensor, want"):
        double(3)
    with pytest.raises(TypeError, match=r"^rest\[0\]: got dtype torch\.float64, .* with \.to\(torch\.float32\)"):
        double(x, x.double())
    with pytest.raises(ValueError, match=r"^rest\[1\]: got a tensor on meta, want the device of the others, cpu"):
        double(x, x, x.to("meta"))
    with pytest.raises(ValueError, match=r"^x: got layout torch.sparse_coo"):
        double(x.to_sparse())
    pair = collections.namedtuple("pair", ["left", "right"])
    nested = bridge.from_jax(lambda tree, *, scale=None: tree["a"][1])
    for name, given, options in (
        ("tree['a'][1]", {"a": [x, x.double()]}, {}),
        ("tree.right", pair(x, x.double()), {}),
        ("scale", {"a": (x, x)}, {"scale": x.double()}),
    ):
        with pytest.raises(TypeError, match=rf"^{re.escape(name)}: got dtype torch\.float64"):
            nested(given, **options)
    for name, given, options in (
        ("tree['a'][1]", {"a": [x, np.ones(3)]}, {}),
        ("tree.right", pair(x, np.ones(3)), {}),
        ("scale", {"a": (x, x)}, {"scale": np.ones(3)}),
    ):
        with pytest.raises(TypeError, match=rf"^{re.escape(name)}: got numpy\.ndarray, want a torch\.Tensor or a hash"):
            nested(given, **options)
    with pytest.raises(TypeError, match=r"^rest\[0\]: got jaxlib\S+, want a torch\.Tensor or a hashable constant"):
        double(x, jnp.ones(3))
    with pytest.raises(TypeError, match=r"^output: got dtype int4, which PyTorch does not take"):
        bridge.from_jax(lambda x: x.astype("int4"))(x)
    with pytest.raises(RuntimeError, match=r"^lost_0: a graph that calls a from_jax function runs only in the process"):
        torch.ops.jax_kernels.call([x], "lost_0")


def test_unguarded_graph_refuses_other_shapes():
    mean = bridge.from_jax(lambda x: x.mean(keepdims=True))
    graph = make_fx(torch.func.grad(lambda x: mean(x).sum()))(torch.ones(8))
    torch.testing.assert_close(graph(torch.ones(8)), torch.full((8,), 1 / 8))
    with pytest.raises(
        ValueError, match=r"^from_jax of <lambda>: got a tensor of shape \(1,\) and dtype torch\.float32"
    ):
        graph(torch.ones(1))
    with pytest.raises(ValueError, match=r"and dtype torch\.float16 in a graph, want the shape and dtype of its trace"):
        graph(torch.ones(8).half())


def test_jitted_and_vmapped_functions():
    outer = bridge.from_jax(jax.jit(jax.vmap(jnp.outer)))
    x, y = torch.randn(3, 4), torch.randn(3, 5)
    torch.testing.assert_close(outer(x, y), x[:, :, None] * y[:, None])


def softplus(x):
    return jnp.logaddexp(x, 0.0)


class Activation(torch.nn.Module):
    """A module that holds a function made by from_jax."""

    def __init__(self):
        super().__init__()
        self.function = bridge.from_jax(softplus)

    def forward(self, x):
        return self.function(x)


def test_result_can_be_copied_and_pickled():
    x, module = torch.linspace(-2, 2, 5), Activation()
    assert copy.deepcopy(module).function is module.function
    for loaded in (pickle.loads(pickle.dumps(module)), pickle.loads(pickle.dumps(module.function))):
        torch.testing.assert_close(loaded(x), module(x))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(bridge.from_jax(lambda x: x))


def test_function_errors_pass_through():
    def fails(x):
        return {[]: x}

    with pytest.raises(TypeError) as error:
        bridge.from_jax(fails)(torch.ones(2))
    assert "want a torch.Tensor" not in str(error.value)
