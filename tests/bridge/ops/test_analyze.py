"""bridge.analyze: the ops that a function of tensors runs."""

import pytest
import torch

from jax_kernels import bridge


def test_calls_of_a_function():
    """Equal calls are one use. A call whose tensors require a gradient counts with its backward."""
    query = torch.randn(1, 64, 2, 32, requires_grad=True)
    x = torch.ones(8, 16)

    def step():
        for _ in range(2):
            bridge.flash_attention(query, query, query, is_causal=True).sum().backward()
        bridge.rms_norm(x)

    for _ in range(2):  # the calls are cached before the second time
        found = bridge.analyze(step, device="h200")
        uses = {use.op: (use.forward, use.backward) for use in found.uses}
        assert uses == {"flash_attention": (2, 2), "rms_norm": (1, 0)}
        pairs = 2 * 64 * 65 / 2
        assert found.uses[0].cost.flops == 2 * pairs * 32 * (4 + 10)
        assert "dtype" in [advice.kind for advice in found.advice]


def test_a_module_and_a_mask():
    layer = bridge.nn.Linear(16, 16)
    query, mask = torch.randn(1, 64, 2, 32), torch.ones(64, 64, dtype=torch.bool).tril()

    def call():
        with torch.no_grad():
            layer(torch.ones(4, 16))
        return bridge.flash_attention(query, query, query, mask=mask)

    found = bridge.analyze(call)
    assert {use.op for use in found.uses} == {"matmul", "flash_attention"}
    (advice,) = found.advice
    assert "is_causal=True" in advice.text


def test_measured_times():
    query = torch.randn(1, 64, 2, 32)
    found = bridge.analyze(bridge.flash_attention, query, query, query, measure=True, seconds=0.002)
    assert found.total_ms > 0
    assert found.uses[0].share == found.uses[0].ms / found.total_ms


def test_a_function_without_ops():
    with pytest.raises(ValueError, match="calls no op of jax_kernels"):
        bridge.analyze(torch.relu, torch.ones(2))
    with pytest.raises(ValueError, match="device: got NVIDIA H200, want CPU or None"):
        bridge.analyze(bridge.rms_norm, torch.ones(2, 4), device="h200", measure=True)
