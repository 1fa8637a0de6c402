"""A scale that requires a gradient, in every attention function on tensors."""

import pytest
import torch

from jax_kernels import bridge

torch.manual_seed(0)
Q, K, V = torch.randn(3, 2, 24, 4, 16)
KEEP = torch.rand(2, 1, 24, 24) > 0.3
heads_first = lambda *tensors: [x.transpose(1, 2) for x in tensors]
FUNCTIONS = {
    "flash": lambda q, scale: bridge.flash_attention(q, K, V, scale=scale, is_causal=True),
    "softmax_scale": lambda q, scale: bridge.flash_attention(q, K, V, softmax_scale=scale, is_causal=True),
    "score_mod": lambda q, scale: bridge.flash_attention(
        q, K, V, scale=scale, score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j)
    ),
    "dynamic_mask": lambda q, scale: bridge.dynamic_mask_attention(q, K, V, KEEP, scale=scale),
    "block_sparse": lambda q, scale: bridge.block_sparse_attention(
        q, K, V, torch.ones(1, 1, dtype=torch.bool), scale=scale
    ),
    "dilated": lambda q, scale: bridge.dilated_attention(
        q, K, V, segment_lengths=(8, 24), dilation_rates=(1, 2), scale=scale
    ),
    "flex": lambda q, scale: bridge.flex_attention(*heads_first(q, K, V), scale=scale),
}


def gradients(name, scale):
    query = Q.clone().requires_grad_()
    out = FUNCTIONS[name](query, scale)
    out.square().sum().backward()
    return out.detach(), query.grad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient(name):
    """The gradient of a scale is the sum of query's gradient times query, over the scale."""
    scale = torch.tensor(0.3, requires_grad=True)
    out, dquery = gradients(name, scale)
    torch.testing.assert_close(scale.grad, (dquery * Q).sum() / 0.3, rtol=1e-5, atol=0)
    want, without = gradients(name, 0.3)
    torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
    torch.testing.assert_close(dquery, without, rtol=0, atol=1e-5)


def test_transforms():
    loss = lambda scale: FUNCTIONS["flash"](Q, scale).square().sum()
    scale = torch.tensor(0.3, requires_grad=True)
    loss(scale).backward()
    torch.testing.assert_close(torch.func.grad(loss)(torch.tensor(0.3)), scale.grad)
    compiled = torch.tensor(0.3, requires_grad=True)
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    torch.testing.assert_close(compiled.grad, scale.grad)
    with torch.no_grad():
        torch.testing.assert_close(loss(scale), loss(0.3))


def test_default_scale_is_exact_in_bfloat16():
    """Query is multiplied by 1 where the scale is the default."""
    qkv = [x.bfloat16() for x in (Q, K, V)]
    scale = torch.tensor(0.25, requires_grad=True)
    assert torch.equal(bridge.flash_attention(*qkv, scale=scale), bridge.flash_attention(*qkv))


def test_no_gradient_is_lost():
    """Functions without a gradient of the scale raise."""
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(TypeError, match=r"^scale: got a tensor that requires a gradient"):
        bridge.decode_attention(Q[:, :1], K, V, scale=scale)
