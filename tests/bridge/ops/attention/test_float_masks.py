"""Masks of floats 0 and 1, in the ops that take masks."""

import pytest
import torch

from jax_kernels import bridge

KEEP = torch.rand(2, 1, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.6
BLOCKS = torch.ones(3, 3, dtype=torch.bool).tril()
CALLS = {
    "flash": (KEEP, lambda mask, *x: bridge.flash_attention(*x, mask=mask)),
    "flash with a score_mod": (
        KEEP,
        lambda mask, *x: bridge.flash_attention(*x, mask=mask, score_mod=lambda s, b, h, i, j: s * 2),
    ),
    "lse": (KEEP, lambda mask, *x: bridge.flash_attention(*x, mask=mask, return_lse=True)[1]),
    "dynamic": (KEEP, lambda mask, *x: bridge.dynamic_mask_attention(*x, mask)),
    "block sparse": (BLOCKS, lambda mask, *x: bridge.block_sparse_attention(*x, mask, block_size=8)),
    "decode": (
        KEEP[:, :, :1],
        lambda mask, q, k, v: bridge.decode_attention(q[:, :1].detach(), k.detach(), v.detach(), mask=mask),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_float_mask_matches_bool_mask(name, dtype, make_qkv):
    mask, call = CALLS[name]
    inputs = make_qkv()
    want, got = (call(x, *inputs) for x in (mask, mask.to(dtype)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    if name != "decode":
        of_theirs, of_ours = (torch.autograd.grad(x.sum(), inputs, allow_unused=True) for x in (want, got))
        torch.testing.assert_close(of_ours, of_theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["flash", "dynamic", "block sparse", "decode"])
def test_other_values(name, make_qkv):
    mask, call = CALLS[name]
    additive = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    with pytest.raises(ValueError, match=r"mask: got torch\.float32 values other than 0 and 1, want torch\.bool"):
        call(additive, *make_qkv())


@pytest.mark.parametrize("name", ["flash", "dynamic", "block sparse", "decode"])
def test_gradient_is_refused(name, make_qkv):
    mask, call = CALLS[name]
    learned = mask.float().requires_grad_()
    with pytest.raises(TypeError, match="mask: got a tensor that requires a gradient, want none"):
        call(learned, *make_qkv())
    with torch.no_grad():
        torch.testing.assert_close(call(learned, *make_qkv()), call(mask, *make_qkv()))


@pytest.mark.parametrize("name", ["flash", "dynamic"])
def test_compiled_other_values_give_nan(name, make_qkv):
    """As under jax.jit: the values are unknown beforehand."""
    mask, call = CALLS[name]
    inputs = make_qkv()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mask.float(), *inputs), call(mask, *inputs))
    out = compiled(mask.float() * 0.5, *inputs)
    assert out.isnan().all()
    assert torch.autograd.grad(out.sum(), inputs)[0].isnan().all()


def test_module(make_qkv):
    module = bridge.nn.DynamicMaskAttention(16, 4)
    x = torch.randn(2, 24, 16)
    torch.testing.assert_close(module(x, mask=KEEP.float()), module(x, mask=KEEP))


def test_sdpa_adds_float_masks(make_qkv):
    query, key, value = (x.detach().transpose(1, 2) for x in make_qkv())
    got = bridge.scaled_dot_product_attention(query, key, value, KEEP.float())
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, KEEP.float())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
