"""Fixtures and settings of every test: the platform, the gpu marker, hypothesis' settings."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes.forked import QUICK_COMPILES

# Before JAX starts. Without a GPU, a CUDA plugin that is installed (to compile for one) must not be tried.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Compiling by XLA dominates small tests.
    os.environ.setdefault("XLA_FLAGS", QUICK_COMPILES)
    # JAX would make a key of its cache for each program, and note 10 frames of Python for each operation.
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Plans of tests do not depend on calls that the user has tuned, nor on the winners that are part of the library.
os.environ["JAX_KERNELS_TUNED"] = "own"
os.environ["JAX_KERNELS_CACHE"] = str(Path(tempfile.gettempdir()) / f"jax_kernels_tests_{os.getpid()}")
# Other processes of the suite, and PyTorch, use the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Processes that tests start import tests.support, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

import hypothesis
import jax
import pytest

from tests.support.cases import ids, tiers
from tests.support.processes import room, without_triton

# JAX makes many small objects that live on. Scanning them again and again takes 6 % of the suite's time.
gc.freeze()
gc.set_threshold(100_000, 20, 20)

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None, print_blob=False)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_gpu = jax.default_backend() == "gpu"
    is_part = any("::" in argument for argument in config.args)
    tiers.mark_repeats(items, is_whole=not (is_part or is_gpu or without_triton.is_on()))
    if without_triton.is_on():
        _skip_triton(items)
    if is_gpu:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the modules and parameters of all tests


def _skip_triton(items: list[pytest.Item]) -> None:
    """Skips the tests that need Pallas-Triton. JAX's lowering for GPUs imports it, so that none compiles kernels."""
    for item in items:
        is_compiled = item.get_closest_marker("compile") is not None
        if item.path.parent.name == "triton" or item.get_closest_marker("triton") or is_compiled:
            item.add_marker(pytest.mark.skip(reason="needs Pallas-Triton"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Without Pallas-Triton, a test ends as skipped where it names implementation="triton"."""
    try:
        return (yield)
    except (NotImplementedError, AssertionError) as error:  # an assertion, where another message is expected
        if without_triton.is_on() and "'triton' cannot serve" in str(error) and "no Pallas-Triton" in str(error):
            pytest.skip("needs Pallas-Triton")
        raise


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    return ids.argument_id(val, argname)


ROOM = room.Room()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    ROOM.after_test()


@pytest.fixture
def no_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels as dispatched without JAX_KERNELS_INTERPRET, whatever the caller's environment says."""
    monkeypatch.delenv("JAX_KERNELS_INTERPRET", raising=False)
