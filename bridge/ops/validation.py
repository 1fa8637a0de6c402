"""validate for functions of tensors: a function and its gradients against a baseline that is computed in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge.jax_functions.argument_checks import check_function_of_tensors
from jax_kernels.testing.validation import ValidationReport, compared, sized_shape

__all__ = ["validate"]


def validate(
    candidate: Callable[..., Any],
    baseline: Callable[..., Any],
    inputs: Sequence[torch.Tensor] | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    gradients: bool = True,
    factor: float = 2.0,
) -> ValidationReport:
    """Compares candidate(*inputs), and its gradients, with a baseline in PyTorch, like jax_kernels.validate.

    The true values are the baseline's for the inputs in float64 (complex128 for complex inputs); if the baseline
    refuses float64, for the inputs as they are. A result passes if its error is at most `factor` times the error of the
    baseline in the inputs' own dtypes, or within a bound of the result's dtype.
    The bounds are 2**-7 in bfloat16, 2**-10 in float16, 2**-18 in float32 and complex64, and 2**-40 in float64 and
    complex128. For example::

        report = bridge.validate(bridge.flash_attention, plain_attention, "realistic")
        assert report.passed, report

    Args:
      candidate, baseline: functions of the inputs, or modules, which return tensors in one structure.
      inputs: tensors; or a size of random query, key and value, such as "small", as in jax_kernels.validate.
      dtype, device: of the tensors of a size. None is the current GPU, or the CPU if there is no GPU.
      gradients: also compares the gradients of all floating-point and complex inputs, for one random cotangent.
      factor: the allowed multiple of the baseline's error.

    Returns a ValidationReport. The errors are jax_kernels.validate's.
    """
    check_function_of_tensors("candidate", candidate)
    check_function_of_tensors("baseline", baseline)
    if not factor >= 1:
        raise ValueError(f"factor: got {factor}, want 1 or more")
    if isinstance(inputs, str):
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator().manual_seed(0)
        drawn = (torch.randn(sized_shape(inputs), generator=generator) for _ in range(3))
        given = [x.to(place, dtype) for x in drawn]
    else:
        kinds = [type(x) for x in inputs] if isinstance(inputs, list | tuple) else [type(inputs)]
        if not isinstance(inputs, list | tuple) or not all(issubclass(kind, torch.Tensor) for kind in kinds):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"inputs: got {names}, want a list or tuple of tensors, or the name of a size")
        given = list(inputs)
    truth = "the baseline in float64"
    of_baseline = _results(baseline, given, gradients)
    try:
        want = _results(baseline, [_exact(x) for x in given], gradients)
    except (TypeError, ValueError, NotImplementedError, RuntimeError):  # torch's own operations raise RuntimeError
        truth, want = "the baseline in the inputs' dtypes, since it refuses float64", of_baseline
    got = _results(candidate, given, gradients)
    return ValidationReport(truth=truth, comparisons=compared(got, of_baseline, want, factor))


def _results(function: Callable[..., Any], inputs: Sequence[torch.Tensor], gradients: bool) -> dict[str, Any]:
    """{"output": the function's results, "gradient": of each float or complex input, in order}, as NumPy arrays.

    The function gets copies of the inputs, which it may change. Gradients are also computed under torch.no_grad.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        given = [x.detach().clone().requires_grad_(gradients and _is_inexact(x)) for x in inputs]
        out = function(*(x.clone() for x in given))
        found = {"output": jax.tree.map(_numpy, out)}
        if not gradients:
            return found
        outs = [x for x in jax.tree.leaves(out) if x.requires_grad]
        moving = [x for x in given if x.requires_grad]
        cotangents = [_cotangent(x) for x in outs]
        of_inputs = torch.autograd.grad(outs, moving, cotangents, allow_unused=True) if moving else ()
        zeros = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(moving, of_inputs, strict=True)]
        return found | {"gradient": [_numpy(x) for x in zeros]}


def _cotangent(x: torch.Tensor) -> torch.Tensor:
    """Random values like x; the same for each dtype, up to rounding."""
    dtype = torch.complex64 if x.is_complex() else torch.float32
    return torch.randn(x.shape, dtype=dtype, generator=torch.Generator().manual_seed(1)).to(x)


def _is_inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _exact(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, or in complex128 if it is complex; other tensors as they are."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def _numpy(x: torch.Tensor) -> Any:
    return _exact(x.detach()).resolve_conj().cpu().numpy().astype(jnp.dtype(str(x.dtype).removeprefix("torch.")))
