"""One graph of torch.compile for tensors of many shapes, by from_jax's operators."""

import enum

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jax_kernels import bridge
from jax_kernels.bridge.jax_functions import dynamic_shapes, store
from jax_kernels.bridge.jax_functions.api import JaxOp
from tests.support.cases import tiers

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_dynamo")]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def qkv(length):
    return [random(1, length, 2, 8, seed=seed) for seed in range(3)]


def dilated(*inputs, **options):
    return bridge.dilated_attention(*inputs, segment_lengths=[8, 16], dilation_rates=[1, 2], **options)


FACTORS = np.ones(3, np.float32)
# By name: (a call of tensors, the tensors of a size, the sizes).
CALLS = {
    "dilated_attention": (dilated, qkv, (16, 20)),
    "matmul": (lambda *x: bridge.matmul(*x, activation="silu"), lambda n: [random(n, 8), random(8, 6)], (5, 6, 9)),
    "both sizes": (bridge.matmul, lambda n: [random(n, 2 * n), random(2 * n, n + 3)], (5, 6, 9)),
    "layer_norm": (bridge.layer_norm, lambda n: [random(2, n, 8), random(8), random(8)], (5, 6, 9)),
    "rms_norm": (lambda x, r: bridge.rms_norm(x, residual=r)[1], lambda n: [random(n, 8), random(n, 8)], (5, 6, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", tiers.cases(list(CALLS), {"matmul", "both sizes", "rms_norm"}))
def test_one_graph_serves_all_sizes(name):
    call, inputs_of, sizes = CALLS[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: call(*x) * 2, backend=counter, fullgraph=True, dynamic=True)
    frames = set()
    for size in sizes:
        inputs = inputs_of(size)
        got, want = compiled(*inputs), call(*inputs) * 2
        frames.add(counter.frame_count)  # the first size may take two: PyTorch restarts for a number
        torch.testing.assert_close(got, want)
        gradients = (torch.autograd.grad(x.square().sum(), inputs) for x in (got, want))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(frames) == 1


class Masked(torch.nn.Module):
    """Attention with two heads. One of the mask's axes also has size 2, which is a symbol."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 48)

    def forward(self, x, mask):
        query, key, value = (part.unflatten(-1, (2, 8)) for part in self.projection(x).chunk(3, -1))
        return bridge.dynamic_mask_attention(query, key, value, mask).flatten(2)


multiply = bridge.from_jax(lambda x, w: x * w)


def closing_over(call, *shapes):
    """A call of a tensor and of parameters. torch.compile takes the parameters' sizes for constants."""
    parameters = [torch.nn.Parameter(random(*shape).detach()) for shape in shapes]
    return lambda x: call(x, *parameters)


# By name: makes a function of a tensor [batch, length, 16], and of a mask if it takes one.
WITH_PARAMETERS = {
    "from_jax": lambda: closing_over(multiply, (16,)),
    "rms_norm": lambda: closing_over(bridge.rms_norm, (16,)),
    "linear": lambda: closing_over(bridge.linear, (24, 16), (24,)),
    "LayerNorm": lambda: bridge.nn.LayerNorm(16),
    "Linear": lambda: bridge.nn.Linear(16, 24),
    "GatedMLP": lambda: bridge.nn.GatedMLP(16, 24),
    "dynamic_mask_attention": Masked,
}


@pytest.mark.parametrize(
    "name", tiers.cases(list(WITH_PARAMETERS), {"from_jax", "rms_norm", "GatedMLP", "dynamic_mask_attention"})
)
def test_one_graph_serves_all_lengths_with_parameters(name):
    """The parameters fix only the last axis. Two heads fix a batch of two: PyTorch makes one symbol of equal sizes."""
    call = WITH_PARAMETERS[name]()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    frames = set()
    is_masked = name == "dynamic_mask_attention"
    for batch, length in ((2, 20), (2, 21), (2 if is_masked else 3, 27)):
        x = random(batch, length, 16)
        inputs = [x, torch.ones(batch, 2, length, length, dtype=torch.bool).tril()] if is_masked else [x]
        got, want = compiled(*inputs), call(*inputs)
        frames.add(counter.frame_count)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (got, want)))
    assert len(frames) == 1


# By name: a call of tensors, and of numbers that torch.compile turns into symbols.
NUMBERS = {
    "scaled_dot_product_attention": (
        lambda q, k, v, *_: bridge.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)
    ),
    "flash_attention": (
        lambda q, k, v, scale, softcap, window: bridge.flash_attention(
            q, k, v, scale=scale, softcap=softcap, window=(window, 0), is_causal=q.shape[1] > 1
        )
    ),
    "a window of both sides": lambda *given: bridge.flash_attention(*given[:3], window=given[5]),
    "flash_attn_func": (
        lambda q, k, v, scale, softcap, window: bridge.flash_attn_func(
            q, k, v, softmax_scale=scale, softcap=softcap, window_size=(window, 0)
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("name", tiers.cases(list(NUMBERS), {"scaled_dot_product_attention", "flash_attention"}))
def test_graph_keeps_its_traced_scalars(name, dynamic):
    call = NUMBERS[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic)
    for numbers in ((0.25, 2.0, 4), (0.5, 3.0, 5), (0.75, 4.0, 6)):
        inputs = qkv(16)
        got, want = compiled(*inputs, *numbers), call(*inputs, *numbers)
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(x.square().sum(), inputs) for x in (got, want)]
        torch.testing.assert_close(*gradients)
    frames = counter.frame_count
    for length in (18, 20, 21):
        torch.testing.assert_close(compiled(*qkv(length), *numbers), call(*qkv(length), *numbers))
    assert counter.frame_count <= frames + (not dynamic)


def test_alibi_slopes():
    """The slopes' size is a size of the tensors, which the trace has made constant."""
    call = lambda *x: bridge.flash_attn_func(*x, causal=True, alibi_slopes=torch.tensor([0.5, 0.25]))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for length in (16, 18, 20, 23):
        torch.testing.assert_close(compiled(*qkv(length)), call(*qkv(length)))
        frames.append(counter.frame_count)
    assert frames[1] == frames[3]


def test_mask_has_a_graph_per_size():
    mask = bridge.masks.causal()
    counter = CompileCounterWithBackend("aot_eager")
    call = lambda *x: bridge.flash_attention(*x, mask=mask)
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for length in (16, 18, 20):
        torch.testing.assert_close(compiled(*qkv(length)), call(*qkv(length)))
    assert counter.frame_count == 3


class Scale(enum.Enum):
    ONE = 1.5


def in_jax(tree, *, power, kind, name="unused"):
    x, (y, index) = tree["x"], tree["pair"]
    cut = y[:, :3]
    return {"a": [jnp.sin(x @ y) * power, cut], "b": (index + 1, None), "c": kind.value * x.sum()}


def test_one_graph_serves_all_sizes_of_a_user_function():
    """A function with several inputs and results in containers, and with constants that have no text."""
    call = bridge.from_jax(in_jax)
    counter = CompileCounterWithBackend("aot_eager")

    def work(x, y, index):
        found = call({"x": x, "pair": (y, index)}, power=-0.0 + 3, kind=Scale.ONE)
        return found["a"][0] * 2, found["b"][0], found["c"], found["b"][1]

    compiled = torch.compile(work, backend=counter, fullgraph=True, dynamic=True)
    frames = set()
    for size in (4, 6, 10):
        x, y, index = random(size, 2 * size), random(2 * size, 3 * size + 1), torch.arange(size, dtype=torch.int32)
        got, want = compiled(x, y, index), work(x, y, index)
        frames.add(counter.frame_count)
        torch.testing.assert_close(got[:3], want[:3])
        assert got[3] is None
        gradients = (torch.autograd.grad(found[0].square().sum() + found[2], (x, y)) for found in (got, want))
        torch.testing.assert_close(*gradients)
    assert len(frames) == 1


def test_sizes_marked_dynamic_by_torch():
    """The first graph is for one size, the second for all sizes."""
    counter = CompileCounterWithBackend("aot_eager")
    w = random(8, 6)
    compiled = torch.compile(lambda x: bridge.matmul(x.sin(), w), backend=counter, fullgraph=True)
    for size in (5, 6, 7, 9):
        x = random(size, 8)
        torch.testing.assert_close(compiled(x), bridge.matmul(x.sin(), w))
    assert counter.frame_count == 2


def test_result_size_from_no_input():
    """Such a size is a constant of its graph."""
    twice = JaxOp(lambda x: jnp.concatenate([x, x]), is_opaque=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: twice.run(None, x), backend=counter, fullgraph=True, dynamic=True)
    for size in (5, 6):
        x = random(size)
        torch.testing.assert_close(compiled(x), torch.cat([x, x]))
    assert counter.frame_count == 2
    wide = [random(size, columns) for size, columns in ((5, 4), (5, 6), (6, 7))]
    counts = []
    for x in wide:
        torch.testing.assert_close(compiled(x), torch.cat([x, x]))
        counts.append(counter.frame_count)
    assert counts == [3, 3, 4]


def test_bounded_size():
    """No graph of many sizes claims size 8 where a call returns 4. Beyond the sizes tried, the call raises."""

    def first(x, most):
        return x[:most]

    first.__name__ = "a first part"
    part = bridge.from_jax(first)

    def mean(x, most):
        y = part(x, most)
        return y.sum() / y.shape[0]

    compiled = torch.compile(mean, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (10, 20, 4):
        torch.testing.assert_close(compiled(torch.arange(size) + 1.0, 8), (min(size, 8) + 1) / 2 * torch.ones(()))
    compiled(torch.ones(100), 1000)
    with pytest.raises(
        RuntimeError,
        match=r"a_first_part: its results have shapes \[\(1000,\)\], but this graph for many shapes has \[\(1500,",
    ):
        compiled(torch.ones(1500), 1000)


def test_rebuilders_without_text_are_kept(monkeypatch):
    """A graph whose call has a text for a name outlives clear_cache(), another one says that it does not."""
    monkeypatch.setattr(store, "MOST", 2)
    scaled = JaxOp(lambda x, by, names=(): x * (by if isinstance(by, float) else by.value), is_opaque=True)
    kinds = [enum.Enum("Kind", {"one": number}) for number in range(2, 6)]
    graph = lambda *given: torch.compile(
        lambda x: scaled.run(None, x, *given), backend="aot_eager", fullgraph=True, dynamic=True
    )
    bridge.clear_cache()
    plain, first = graph(-0.5, ("a b", None, True, 2**70, [1])), graph(kinds[0].one)
    x = random(5).detach()
    torch.testing.assert_close((plain(x), first(x)), (x * -0.5, x * 2))
    assert bridge.cache_info().dynamic_calls == 1
    for kind in kinds[1:]:
        graph(kind.one)(x)
        first(x)  # keeps it in the cache
    assert bridge.cache_info().dynamic_calls == 2
    bridge.clear_cache()
    assert bridge.cache_info().dynamic_calls == 0
    torch.testing.assert_close(plain(random(9).detach()), random(9).detach() * -0.5)
    with pytest.raises(RuntimeError, match=r"compile it again, after torch\.compiler\.reset"):
        first(x)
    torch.compiler.reset()
    torch.testing.assert_close(first(x), x * 2)


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("name", ["call_any", "call_any_backward"])
def test_opcheck(name, is_strided):
    names = []
    own = dynamic_shapes.name_of
    x, w = random(5, 8).detach(), random(8, 6).detach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_shapes, "name_of", lambda *call: names.append(own(*call)) or names[-1])
        torch.compile(bridge.matmul, backend="aot_eager", fullgraph=True, dynamic=True)(x, w)
    if is_strided:
        x, w = x.t().contiguous().t(), w.t().contiguous().t()
    arguments = ([x, w], names[-1]) if name == "call_any" else ([x, w], [torch.ones(5, 6)], 0b11, names[-1])
    checks = torch.library.opcheck(getattr(torch.ops.jax_kernels, name).default, arguments)
    assert set(checks.values()) == {"SUCCESS"}


def test_second_derivative_raises():
    names = []
    own = dynamic_shapes.name_of
    inputs = [random(5, 8), random(8, 6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_shapes, "name_of", lambda *call: names.append(own(*call)) or names[-1])
        torch.compile(bridge.matmul, backend="aot_eager", fullgraph=True, dynamic=True)(*inputs)
    (out,) = torch.ops.jax_kernels.call_any(inputs, names[-1])
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        gradient.sum().backward()


def test_unhashable_constant_is_named():
    """torch.compile before torch 2.12 raises its own error."""
    own = torch.__version__ >= (2, 12)
    text = r"^factors: got numpy\.ndarray, want a torch\.Tensor or a hashable constant" if own else "not a constant"
    scaled = bridge.from_jax(lambda x, factors: x * factors)
    with pytest.raises(TypeError if own else Exception, match=text):
        torch.compile(lambda x: scaled(x, FACTORS), backend="eager")(random(3))


def test_exported_dynamic_program_trains():
    class Module(torch.nn.Module):
        def forward(self, query, key, value):
            return dilated(query, key, value, is_causal=True)

    length = torch.export.Dim("length", min=4, max=1024)
    exported = torch.export.export(Module(), tuple(qkv(16)), dynamic_shapes=[{1: length}] * 3).module()
    inputs = qkv(20)
    gradients = (torch.autograd.grad(x(*inputs).square().sum(), inputs) for x in (exported, Module()))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
