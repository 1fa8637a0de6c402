"""Argument checks for several ops of the bridge. Errors have the form "argument: got ..., want ..."."""

from typing import Any

import jax
import numpy as np
import torch

from jax_kernels.bridge.translate.activations import Activation

__all__ = [
    "FLOATS",
    "advice",
    "check_activation",
    "check_float",
    "check_float_dtype",
    "check_function_of_tensors",
    "check_optional_tensors",
    "check_precision",
    "check_scales",
    "check_tensors",
    "type_name",
    "way_out",
]


# The float dtypes that the library's ops take, except 8-bit values.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_float(name: str, x: torch.Tensor) -> None:
    """Raises TypeError, naming the argument, unless the tensor's dtype is in FLOATS."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{name}: got dtype {x.dtype}, want torch.bfloat16, torch.float16 or torch.float32; cast it, with "
            f"{name}.to(torch.float32)"
        )


def check_float_dtype(dtype: Any) -> None:
    """Raises TypeError, naming the argument `dtype`, unless it is in FLOATS."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        got = repr(dtype) if isinstance(dtype, torch.dtype | str) else type(dtype).__name__
        raise TypeError(f"dtype: got {got}, want torch.bfloat16, torch.float16 or torch.float32")


def check_tensors(**tensors: Any) -> None:
    """Raises TypeError for an argument that is no torch.Tensor, such as a NumPy or JAX array."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type_name(x)}, want a torch.Tensor{advice(x)}")


def check_optional_tensors(**tensors: Any) -> None:
    """Raises TypeError for an argument that is neither a torch.Tensor nor None."""
    for name, x in tensors.items():
        if not (x is None or isinstance(x, torch.Tensor)):
            raise TypeError(f"{name}: got {type_name(x)}, want a torch.Tensor or None{advice(x)}")


def check_function_of_tensors(argument: str, function: Any) -> None:
    """Raises TypeError, with the argument's name, for a function of jax_kernels that takes arrays, not tensors."""
    home = getattr(getattr(function, "func", function), "__module__", None) or ""  # func: of a functools.partial
    if home.startswith("jax_kernels.") and not home.startswith("jax_kernels.bridge."):
        name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
        raise TypeError(f"{argument}: got {name} of jax_kernels, which takes arrays; want bridge.{name}")


def check_scales(**scales: Any) -> None:
    """Raises TypeError for an argument that is neither a torch.Tensor nor a number nor None.

    Numbers are Python's and NumPy's, and NumPy and JAX arrays without axes.
    """
    for name, x in scales.items():
        if x is None or isinstance(x, torch.Tensor | int | float | np.generic):
            continue
        if not isinstance(x, np.ndarray | jax.Array) or x.ndim:
            raise TypeError(f"{name}: got {type_name(x)}, want a torch.Tensor, a number or None{advice(x)}")


def check_activation(activation: str | Activation | None, *, is_optional: bool = True) -> None:
    """Raises unless activation is the name of an activation, a function, or, if is_optional, None.

    Raises ValueError for an unknown name, and TypeError for other objects.
    """
    if callable(activation) or (activation is None and is_optional):
        return
    if not isinstance(activation, str):
        want = f"want a name, a function{' or None' * is_optional}"
        raise TypeError(f"activation: got {type(activation).__name__}, {want}")
    from jax_kernels.ops.activations import ACTIVATIONS

    if activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation: got {activation!r}, want {'None or ' * is_optional}one of {known}")


def check_precision(precision: str | None, wanted: tuple[str, ...] | None = None) -> None:
    """Raises ValueError unless precision is None or one of the names in `wanted`.

    wanted=None means the names that the op `matmul` takes.
    """
    from jax_kernels.ops.matmul.checks import PRECISIONS

    names = PRECISIONS if wanted is None else wanted
    if precision is not None and not (isinstance(precision, str) and precision in names):
        raise ValueError(f"precision: got {precision!r}, want {', '.join(map(repr, names))} or None")


def type_name(x: Any) -> str:
    """The type of x with its module, such as "numpy.ndarray", for an error."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def advice(x: Any) -> str:
    """The end of an error about an argument x that is no tensor: for arrays of JAX and NumPy, and as in way_out."""
    if isinstance(x, jax.Array):
        return "; jax_kernels itself has the ops for JAX arrays"
    return "; torch.from_numpy makes one" if isinstance(x, np.ndarray) else way_out(x)


def way_out(x: Any) -> str:
    """The end of an error about an argument x that is no tensor.

    For a torch.fx.Proxy it is a workaround, else "".
    """
    if not isinstance(x, torch.fx.Proxy):
        return ""
    return (
        "; torch.fx.symbolic_trace cannot look into this function: use a module of bridge.nn, or call this function in "
        "a function of your own that is marked with torch.fx.wrap"
    )
