"""decode_attention, quantize, quantize_fp8 and flash_attention_fp8 on tensors, against float64."""

import math

import pytest
import torch

from jax_kernels import bridge


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KEPT = random(2, 1, 1, 40) > -0.5
OPTIONS = {
    "plain": {},
    "window": {"window": (3, 0)},
    "softcap": {"softcap": 2.0, "scale": 0.5},
    "mask": {"mask": KEPT.expand(2, 4, 3, 40)},
    "bias": {"bias": random(1, 4, 1, 40).expand(2, 4, 1, 40), "mask": KEPT},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode_attention(options, reference):
    query, key, value = random(2, 3, 4, 16), random(2, 40, 2, 16, seed=1), random(2, 40, 2, 16, seed=2)
    lengths = torch.tensor([17, 40], dtype=torch.int32)
    out, lse = bridge.decode_attention(query, key, value, kv_lengths=lengths, return_lse=True, **options)
    want, want_lse = reference(query, key, value, is_causal=True, kv_lengths=lengths, q_offset=lengths - 3, **options)
    torch.testing.assert_close(out, want.float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse.float(), atol=2e-6, rtol=1e-5)
    compiled = torch.compile(bridge.decode_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key, value, kv_lengths=lengths, **options), out)


def test_decode_attention_with_mask_object():
    query, key, value = random(2, 3, 4, 16), random(2, 40, 2, 16, seed=1), random(2, 40, 2, 16, seed=2)
    lengths = torch.tensor([17, 40], dtype=torch.int32)
    mask = bridge.masks.sliding_window(5, 0) | bridge.masks.prefix(2)
    attend = lambda *x: bridge.decode_attention(*x, kv_lengths=lengths, mask=mask)
    positions = (lengths[:, None] - 3 + torch.arange(3))[..., None]
    keys = torch.arange(40)
    dense = (((positions - 5 <= keys) & (keys <= positions)) | (keys < 2))[:, None]
    want = bridge.decode_attention(query, key, value, kv_lengths=lengths, mask=dense)
    torch.testing.assert_close(attend(query, key, value), want)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key, value), want)
    with pytest.raises(TypeError, match=r"^mask: got dtype torch\.int32, want torch\.bool"):
        bridge.decode_attention(query, key, value, mask=dense.int())
    with pytest.raises(ValueError, match=r"^bias: got shape \(3, 1, 1, 40\), want a shape broadcastable"):
        bridge.decode_attention(query, key, value, bias=torch.zeros(3, 1, 1, 40))


def test_paged_cache():
    query, key, value = random(2, 1, 4, 16), random(6, 16, 2, 16, seed=1), random(6, 16, 2, 16, seed=2)
    tables = torch.tensor([[5, 0, 2], [1, 3, 4]], dtype=torch.int32)
    lengths = torch.tensor([20, 48], dtype=torch.int32)
    cache = [x[tables.long()].reshape(2, 48, 2, 16) for x in (key, value)]
    got = bridge.decode_attention(query, key, value, kv_lengths=lengths, block_tables=tables)
    torch.testing.assert_close(got, bridge.decode_attention(query, *cache, kv_lengths=lengths))


def test_decode_attention_has_no_gradient():
    query, key, value = random(1, 1, 2, 16).requires_grad_(), random(1, 8, 2, 16), random(1, 8, 2, 16)
    with pytest.raises(NotImplementedError):
        bridge.decode_attention(query, key, value).sum().backward()


@pytest.mark.parametrize("options", [{}, {"scaling": "row"}, {"scaling": "block", "format": "e5m2"}])
def test_quantize(options):
    x = random(130, 256)
    values, scale = bridge.quantize(x, **options)
    assert values.dtype == {"e5m2": torch.float8_e5m2}.get(options.get("format"), torch.float8_e4m3fn)
    spread = scale
    if options.get("scaling") == "row":
        spread = scale[:, None]
    elif options.get("scaling") == "block":
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130]
    step = 2**-3 if "format" in options else 2**-4
    assert bool(((values.float() * spread - x).abs() <= step * x.abs() + 2e-4 * x.abs().max()).all())


def test_fp8_attention(reference):
    exact = [random(2, 24, 4, 16, seed=seed) for seed in range(3)]
    values, scales = zip(*(bridge.quantize_fp8(x, axis=(1, 3)) for x in exact), strict=True)
    names = ("q_scale", "k_scale", "v_scale")
    out, lse = bridge.flash_attention_fp8(
        *values, **dict(zip(names, scales, strict=True)), is_causal=True, return_lse=True
    )
    rounded = [x.double() * scale[:, None, :, None].double() for x, scale in zip(values, scales, strict=True)]
    want, want_lse = reference(*rounded, is_causal=True, scale=1 / math.sqrt(16))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)
