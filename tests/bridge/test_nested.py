"""Nested tensors raise an error that names the argument, whether the call is known or not."""

import pytest
import torch
from known_cases import qkv

from jax_kernels import bridge


def doubled(x):
    return x * 2


KEEP = torch.ones(3, 3, dtype=torch.bool)
MASK = bridge.masks.causal()
# By name, (a call of tensors, their shape, the argument that the first one is).
OF_TENSORS = {
    "flash_attention": (bridge.flash_attention, (2, 24, 4, 16), "query"),
    "a Mask": (lambda *x: bridge.flash_attention(*x, mask=MASK), (2, 24, 4, 16), "query"),
    "block_sparse_attention": (
        lambda *x: bridge.block_sparse_attention(*x, KEEP, block_size=8), (2, 24, 4, 16), "query",
    ),
    "dilated_attention": (
        lambda *x: bridge.dilated_attention(*x, segment_lengths=(12,), dilation_rates=(1,)), (2, 24, 4, 16), "query",
    ),
    "scaled_dot_product_attention": (bridge.scaled_dot_product_attention, (2, 4, 24, 16), "query"),
    "decode_attention": (bridge.decode_attention, (2, 4, 4, 16), "query"),
    "matmul": (lambda x, w, _: bridge.matmul(x, w), (16, 16), "x"),
    "gated_matmul": (bridge.gated_matmul, (16, 16), "x"),
    "nn.Linear": (lambda x, *_: LINEAR(x), (16, 16), "x"),
    "rms_norm": (lambda x, *_: bridge.rms_norm(x), (4, 16), "x"),
    "nn.RMSNorm": (lambda x, *_: RMS_NORM(x), (4, 16), "x"),
    "from_jax": (lambda x, *_: DOUBLED(x), (4, 16), "x"),
    "quantize": (lambda x, *_: bridge.quantize(x), (4, 16), "x"),
    "masks.dense": (lambda x, *_: bridge.masks.dense(x > 0), (4, 16), "array"),
}  # fmt: skip
LINEAR, RMS_NORM, DOUBLED = bridge.nn.Linear(16, 8), bridge.nn.RMSNorm(16), bridge.from_jax(doubled)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_nested_tensor_raises_before_and_after_a_call_is_known(name, direct):
    call, shape, argument = OF_TENSORS[name]
    dense = [torch.randn(shape) for _ in range(3)]
    first, *others = dense
    nested = torch.nested.nested_tensor([first[0], first[1, ..., :1]])
    jagged = torch.nested.nested_tensor([first[:1], first], layout=torch.jagged)
    for _ in range(3):
        for x in (nested, jagged):
            with pytest.raises(ValueError, match=f"^{argument}: got a nested tensor, want a dense one"):
                call(x, *others)
        call(*dense)


def test_a_nested_key_names_flash_attn_varlen_func(direct):
    query, key, value = (x.detach() for x in qkv())
    with pytest.raises(ValueError, match=r"key: .* segment_ids, or by flash_attn_varlen"):
        bridge.flash_attention(query, torch.nested.nested_tensor(list(key), layout=torch.jagged), value)
