"""Checks of the arrays that a call of a module gets. An error names the argument, its value and the wanted value."""

from typing import Any

import jax.numpy as jnp

from jax_kernels.masks.checks import is_array
from jax_kernels.ops.checks import checked_array

__all__ = ["check_features", "check_floats", "check_promotion", "checked_residual"]


def checked_residual(residual: Any, shape: tuple[int, ...], of: str = "x's") -> Any:
    """The residual as a jax.Array. Raises TypeError unless it has floats of 16 bits or more, ValueError for another
    shape.

    of: the source of the wanted shape, for the error.
    """
    residual = checked_array("residual", residual)
    if not jnp.issubdtype(residual.dtype, jnp.floating) or residual.dtype.itemsize == 1:
        raise TypeError(f"residual: got dtype {residual.dtype}, want bfloat16, float16 or float32")
    if residual.shape != shape:
        raise ValueError(f"residual: got shape {residual.shape}, want {of} {shape}")
    return residual


def check_promotion(dtype: Any, *, param_dtype: Any = None, **arrays: Any) -> None:
    """Raises TypeError for 8-bit floats of a module without a dtype: JAX does not promote them.

    dtype: the module's dtype; with one, its matmuls cast all arrays. param_dtype: of the parameters, or None. arrays:
    the call's arrays, or None, by their names in messages. With parameters of the same 8-bit dtype nothing is raised.
    """
    if dtype is not None:
        return
    dtypes = {name: x.dtype for name, x in arrays.items() if hasattr(x, "dtype")}
    dtypes |= {} if param_dtype is None else {"param_dtype": jnp.dtype(param_dtype)}
    if len(set(dtypes.values())) == 1:
        return
    for name, found in dtypes.items():
        if jnp.issubdtype(found, jnp.floating) and found.itemsize == 1:
            want = "want bfloat16, float16 or float32, or a module with a dtype"
            raise TypeError(f"{name}: got {'' if name == 'param_dtype' else 'dtype '}{found}, {want}")


def check_features(name: str, x: Any, features: int) -> None:
    """Raises ValueError unless the last axis of x has as many entries as the module has features.

    name: the argument's name, for the error.
    """
    if jnp.shape(x)[-1:] != (features,):
        raise ValueError(f"{name}: got shape {jnp.shape(x)}, want [..., {features}]")


def check_floats(name: str, x: Any) -> None:
    """Raises TypeError unless x is an array of floats. name: the argument's name, for the error."""
    is_array(name, x, "an array of floats")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: got dtype {x.dtype}, want floats")
