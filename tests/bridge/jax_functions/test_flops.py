"""PyTorch's FLOP counter sees the bridge's operators."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from jax_kernels import bridge

ATTENTION = 2 * 2 * 24 * 24 * 4 * 16  # a matmul of all queries and keys


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


# By name: (a call of tensors, the tensors, the operations of the forward and of the backward).
CALLS = {
    "flash_attention": (bridge.flash_attention, [random(2, 24, 4, 16)] * 3, 2 * ATTENTION, 5 * ATTENTION),
    "matmul": (bridge.matmul, [random(5, 8), random(8, 6)], 2 * 5 * 8 * 6, 4 * 5 * 8 * 6),
    "gated_matmul": (
        bridge.gated_matmul, [random(5, 8), random(8, 6), random(8, 6)], 4 * 5 * 8 * 6, 8 * 5 * 8 * 6
    ),
    "rms_norm": (bridge.rms_norm, [random(5, 8), random(8)], 0, 0),
    "matmul bfloat16": (
        lambda x, w: bridge.matmul(x.bfloat16(), w.bfloat16()), [random(5, 8), random(8, 6)], 480, 960
    ),
    "from_jax": (bridge.from_jax(lambda x, w: jnp.tanh(x @ w)), [random(5, 8), random(8, 6)], 480, 960),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_counts(name):
    """The second round has cached calls, which the counter must see."""
    call, inputs, forward, backward = CALLS[name]
    for _ in range(2):
        call(*inputs).sum().backward()
        with FlopCounterMode(display=False) as counter:
            out = call(*inputs)
        assert counter.get_total_flops() == forward
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == backward
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(*inputs)
        assert counter.get_total_flops() == forward


def test_cond_counts_its_largest_branch():
    branches = [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x]
    choose = bridge.from_jax(lambda x: jax.lax.switch(jnp.int32(x[0, 0] > 0), branches, x))
    with FlopCounterMode(display=False) as counter:
        choose(random(4, 4).detach())
    assert counter.get_total_flops() == 2 * 2 * 4**3


def test_loop_counts_each_iteration():
    power = bridge.from_jax(lambda x: jnp.linalg.matrix_power(x, 2) @ x)
    with FlopCounterMode(display=False) as counter:
        power(random(4, 4).detach())
    assert counter.get_total_flops() == 2 * 2 * 4**3
