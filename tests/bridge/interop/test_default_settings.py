"""PyTorch's default device and default dtype change no call of the bridge."""

import pytest
import torch

from jax_kernels import bridge
from tests.support.cases.cached_calls import CALLS, random
from tests.support.default_settings import SETTINGS, results

OWN_TENSORS = {"lengths", "constant bias", "Mask and tensors"}  # their calls make tensors themselves
STARTS = torch.tensor([0, 5, 12], dtype=torch.int32)
COS = torch.ones(40, 8)


def with_cache(q, k, v):
    """flash_attn_with_kvcache on new pages."""
    pages = [torch.ones(6, 8, 2, 16, device="cpu", dtype=torch.float32) for _ in range(2)]
    table = torch.arange(6, device="cpu", dtype=torch.int32).reshape(2, 3)
    with torch.no_grad():
        return bridge.flash_attn_with_kvcache(
            q, *pages, k, v, COS, COS, cache_seqlens=3, block_table=table, causal=True,
        )  # fmt: skip


MORE_CALLS = {
    "varlen": (
        lambda q, k, v: bridge.flash_attn_varlen_func(q, k, v, STARTS, STARTS, 7, 7, causal=True),
        [random(12, 2, 16) for _ in range(3)],
    ),
    "varlen with two starts": (
        lambda q, k, v: bridge.flash_attn_varlen_func(q, k, v, STARTS, STARTS.clone(), 7, 7, causal=True),
        [random(12, 2, 16) for _ in range(3)],
    ),
    "kvcache": (with_cache, [random(2, 1, 4, 16), random(2, 1, 2, 16), random(2, 1, 2, 16)]),
    "slopes": (
        lambda q, k, v, slopes: bridge.flash_attn_func(q, k, v, alibi_slopes=slopes, causal=True),
        [*(random(1, 9, 2, 16) for _ in range(3)), random(2)],
    ),
    "sdpa": (
        lambda q, k, v, mask: bridge.scaled_dot_product_attention(q, k, v, mask),
        [*(random(1, 2, 9, 16) for _ in range(3)), random(9, 9)],
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", [name for name in CALLS | MORE_CALLS if name not in OWN_TENSORS])
def test_calls(name, setting):
    """The first call with the setting, and a later one."""
    call, tensors = (CALLS | MORE_CALLS)[name]
    bridge.clear_cache()
    with SETTINGS[setting]():
        first = results(call, tensors)
    want = results(call, tensors)
    with SETTINGS[setting]():
        later = results(call, tensors)
    for got in (first, later):
        torch.testing.assert_close(got, want)
