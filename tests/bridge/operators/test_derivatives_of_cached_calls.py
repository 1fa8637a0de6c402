"""Derivatives of cached calls: right, refused, or computed by another way, whatever was called before."""

import jax.numpy as jnp
import pytest
import torch
import torch.utils.checkpoint

from jax_kernels import bridge
from jax_kernels.bridge.direct import route
from jax_kernels.bridge.operators import call_cache
from tests.support.cases import tiers
from tests.support.cases.cached_calls import CALLS, qkv, random, total

QUICK = [
    "plain",
    "bias",
    "dilated",
    "Mask and tensors",
    "linear",
    "layer_norm",
    "from_jax of a tree",
    "several results",
]


@pytest.mark.parametrize("needs", [("query",), ("value",), ("bias",), ("query", "bias")], ids="-".join)
def test_only_needed_gradients_are_computed(needs, direct):
    """Each backward returns just the needed gradients, which equal the gradients of PyTorch's own formula."""
    given = dict(zip(("query", "key", "value", "bias"), (*qkv(), random(1, 4, 24, 24)), strict=True))
    given = {name: x.detach().requires_grad_(name in needs) for name, x in given.items()}
    moved = [given[name] for name in needs]
    query, key, value = (given[name].double().transpose(1, 2) for name in ("query", "key", "value"))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, given["bias"].double())
    want = torch.autograd.grad(out.transpose(1, 2).sin().sum(), moved)
    for _ in range(3):
        chains = set(direct.chains.values())
        got = torch.autograd.grad(bridge.flash_attention(**given).sin().sum(), moved)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    backwards = [chain for chain in direct.chains.values() if chain.calls and len(chain.there) > 10]
    assert [chain.results for chain in backwards] == [len(needs)] * len(backwards)
    assert backwards
    assert chains


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", ["plain", "bias", "rms_norm"])
def test_checkpoint_recomputes_by_a_cached_call(name, is_reentrant, direct):
    """A checkpoint recomputes by a cached call the result of a first call."""
    call, given = CALLS[name]
    with route.disabled():
        want = torch.autograd.grad(total(call(*given)), given)
    call_cache.clear()
    for _ in range(3):
        fresh = [x.detach().requires_grad_() for x in given]
        total(torch.utils.checkpoint.checkpoint(call, *fresh, use_reentrant=is_reentrant)).backward()
        torch.testing.assert_close([x.grad for x in fresh], list(want))


@pytest.mark.parametrize("name", ["plain", "matmul", "from_jax"])
def test_gradients_off_and_on(name, direct):
    """A call under no_grad, of tensors that require gradients, is not the call with gradients."""
    call, given = CALLS[name]
    for _ in range(3):
        with torch.no_grad():
            assert not call(*given).requires_grad
        assert len(torch.autograd.grad(total(call(*given)), given)) == len(given)
        fixed = [x.detach() for x in given]
        assert not call(*fixed).requires_grad
        assert call(fixed[0], *given[1:]).requires_grad == (len(given) > 1)


def test_forward_mode_raises(direct):
    query, key, value = (x.detach() for x in qkv())
    for _ in range(2):
        bridge.flash_attention(query, key, value)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(bridge.flash_attention, (query, key, value), (query, key, value))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, query)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            bridge.flash_attention(dual, key, value)


@pytest.mark.parametrize("name", ["plain", "matmul", "from_jax"])
def test_second_derivative_raises(name, direct):
    call, given = CALLS[name]
    for _ in range(3):
        (first, *_) = torch.autograd.grad(total(call(*given)), given, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            first.sum().backward()
        torch.autograd.grad(total(call(*given)), given)


@pytest.mark.parametrize("name", tiers.cases(CALLS, QUICK))
def test_batched_cotangents(name, direct):
    """Before the call is cached, and after the call and its backward are, on either route."""
    call, given = CALLS[name]
    for _ in range(2):
        for _ in range(3):
            out = first_of(call(*given))
            cotangents = torch.stack([out.detach().cos(), torch.full_like(out, 2.0)])
            got = torch.autograd.grad(out, given, cotangents, is_grads_batched=True, retain_graph=True)
            each = [torch.autograd.grad(out, given, x, retain_graph=True) for x in cotangents]
            torch.testing.assert_close(list(got), [torch.stack(x) for x in zip(*each, strict=True)])
        route._STATE.is_enabled = False


def first_of(found):
    if isinstance(found, dict):
        found = list(found.values())
    return first_of(found[0]) if isinstance(found, tuple | list) else found


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian(strategy, direct):
    x, y = random(4), random(4, seed=1)
    product = bridge.from_jax(lambda x, y: jnp.sin(x) * y * x.sum())
    want = torch.autograd.functional.jacobian(lambda x, y: torch.sin(x) * y * x.sum(), (x, y))
    for _ in range(3):
        got = torch.autograd.functional.jacobian(product, (x, y), vectorize=True, strategy=strategy)
        torch.testing.assert_close(got, want)
        torch.autograd.grad(product(x, y).sum(), (x, y))


def test_compiled_batched_cotangents():
    """Also by a graph of many sizes. With two nested calls of torch's vmap, the batches are nested."""
    from torch._vmap_internals import _vmap

    torch._dynamo.reset()
    x, w = random(3, 4), random(4, 2)
    want = torch.autograd.functional.jacobian(bridge.matmul, (x, w))
    for dynamic in (False, True):
        compiled = torch.compile(bridge.matmul, backend="aot_eager", dynamic=dynamic)
        torch.testing.assert_close(torch.autograd.functional.jacobian(compiled, (x, w), vectorize=True), want)
    z = random(2, 3, 5, 8).detach()
    got = _vmap(_vmap(bridge.rms_norm, 1), 1)(z)
    torch.testing.assert_close(got, bridge.rms_norm(z).permute(1, 2, 0, 3))


def test_input_changed_before_the_backward_raises(direct):
    query, key, value = qkv()
    for _ in range(3):
        doubled = query * 2
        out = bridge.flash_attention(doubled, key, value)
        with torch.no_grad():
            doubled.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
