"""torch.func's transforms, checkpointing, and differentiating twice."""

import numpy as np
import pytest
import torch
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from jax_kernels import bridge, masks
from tests.support.cases import tiers


def stacked(function, count, *inputs):
    """The expected result of vmap: the function applied to each slice."""
    results = [function(*(x[i] for x in inputs)) for i in range(count)]
    return (
        tuple(torch.stack(x) for x in zip(*results, strict=True))
        if isinstance(results[0], tuple)
        else torch.stack(results)
    )


def close(got, want, atol=1e-5):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def test_grad(make_qkv, reference):
    inputs = [x.detach() for x in make_qkv()]

    def loss(function):
        def of(*x):
            out, lse = function(*x)
            return (out**2).sum() + lse.sin().sum()

        return grad(of, (0, 1, 2))(*inputs)

    close(loss(lambda *x: bridge.flash_attention(*x, return_lse=True)), loss(reference))


def test_grad_without_lse(make_qkv, reference):
    query, key, value = (x.detach() for x in make_qkv())
    got = grad(lambda k: bridge.flash_attention(query, k, value).square().sum())(key)
    close(got, grad(lambda k: reference(query, k, value)[0].square().sum())(key))


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_vmap(make_qkv):
    inputs = [torch.stack([x.detach(), x.detach().flip(1), x.detach() / 2]) for x in make_qkv()]
    close(vmap(bridge.flash_attention)(*inputs), stacked(bridge.flash_attention, 3, *inputs))
    both = lambda *x: bridge.flash_attention(*x, return_lse=True)
    close(vmap(both)(*inputs), stacked(both, 3, *inputs))
    query, key, value = inputs
    moved = vmap(bridge.flash_attention, (1, None, None))(query.movedim(0, 1), key[0], value[0])
    close(moved, torch.stack([bridge.flash_attention(q, key[0], value[0]) for q in query]))


MASKS = {
    "one mask": (None, torch.rand(24, 24) > 0.3),
    "one mask for each entry": (None, torch.rand(2, 1, 24, 24) > 0.3),
    "mapped, two axes": (0, torch.rand(3, 24, 24) > 0.3),
    "mapped, four axes": (0, torch.rand(3, 2, 1, 1, 24) > 0.3),
    "mapped, one entry": (0, torch.rand(3, 1, 4, 24, 24) > 0.3),
}


@pytest.mark.parametrize("case", MASKS)
def test_vmap_of_masks(case, make_qkv):
    dim, mask = MASKS[case]
    inputs = [torch.stack([x.detach() / (i + 1) for i in range(3)]) for x in make_qkv()]
    function = lambda q, k, v, m: bridge.flash_attention(q, k, v, mask=m)
    got = vmap(function, (0, 0, 0, dim))(*inputs, mask)
    close(got, stacked(function, 3, *inputs, mask if dim == 0 else mask.expand(3, *mask.shape)))


@pytest.mark.parametrize("offset_shape", [(3,), (3, 2)])
def test_vmap_of_lengths_and_offsets(offset_shape, make_qkv):
    inputs = [torch.stack([x.detach() / (i + 1) for i in range(3)]) for x in make_qkv()]
    lengths = torch.tensor([[3, 24], [9, 1], [20, 0]], dtype=torch.int32)
    offsets = torch.arange(-2, -2 + 3 * (len(offset_shape) * 2 - 1), dtype=torch.int32)[
        : 3 * (2 if len(offset_shape) == 2 else 1)
    ]
    offsets = offsets.reshape(offset_shape)
    function = lambda q, k, v, n, o: bridge.flash_attention(q, k, v, kv_lengths=n, q_offset=o, is_causal=True)
    close(vmap(function)(*inputs, lengths, offsets), stacked(function, 3, *inputs, lengths, offsets))
    fixed = lambda q, k, v: function(q, k, v, lengths[0], offsets[0])
    close(vmap(fixed)(*inputs), stacked(fixed, 3, *inputs))


BIASES = {
    "shared": (None, (4, 24, 24), None),
    "of each entry": (None, (2, 1, 1, 24), None),
    "mapped": (0, (3, 24, 24), None),
    "mapped, and sinks": (0, (3, 2, 4, 1, 24), 0),
    "no bias": (None, None, 0),
}


@pytest.mark.parametrize("case", BIASES)
def test_vmap_of_biases_sinks_and_segments(case, make_qkv):
    """vmap and vmap(grad) equal a loop: each call has its own gradient, also of tensors that the calls share."""
    dim, shape, sinks_dim = BIASES[case]
    bias = None if shape is None else torch.randn(shape)
    sinks = None if case == "shared" else torch.randn(3, 4) if sinks_dim == 0 else torch.randn(4)
    ids = torch.randint(0, 2, (3, 2, 24), dtype=torch.int32)
    inputs = [torch.stack([x.detach() / (i + 1) for i in range(3)]) for x in make_qkv()]

    def function(q, k, v, ids, b, s):
        return bridge.flash_attention(q, k, v, segment_ids=ids, bias=b, sinks=s, window=9)

    wanted = tuple(i for i, x in enumerate((*inputs, None, bias, sinks)) if x is not None)
    loss = grad(lambda *x: function(*x).square().sum(), wanted)
    in_dims = (0, 0, 0, 0, dim, sinks_dim)
    every = [x if d == 0 else [x] * 3 for x, d in zip((*inputs, ids, bias, sinks), in_dims, strict=True)]
    for f in (function, loss):
        got = vmap(f, in_dims)(*inputs, ids, bias, sinks)
        close(got, stacked(f, 3, *every), atol=1e-4)


def test_grad_of_vmap_sums_shared_bias_and_sinks(make_qkv):
    query, key, value = (x.detach() for x in make_qkv())
    queries, shared = torch.stack([query, query.flip(1)]), (torch.randn(1, 4, 1, 24), torch.randn(4))
    function = lambda q, b, s: bridge.flash_attention(q, key, value, bias=b, sinks=s)
    got = grad(lambda *x: vmap(function, (0, None, None))(queries, *x).square().sum(), (0, 1))(*shared)
    each = [grad(lambda *x, q=q: function(q, *x).square().sum(), (0, 1))(*shared) for q in queries]
    close(got, tuple(a + b for a, b in zip(*each, strict=True)), atol=1e-4)


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_vmap_of_grad(make_qkv):
    inputs = [torch.stack([x.detach() / (i + 1) for i in range(3)]) for x in make_qkv()]
    loss = grad(lambda *x: bridge.flash_attention(*x, is_causal=True).square().sum(), (0, 1, 2))
    close(vmap(loss)(*inputs), stacked(loss, 3, *inputs), atol=1e-4)


def test_grad_of_vmap_sums_shared_inputs(make_qkv):
    query, key, value = (x.detach() for x in make_qkv())
    queries = torch.stack([query, query.flip(1)])
    got = grad(lambda k: vmap(bridge.flash_attention, (0, None, None))(queries, k, value).square().sum())(key)
    each = [grad(lambda k, q=q: bridge.flash_attention(q, k, value).square().sum())(key) for q in queries]
    close(got, sum(each), atol=1e-4)


LENGTHS = masks.prefix(np.array([5, 9], np.int32))


def own_key(score, b, h, q, k):
    return score + (q == k) * (b + 1.0)


OF_FROM_JAX = {
    "a Mask": lambda *x: bridge.flash_attention(*x, mask=masks.causal() | masks.prefix(5)),
    "a Mask of an array": lambda *x: bridge.flash_attention(*x, mask=masks.block_sparse(np.tri(3, dtype=bool), 8)),
    "a Mask of batch entries": lambda *x: bridge.flash_attention(*x, mask=masks.causal() & LENGTHS),
    "a score_mod": lambda *x: bridge.flash_attention(*x, score_mod=own_key),
    "block_sparse": lambda *x: bridge.block_sparse_attention(*x, torch.ones(3, 3).bool().tril(), block_size=8),
    "dilated": lambda *x: bridge.dilated_attention(*x, segment_lengths=(12, 24), dilation_rates=(1, 2)),
}


@pytest.mark.parametrize("case", tiers.cases(OF_FROM_JAX, {"a Mask of batch entries", "dilated"}))
def test_vmap_of_from_jax(case, make_qkv):
    """vmap, vmap(grad), grad(vmap) with a shared key, autograd of vmap, and vmap(vmap)."""
    function = OF_FROM_JAX[case]
    inputs = [torch.stack([x.detach(), x.detach().flip(1), x.detach() / 2]) for x in make_qkv()]
    want = stacked(function, 3, *inputs)
    close(vmap(function, (0, 1, 0), 1)(inputs[0], inputs[1].movedim(0, 1), inputs[2]), want.movedim(0, 1))

    loss = grad(lambda *x: function(*x).square().sum(), (0, 1, 2))
    each = stacked(loss, 3, *inputs)
    close(vmap(loss)(*inputs), each, atol=1e-4)
    watched = [x.clone().requires_grad_() for x in inputs]
    close(torch.autograd.grad(vmap(function)(*watched).square().sum(), watched), each, atol=1e-4)

    query, key, value = inputs
    shared = grad(lambda k: vmap(function, (0, None, 0))(query, k, value).square().sum())(key[0])
    close(shared, sum(loss(q, key[0], v)[1] for q, v in zip(query, value, strict=True)), atol=1e-4)
    twice = vmap(vmap(function, (0, None, None)), (None, 0, 0))(query, key, value)
    close(twice[1], torch.stack([function(q, key[1], value[1]) for q in query]))


def test_vmap_of_pytrees_integers_unmapped_arguments():
    @bridge.from_jax
    def function(tree, n):
        return {"sum": tree["x"].sum(0) * tree["y"], "index": (n + 1, tree["y"])}

    x, y, n = torch.randn(3, 4, 5), torch.randn(5), torch.arange(3, dtype=torch.int32)
    got = vmap(function, ({"x": 2, "y": None}, 0))({"x": x.movedim(0, 2), "y": y}, n)
    torch.testing.assert_close(got["sum"], x.sum(1) * y)
    torch.testing.assert_close(got["index"], (n + 1, y.expand(3, 5)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, make_qkv):
    inputs = make_qkv()
    want = torch.autograd.grad(bridge.flash_attention(*inputs).square().sum(), inputs)
    out = checkpoint(bridge.flash_attention, *inputs, use_reentrant=use_reentrant)
    out.square().sum().backward()
    close([x.grad for x in inputs], list(want), atol=0)


def test_saved_tensor_hooks_see_all_residuals(make_qkv):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x):
        bridge.flash_attention(*make_qkv())
    assert packed == [(2, 24, 4, 16)] * 4 + [(2, 4, 24)]


TWICE = "double backward is not supported"


def test_second_derivative_raises(make_qkv):
    inputs = make_qkv()
    first = torch.autograd.grad(bridge.flash_attention(*inputs).square().sum(), inputs, create_graph=True)
    assert all(x.requires_grad for x in first)
    with pytest.raises(RuntimeError, match=f"flash_attention: {TWICE}"):
        torch.autograd.grad(first[0].sum(), inputs)
    query, key, value = (x.detach() for x in inputs)
    once = grad(lambda q: bridge.flash_attention(q, key, value).sum())
    with pytest.raises(RuntimeError, match=f"flash_attention: {TWICE}"):
        grad(lambda q: once(q).sum())(query)
