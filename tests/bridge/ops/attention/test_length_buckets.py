"""Calls with more and more keys: they are right at every length, and compile few programs."""

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.interop import dlpack, keyed_cache
from jax_kernels.bridge.ops.attention import flash_attention_operator, length_buckets
from tests.support.cases import tiers


@pytest.fixture(autouse=True)
def nothing_seen():
    length_buckets._SEEN.clear()


def qkv(length, queries=1, batch=2):
    generator = torch.Generator().manual_seed(length)
    shapes = (batch, queries, 4, 16), (batch, length, 2, 16), (batch, length, 2, 16)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def programs(monkeypatch):
    """A list that collects each number of keys that JAX gets."""
    lengths = []
    own = flash_attention_operator._prepare
    monkeypatch.setattr(
        flash_attention_operator,
        "_prepare",
        lambda options, *arrays: lengths.append(arrays[1].shape[1]) or own(options, *arrays),
    )
    keyed_cache.clear()
    return lengths


def mask_of(length):
    return torch.rand(2, 1, 1, length, generator=torch.Generator().manual_seed(length)) < 0.8


CASES = {
    "plain": lambda length: {},
    "causal": lambda length: {"is_causal": True, "q_offset": length - 2},
    "window": lambda length: {"window": (20, 0), "q_offset": length - 2},
    "lengths": lambda length: {"kv_lengths": torch.tensor([length // 2, length + 5], dtype=torch.int32)},
    "mask": lambda length: {"mask": mask_of(length)},
    "bias": lambda length: {"bias": mask_of(length).float() - 3},
    "sinks": lambda length: {"sinks": torch.arange(4.0), "is_causal": True, "q_offset": torch.tensor(length - 2).int()},
}


@pytest.mark.parametrize("name", tiers.cases(CASES, list(CASES)[::2]))
def test_many_lengths_compile_few_programs(name, reference, monkeypatch):
    compiled = programs(monkeypatch)
    for length in (*range(120, 144, 2), 160, 320, 513):
        query, key, value = qkv(length, queries=2)
        options = CASES[name](length)
        out, lse = bridge.flash_attention(query, key, value, return_lse=True, **options)
        want, want_lse = reference(query, key, value, **options)
        torch.testing.assert_close(out, want.float(), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse, want_lse.float(), atol=2e-6, rtol=1e-5)
    assert set(compiled[2:]) - {124} <= {128, 160, 320, 640}, compiled


def test_unbucketed_calls_keep_their_length(monkeypatch):
    compiled = programs(monkeypatch)
    for length in (40, 41, 42, 43, 44):
        bridge.flash_attention(*qkv(length, queries=17))
        bridge.flash_attention(*(x.requires_grad_() for x in qkv(length)))
        bridge.flash_attention(*qkv(length), implementation="xla")
    assert set(compiled) == {40, 41, 42, 43, 44}
    for _ in range(5):
        bridge.flash_attention(*qkv(50))
    assert compiled[-1] == 50


def test_padded_key_lengths():
    for length in range(1, 5000):
        size = length_buckets.bucket_length(length)
        assert length <= size <= max(128, 1.26 * length)
        assert length_buckets.bucket_length(size) == size
    assert len({length_buckets.bucket_length(length) for length in range(1, 65_537)}) == 1 + 9 * 4


@pytest.fixture
def read(monkeypatch):
    """The shapes of the arrays that each call passes to JAX."""
    found, own = [], dlpack.import_tensors

    def import_tensors(tensors, device, **options):
        found.append([tuple(x.shape) for x in tensors])
        return own(tensors, device, **options)

    monkeypatch.setattr(dlpack, "import_tensors", import_tensors)
    return found


@pytest.mark.parametrize("with_gradient", [False, True])
def test_many_offsets_compile_few_programs(with_gradient, reference, make_qkv):
    inputs = make_qkv(length=6, kv_length=30)
    if not with_gradient:
        inputs = [x.detach() for x in inputs]
    length_buckets._OFFSETS.clear()
    made = flash_attention_operator._forward if with_gradient else flash_attention_operator._inference
    before, wide = made.cache_info().misses, [x.detach().double().requires_grad_(with_gradient) for x in inputs]
    for offset in (0, 24, 3, 20, 11, 24, 7, 0):
        got = bridge.flash_attention(*inputs, is_causal=True, q_offset=offset)
        want, _ = reference(*wide, is_causal=True, q_offset=offset)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
        if with_gradient:
            pairs = torch.autograd.grad(got.square().sum(), inputs), torch.autograd.grad(want.square().sum(), wide)
            for ours, theirs in zip(*pairs, strict=True):
                torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=0)
    assert made.cache_info().misses - before <= length_buckets._LENGTHS


def test_expanded_masks_and_biases_are_not_materialised(read, reference, make_qkv):
    inputs = [x.detach() for x in make_qkv()]
    mask = (torch.arange(24) % 3 > 0).expand(2, 4, 24, 24)
    bias = torch.randn(4, 1, 24).expand(2, 4, 24, 24)
    got = bridge.flash_attention(*inputs, mask=mask, bias=bias)
    want, _ = reference(*inputs, mask=mask, bias=bias)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    assert read[-1][3:] == [(1, 4, 1, 24), (1, 1, 1, 24)]
    got = bridge.dynamic_mask_attention(*inputs, mask)
    torch.testing.assert_close(got.double(), reference(*inputs, mask=mask)[0], atol=1e-5, rtol=0)
    assert read[-1][3] == (1, 1, 1, 24)


def test_expanded_bias_gradient_keeps_its_shape(read, reference, make_qkv):
    """Each entry has a gradient, though all share memory. Key and value with gradients stay expanded, too."""
    query, key, value = make_qkv(heads=4, kv_heads=1)
    bias = torch.randn(1, 1, 1, 24).expand(2, 4, 24, 24).requires_grad_()
    heads = [x.expand(-1, -1, 4, -1) for x in (key, value)]
    exact = [x.detach().double().requires_grad_() for x in (query, key, value, bias)]
    got = bridge.flash_attention(query, *heads, bias=bias)
    assert read[-1] == [(2, 24, 4, 16), (2, 24, 1, 16), (2, 24, 1, 16), (1, 1, 1, 24)]
    want, _ = reference(*exact[:3], bias=exact[3])
    pairs = (torch.autograd.grad(x.square().sum(), y) for x, y in ((got, (query, key, value, bias)), (want, exact)))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=0)
    assert read[-1][1:4] == [(2, 24, 4, 16), (2, 24, 4, 16), (2, 4, 24, 24)]


def test_backward_reads_an_expanded_mask_in_place(read, make_qkv):
    inputs, mask = make_qkv(), torch.ones(24, 1, dtype=torch.bool).expand(2, 1, 24, 24)
    bridge.flash_attention(*inputs, mask=mask).sum().backward()
    assert [shapes[3] for shapes in read] == [(1, 1, 24, 1), (1, 1, 24, 1)]
