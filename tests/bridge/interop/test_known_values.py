"""Whether the host may read a tensor's values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from jax_kernels import bridge
from jax_kernels.bridge.interop.torch_internals import has_known_values


def test_eager_cpu_tensor_has_known_values():
    assert has_known_values(torch.ones(2))


def test_tensors_without_values():
    assert not has_known_values(torch.ones(2, device="meta"))
    with FakeTensorMode() as mode:
        fake = torch.ones(2)
        assert not has_known_values(fake)
    assert not has_known_values(fake), mode
    torch.func.vmap(lambda x: x if not has_known_values(x) else pytest.fail("read a mapped tensor"))(torch.ones(2))


def test_float_mask_of_fake_tensors():
    """A float mask's values are checked only where it has some."""
    with FakeTensorMode():
        q, mask = torch.ones(1, 8, 2, 16), torch.ones(8, 8)
        assert bridge.flash_attention(q, q, q, mask=mask).shape == (1, 8, 2, 16)
