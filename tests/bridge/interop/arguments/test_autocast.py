"""Autocast on the meta device: masks, dtypes and modules that ask for autocast's dtype run or raise as elsewhere."""

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.interop.arguments.autocast import autocast_dtype, without_autocast

META = torch.device("meta")


def test_dtype_of_each_device():
    assert autocast_dtype(torch.device("cpu")) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(torch.device("cpu")) == torch.bfloat16
        assert autocast_dtype(META) is None
        with without_autocast(torch.device("cpu")), without_autocast(META):
            assert autocast_dtype(torch.device("cpu")) is None


def test_sdpa_with_floats_as_mask():
    query = torch.zeros(2, 4, 9, 16, device=META)
    out = bridge.scaled_dot_product_attention(query, query, query, attn_mask=torch.zeros(9, 9, device=META))
    assert (out.shape, out.device) == (query.shape, META)


HALF, CACHE = (torch.zeros(1, 1, 2, 16, device=META, dtype=dtype) for dtype in (torch.float16, torch.float32))
WRONG = {
    "sdpa": (lambda: bridge.scaled_dot_product_attention(CACHE, HALF, CACHE), "^key: got dtype torch.float16"),
    "sdpa_mask": (
        lambda: bridge.scaled_dot_product_attention(CACHE, CACHE, CACHE, HALF[0, 0, :, :2]),
        "^attn_mask: got dtype torch.float16",
    ),
    "kvcache": (lambda: bridge.flash_attn_with_kvcache(CACHE, HALF, CACHE), "^k_cache: got dtype torch.float16"),
    "multihead": (
        lambda: bridge.nn.MultiheadAttention(16, 2, device=META)(CACHE[0], CACHE[0], CACHE[0], attn_mask=HALF[0, 0]),
        "^attn_mask: got dtype torch.float16",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_dtype_is_named(name):
    call, message = WRONG[name]
    with pytest.raises(TypeError, match=message):
        call()
