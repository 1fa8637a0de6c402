"""The random calls of random_calls, with PyTorch tensors by the bridge."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from jax_kernels import bridge
from tests.support.random.draws import Call, Draw, cotangent


def made(call: Call, draw: Draw, device: str) -> Mapping[str, torch.Tensor]:
    """The call's arrays as tensors. Some have permuted strides, some are slices of larger tensors."""
    tensors = {name: _laid_out(draw, _tensor(call, name, x).to(device)) for name, x in call.arrays.items()}
    for name in call.moved:
        tensors[name].requires_grad_()
    return tensors


def results(call: Call, tensors: Mapping[str, torch.Tensor], **how: Any) -> Mapping[str, np.ndarray]:
    """The bridge's results, and as d_name PyTorch's gradients of the tensors in `moved`. how: implementation."""
    found = call.forward(_Bridge(), dict(tensors), **how)
    differentiated = [x for x in found.values() if x.requires_grad] if call.moved else []
    cotangents = [torch.tensor(cotangent(x.shape)).to(x) for x in differentiated]
    gradients = dict.fromkeys(f"d_{name}" for name in call.moved)
    if differentiated:
        moved = [tensors[name] for name in call.moved]
        gradients = dict(zip(gradients, torch.autograd.grad(differentiated, moved, cotangents), strict=True))
    assert None not in gradients.values(), call.options
    return {name: x.detach().double().cpu().numpy() for name, x in (found | gradients).items()}


def poison() -> None:
    """Fills free memory of PyTorch's allocator, on the current stream, with NaN."""
    sizes = (*(2**8,) * 64, *(2**17,) * 32, *(2**23,) * 8)
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in sizes]
    del blocks


def _tensor(call: Call, name: str, x: np.ndarray) -> torch.Tensor:
    tensor = torch.tensor(x)
    is_cast = tensor.dtype == torch.float32 and name not in call.keeps
    return tensor.to(getattr(torch, call.dtype)) if is_cast else tensor


def _laid_out(draw: Draw, x: torch.Tensor) -> torch.Tensor:
    """The same values, in a random memory layout."""
    kind = draw.one("as it is", "as it is", "axes", "part")
    if kind == "axes":
        order = [int(axis) for axis in draw.random.permutation(x.ndim)]
        inverse = [order.index(axis) for axis in range(x.ndim)]
        return x.permute(order).contiguous().permute(inverse)
    if kind == "part" and x.ndim:
        axis = draw.integer(0, x.ndim)
        return torch.cat([torch.zeros_like(x), x, torch.zeros_like(x)], axis).narrow(axis, x.shape[axis], x.shape[axis])
    return x


class _Rounded(NamedTuple):
    """A tensor in 8 bits with its scales."""

    values: torch.Tensor
    scale: torch.Tensor
    scaling: str


class _Bridge:
    """The names of jax_kernels, for tensors. Dtypes are PyTorch's, and scales are separate arguments."""

    def __getattr__(self, name: str) -> Any:
        return getattr(bridge, name)

    def quantize(self, x: torch.Tensor, format: str = "e4m3", **options: Any) -> Any:
        found = bridge.quantize(x, format, **options)
        return _Rounded(*found, options["scaling"]) if isinstance(found, tuple) else found

    def matmul(self, x: Any, w: Any, **options: Any) -> torch.Tensor:
        return _product(bridge.matmul, {"x": x, "w": w}, options)

    def gated_matmul(self, x: Any, w_gate: Any, w_up: Any, **options: Any) -> torch.Tensor:
        return _product(bridge.gated_matmul, {"x": x, "w_gate": w_gate, "w_up": w_up}, options)


def _product(op: Callable[..., torch.Tensor], operands: Mapping[str, Any], options: dict[str, Any]) -> torch.Tensor:
    rounded = {name: x for name, x in operands.items() if isinstance(x, _Rounded)}
    options |= {f"{name}_scale": x.scale for name, x in rounded.items()}
    for x in rounded.values():
        options["scaling"] = x.scaling
    if "out_dtype" in options:
        options["out_dtype"] = getattr(torch, options["out_dtype"])
    return op(**{name: x.values if name in rounded else x for name, x in operands.items()}, **options)
