"""Who gets the GPU's memory, and leaving the process."""

import os
import subprocess
import sys

import pytest
from jax._src import xla_bridge

from jax_kernels.bridge import memory


@pytest.fixture
def unset(monkeypatch):
    for setting in memory._SETTINGS:
        monkeypatch.delenv(setting, raising=False)


@pytest.mark.usefixtures("unset")
def test_preallocation_is_turned_off_before_jax_starts(monkeypatch):
    monkeypatch.setattr(xla_bridge, "_backends", {})
    memory.leave_memory_to_torch()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


@pytest.mark.usefixtures("unset")
def test_it_warns_when_jax_has_the_memory(monkeypatch):
    monkeypatch.setattr(xla_bridge, "_backends", {"cpu": None, "cuda": None})
    with pytest.warns(RuntimeWarning, match="Import jax_kernels.bridge before the first use of JAX"):
        memory.leave_memory_to_torch()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


@pytest.mark.usefixtures("unset")
@pytest.mark.filterwarnings("error")
def test_nothing_is_said_without_a_gpu(monkeypatch):
    monkeypatch.setattr(xla_bridge, "_backends", {"cpu": None})
    memory.leave_memory_to_torch()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


@pytest.mark.usefixtures("unset")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("setting", memory._SETTINGS)
def test_the_users_choice_stands(monkeypatch, setting):
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
def test_a_process_ends_in_peace():
    """Tensors that JAX's threads still hold when the interpreter ends would abort the process."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr
