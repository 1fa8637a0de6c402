"""Nested tensors raise an error that names the argument, unless PyTorch's function of that name serves them."""

import warnings

import pytest
import torch
from torch.nn import functional

from jax_kernels import bridge
from jax_kernels.bridge.interop import warn_once
from tests.support.cases.cached_calls import qkv

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def doubled(x):
    return x * 2


KEEP = torch.ones(3, 3, dtype=torch.bool)
MASK = bridge.masks.causal()
# By name: (a call of tensors, their shape, the argument of the first tensor).
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
    "nn.Linear": (lambda x, *_: LINEAR(x), (16, 16), "input"),
    "rms_norm": (lambda x, *_: bridge.rms_norm(x), (4, 16), "x"),
    "nn.RMSNorm": (lambda x, *_: RMS_NORM(x), (4, 16), "x"),
    "from_jax": (lambda x, *_: DOUBLED(x), (4, 16), "x"),
    "quantize": (lambda x, *_: bridge.quantize(x), (4, 16), "x"),
    "masks.dense": (lambda x, *_: bridge.masks.dense(x > 0), (4, 16), "array"),
}  # fmt: skip
LINEAR, RMS_NORM, DOUBLED = bridge.nn.Linear(16, 8), bridge.nn.RMSNorm(16), bridge.from_jax(doubled)


@pytest.mark.parametrize("name", OF_TENSORS)
def test_nested_tensor_raises_before_and_after_caching(name, direct):
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


def test_nested_key_error_names_varlen_func(direct):
    query, key, value = (x.detach() for x in qkv())
    with pytest.raises(ValueError, match=r"key: .* segment_ids, or by flash_attn_varlen"):
        bridge.flash_attention(query, torch.nested.nested_tensor(list(key), layout=torch.jagged), value)


def nested_like(x, layout):
    """A nested tensor of two entries with x's dtype and axes. The second entry is shorter."""
    first, second = x[0], x[-1]
    entries = [first, second[..., :1] if second.ndim == 1 else second[:1]]
    return torch.nested.nested_tensor(entries, layout=layout)


ATTENTION_SHAPES = [(2, 24, 4, 16)] * 3
TOKENS = [(2, 24, 16)]
DILATED = {"segment_lengths": (12,), "dilation_rates": (1,)}
CONFIG = {"vocab_size": 32, "model_dim": 16, "num_layers": 1, "num_heads": 2}
# By name: (the function, the shapes of the tensors, the names of the arguments). A bool tensor is a mask.
EVERY_ARGUMENT = {
    "flash_attention": (bridge.flash_attention, ATTENTION_SHAPES, ("query", "key", "value")),
    "flash_attention, mask": (
        lambda *x: bridge.flash_attention(*x[:3], mask=x[3], bias=x[4]),
        *([*ATTENTION_SHAPES, (2, 4, 24, 24, bool), (2, 4, 24, 24)], ("query", "key", "value", "mask", "bias")),
    ),
    "dilated_attention": (
        *(lambda *x: bridge.dilated_attention(*x, **DILATED), ATTENTION_SHAPES, ("query", "key", "value")),
    ),
    "decode_attention": (bridge.decode_attention, [(2, 4, 4, 16)] * 3, ("query", "key", "value")),
    "dynamic_mask_attention": (
        bridge.dynamic_mask_attention,
        *([*ATTENTION_SHAPES, (2, 4, 24, 24, bool), (2, 4, 24, 24)], ("query", "key", "value", "mask", "bias")),
    ),
    "block_sparse_attention": (
        lambda *x: bridge.block_sparse_attention(*x, block_size=8),
        *([*ATTENTION_SHAPES, (2, 4, 3, 3, bool)], ("query", "key", "value", "block_mask")),
    ),
    "gated_matmul": (bridge.gated_matmul, [(16, 16)] * 3, ("x", "w_gate", "w_up")),
    "linear": (bridge.linear, [(16, 16), (16, 16), (16,)], ("x", "weight")),
    "mlp": (lambda x, up, down: bridge.mlp(x, up, down), [(16, 16)] * 3, ("x", "w_up", "w_down")),
    "layer_norm": (bridge.layer_norm, [(4, 16), (16,), (16,)], ("x",)),
    "nn.LayerNorm": (bridge.nn.LayerNorm(16), [(4, 16)] * 2, ("input", "residual")),
    "nn.GatedMLP": (bridge.nn.GatedMLP(16, 32), [(4, 16)], ("x",)),
    "nn.QuantizedLinear": (bridge.nn.QuantizedLinear(16, 16, format="int8"), [(4, 16)], ("x",)),
    "nn.AdaptiveAttention": (
        lambda x, context, mask: ADAPTIVE(x, context, mask=mask),
        *([*TOKENS, (2, 20, 16), (2, 4, 24, 20, bool)], ("x", "context", "mask")),
    ),
    "nn.AdaptiveAttention of itself": (lambda x: ADAPTIVE(x), TOKENS, ("x",)),
    "nn.DynamicMaskAttention": (
        *(lambda x, mask: DYNAMIC(x, mask=mask), [*TOKENS, (2, 4, 24, 24, bool)], ("x", "mask")),
    ),
    "nn.DynamicMaskAttention, a mask of floats": (
        lambda x, mask: DYNAMIC(x, mask=mask if mask.is_nested else mask.gt(0).float()),
        *([*TOKENS, (2, 4, 24, 24)], ("x", "mask")),
    ),
    "nn.FlexAttention": (bridge.nn.FlexAttention("causal"), ATTENTION_SHAPES, ("query", "key", "value")),
    "nn.MultiheadDilatedAttention": (
        *(bridge.nn.MultiheadDilatedAttention(16, 4, (12,), (1,)), TOKENS * 3, ("query", "key", "value")),
    ),
    "nn.RingDilatedAttention": (bridge.nn.RingDilatedAttention(16, 4, (12,), (1,)), TOKENS, ("query",)),
    "nn.MultiheadAttention's masks": (
        lambda x, padding, mask: MULTIHEAD(x, x, x, key_padding_mask=padding, attn_mask=mask),
        *([*TOKENS, (2, 24, bool), (8, 24, 24)], ("query", "key_padding_mask", "attn_mask")),
    ),
    "huggingface.attention": (
        lambda *x: bridge.huggingface.attention(torch.nn.Module(), *x, None),
        *([(2, 4, 24, 16)] * 3, ("query", "key", "value")),
    ),
    "nn.Attention": (lambda x: bridge.nn.Transformer(CONFIG).layers[0].attention(x), TOKENS, ("x",)),
    "nn.Block": (lambda x: bridge.nn.Transformer(CONFIG).layers[0](x), TOKENS, ("x",)),
    "nn.Transformer": (lambda x: bridge.nn.Transformer(CONFIG)(embeddings=x), TOKENS, ("embeddings",)),
}  # fmt: skip
ADAPTIVE, DYNAMIC = bridge.nn.AdaptiveAttention(16, 4), bridge.nn.DynamicMaskAttention(16, 4)
MULTIHEAD = bridge.nn.MultiheadAttention(16, 4, batch_first=True)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
@pytest.mark.parametrize("name", EVERY_ARGUMENT)
def test_nested_argument_is_named(name, layout):
    call, shapes, arguments = EVERY_ARGUMENT[name]
    dense = [torch.ones(x[:-1], dtype=torch.bool) if x[-1] is bool else torch.randn(x) for x in shapes]
    for at, argument in enumerate(arguments):
        given = [nested_like(x, layout) if index == at else x for index, x in enumerate(dense)]
        with pytest.raises(ValueError, match=rf"^{argument}: got a nested tensor, want a dense one"):
            call(*given)


def padded(x):
    return x if not x.is_nested else x.to_padded_tensor(0.0)


def multihead_pair(**options):
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True, **options).eval()
    ours = bridge.nn.MultiheadAttention(16, 4, batch_first=True, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("lengths", [(3, 5), (5, 5, 1)])
def test_multihead_attention_strided_nested_tensors(lengths, need_weights):
    theirs, ours = multihead_pair()
    entries = [torch.randn(n, 16) for n in lengths]
    x = torch.nested.nested_tensor(entries)
    with torch.no_grad():
        want, got = (m(x, x, x, need_weights=need_weights) for m in (theirs, ours))
    assert got[0].is_nested == want[0].is_nested
    torch.testing.assert_close(padded(got[0]), padded(want[0]))
    assert (got[1] is None) == (want[1] is None)
    if need_weights:
        torch.testing.assert_close(got[1], want[1])
    else:  # each sequence on its own is right
        for entry, out in zip(entries, got[0].unbind(), strict=True):
            torch.testing.assert_close(out, ours(entry, entry, entry)[0], atol=3e-6, rtol=0)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_multihead_attention_refuses_as_pytorch(layout):
    _, ours = multihead_pair()
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=layout)
    dense = torch.randn(2, 5, 16)
    refused = r"^{}: got a nested tensor, want a dense one: pad it, with key_padding_mask .*{}"
    with pytest.raises(ValueError, match=refused.format("query", "grad is enabled|has_torch_function")):
        ours(x, x, x)
    with torch.no_grad():
        for given, options, name, why in (
            ((x, x, x), {"is_causal": True}, "query", "is_causal=False"),
            ((x, x, x), {"key_padding_mask": torch.zeros(2, 5).bool()}, "query", "is not supported|has_torch_function"),
            ((dense, x, x), {}, "key", "non-self attention"),
            ((dense, dense, x), {}, "value", "non-self attention"),
        ):
            with pytest.raises(ValueError, match=refused.format(name, why)):
                ours(*given, **options)
        if layout is torch.jagged:
            with pytest.raises(ValueError, match=refused.format("query", "has_torch_function")):
                ours(x, x, x)
        with pytest.raises(ValueError, match=refused.format("query", "training is enabled|has_torch_function")):
            ours.train()(x, x, x)
        _, without = multihead_pair(bias=False)
        with pytest.raises(ValueError, match=refused.format("query", "no bias|has_torch_function")):
            without(x, x, x)


def test_pytorch_encoders_with_our_layers():
    """Padding makes PyTorch's encoder nest its tensors. PyTorch's own layers give the same results."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    theirs = torch.nn.TransformerEncoder(layer, 2).eval()
    own = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    own.self_attn = bridge.nn.MultiheadAttention(16, 4, batch_first=True)
    own.linear1, own.linear2 = bridge.nn.Linear(16, 32), bridge.nn.Linear(32, 16)
    own.norm1, own.norm2 = bridge.nn.LayerNorm(16), bridge.nn.LayerNorm(16)
    ours = torch.nn.TransformerEncoder(own, 2, norm=bridge.nn.LayerNorm(16)).eval()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    theirs.norm = torch.nn.LayerNorm(16)
    x, padding = torch.randn(2, 6, 16), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    nested = torch.nested.nested_tensor([x[0], x[1, :4]])
    with torch.no_grad():
        want, got = (m(x, src_key_padding_mask=padding) for m in (theirs, ours))
        torch.testing.assert_close(got[~padding], want[~padding], atol=3e-6, rtol=0)
        theirs.norm = ours.norm = None
        want, got = (m(nested) for m in (theirs, ours))
        torch.testing.assert_close(padded(got), padded(want), atol=3e-6, rtol=0)
    slow = ours(x, src_key_padding_mask=padding)  # with gradients, by this library's attention
    torch.testing.assert_close(slow[~padding], theirs(x, src_key_padding_mask=padding)[~padding], atol=3e-6, rtol=0)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_scaled_dot_product_attention_falls_back(layout, monkeypatch):
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    entries = [torch.randn(n, 4, 8) for n in (3, 5)]
    if layout is torch.strided:  # PyTorch's own function needs contiguous tensors
        nested = lambda: torch.nested.nested_tensor([x.transpose(0, 1) for x in entries])
    else:
        nested = lambda: torch.nested.nested_tensor(entries, layout=layout).transpose(1, 2)
    with pytest.warns(UserWarning, match="nested tensors have no shape.*PyTorch's own computation"):
        got = bridge.scaled_dot_product_attention(nested(), nested(), nested())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridge.scaled_dot_product_attention(nested(), nested(), nested(), scale=0.5)
    want = functional.scaled_dot_product_attention(nested(), nested(), nested())
    assert got.is_nested
    for out, right, entry in zip(got.unbind(), want.unbind(), entries, strict=True):
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(out, functional.scaled_dot_product_attention(*[entry.transpose(0, 1)] * 3))
    dense = torch.randn(2, 4, 5, 8)
    for given, name in (((nested(), dense, dense), "query"), ((dense, nested(), nested()), "key")):
        with pytest.raises(ValueError, match=rf"^{name}: got a nested tensor, want a dense one.*nested together$"):
            bridge.scaled_dot_product_attention(*given)
    with pytest.raises(ValueError, match=r"^query: got a nested tensor, .* without an attn_mask$"):
        bridge.scaled_dot_product_attention(*[nested()] * 3, torch.ones(2, 1, 5, 5).bool())
