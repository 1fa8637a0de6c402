"""The division of the GPU's memory, and the end of the process."""

import os

import jax
import pytest
import torch
from jax._src import xla_bridge

from jax_kernels import bridge
from jax_kernels.bridge.interop import dlpack, memory
from tests.support.processes.python import done_by


@pytest.fixture
def unset(monkeypatch):
    for setting in memory._SETTINGS:
        monkeypatch.delenv(setting, raising=False)


@pytest.mark.usefixtures("unset")
def test_preallocation_is_off_before_jax_starts(monkeypatch):
    monkeypatch.setattr(xla_bridge, "_backends", {})
    memory.leave_memory_to_torch()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


@pytest.mark.usefixtures("unset")
def test_warns_when_jax_has_the_memory(monkeypatch):
    monkeypatch.setattr(xla_bridge, "_backends", {"cpu": None, "cuda": None})
    with pytest.warns(RuntimeWarning, match="Import jax_kernels.bridge before the first use of JAX"):
        memory.leave_memory_to_torch()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


@pytest.mark.usefixtures("unset")
@pytest.mark.filterwarnings("error")
def test_no_warning_without_a_gpu(monkeypatch):
    monkeypatch.setattr(xla_bridge, "_backends", {"cpu": None})
    memory.leave_memory_to_torch()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


@pytest.mark.usefixtures("unset")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("setting", memory._SETTINGS)
def test_user_setting_is_kept(monkeypatch, setting):
    monkeypatch.setenv(setting, "0.5")
    monkeypatch.setattr(xla_bridge, "_backends", {"cuda": None})
    memory.leave_memory_to_torch()
    assert [name for name in memory._SETTINGS if name in os.environ] == [setting]


PROGRAM = """
import os
import jax_kernels.bridge as bridge
from jax._src import xla_bridge
assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
assert not xla_bridge._backends, "importing the bridge started JAX"
import torch
tensors = [torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3)]
for _ in range(50):
    bridge.flash_attention(*tensors).sum().backward()
"""


@pytest.mark.usefixtures("unset")
@pytest.mark.timeout(120)
def test_process_exits_cleanly():
    """JAX's threads may still hold tensors when the interpreter ends, which must not abort the process."""
    assert "terminate" not in done_by("-c", PROGRAM, limit=100, JAX_PLATFORMS="cpu").stderr


class OnGpu:
    """The memory statistics of a fake GPU, for memory_report."""

    def memory_stats(self):
        return {"bytes_in_use": 3 * 2**30, "pool_bytes": 4 * 2**30}


@pytest.fixture
def gpu(monkeypatch):
    emptied = []
    monkeypatch.setattr(dlpack, "jax_device", lambda device: OnGpu())
    figures = {"mem_get_info": (10 * 2**30, 80 * 2**30), "memory_allocated": 5 * 2**30, "memory_reserved": 6 * 2**30}
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: figure)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    return emptied


def test_report_has_both_allocators(gpu):
    report = bridge.memory_report("cuda:0")
    assert (report.device, report.total, report.free) == (torch.device("cuda", 0), 80 * 2**30, 10 * 2**30)
    assert (report.torch_allocated, report.torch_reserved) == (5 * 2**30, 6 * 2**30)
    assert (report.jax_in_use, report.jax_reserved, report.held) == (3 * 2**30, 4 * 2**30, 0)
    assert report.other == (80 - 10 - 6 - 4) * 2**30
    assert "PyTorch: 5.00 GiB in tensors, 6.00 GiB reserved" in str(report)
    assert bridge.memory_report(0) == report
    with pytest.raises(ValueError, match="device: got cpu, want a CUDA device"):
        bridge.memory_report("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("given", [None, "cuda"])
def test_no_report_without_a_gpu(given):
    with pytest.raises(ValueError, match=r"^device: got none, want a CUDA device$"):
        bridge.memory_report(given)


def failing(*messages):
    """A call that fails with each of the messages in turn, and then returns 7."""
    left = list(messages)

    def call():
        if left:
            raise jax.errors.JaxRuntimeError(left.pop(0))
        return 7

    return call


FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes."


def test_pytorch_frees_memory_for_jax(gpu):
    device = torch.device("cuda", 0)
    assert memory.retry_on_oom(device, failing()) == 7
    assert not gpu
    assert memory.retry_on_oom(device, failing(FULL)) == 7
    assert gpu == [True]
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"JAX is out of memory: RESOURCE(.|\n)*JAX: 3.00 GiB"):
        memory.retry_on_oom(device, failing(FULL, FULL))
    assert gpu == [True, True]


@pytest.mark.parametrize(("place", "message"), [("cuda:0", "INTERNAL: x"), ("cpu", FULL)])
def test_other_errors_are_raised_at_once(gpu, place, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message.split()[0]):
        memory.retry_on_oom(torch.device(place), failing(message))
    assert not gpu
