"""torch.compile of Python code around the bridge: the frames that it enters, and Masks in one graph."""

import gc

import jax.numpy as jnp
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from jax_kernels import bridge
from jax_kernels.bridge import masks
from jax_kernels.bridge.jax_functions import mask_operands
from tests.support.cases.cached_calls import random

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BLOCKS = masks.block_sparse(torch.ones(3, 3, dtype=torch.bool).tril(), 8)


def qkv(length=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, 2, 8, generator=generator).requires_grad_() for _ in range(3)]


scaled = bridge.from_jax(lambda x, y: jnp.sin(x) * y)
# By name: (a call of tensors, the tensors).
CALLS = {
    "bias": (
        lambda q, k, v, b: bridge.flash_attention(q, k, v, bias=b, is_causal=True),
        [*qkv(), random(1, 2, 24, 24)],
    ),
    "a score_mod": (lambda *x: bridge.flash_attention(*x, score_mod=lambda s, b, h, i, j: s * 2.0), qkv()),
    "a Mask": (lambda *x: bridge.flash_attention(*x, mask=BLOCKS), qkv()),
    "from_jax": (scaled, [random(5), random(5, seed=1)]),
    "rms_norm": (bridge.rms_norm, [random(5, 8), random(8)]),
}


def gradients(call, inputs):
    return torch.autograd.grad(call(*inputs).square().sum(), inputs)


def close(got, want):
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", CALLS)
def test_backward_inside_the_graph(name):
    """The bridge has nothing cached, so JAX traces while torch.compile inspects frames."""
    call, inputs = CALLS[name]
    bridge.clear_cache()

    def step(*inputs):
        loss = call(*inputs).square().sum()
        loss.backward()
        return loss

    fresh = [x.detach().clone().requires_grad_() for x in inputs]
    torch.compile(step, backend="eager")(*fresh)
    close([x.grad for x in fresh], gradients(call, inputs))


@pytest.mark.parametrize("name", CALLS)
def test_call_after_a_graph_break(name):
    call, inputs = CALLS[name]

    def broken(first, *others):
        first = first * 2
        torch._dynamo.graph_break()
        return call(first, *others)

    torch.testing.assert_close(torch.compile(broken, backend="eager")(*inputs), broken(*inputs))


@pytest.mark.parametrize("name", ["bias", "a Mask"])
def test_checkpoint(name):
    call, inputs = CALLS[name]
    step = lambda *inputs: checkpoint(call, *inputs, use_reentrant=False)
    close(gradients(torch.compile(step, backend="aot_eager"), inputs), gradients(call, inputs))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_mask_in_one_graph(backend):
    attend = lambda *x: bridge.flash_attention(*x, mask=BLOCKS)
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    close(gradients(compiled, qkv()), gradients(attend, qkv()))


def test_mask_as_argument():
    """Each Mask object has its own graph, even with equal arrays."""
    attend = lambda mask, *x: bridge.flash_attention(*x, mask=mask)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for mask in (BLOCKS, masks.causal(), masks.block_sparse(torch.ones(3, 3, dtype=torch.bool).triu(), 8), BLOCKS):
        torch.testing.assert_close(compiled(mask, *qkv()), attend(mask, *qkv()))


def test_mask_and_lengths_in_one_graph():
    attend = lambda *x: bridge.flash_attention(*x, mask=masks_of_all)
    masks_of_all = masks.causal() & masks.sliding_window(5, 0)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (8, 24, 17):
        torch.testing.assert_close(compiled(*qkv(length)), attend(*qkv(length)))


def test_prepared_masks_and_compiled_attention():
    prepared = bridge.prepare_mask(masks.causal(), *qkv())
    compiled = bridge.compile_attention("causal", 24, 8, num_heads=2, dtype=torch.float32)
    attend = lambda *x: bridge.flash_attention(*x, mask=prepared) - 2 * compiled(*x)
    close(gradients(torch.compile(attend, backend="aot_eager", fullgraph=True), qkv()), gradients(attend, qkv()))


def test_exported_program_with_mask_trains():
    class Module(torch.nn.Module):
        def forward(self, query, key, value):
            return bridge.flash_attention(query, key, value, mask=BLOCKS)

    exported = torch.export.export(Module(), tuple(qkv())).module()
    close(gradients(exported, qkv(seed=1)), gradients(Module(), qkv(seed=1)))


def test_graph_masks_keep_one_name():
    """A Mask that a graph uses keeps one name while it is alive."""
    gc.collect()  # masks of earlier tests
    mask, before = masks.block_sparse(torch.ones(3, 3, dtype=torch.bool), 8), len(mask_operands._KEPT)
    device = torch.device("cpu")
    names = {mask_operands.register_weak([mask], device).name for _ in range(3)}
    assert len(mask_operands._KEPT) == before + 1
    (name,) = names
    assert mask_operands.masks_by_name(name).masks == (mask,)
    assert mask_operands.register_weak([mask, mask], device).name != name
    del mask
    gc.collect()
    assert len(mask_operands._KEPT) == before
    with pytest.raises(RuntimeError, match="only while the Mask is alive"):
        mask_operands.masks_by_name(name)


@pytest.mark.parametrize("name", ["flash_attention", "rms_norm"])
def test_call_is_one_graph_node(name):
    """torch.compile checks each name that it sees inside of a call before every call."""
    graphs = []

    def backend(module, inputs):
        graphs.append([x.target for x in module.graph.nodes if x.op == "call_function"])
        return module.forward

    call, inputs = {
        "flash_attention": (lambda *x: bridge.flash_attention(*x, is_causal=True), qkv()),
        "rms_norm": (bridge.rms_norm, [random(5, 8), random(8)]),
    }[name]
    compiled = torch.compile(lambda *x: call(*x), backend=backend, fullgraph=True)
    close(gradients(compiled, inputs), gradients(call, inputs))
    ((target,),) = graphs
    assert target.__name__.endswith("in_graph")
