"""Functions of arrays refuse functions and tensors of PyTorch, and name the function of the bridge."""

import functools
import traceback

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_kernels
from jax_kernels import bridge, flash_attention

X = jnp.ones((1, 8, 2, 16))
T = torch.ones(1, 8, 2, 16)
CALLS = {
    "explain": lambda op, x: jax_kernels.explain(op, x, x, x),
    "analyze": lambda op, x: jax_kernels.analyze(op, x, x, x),
    "benchmark_implementations": lambda op, x: jax_kernels.benchmark_implementations(op, x, x, x),
    "validate": lambda op, x: jax_kernels.validate(op, op, [x, x, x]),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_of_tensors_are_refused(name):
    for op in (
        bridge.flash_attention,
        functools.partial(bridge.flash_attention, is_causal=True),
        torch.nn.Linear(2, 2),
    ):
        with pytest.raises(TypeError, match=rf"which takes tensors, want a function of arrays; use bridge\.{name}"):
            CALLS[name](op, T)
    with pytest.raises(TypeError, match="got ArrayImpl, want a function, and its arguments after it"):
        CALLS[name](X, X)
    if name != "explain":
        with pytest.raises(TypeError, match=rf"got a torch.Tensor, want jax.Arrays; use bridge\.{name} for tensors"):
            CALLS[name](flash_attention, T)


@pytest.mark.parametrize("name", CALLS)
def test_the_bridge_refuses_functions_of_arrays(name):
    arguments = {"validate": ([T, T, T],)}.get(name, (T, T, T))
    for op in (flash_attention, functools.partial(flash_attention, is_causal=True)):
        with pytest.raises(TypeError, match=r"of jax_kernels, which takes arrays; want bridge\.flash_attention"):
            getattr(bridge, name)(op, *((op,) if name == "validate" else ()), *arguments)


def test_the_bridge_refuses_arrays():
    with pytest.raises(TypeError, match=r"query: got jaxlib.*, want a torch\.Tensor; jax_kernels itself has the ops"):
        bridge.flash_attention(X, X, X)
    with pytest.raises(TypeError, match=r"query: got numpy.ndarray, want a torch\.Tensor; torch\.from_numpy makes one"):
        bridge.flash_attention(np.asarray(X), T, T)


def test_an_analysis_without_ops_says_so():
    assert "no op of this library ran, and no matmul" in str(jax_kernels.analyze(jnp.sin, X))
    assert "no op" not in str(jax_kernels.analyze(flash_attention, X, X, X))


@pytest.mark.parametrize("module", [jax_kernels, bridge])
def test_tracebacks_name_the_attribute_that_is_meant(module):
    with pytest.raises(AttributeError) as raised:
        _ = module.flash_atention
    text = "".join(traceback.format_exception(raised.value))
    assert "has no attribute 'flash_atention'. Did you mean: 'flash_attention'?" in text


def test_packages_are_attributes_without_an_import():
    """dir() does not list them: Flax and PyTorch are extras."""
    assert jax_kernels.__getattr__("models").__name__ == "jax_kernels.models"
    assert not {"adapters", "bridge", "models"} & set(jax_kernels.__dir__())
