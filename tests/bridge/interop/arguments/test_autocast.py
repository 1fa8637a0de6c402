"""Autocast on the meta device: masks, dtypes and modules that ask for autocast's dtype run or raise as elsewhere."""

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.interop import warn_once
from jax_kernels.bridge.interop.arguments.autocast import autocast_dtype, cast_dtype, under_autocast, without_autocast

META = torch.device("meta")


def test_dtype_of_each_device():
    assert autocast_dtype(torch.device("cpu")) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(torch.device("cpu")) == torch.bfloat16
        assert autocast_dtype(META) is None
        with without_autocast(torch.device("cpu")), without_autocast(META):
            assert autocast_dtype(torch.device("cpu")) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.bfloat16, torch.float32])
def test_dtypes_that_autocast_casts(dtype):
    x = torch.ones(3, dtype=dtype)
    assert under_autocast(x) is x
    with torch.autocast("cpu", torch.float16):
        want = torch.float16 if dtype in (torch.bfloat16, torch.float32) else dtype
        assert cast_dtype(x) == under_autocast(x).dtype == want


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


X, W, Q = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 8), (8, 6), (1, 4, 2, 8)))
SIZES = torch.tensor([1, 2], dtype=torch.int32)
REFUSED = {
    "flash_attention": lambda: bridge.flash_attention(Q, Q, Q),
    "dynamic_mask_attention": lambda: bridge.dynamic_mask_attention(Q, Q, Q, torch.ones(4, 4, dtype=torch.bool)),
    "matmul": lambda: bridge.matmul(X, W),
    "linear": lambda: bridge.linear(X, W.T.contiguous()),
    "gated_matmul": lambda: bridge.gated_matmul(X, W, W),
    "mlp": lambda: bridge.mlp(X, W, W.T.contiguous()),
    "grouped_matmul": lambda: bridge.grouped_matmul(X, W[None].expand(2, -1, -1), SIZES),
    "linear_cross_entropy": lambda: bridge.linear_cross_entropy(X, W, SIZES.new_zeros(3)),
    "Linear": lambda: bridge.nn.Linear(8, 6, dtype=torch.float64)(X),
    "GatedMLP": lambda: bridge.nn.GatedMLP(8, 6, dtype=torch.float64)(X),
}


@pytest.mark.parametrize("name", REFUSED)
def test_float64_is_not_cast(name):
    """As in PyTorch, whose autocast never casts float64. So the call raises as without autocast."""
    errors = []
    for is_on in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on), pytest.raises((TypeError, ValueError)) as error:
            REFUSED[name]()
        errors.append(str(error.value))
    assert "float64" in errors[0]
    assert errors[0] == errors[1]


def test_float64_falls_back_to_pytorch(monkeypatch):
    """The functions that promise PyTorch's own computation for float64 give it under autocast too."""
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    query = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    module = bridge.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    attend = lambda: (module(x, x, x, need_weights=True), bridge.flex_attention(query, query, query))
    want = attend()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attend(), want)
