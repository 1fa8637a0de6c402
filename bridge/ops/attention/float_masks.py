"""Masks of floats that are 0 or 1, as Flax makes them. jax_kernels' ops and the bridge's ops accept them.

The floats are no bias here. PyTorch's scaled_dot_product_attention, and the bridge's function of the same name, add a
mask of floats to the scores.
"""

from typing import Any, TypeGuard

import torch

from jax_kernels.bridge.interop import torch_internals

__all__ = ["as_bool", "is_float", "or_nan"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_float(mask: Any) -> TypeGuard[torch.Tensor]:
    """Whether mask is a dense tensor of float32, bfloat16 or float16."""
    if not isinstance(mask, torch.Tensor) or mask.dtype not in _FLOATS:
        return False
    return mask.layout == torch.strided and not mask.is_nested


def as_bool(name: str, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (the mask as bool, is_valid), where is_valid says whether all values of the mask are 0 or 1.

    is_valid is None if the values were checked here, or on the meta device. Otherwise it is a bool tensor [] for
    or_nan: the host does not wait for the values on a GPU, and cannot see the values in a graph or under torch.func.

    Raises ValueError, naming the argument, if a value on a CPU is neither 0 nor 1, and TypeError if the mask requires a
    gradient: it would get none.
    """
    if mask.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name}: got a tensor that requires a gradient, want none: a mask has no gradient; a bias has one"
        )
    mask = mask.detach()
    keep = mask == 1
    is_valid = (keep | (mask == 0)).all()
    if mask.device.type == "meta":
        return keep, None
    if not torch_internals.has_known_values(mask):
        return keep, is_valid
    if not bool(is_valid):
        raise ValueError(
            f"{name}: got {mask.dtype} values other than 0 and 1, want torch.bool (True = attend); an additive mask is "
            "a bias"
        )
    return keep, None


def or_nan(results: Any, is_valid: torch.Tensor | None) -> Any:
    """Returns the results unchanged if is_valid is None or true; otherwise the results and their gradients are NaN.

    NaN replaces an error that the host cannot raise without waiting for a GPU. results: a tensor, or a tuple of
    tensors. is_valid: bool tensor [], or None.
    """
    if is_valid is None:
        return results
    if isinstance(results, tuple):
        return tuple(or_nan(x, is_valid) for x in results)
    one, nan = (torch.full((), x, dtype=results.dtype, device=results.device) for x in (1.0, float("nan")))
    return results * torch.where(is_valid, one, nan)
