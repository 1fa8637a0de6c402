"""Every module: PyTorch's default device and dtype change nothing, and errors about dtypes name the argument."""

import inspect

import pytest
import torch

from jax_kernels import bridge
from tests.support.cases.cached_calls import random
from tests.support.default_settings import SETTINGS, results

# By name: (a function of the module's device and dtype, the shapes of its inputs).
TOKENS = (2, 8, 16)
MODULES = {
    "AdaptiveAttention": (lambda **options: bridge.nn.AdaptiveAttention(16, 2, **options), [TOKENS]),
    "DynamicMaskAttention": (
        lambda **options: bridge.nn.DynamicMaskAttention(16, 2, keys_to_keep=3, **options),
        [TOKENS],
    ),
    "GatedMLP": (lambda **options: bridge.nn.GatedMLP(16, 8, **options), [TOKENS]),
    "LayerNorm": (lambda **options: bridge.nn.LayerNorm(16, **options), [TOKENS]),
    "Linear": (lambda **options: bridge.nn.Linear(16, 8, **options), [TOKENS]),
    "MixtureOfExperts": (
        lambda **options: bridge.nn.MixtureOfExperts(16, 8, 4, 2, shared_experts=1, balance_bias=True, **options),
        [TOKENS],
    ),
    "MultiheadAttention": (
        lambda **options: bridge.nn.MultiheadAttention(16, 2, add_bias_kv=True, **options),
        [TOKENS] * 3,
    ),
    "MultiheadDilatedAttention": (
        lambda **options: bridge.nn.MultiheadDilatedAttention(16, 2, [4, 8], [1, 2], **options),
        [TOKENS] * 3,
    ),
    "QuantizedLinear": (lambda **options: bridge.nn.QuantizedLinear(128, 8, **options), [(3, 128)]),
    "RMSNorm": (lambda **options: bridge.nn.RMSNorm(16, **options), [TOKENS]),
}


def test_every_module_has_a_case():
    classes = {name for name in dir(bridge.nn) if inspect.isclass(getattr(bridge.nn, name))}
    with_device = {name for name in classes if "device" in inspect.signature(getattr(bridge.nn, name)).parameters}
    assert with_device == set(MODULES)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, setting):
    """A module with a device and a dtype of its own."""
    make, shapes = MODULES[name]
    tensors = [random(*shape) for shape in shapes]
    options = {"device": "cpu", "dtype": torch.float32}
    module = make(**options)
    with SETTINGS[setting]():
        other = make(**options)
        other.load_state_dict(module.state_dict())
        got = results(other, tensors)
        routed = other.with_routing(tensors[0])[1] if name == "MixtureOfExperts" else ()
    assert [(x.dtype, x.device) for x in other.state_dict().values()] == [
        (x.dtype, x.device) for x in module.state_dict().values()
    ]
    torch.testing.assert_close(got, results(module, tensors))
    assert [x.dtype for x in routed] in ([], [torch.int32, torch.float32])


OWN_FIRST_LAYER = sorted(set(MODULES) - {"MultiheadAttention", "MultiheadDilatedAttention"})  # theirs is PyTorch's


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", OWN_FIRST_LAYER)
def test_inputs_of_another_dtype(name, dtype):
    make, shapes = MODULES[name]
    module = make(device="cpu", dtype=torch.float32)
    with pytest.raises(TypeError, match=f"^(x|input): got dtype (torch.)?{str(dtype).removeprefix('torch.')}"):
        module(*(torch.ones(shape, dtype=dtype) for shape in shapes))


@pytest.mark.parametrize("name", ["AdaptiveAttention", "GatedMLP", "MixtureOfExperts"])
def test_inputs_and_parameters_of_two_dtypes(name):
    make, shapes = MODULES[name]
    module = make(device="cpu", dtype=torch.float32)
    inputs = [random(*shape).detach().bfloat16() for shape in shapes]
    with pytest.raises(
        TypeError, match=r"^x: got dtype torch.bfloat16, want the parameters' torch.float32, or autocast"
    ):
        module(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(*inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", OWN_FIRST_LAYER)
def test_modules_of_another_dtype(name, dtype):
    """The error comes from the call, as other code may use the module's weights."""
    make, shapes = MODULES[name]
    module = make(device="cpu", dtype=dtype)
    with pytest.raises(TypeError, match=r"^(x|input): got dtype"):
        module(*(torch.ones(shape, dtype=dtype) for shape in shapes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_dilated_module_of_another_dtype(dtype):
    """Its implementation is chosen when it is made."""
    make, _ = MODULES["MultiheadDilatedAttention"]
    with pytest.raises(TypeError, match=f"^dtype: got {dtype}, want torch.bfloat16"):
        make(device="cpu", dtype=dtype)
