"""Masks of a wrong shape and misspelt patterns: errors name the caller's argument."""

import pytest
import torch

from jax_kernels import bridge

QUERY, KEY = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
BAD = torch.ones(3, 1, 5, 7, dtype=torch.bool), torch.ones(5, 6, dtype=torch.bool), torch.ones(1, 3, 5, 7).bool()
WANT = r"want one broadcastable to \[B, H, T, S\] = \(2, 4, 5, 7\)"


@pytest.mark.parametrize("mask", BAD, ids=["batch", "keys", "heads"])
def test_attn_mask_shapes(mask):
    message = rf"attn_mask: got shape \({', '.join(map(str, mask.shape))}\), {WANT}"
    for function in (bridge.flash_attention, bridge.dynamic_mask_attention):
        with pytest.raises(ValueError, match=message):
            function(QUERY, KEY, KEY, attn_mask=mask)
    with pytest.raises(ValueError, match=message):
        bridge.flash_dmattn_func(QUERY, KEY, KEY, mask)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}], ids=["ours", "torch"])
def test_sdpa_attn_mask_shapes(options):
    query, key = QUERY.transpose(1, 2), torch.zeros(2, 4, 7, 8)
    with pytest.raises(ValueError, match=r"attn_mask: got shape \(5, 6\), want one broadcastable to"):
        bridge.scaled_dot_product_attention(query, key, key, BAD[1], **options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["mask", "causal"])
def test_multihead_attention_mask_shapes(options):
    module, x = bridge.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(2, 5, 8)
    with pytest.raises(ValueError, match=r"attn_mask: got shape \(5, 6\), want \(5, 5\) or \(4, 5, 5\)"):
        module(x, x, x, attn_mask=BAD[1], need_weights=False, **options)
    with pytest.raises(ValueError, match=r"key_padding_mask: got shape \(5, 6\), want \(2, 5\)"):
        module(x, x, x, key_padding_mask=BAD[1], need_weights=False, **options)


def test_valid_masks_are_used_unchanged():
    query, key, value = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    mask = torch.rand(2, 1, 5, 7) < 0.7
    got = bridge.flash_attention(query, key, value, attn_mask=mask)
    many = [x.repeat_interleave(2, 2).transpose(1, 2).double() for x in (key, value)]
    scores = (query.transpose(1, 2).double() @ many[0].mT / 8**0.5).masked_fill(~mask, -torch.inf)
    want = (scores.softmax(-1).nan_to_num() @ many[1]).transpose(1, 2)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_misspelt_pattern_gives_a_hint():
    message = r"pattern: got 'sliding_windw', want one of 'attention_sinks', .+; did you mean 'sliding_window'\?"
    for window in (16, None):
        with pytest.raises(ValueError, match=message):
            bridge.nn.FlexAttention("sliding_windw", window)
    with pytest.raises(ValueError, match=r"name: got 'Causual', want one of .+; did you mean 'causal'\?"):
        bridge.masks.preset("Causual")
    with pytest.raises(ValueError, match=r"want one of 'attention_sinks', .+'strided'$"):
        bridge.nn.FlexAttention("moon")
    with pytest.raises(TypeError, match=r"pattern: got int, want a name or a masks\.Mask"):
        bridge.nn.FlexAttention(3, 16)
    with pytest.raises(TypeError, match="implementation: got int, want a name or None"):
        bridge.nn.FlexAttention("causal", implementation=3)
