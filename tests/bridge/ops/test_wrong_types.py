"""An argument of a wrong type raises an error of this library that names it, in every op on tensors."""

import numpy as np
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import masks
from tests.support.wrong_types import check_errors

ones = lambda *shape, dtype=torch.float32: torch.ones(shape, dtype=dtype)
ATTENTION = {"query": ones(2, 8, 2, 16), "key": ones(2, 8, 2, 16), "value": ones(2, 8, 2, 16)}
FLASH_ATTN = {"q": ones(2, 8, 2, 16), "k": ones(2, 8, 2, 16), "v": ones(2, 8, 2, 16)}
GROUPS, LENGTHS = torch.tensor([3, 0, 5], dtype=torch.int32), torch.tensor([0, 3, 8], dtype=torch.int32)
CALLS = {
    "flash_attention": ATTENTION,
    "block_sparse_attention": ATTENTION | {"block_mask": ones(2, 2, dtype=torch.bool), "block_size": 4},
    "dynamic_mask_attention": ATTENTION | {"mask": ones(8, 8, dtype=torch.bool), "bias": ones(8, 8)},
    "dilated_attention": ATTENTION | {"segment_lengths": (8,), "dilation_rates": (1,)},
    "decode_attention": ATTENTION | {"query": ones(2, 1, 2, 16)},
    "matmul": {"x": ones(8, 16), "w": ones(16, 8)},
    "gated_matmul": {"x": ones(8, 16), "w_gate": ones(16, 8), "w_up": ones(16, 8)},
    "mlp": {"x": ones(8, 16), "w_up": ones(16, 8), "w_down": ones(8, 16)},
    "layer_norm": {"x": ones(8, 16), "scale": ones(16)},
    "rms_norm": {"x": ones(8, 16), "scale": ones(16)},
    "grouped_matmul": {"x": ones(8, 16), "w": ones(3, 16, 8), "group_sizes": GROUPS},
    "grouped_gated_matmul": {
        "x": ones(8, 16),
        "w_gate": ones(3, 16, 8),
        "w_up": ones(3, 16, 8),
        "group_sizes": GROUPS,
    },
    "linear_cross_entropy": {"x": ones(8, 16), "w": ones(16, 7), "targets": torch.zeros(8, dtype=torch.int64)},
    "quantize": {"x": ones(8, 16)},
    "dequantize": {"x": bridge.quantize(ones(8, 16), "int8")},
    "compile_attention": {"pattern": "causal", "seq_len": 16, "head_dim": 16, "dtype": torch.float32},
    "scaled_dot_product_attention": ATTENTION,
    "flex_attention": ATTENTION,
    "flash_attn_func": FLASH_ATTN,
    "flash_dmattn_func": ATTENTION,
    "flash_attn_varlen_func": {
        **{name: x.flatten(0, 1)[:8] for name, x in FLASH_ATTN.items()},
        "cu_seqlens_q": LENGTHS,
        "cu_seqlens_k": LENGTHS,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    },
    "flash_attn_with_kvcache": {
        "q": ones(2, 1, 2, 16),
        "k_cache": ones(2, 8, 2, 16),
        "v_cache": ones(2, 8, 2, 16),
        "cache_seqlens": torch.tensor([3, 5], dtype=torch.int32),
    },
}
WRONG = {
    "list": [],
    "dict": {},
    "object": object(),
    "text": "x",
    "empty": np.zeros(0, np.float32),
    "array": np.ones(3, np.float32),
    "empty_tensor": torch.zeros(0),
    "three": torch.ones(3),
    "mask": masks.causal(),
    "module": torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("op", CALLS)
def test_error_names_the_argument(op):
    check_errors(getattr(bridge, op), CALLS[op], WRONG)


@pytest.mark.parametrize("device", ["x", "", -1, True, 1.5])
def test_unknown_device(device):
    with pytest.raises((TypeError, ValueError), match=r"^device: got .*, want a torch\.device"):
        bridge.compile_attention("causal", 16, 16, device=device)


@pytest.mark.parametrize("window_size", [("a", "b"), (None, None), (1.5, 0), 3])
def test_wrong_window_size(window_size):
    with pytest.raises(TypeError, match=r"^window_size: got "):
        bridge.flash_attn_func(**FLASH_ATTN, window_size=window_size)


@pytest.mark.parametrize("heads", [2, 3, 8])
def test_bias_of_another_number_of_heads(heads):
    query, key = ones(1, 8, 4, 16), ones(1, 8, 4, 16)
    with pytest.raises(ValueError, match=rf"^attn_bias: got shape \(1, {heads}, 8, 8\), want"):
        bridge.flash_dmattn_func(query, key, key, attn_bias=ones(1, heads, 8, 8))


@pytest.mark.parametrize("module", ["Linear", "GatedMLP", "QuantizedLinear"])
def test_module_with_an_array_as_precision(module):
    with pytest.raises(ValueError, match=r"^precision: got array\("):
        getattr(bridge.nn, module)(32, 64, precision=np.ones(3))


def test_deterministic_of_none_is_false():
    torch.testing.assert_close(bridge.flash_attn_func(**FLASH_ATTN, deterministic=None), ones(2, 8, 2, 16))
