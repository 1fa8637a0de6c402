"""Attention of tensors with an axis of length 0: out is empty or 0, lse is -inf, gradients are empty or 0."""

import numpy as np
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import masks, nn

# (batch, queries, keys)
SIZES = {"batch": (0, 3, 5), "queries": (2, 0, 5), "keys": (2, 3, 0)}
HEADS, KV_HEADS, DIM = 4, 2, 16


def tensors(sizes):
    batch, queries, keys = sizes
    of_key = (batch, keys, KV_HEADS, DIM)
    return [torch.ones(x, requires_grad=True) for x in ((batch, queries, HEADS, DIM), of_key, of_key)]


def ids(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def check(call, given, lse=-np.inf):
    """Checks call(*tensors) -> out, or (out, lse, ...), twice: cached calls take another way."""
    for _ in range(2):
        out, *found = results if isinstance(results := call(*given), tuple) else (results,)
        assert out.shape == given[0].shape
        assert not out.any()
        loss = out.sum()
        if found:
            batch, length, heads, _ = out.shape
            assert torch.equal(found[0], torch.full((batch, heads, length), float(lse)))
            loss = loss + torch.where(found[0].isneginf(), 0, found[0]).sum()
        for x, dx in zip(given, torch.autograd.grad(loss, given), strict=True):
            assert dx.shape == x.shape
            assert not dx.any()


CALLS = {
    "plain": lambda sizes: {"is_causal": True, "kv_lengths": ids(sizes[0])},
    "bias": lambda sizes: {"bias": torch.ones(sizes[0], HEADS, *sizes[1:]), "mask": torch.ones(sizes[1:])},
    "segments": lambda sizes: {"segment_ids": (ids(*sizes[:2]), ids(sizes[0], sizes[2])), "q_offset": ids(sizes[0])},
    "Mask": lambda sizes: {"mask": masks.causal() | masks.prefix(1)},
    "score_mod": lambda sizes: {"score_mod": lambda score, b, h, q, k: score + 1},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_flash_attention(sizes, name):
    options = CALLS[name](sizes)
    check(lambda *given: bridge.flash_attention(*given, return_lse=True, **options), tensors(sizes))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sinks(sizes):
    sinks = torch.full((HEADS,), 0.5, requires_grad=True)
    attend = lambda *given: bridge.flash_attention(*given, sinks=sinks, return_lse=True)
    check(attend, tensors(sizes), lse=0.5)
    (gradient,) = torch.autograd.grad(attend(*tensors(sizes))[1].sum(), sinks)
    assert torch.equal(gradient, torch.full((HEADS,), 0.0 if sizes[2] else float(sizes[0] * sizes[1])))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_flash_attn_func(sizes):
    slopes = torch.ones(sizes[0], HEADS)
    check(
        lambda *given: bridge.flash_attn_func(*given, causal=True, alibi_slopes=slopes, return_attn_probs=True)[:2],
        tensors(sizes),
    )
    if sizes[2]:
        return
    query, kv = torch.ones(2, 3, HEADS, DIM), torch.ones(2, 0, 2, KV_HEADS, DIM)
    assert not bridge.flash_attn_kvpacked_func(query, kv).any()
    assert bridge.flash_attn_qkvpacked_func(torch.ones(0, 3, 3, HEADS, DIM), causal=True).shape == (0, 3, HEADS, DIM)


# Tokens of queries and of keys, and the bounds of the sequences.
VARLEN = {
    "no tokens": (0, 0, [0, 0, 0], [0, 0, 0]),
    "no sequences": (3, 4, [0], [0]),
    "nothing": (0, 0, [0], [0]),
    "no queries": (0, 4, [0, 0], [0, 4]),
    "no keys": (3, 0, [0, 3], [0, 0]),
    "some": (5, 4, [0, 0, 3, 3], [0, 2, 2, 4]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", VARLEN)
def test_flash_attn_varlen_func(name, causal):
    """None of these sequences has both queries and keys."""
    queries, keys, *starts = VARLEN[name]
    starts = [torch.tensor(x, dtype=torch.int32) for x in starts]
    longest = [int(max([0, *np.diff(x)])) for x in starts]
    given = [torch.ones(queries, HEADS, DIM, requires_grad=True)]
    given += [torch.ones(keys, KV_HEADS, DIM, requires_grad=True) for _ in range(2)]
    slopes = torch.ones(len(starts[0]) - 1, HEADS) if causal else None
    out, lse, _ = bridge.flash_attn_varlen_func(
        *given, *starts, *longest, causal=causal, alibi_slopes=slopes, return_attn_probs=True
    )
    assert (out.shape, lse.shape) == ((queries, HEADS, DIM), (HEADS, queries))
    assert not out.any()
    assert torch.equal(torch.autograd.grad(out.sum(), given)[0], torch.zeros_like(given[0]))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_other_attentions(sizes):
    batch, queries, keys = sizes
    given, mask = tensors(sizes), torch.ones(batch, KV_HEADS, queries, keys, dtype=torch.bool)
    check(lambda *given: bridge.dynamic_mask_attention(*given, mask, return_lse=True), given)
    check(lambda *given: bridge.flash_dmattn_func(*given, attn_mask=mask, is_causal=True), given)
    cells = torch.ones(-(-queries // 128), -(-keys // 128), dtype=torch.bool)
    check(lambda *given: bridge.block_sparse_attention(*given, cells, return_lse=True), given)
    check(nn.FlexAttention("sliding_window", 2), given)
    check(nn.FlexAttention("bigbird", block_size=2), given)
    with torch.no_grad():
        out, lse = bridge.decode_attention(*given, return_lse=True)
    assert not out.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0)])
def test_dilated_attention(shape):
    given = [torch.ones(*shape, HEADS, DIM, requires_grad=True) for _ in range(3)]
    pattern = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
    check(lambda *given: bridge.dilated_attention(*given, segment_ids=ids(*shape), **pattern), given)


def test_compiled():
    attend = torch.compile(lambda *given: bridge.flash_attention(*given, is_causal=True, return_lse=True))
    check(attend, tensors(SIZES["keys"]))
    check(torch.compile(nn.FlexAttention("causal")), tensors(SIZES["batch"]))


def test_mapped():
    given = [torch.ones(3, *x.shape) for x in tensors(SIZES["batch"])]
    offset = torch.zeros(3, 0, dtype=torch.int32)
    attend = lambda *given: bridge.flash_attention(*given[:3], q_offset=given[3], is_causal=True)
    assert torch.func.vmap(attend)(*given, offset).shape == given[0].shape


def test_empty_context():
    module = nn.AdaptiveAttention(32, 4, context_dim=20)
    x, context = torch.ones(2, 3, 32, requires_grad=True), torch.ones(2, 0, 20, requires_grad=True)
    out = module(x, context)
    assert torch.equal(out, module.out_proj(torch.zeros(2, 3, 32)))
    assert not any(dx.any() for dx in torch.autograd.grad(out.sum(), [x, context]))
