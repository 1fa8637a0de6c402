"""The choice of the direct route: the setting, the self-test, and the fallback to the DLPack route."""

import types
import warnings

import pytest
import torch

from jax_kernels.bridge.direct import route
from jax_kernels.bridge.direct.chain import NotDirectError
from jax_kernels.bridge.interop import dlpack
from tests.support.processes import forked

GPU = torch.device("cuda", 0)
TENSOR = types.SimpleNamespace(shape=(4, 8), dtype=torch.bfloat16, device=GPU)


def double(x):
    return (x * 2,)


def half(x):
    return (x / 2,)


@pytest.fixture
def gpu(monkeypatch):
    """A route without any state, and a fake GPU that answers its questions."""
    monkeypatch.setattr(route, "_STATE", route._State(is_enabled=True))
    monkeypatch.setattr(dlpack, "is_capturing", lambda device: False)
    monkeypatch.setattr(dlpack, "jax_device", lambda device: None)
    monkeypatch.setattr(route.program_cache, "folder", lambda: None)


def test_route_is_on_by_default():
    assert [route._is_wanted(setting) for setting in (None, "", "1", "0")] == [True, True, True, False]
    with pytest.raises(ValueError, match="JAX_KERNELS_DIRECT: got 'off', want 0 to turn"):
        route._is_wanted("off")


@pytest.mark.parametrize("setting", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_environment_is_read(setting, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from jax_kernels.bridge.direct import route; print(route.is_enabled())")
    done = forked.run(script, env={"JAX_KERNELS_DIRECT": setting}, timeout=120)
    assert done.stdout.split() == [str(setting == "1")], done.stderr


def test_failed_self_test_falls_back_to_dlpack(gpu, monkeypatch):
    """A failed self test sends all calls through DLPack and warns once."""
    tested = []

    def fails(device, kind):
        tested.append((device, kind))
        raise RuntimeError("wrong numbers")

    monkeypatch.setattr(route, "_test", fails)
    with pytest.warns(RuntimeWarning, match=r"cuda:0 directly.*RuntimeError: wrong numbers.*JAX_KERNELS_DIRECT=0"):
        assert route.find(double, [TENSOR]) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert route.find(half, [TENSOR]) is None
        assert route.find(double, [TENSOR]) is None
    assert tested == [(GPU, "kernels")]
    assert route.reasons() == ["cuda:0: RuntimeError: wrong numbers", *["RuntimeError: wrong numbers"] * 2]


def test_a_self_test_that_passed_is_remembered(gpu, monkeypatch, tmp_path):
    """A later process on an equal GPU skips it. A failure is not remembered, and another driver tests again."""
    tested, version = [], ["13000"]
    monkeypatch.setattr(route.program_cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(route, "_target", lambda device: types.SimpleNamespace(description="an H200"))
    monkeypatch.setattr(route, "driver_version", lambda: version[0])

    def test(device, kind):
        tested.append(kind)
        if len(tested) == 1:
            raise RuntimeError("wrong numbers")

    monkeypatch.setattr(route, "_test", test)
    with pytest.warns(RuntimeWarning, match="wrong numbers"):
        assert route._fails(GPU, "kernels") == "RuntimeError: wrong numbers"
    assert [route._fails(GPU, kind) for kind in ("kernels", "kernels", "Mosaic's")] == [None] * 3
    assert tested == ["kernels", "kernels", "Mosaic's"]
    version[0] = "13010"
    assert route._fails(GPU, "kernels") is None
    assert tested[3:] == ["kernels"]


def test_failed_chain_falls_back_for_its_function_only(gpu, monkeypatch):
    """A function without a working chain takes the DLPack route; other functions stay on the direct route."""
    chain = object()

    def loaded(function, tensors, masks, device):
        if function is double:
            raise KeyError("field 12")
        return chain

    monkeypatch.setattr(route, "_test", lambda device, kind: None)
    monkeypatch.setattr(route, "_loaded", loaded)
    with pytest.warns(RuntimeWarning, match=r"a function on cuda:0 directly.*KeyError: 'field 12'"):
        assert route.find(double, [TENSOR]) is None
    assert route.find(half, [TENSOR]) is chain


def test_missing_chain_falls_back_silently(gpu, monkeypatch):
    def loaded(function, tensors, masks, device):
        raise NotDirectError("the program has a convolution")

    monkeypatch.setattr(route, "_test", lambda device, kind: None)
    monkeypatch.setattr(route, "_loaded", loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert route.find(double, [TENSOR]) is None
    assert route.reasons() == ["the program has a convolution"]


def test_disabled_route_is_not_queried(gpu, monkeypatch):
    monkeypatch.setattr(route, "_make", lambda *given: pytest.fail("the route is off"))
    with route.disabled():
        assert not route.is_enabled()
        assert route.find(double, [TENSOR]) is None
