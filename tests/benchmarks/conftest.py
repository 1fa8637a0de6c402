"""The scripts of benchmarks/ import the harness next to them, so the folder is added to the path."""

import os
import pathlib
import subprocess
import sys
import threading

import jax
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
TIMER = threading.Timer  # tests patch the name


@pytest.fixture
def run_script():
    """run_script(name, *argv): the finished process of a script, started from the root, on the CPU."""

    def run(script, *argv):
        command = [sys.executable, str(BENCHMARKS / script), *argv]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_KERNELS_INTERPRET": "",
            "PYTHONPATH": str(BENCHMARKS.parent),
        }
        options = {"cwd": BENCHMARKS.parent, "env": environment, "timeout": 240}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    return run


@pytest.fixture(autouse=True)
def no_timer_left():
    """A watchdog that outlives its run would end the suite's process minutes later, without a message."""
    before = set(threading.enumerate())
    yield
    timers = [thread for thread in threading.enumerate() if isinstance(thread, TIMER) and thread not in before]
    waiting = [timer for timer in timers if not timer.finished.is_set()]
    for timer in waiting:
        timer.cancel()
    assert not waiting


@pytest.fixture
def make_case():
    """make_case(mode, causal, shape): a small Case with grouped heads."""
    from harness import cases

    def make(mode="fwd", causal=True, shape=(1, 64, 4, 16, 2)):
        return cases.Case(*shape, "bf16", causal, mode)

    return make


@pytest.fixture
def without_gpu(monkeypatch):
    """Skips a test of messages without a GPU, if there is a GPU."""
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU; JAX_PLATFORMS=cpu runs this test")
    monkeypatch.delenv("JAX_KERNELS_INTERPRET", raising=False)
