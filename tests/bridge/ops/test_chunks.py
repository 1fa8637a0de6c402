"""A call of the bridge that runs out of memory is traced again in chunks."""

import jax
import pytest
import torch

from jax_kernels import bridge, chunks
from jax_kernels.bridge.operators import execute

ERROR = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."


@pytest.mark.parametrize("name", ["flash_attention", "matmul"])
def test_a_call_is_tried_again(monkeypatch, name):
    """Programs with fewer than 4 chunks fail here, in the forward and in the backward."""
    query = torch.randn(2, 8, 2, 4, requires_grad=True)
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, 6)
    calls = {
        "flash_attention": lambda: bridge.flash_attention(query, query, query),
        "matmul": lambda: bridge.matmul(x, w),
    }
    moving = query if name == "flash_attention" else x

    def step():
        moving.grad = None
        calls[name]().square().sum().backward()
        return moving.grad

    want = step().clone()
    real = execute.memory.retry_on_oom

    def limited(device, call):
        results = real(device, call)
        if chunks._FORCED.value < 4:
            raise jax.errors.JaxRuntimeError(ERROR)
        return results

    monkeypatch.setattr(execute.memory, "retry_on_oom", limited)
    with pytest.warns(RuntimeWarning, match=rf"{name}(_backward)?: out of memory on cpu; the call ran in 4 chunks"):
        got = step()
    torch.testing.assert_close(got, want)
