"""Calls with more and more keys: they are right at every length, and compile few programs."""

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import attention_ops, growing


@pytest.fixture(autouse=True)
def nothing_seen():
    growing._SEEN.clear()


def qkv(length, queries=1, batch=2):
    generator = torch.Generator().manual_seed(length)
    shapes = (batch, queries, 4, 16), (batch, length, 2, 16), (batch, length, 2, 16)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def programs(monkeypatch):
    """A list to which each length of keys that JAX gets is added."""
    lengths = []
    own = attention_ops._prepare
    monkeypatch.setattr(
        attention_ops, "_prepare", lambda options, *arrays: lengths.append(arrays[1].shape[1]) or own(options, *arrays)
    )
    attention_ops._forward.clear()
    attention_ops._inference.clear()
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


@pytest.mark.parametrize("name", CASES)
def test_many_lengths_are_right_and_few_are_compiled(name, reference, monkeypatch):
    compiled = programs(monkeypatch)
    for length in (*range(120, 144, 2), 160, 320, 513):
        query, key, value = qkv(length, queries=2)
        options = CASES[name](length)
        out, lse = bridge.flash_attention(query, key, value, return_lse=True, **options)
        want, want_lse = reference(query, key, value, **options)
        torch.testing.assert_close(out, want.float(), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse, want_lse.float(), atol=2e-6, rtol=1e-5)
    assert set(compiled[2:]) - {124} <= {128, 160, 320, 640}, compiled


def test_what_stays_as_it_is(monkeypatch):
    compiled = programs(monkeypatch)
    for length in (40, 41, 42, 43, 44):
        bridge.flash_attention(*qkv(length, queries=17))
        bridge.flash_attention(*(x.requires_grad_() for x in qkv(length)))
        bridge.flash_attention(*qkv(length), implementation="xla")
    assert set(compiled) == {40, 41, 42, 43, 44}
    for _ in range(5):
        bridge.flash_attention(*qkv(50))
    assert compiled[-1] == 50


def test_lengths_that_keys_are_padded_to():
    for length in range(1, 5000):
        size = growing.bucket(length)
        assert length <= size <= max(128, 1.26 * length)
        assert growing.bucket(size) == size
    assert len({growing.bucket(length) for length in range(1, 65_537)}) == 1 + 9 * 4
