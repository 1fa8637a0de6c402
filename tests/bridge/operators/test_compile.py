"""torch.compile, torch.export and opcheck see opaque operators, without a graph break."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jax_kernels import bridge

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_dynamo")]


def model(query, key, value, **options):
    out = bridge.flash_attention(query * 1.5, key, value.sin(), is_causal=True, **options)
    return (out * 2).cos()


def compare(function, inputs, *, compiled, atol=1e-5):
    results = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(*results, atol=atol, rtol=0)
    cotangent = torch.randn_like(results[0])
    for ours, theirs in zip(*(torch.autograd.grad(r, inputs, cotangent) for r in results), strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph(backend, make_qkv):
    counter = CompileCounterWithBackend(backend)
    compare(model, make_qkv(), compiled=torch.compile(model, backend=counter, fullgraph=True))
    assert counter.frame_count == 1


def test_lse_and_repeated_tensors(make_qkv):
    def function(x):
        out, lse = bridge.flash_attention(x, x, x, return_lse=True)
        return out.sum(-1).transpose(1, 2) + lse

    compare(function, make_qkv()[:1], compiled=torch.compile(function, backend="aot_eager", fullgraph=True))


def test_one_graph_serves_every_length(make_qkv):
    def function(query, key, value):
        return model(query, key, value, q_offset=key.shape[1] - query.shape[1])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for length, kv_length in ((9, 18), (12, 32), (20, 21)):
        compare(function, make_qkv(length=length, kv_length=kv_length), compiled=compiled)
    assert counter.frame_count == 1


def test_tensor_arguments_and_no_grad(make_qkv):
    lengths = torch.tensor([7, 24], dtype=torch.int32)
    offset = torch.tensor(3, dtype=torch.int32)
    mask = torch.rand(24, 24) > 0.3

    def function(*inputs):
        return model(*inputs, kv_lengths=lengths, q_offset=offset, mask=mask)

    with torch.no_grad():
        inputs = make_qkv()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), function(*inputs), atol=1e-5, rtol=0)


def test_autocast(make_qkv):
    inputs = make_qkv()
    function = lambda *x: bridge.flash_attention(*x) * 1
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        results = function(*inputs), compiled(*inputs)
    assert results[1].dtype == torch.bfloat16
    torch.testing.assert_close(*results, atol=0, rtol=0)
    assert {x.dtype for x in torch.autograd.grad(results[1].sum(), inputs)} == {torch.float32}


def test_wrong_shapes_raise_while_compiling():
    compiled = torch.compile(bridge.flash_attention, backend="aot_eager", fullgraph=True)
    query, key = torch.zeros(1, 8, 4, 16), torch.zeros(1, 8, 3, 16)
    with pytest.raises(RuntimeError, match=r"ValueError\(\"key: got 3 heads, want a divisor of query's 4 heads\"\)"):
        compiled(query, key, key)


def test_scaled_dot_product_attention(make_qkv):
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in make_qkv()]
    function = lambda *x: bridge.scaled_dot_product_attention(*x, is_causal=True)
    compare(function, inputs, compiled=torch.compile(function, backend="aot_eager", fullgraph=True))


def test_export(make_qkv):
    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return model(*inputs)

    inputs = [x.detach() for x in make_qkv()]
    exported = torch.export.export(Module(), tuple(inputs))
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert "jax_kernels.flash_attention_inference.default" in names
    torch.testing.assert_close(exported.module()(*inputs), model(*inputs), atol=1e-6, rtol=0)


def test_every_argument_in_one_graph(make_qkv):
    ids = torch.tensor([[0] * 9 + [1] * 15] * 2, dtype=torch.int32)
    bias, sinks = torch.randn(4, 24, 24, requires_grad=True), torch.randn(4, requires_grad=True)

    def function(query, key, value, bias, sinks):
        options = {"window": (9, 4), "segment_ids": ids, "softcap": 3.0}
        return bridge.flash_attention(query, key, value, bias=bias, sinks=sinks, **options) * 1

    counter = CompileCounterWithBackend("aot_eager")
    compare(function, [*make_qkv(), bias, sinks], compiled=torch.compile(function, backend=counter, fullgraph=True))
    assert counter.frame_count == 1


STATICS = (True, -1, -1, 2, 0.3, None, True, None, None, "xla")
SPECIAL = (False, 5, 7, 2, 0.3, 4.0, True, None, None, "xla")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_inference", "flash_attention_backward"])
def test_opcheck(name, with_bias, make_qkv):
    inputs = [x.detach() for x in make_qkv(kv_heads=2)]
    ids = torch.arange(48, dtype=torch.int32).reshape(2, 24) // 7
    lengths = torch.tensor([5, 24], dtype=torch.int32)
    if with_bias:
        bias, sinks = torch.randn(2, 1, 24, 24), torch.randn(4)
        arguments = (*inputs, bias, sinks, None, ids, ids.clone(), lengths, None, *SPECIAL)
    else:
        arguments = (*inputs, None, None, None, None, None, lengths, None, *STATICS)
    if name.endswith("backward"):
        out, lse = torch.ops.jax_kernels.flash_attention(*arguments)
        wanted = 0b11111 if with_bias else 0b00101  # all gradients, or query's and value's
        arguments = (*arguments, wanted, out, lse, torch.randn_like(out), None)
    operator = getattr(torch.ops.jax_kernels, name).default
    assert torch.Tag.cudagraph_unsafe in operator.tags
    checks = torch.library.opcheck(operator, arguments)
    assert set(checks.values()) == {"SUCCESS"}
