"""The device that JAX plans for while the bridge calls it."""

import jax
import pytest
import torch
from jax._src import core

from jax_kernels import dispatch
from jax_kernels.bridge.interop import planning_device

CPU = torch.device("cpu")


def test_target_ends_with_the_block(monkeypatch):
    monkeypatch.setattr(planning_device, "_device_info", lambda device: dispatch.device_info("h200"))
    before = dispatch.target_device()
    with planning_device.planning_on(CPU):
        assert dispatch.target_device() == dispatch.device_info("h200") != before
    assert dispatch.target_device() == before
    with pytest.raises(ZeroDivisionError), planning_device.planning_on(CPU):
        _ = 1 / 0
    assert dispatch.target_device() == before


def test_outside_work_is_not_traced():
    """JAX computes inside the block, and traces the function again after it."""
    seen = []

    def function(x):
        with planning_device.planning_on(CPU):
            seen.append(core.trace_state_clean())
        seen.append(core.trace_state_clean())
        return x + 1

    jax.jit(function).trace(jax.ShapeDtypeStruct((3,), "float32"))
    assert seen == [True, False]


def test_meta_tensor_has_the_default_device():
    before = dispatch.target_device()
    with planning_device.planning_on(torch.device("meta")):
        assert dispatch.target_device() == before
