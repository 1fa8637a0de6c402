"""Errors for functions and tensors of PyTorch where JAX's are wanted."""

import sys
from typing import Any

import jax

__all__ = ["check_function", "check_no_tensors"]


def check_function(argument: str, function: Any, name: str) -> None:
    """Raises TypeError unless `function` is a function of arrays.

    argument: its name in the error. name: of the function of this library that takes it, which jax_kernels.bridge has
    for functions of tensors.
    """
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(function, torch.nn.Module)
    home = getattr(getattr(function, "func", function), "__module__", None) or ""  # func: of a functools.partial
    if callable(function) and (is_module or f"{home}.".startswith(("jax_kernels.bridge.", "torch."))):
        given = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{argument}: got {given}, which takes tensors, want a function of arrays; use bridge.{name}")
    if not callable(function):
        raise TypeError(f"{argument}: got {type(function).__name__}, want a function, and its arguments after it")


def check_no_tensors(arguments: Any, name: str) -> None:
    """Raises TypeError if a tree of arguments has a tensor. name: as for check_function."""
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(x, torch.Tensor) for x in jax.tree.leaves(arguments)):
        raise TypeError(f"args: got a torch.Tensor, want jax.Arrays; use bridge.{name} for tensors")
