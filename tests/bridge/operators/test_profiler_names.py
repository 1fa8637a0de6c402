"""The rows of torch.profiler carry the op's name, in first and in cached calls, forward and backward."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from jax_kernels import bridge


def rows_of(call: Any) -> dict[str, int]:
    """The rows of torch.profiler for a call: their counts by name."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call()
    return {row.key: row.count for row in recorded.key_averages()}


X = torch.randn(16, 8)
Q = torch.randn(1, 16, 2, 8)
CALLS = {
    "flash_attention": lambda x: bridge.flash_attention(x, Q, Q),
    "matmul": lambda x: bridge.matmul(x, torch.ones(8, 8)),
    "rms_norm": lambda x: bridge.rms_norm(x, torch.ones(8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_have_the_ops_name(name):
    """Forward and backward have a row each with the op's name; no row is of a private class."""
    x = (Q if name == "flash_attention" else X).clone().requires_grad_()
    run = CALLS[name]
    for step in range(3):  # the first call, the call that caches, and a cached one
        rows = rows_of(lambda: run(x).sum().backward())
        assert rows[f"jax_kernels::{name}"] == 1, (step, rows)
        assert rows[f"jax_kernels::{name}_backward"] == 1, (step, rows)
        assert rows[name] == 1, (step, rows)
        assert rows[f"{name}Backward"] == 1, (step, rows)
        assert not [row for row in rows if "Cached" in row or "CallFunction" in row], rows
        x.grad = None


@pytest.mark.parametrize("name", CALLS)
def test_rows_without_gradients(name):
    x, run = Q if name == "flash_attention" else X, CALLS[name]
    with torch.no_grad():
        for _ in range(3):
            rows = rows_of(lambda: run(x))
            found = [row for row in rows if row in (f"jax_kernels::{name}", f"jax_kernels::{name}_inference")]
            assert found, rows


def test_rows_of_a_users_function():
    def double(x):
        return x * 2

    run = bridge.from_jax(double)
    run(X)
    assert rows_of(lambda: run(X))["jax_kernels::double"] == 1


def test_grad_fn_has_the_ops_name():
    x = X.clone().requires_grad_()
    run = CALLS["matmul"]
    run(x)
    assert run(x).grad_fn.name() == "matmulBackward"
