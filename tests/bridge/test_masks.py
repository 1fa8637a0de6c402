"""Masks in calls on tensors, whose arrays are data of the call; and the builders of bridge.masks."""

import copy
import gc
import pickle

import jax
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import jax_kernels
from jax_kernels import bridge, masks
from jax_kernels.bridge.jax_functions import mask_operands
from jax_kernels.bridge.jax_functions import programs as kept

LENGTH, HEADS = 24, 4


def of(seed):
    """Masks of several structures, with other arrays for each seed."""
    random = np.random.default_rng(seed)
    lengths = masks.prefix(random.integers(1, LENGTH, 2).astype(np.int32))
    table = random.random((2, LENGTH)) < 0.7
    return {
        "dense": masks.dense(random.random((2, 1, LENGTH, LENGTH)) < 0.5),
        "segments": masks.segments(random.integers(0, 3, (2, LENGTH)).astype(np.int32)),
        "block_sparse": masks.block_sparse(random.random((HEADS, 3, 3)) < 0.6, 8),
        "composed": masks.causal() & masks.block_sparse(random.random((3, 3)) < 0.6, 8) | lengths,
        "complement": ~(masks.sliding_window(3, 3) | lengths),
        "function": masks.from_function(lookup, table, batch=2),
    }


def lookup(b, h, q, k, table):
    return table[b, q] | table[b, k]


def jax_gradients(inputs, cotangent, **arguments):
    attend = lambda *x: jax_kernels.flash_attention(*x, **arguments)
    out, pullback = jax.vjp(attend, *(x.detach().numpy() for x in inputs))
    return [torch.from_numpy(np.array(x)) for x in (out, *pullback(cotangent.numpy()))]


def check(out, inputs, **arguments):
    """Compares with jax_kernels.flash_attention, including gradients."""
    cotangent = torch.randn(out.shape)
    got = (out, *torch.autograd.grad(out, inputs, cotangent))
    torch.testing.assert_close(list(got), jax_gradients(inputs, cotangent, **arguments), atol=1e-5, rtol=1e-5)


@pytest.fixture
def plans(no_programs):
    """Counts the programs that from_jax has made since the start of the test."""
    return lambda: len(kept.PROGRAMS)


@pytest.mark.parametrize("case", of(0))
def test_masks_with_one_structure_share_a_program(case, make_qkv, plans):
    inputs = make_qkv(kv_heads=2)
    seen = []
    for seed in range(3):
        mask = of(seed)[case]
        out = bridge.flash_attention(*inputs, mask=mask)
        check(out, inputs, mask=mask)
        seen.append(out.detach())
    assert plans() == 1
    plan = list(kept.PROGRAMS.kept.values())[-1]
    assert plan.forward._cache_size() == plan.backward._cache_size() == 1
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    with torch.no_grad():
        torch.testing.assert_close(bridge.flash_attention(*inputs, mask=of(1)[case]), seen[1], atol=1e-6, rtol=0)
    assert plans() == 2


def test_prepared_masks_pass_lists_as_data(make_qkv, plans):
    """The lists are operands, although no kernel reads them here."""
    inputs = make_qkv(batch=1, length=384, heads=2, head_dim=64)
    specs = (jax.ShapeDtypeStruct((1, 384, 2, 64), "bfloat16"),) * 3
    for n in range(3):
        mask = masks.block_sparse(np.random.default_rng(n).random((3, 3)) < 0.4, 128) | masks.sliding_window(2, 2)
        with jax_kernels.dispatch.on_device("H200"):
            prepared = jax.jit(jax_kernels.prepare_mask)(mask, *specs)
        assert prepared.lists
        check(bridge.flash_attention(*inputs, mask=prepared), inputs, mask=mask)
    assert plans() == 1


def test_numpy_and_torch_arrays_are_read_in_each_call(make_qkv, plans):
    inputs, given = make_qkv(), of(0)["composed"]
    leaves, structure = jax.tree.flatten(given)
    own = [np.array(x) for x in leaves]
    tensors = [torch.tensor(x) for x in own]
    for arrays in (own, tensors, [leaves[0], *own[1:]]):
        mask = jax.tree.unflatten(structure, arrays)
        check(bridge.flash_attention(*inputs, mask=mask), inputs, mask=given)
    other = of(1)["composed"]
    for mine, theirs, leaf in zip(own, tensors, jax.tree.leaves(other), strict=True):
        mine[...] = leaf
        theirs.copy_(torch.tensor(np.array(leaf)))
    for arrays in (own, tensors):
        mask = jax.tree.unflatten(structure, arrays)
        check(bridge.flash_attention(*inputs, mask=mask), inputs, mask=other)
    assert plans() == 1


def test_jax_arrays_are_passed_unchanged():
    mask = of(0)["composed"]
    assert mask_operands.on_device(mask, torch.device("cpu")) is mask


def test_moved_mask_is_cached_while_alive(monkeypatch):
    """JAX has one device here; the test pretends that the arrays are on another device."""
    moves = []
    monkeypatch.setattr(mask_operands.dlpack, "jax_device", lambda device: "another device")
    monkeypatch.setattr(
        mask_operands.jax, "device_put", lambda x, device: moves.append(device) or jax.tree.map(np.copy, x)
    )
    mask, before = of(0)["composed"], len(mask_operands._MOVED)
    first, second = (mask_operands.on_device(mask, torch.device("cpu")) for _ in range(2))
    assert first is second
    assert moves == ["another device"]
    assert mask in mask_operands._MOVED
    del mask, first, second
    gc.collect()
    assert len(mask_operands._MOVED) <= before


def test_arrays_live_until_the_backward(make_qkv):
    inputs = make_qkv()
    gc.collect()
    before = set(mask_operands._FOUND)
    out = bridge.flash_attention(*inputs, mask=of(0)["dense"])
    gc.collect()
    assert len(mask_operands._FOUND) == len(before) + 1
    check(out, inputs, mask=of(0)["dense"])
    del out
    gc.collect()
    assert set(mask_operands._FOUND) <= before


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_and_second_derivative(use_reentrant, make_qkv):
    inputs, mask = make_qkv(), of(0)["composed"]
    attend = lambda *x: bridge.flash_attention(*x, mask=mask)
    want = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
    checkpoint(attend, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close([x.grad for x in inputs], [x.detach() for x in want], atol=0, rtol=0)
    with pytest.raises(RuntimeError, match=r"^flash_attention: double backward is not supported"):
        want[0].sum().backward()


def test_other_functions(make_qkv, plans):
    inputs = make_qkv(kv_heads=2)
    bias = torch.randn(2, 2, 1, LENGTH, requires_grad=True)
    for seed in range(2):
        blocks, dense = of(seed)["block_sparse"], of(seed)["dense"]
        check(bridge.block_sparse_attention(*inputs, blocks, is_causal=True), inputs, mask=blocks, is_causal=True)
        out = bridge.dynamic_mask_attention(*inputs, dense, bias)
        cotangent = torch.randn(out.shape)
        got = torch.autograd.grad(out, [*inputs, bias], cotangent)
        attend = lambda q, k, v, bias: jax_kernels.dynamic_mask_attention(q, k, v, dense, bias)  # noqa: B023
        want = jax.vjp(attend, *(x.detach().numpy() for x in (*inputs, bias)))[1](cotangent.numpy())
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)
    assert plans() == 2


def test_from_jax_takes_masks_in_any_argument(plans):
    dense = bridge.from_jax(lambda x, tree, *, other: (x * tree["mask"].to_dense(3, 3)[0, 0], other[0].to_dense(3, 3)))
    x = torch.arange(9.0).reshape(3, 3)
    for n in (1, 2):
        lengths = masks.prefix(np.array([n], np.int32))
        product, keep = dense(x, {"mask": lengths}, other=[masks.causal() | lengths])
        torch.testing.assert_close(product, x * (torch.arange(3) < n))
        assert torch.equal(keep[0, 0], torch.ones(3, 3).tril().bool() | (torch.arange(3) < n))
    assert plans() == 1
    with pytest.raises(ValueError, match=r"^args: got no tensor, want"):
        dense(None, {"mask": masks.causal()}, other=[])


@pytest.mark.timeout(300)
def test_compiled_with_a_graph_break(make_qkv):
    torch._dynamo.reset()
    inputs, direct = make_qkv(), bridge.from_jax(lambda x, mask: x * mask.to_dense(LENGTH, LENGTH)[0, 0, :, 0, None])
    mask = of(0)["composed"]

    def attend(query, key, value):
        out = bridge.flash_attention(query * 2, key, value, mask=mask) + 1
        return direct(out[0, :, 0].contiguous(), mask)

    compiled = torch.compile(attend, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    got, want = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, attend))
    torch.testing.assert_close(got, want)


def test_errors(make_qkv):
    inputs = make_qkv()
    leaves, structure = jax.tree.flatten(of(0)["segments"])
    attend = lambda leaf: bridge.flash_attention(*inputs, mask=jax.tree.unflatten(structure, [leaf] * len(leaves)))
    with pytest.raises(TypeError, match=r"^mask: got float, want arrays"):
        attend(1.0)
    with pytest.raises(TypeError, match=r"^mask: got dtype torch\.int64, want at most 32 bits"):
        attend(torch.zeros(1, LENGTH, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^mask: got a Mask whose arrays JAX traces"):
        jax.jit(attend)(leaves[0])
    with pytest.raises(ValueError, match=r"^segments: got q_ids of shape \(1, 7\), want \[batch, 24\]"):
        bridge.flash_attention(*inputs, mask=masks.segments(np.zeros(7, np.int32)))
    with pytest.raises(RuntimeError, match=r"^mask: a graph that calls a function with a Mask runs only in the proc"):
        mask_operands.masks_by_name("lost")


def test_compiled_attention_can_be_copied_and_pickled(make_qkv):
    mask = masks.causal() & bridge.masks.block_sparse(torch.ones(3, 3, dtype=torch.bool).tril(), 8)
    options = {"num_heads": 4, "num_kv_heads": 2, "dtype": torch.float32, "implementation": "xla"}
    attention = bridge.compile_attention(mask, 24, 16, **options)
    inputs = make_qkv(kv_heads=2)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert (other.dtype, other.device, other.plan.implementation) == (torch.float32, torch.device("cpu"), "xla")
        torch.testing.assert_close(other(*inputs), attention(*inputs))
