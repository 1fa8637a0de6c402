"""Block-sparse and dynamic-mask attention, Mask objects and score_mod on PyTorch tensors, against plain PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import bridge, masks, prepare_mask
from jax_kernels.dispatch import on_device

ZEROS = torch.zeros(2, 8, 4, 16)
BLOCKS = torch.tensor([[True, False, True], [False, True, True], [False, False, False]])
SLOPES = jnp.array([0.5, 0.25, 0.125, 0.0625])


def alibi(score, b, h, q, k):
    return score - SLOPES[h] * jnp.abs(q - k)


def alibi_bias(length):
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    return -torch.from_numpy(np.array(SLOPES))[:, None, None] * distance


def check(results, inputs, reference, atol=1e-5, **arguments):
    """results: (out, lse) of the inputs; compared with the reference, with all gradients."""
    torch.manual_seed(0)
    want = reference(*inputs[:3], **arguments)
    alive = ~want[1].isneginf()
    cotangents = torch.randn_like(results[0]), torch.randn_like(results[1])
    gradients = []
    for out, lse in (results, want):
        torch.testing.assert_close(out, want[0].to(out.dtype), atol=3e-6, rtol=0)
        torch.testing.assert_close(lse, want[1].to(lse.dtype), atol=3e-6, rtol=0)
        total = (out * cotangents[0]).sum() + (torch.where(alive, lse, 0) * cotangents[1]).sum()
        gradients.append(torch.autograd.grad(total, inputs))
    for got, right in zip(*gradients, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, right.to(got.dtype), atol=atol, rtol=1e-6)


@pytest.mark.parametrize("kind", ["tensor", "mask"])
def test_block_sparse_attention(kind, make_qkv, reference):
    inputs = make_qkv(kv_heads=2)
    mask = BLOCKS if kind == "tensor" else masks.block_sparse(BLOCKS.numpy(), 8)
    size = {"block_size": 8} if kind == "tensor" else {}
    results = bridge.block_sparse_attention(*inputs, mask, return_lse=True, is_causal=True, **size)
    keep = BLOCKS.repeat_interleave(8, 0).repeat_interleave(8, 1)
    check(results, inputs, reference, mask=keep, is_causal=True)


@pytest.mark.parametrize("kind", ["tensor", "mask", "bias of pairs"])
def test_dynamic_mask_attention(kind, make_qkv, reference):
    rows = 24 if kind == "bias of pairs" else 1
    inputs = [*make_qkv(kv_heads=2), torch.randn(2, 2, rows, 24, requires_grad=True)]
    keep = torch.rand(2, 2, 24, 24) < 0.4
    keep[:, :, 5:7] = False
    mask = masks.dense(keep.numpy()) if kind == "mask" else keep
    results = bridge.dynamic_mask_attention(*inputs[:3], mask, inputs[3], return_lse=True)
    of_heads = lambda x: x.repeat_interleave(2, dim=1)
    check(results, inputs, reference, mask=of_heads(keep), bias=of_heads(inputs[3]))


def test_mask_objects_and_score_mod(make_qkv, reference):
    inputs = make_qkv(kv_heads=2)
    keep = torch.ones(24, 24).tril().bool() | (torch.arange(24) < 5)
    mask = masks.causal() | masks.prefix(5)
    check(bridge.flash_attention(*inputs, mask=mask, return_lse=True), inputs, reference, mask=keep)
    specs = (jax.ShapeDtypeStruct((2, 24, heads, 16), "bfloat16") for heads in (4, 2))
    with on_device("H200"):
        prepared = prepare_mask(mask, *specs)
    assert prepared.lists
    check(bridge.flash_attention(*inputs, mask=prepared, return_lse=True), inputs, reference, mask=keep)
    dead = torch.rand(2, 1, 24, 24) < 0.5
    results = bridge.flash_attention(*inputs, mask=dead, score_mod=alibi, return_lse=True)
    check(results, inputs, reference, mask=dead, bias=alibi_bias(24))


def test_closed_over_tensors_have_gradients(make_qkv, reference):
    from jax_kernels import flash_attention

    def attend(query, key, value, slopes):
        mod = lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k)
        return flash_attention(query, key, value, score_mod=mod, return_lse=True)

    slopes = torch.from_numpy(np.array(SLOPES)).requires_grad_()
    inputs = [*make_qkv(), slopes]
    distance = (torch.arange(24)[:, None] - torch.arange(24)).abs()
    # A slope's gradient is a float32 sum of distances up to 23 over all pairs, which unoptimised XLA adds one by one.
    bias = -slopes[:, None, None] * distance
    check(bridge.from_jax(attend)(*inputs), inputs, reference, atol=4e-5, bias=bias)


def test_autocast(make_qkv, reference):
    inputs = make_qkv()
    want, _ = reference(*inputs, bias=alibi_bias(24))
    with torch.autocast("cpu", torch.bfloat16):
        out = bridge.flash_attention(*inputs, score_mod=alibi)
        dynamic = bridge.dynamic_mask_attention(*inputs, torch.ones(24, 24, dtype=torch.bool), alibi_bias(24))
    for found in (out, dynamic):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), want, atol=2e-2, rtol=0)


def test_compiled(make_qkv, reference):
    inputs = make_qkv()
    keep = torch.rand(24, 24) < 0.5

    def attend(query, key, value, keep):
        first = bridge.dynamic_mask_attention(query, key, value, keep, score_mod=alibi)
        return first + bridge.block_sparse_attention(query, key, value, keep[:3, :3], block_size=8)

    blocks = keep[:3, :3].repeat_interleave(8, 0).repeat_interleave(8, 1)
    want = reference(*inputs, mask=keep, bias=alibi_bias(24))[0] + reference(*inputs, mask=blocks)[0]
    want_gradients = torch.autograd.grad(want.square().sum(), inputs)
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        got = call(*inputs, keep)
        torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(torch.autograd.grad(got.square().sum(), inputs), want_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_mask_built_while_compiling_breaks_the_graph(make_qkv, reference):
    inputs = make_qkv()
    attend = lambda query, key, value: (
        bridge.flash_attention(query * 2, key, value, mask=~(masks.causal() | masks.prefix(5))) + 1
    )
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs)
    keep = torch.ones(24, 24).triu(1).bool() & (torch.arange(24) >= 5)
    want = reference(inputs[0] * 2, *inputs[1:], mask=keep)[0] + 1
    for call in (attend, torch.compile(attend, backend="aot_eager")):
        torch.testing.assert_close(call(*inputs), want.float(), atol=1e-5, rtol=1e-5)


ERRORS = [
    (
        lambda: bridge.block_sparse_attention(ZEROS, ZEROS, ZEROS, BLOCKS),
        ValueError,
        "^block_mask: got shape",
    ),
    (
        lambda: bridge.block_sparse_attention(ZEROS, ZEROS, ZEROS, BLOCKS.int()),
        TypeError,
        r"^block_mask: got dtype torch\.int32, want torch\.bool",
    ),
    (
        lambda: bridge.block_sparse_attention(ZEROS, ZEROS, ZEROS, None),
        TypeError,
        r"^block_mask: got builtins\.NoneType",
    ),
    (
        lambda: bridge.block_sparse_attention(ZEROS, ZEROS, ZEROS, BLOCKS, mask=BLOCKS),
        TypeError,
        "^mask: got the argument with block_sparse_attention, want block_mask",
    ),
    (
        lambda: bridge.dynamic_mask_attention(ZEROS, ZEROS, ZEROS, ZEROS.int()),
        TypeError,
        r"^mask: got dtype torch\.int32, want torch\.bool",
    ),
    (
        lambda: bridge.dynamic_mask_attention(ZEROS, ZEROS, ZEROS, None),
        TypeError,
        "^mask: got None, want a bool tensor",
    ),
    (
        lambda: bridge.dynamic_mask_attention(ZEROS, ZEROS, ZEROS, BLOCKS),
        ValueError,
        r"^mask: got shape \(3, 3\), want a shape broadcastable to \[B, H, T, S\]",
    ),
    (
        lambda: bridge.flash_attention(ZEROS, ZEROS, ZEROS, score_mod=alibi, softcap=2.0),
        ValueError,
        r"^softcap: got 2\.0 with a score_mod",
    ),
    (lambda: bridge.flash_attention(ZEROS, ZEROS, ZEROS, score_mod=3), TypeError, "^score_mod: got int, want"),
    (
        lambda: bridge.flash_attention(ZEROS.double(), ZEROS, ZEROS, score_mod=alibi),
        TypeError,
        r"^query: got dtype torch\.float64",
    ),
    (
        lambda: bridge.flash_attention(ZEROS, ZEROS, ZEROS, mask=masks.segments(np.zeros(7, np.int32))),
        ValueError,
        r"^segments: got q_ids of shape \(1, 7\), want \[batch, 8\]",
    ),
    (
        lambda: bridge.flash_attention(ZEROS, ZEROS, ZEROS, mask=masks.causal(), kv_lengths=torch.ones(2)),
        TypeError,
        r"^kv_lengths: got dtype torch\.float32, want torch\.int32",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[case[2] for case in ERRORS])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
