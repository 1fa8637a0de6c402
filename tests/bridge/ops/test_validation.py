"""bridge.validate: functions of tensors and modules against a baseline in float64."""

import functools

import pytest
import torch

from jax_kernels import bridge

X, W = torch.randn(16, 32), torch.randn(32, 8)
SDPA = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype):
    ours = functools.partial(bridge.scaled_dot_product_attention, is_causal=True)
    report = bridge.validate(ours, SDPA, "small", dtype=dtype, device="cpu")
    assert report.passed, report
    assert report.truth == "the baseline in float64"
    assert [x.name for x in report.comparisons] == ["output", "gradient 0", "gradient 1", "gradient 2"]
    assert {x.dtype for x in report.comparisons} == {str(dtype).removeprefix("torch.")}
    full = functools.partial(bridge.scaled_dot_product_attention, is_causal=False)
    assert not any(x.passed for x in bridge.validate(full, SDPA, "small", dtype=dtype, device="cpu").comparisons)


def test_a_wrong_gradient():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(context, x, w):
            context.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(context, cotangent):
            x, w = context.saved_tensors
            return cotangent @ w.T, 1.01 * x.T @ cotangent

    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            report = bridge.validate(Wrong.apply, torch.matmul, (X, W))
        assert [x.name for x in report.comparisons if not x.passed] == ["gradient 1"]
    assert bridge.validate(Wrong.apply, torch.matmul, (X, W), gradients=False).passed


def test_a_baseline_that_refuses_float64():
    report = bridge.validate(torch.matmul, bridge.matmul, (X, W))
    assert report.passed, report
    assert "it refuses float64" in report.truth


@pytest.mark.parametrize("gradients", [False, True], ids=["outputs", "gradients"])
def test_functions_may_change_their_inputs(gradients):
    x = X.clone()
    plus = lambda x: x + 1
    assert bridge.validate(plus, lambda x: x.add_(1), [x], gradients=gradients).passed
    assert bridge.validate(lambda x: x.add_(1), plus, [x], gradients=gradients).passed
    assert torch.equal(x, X)


def test_complex_and_integer_inputs():
    """The imaginary parts count, in outputs, gradients and cotangents. Integers have no gradients."""
    z = torch.complex(X[0], X[1])
    report = bridge.validate(lambda x, z: torch.fft.fft(x) * z, lambda x, z: torch.fft.fft(x) * z, (X[2], z))
    assert report.passed, report
    assert [x.dtype for x in report.comparisons] == ["complex64", "float32", "complex64"]
    assert all(0 < x.baseline_error < x.bound for x in report.comparisons)
    assert not bridge.validate(torch.conj, lambda z: z, [z], gradients=False).passed
    wrong = bridge.validate(lambda z: torch.complex(z.real, z.imag.detach()), lambda z: z, [z])
    assert [x.name for x in wrong.comparisons if not x.passed] == ["gradient 0"]
    report = bridge.validate(lambda x: x + 1, lambda x: x + 1, [torch.arange(3)])
    assert [x.name for x in report.comparisons] == ["output"]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="did you mean 'large'"):
        bridge.validate(SDPA, SDPA, "larg")
    with pytest.raises(ValueError, match="factor: got 0, want 1 or more"):
        bridge.validate(SDPA, SDPA, "small", factor=0)


@pytest.mark.parametrize(
    ("inputs", "got"),
    [({"query": X}, "dict"), (X, "Tensor"), ([X, 3.0], "Tensor, float")],
    ids=["dict", "one", "number"],
)
def test_inputs_are_tensors(inputs, got):
    with pytest.raises(TypeError, match=f"^inputs: got {got}, want a list or tuple of tensors, or the name of a size"):
        bridge.validate(torch.relu, torch.relu, inputs)
