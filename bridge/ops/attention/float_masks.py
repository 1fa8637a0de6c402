"""Masks of floats that are 0 or 1, as Flax makes them. jax_kernels' ops take them, and so do the bridge's.

A float is no bias here. PyTorch's scaled_dot_product_attention, and the bridge's, add a mask of floats to the scores.
"""

from typing import Any

import torch

from jax_kernels.bridge.interop import torch_internals

__all__ = ["as_bool", "is_float", "or_nan"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_float(mask: Any) -> bool:
    """Whether it is a dense mask of floats."""
    if not isinstance(mask, torch.Tensor) or mask.dtype not in _FLOATS:
        return False
    return mask.layout == torch.strided and not mask.is_nested


def as_bool(name: str, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(the mask of floats as bool, whether it holds 0 and 1 alone). The second is None where that is known.

    Values on a CPU are looked at. The host does not wait for those of a GPU, nor can it see those of a graph, or of
    torch.func: see or_nan.

    Raises ValueError, naming the argument, where a value is neither.
    """
    mask = mask.detach()
    keep = mask == 1
    is_valid = (keep | (mask == 0)).all()
    if mask.device.type == "meta":
        return keep, None
    if mask.device.type != "cpu" or torch.compiler.is_compiling() or not torch_internals.is_plain_call():
        return keep, is_valid
    if not bool(is_valid):
        raise ValueError(
            f"{name}: got {mask.dtype} values other than 0 and 1, want torch.bool (True = attend); an additive mask is "
            "a bias"
        )
    return keep, None


def or_nan(results: Any, is_valid: torch.Tensor | None) -> Any:
    """The results, which are NaN, as their gradients are, if a mask holds other values: the host cannot raise."""
    if is_valid is None:
        return results
    if isinstance(results, tuple):
        return tuple(or_nan(x, is_valid) for x in results)
    one, nan = (torch.full((), x, dtype=results.dtype, device=results.device) for x in (1.0, float("nan")))
    return results * torch.where(is_valid, one, nan)
